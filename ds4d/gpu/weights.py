"""Weights on the device: which buffers a tensor becomes, and how its bytes get there.

    Q8       one or several Q8_0 matrices of one input: codes and scales apart (`kernels/product`)
    Floats   F16 or F32 ones, BF16 as F32 (`kernels/floats`), or a hyper-connection's function
             (`kernels/hyper`)
    LowBit   the routed experts' IQ2_XXS, Q2_K or Q4_K matrices (`kernels/lowbit`)
    Vector   norms, biases, tables: the file's values, as f32 or i32

All layouts but padding are byte-neutral. Whoever builds the pass asks for weights one by one; that
adds their buffers, to a dry run as well, and notes how to fill them. `fill` then packs on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.errors import ModelFileError
from ds4d.gpu.kernels import floats, hyper, product
from ds4d.gpu.kernels.lowbit.experts import FORMATS
from ds4d.model import quants
from ds4d.model.quants import Quant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from ds4d.gpu.buffers import Buffer, Buffers
    from ds4d.model.quants import Tensor

    Array = npt.NDArray[Any]

WIDE = (Quant.F16, Quant.F32, Quant.BF16)


@dataclass(frozen=True, slots=True)
class Q8:
    """`groups`: outputs are cut into as many, each with an input of its own; or experts."""

    w: Buffer
    s: Buffer
    n_out: int  # of all groups, of one expert
    n_in: int


@dataclass(frozen=True, slots=True)
class Floats:
    words: Buffer
    n_out: int
    n_in: int
    half: bool


@dataclass(frozen=True, slots=True)
class LowBit:
    quant: Quant
    data: Buffer
    n_out: int  # of one expert
    n_in: int


class Weights:
    """Of one model. Raises ModelFileError for a type that the kernels do not have, or values that
    are not finite."""

    def __init__(self, tensors: Mapping[str, Tensor], buffers: Buffers) -> None:
        self._tensors, self._buffers = tensors, buffers
        self._fills: list[Callable[[], None]] = []

    def fill(self, progress: Callable[[float], None] | None = None) -> None:
        for i, each in enumerate(self._fills):
            each()
            if progress is not None:
                progress((i + 1) / len(self._fills))

    def matrix(self, *names: str) -> Q8 | Floats:
        """Matrices of one input, the rows of one below those of the other."""
        found = [self._tensors[name] for name in names]
        n_in = found[0].shape[-1]
        n_out = sum(math.prod(t.shape[:-1]) for t in found)
        kinds = {t.quant for t in found}
        if kinds == {Quant.Q8_0}:
            return self._q8(names, found, n_out, n_in)
        if kinds <= set(WIDE):
            return self._floats(names, found, n_out, n_in)
        raise _unsuited(found, "Q8_0, F16, F32 or BF16, one for all that share an input")

    def _q8(self, names: Sequence[str], found: Sequence[Tensor], n_out: int, n_in: int) -> Q8:
        w_bytes, s_bytes = product.sizes_q8_0(n_out, n_in)
        made = Q8(
            self._buffers.add(f"{names[0]} w", (w_bytes,), np.uint8),
            self._buffers.add(f"{names[0]} s", (s_bytes // 2,), np.uint16),
            n_out,
            n_in,
        )

        def fill() -> None:
            raw = np.concatenate([t.data for t in found])
            w, s = product.pack_q8_0(raw, n_out, n_in)
            _check_finite(names[0], s.view(np.float16))
            made.w.write(w.reshape(-1))
            made.s.write(s.reshape(-1))

        self._fills.append(fill)
        return made

    def _floats(
        self, names: Sequence[str], found: Sequence[Tensor], n_out: int, n_in: int
    ) -> Floats:
        if n_in % floats.STEP:
            raise ModelFileError(
                f"tensor {names[0]} has rows of {n_in}, expected a multiple of {floats.STEP} on"
                " the GPU"
            )
        half = {t.quant for t in found} == {Quant.F16}
        n = floats.padded(n_out) * n_in // (2 if half else 1)
        made = Floats(self._buffers.add(names[0], (n,), np.uint32), n_out, n_in, half)

        def fill() -> None:
            parts = [_values(t, half).reshape(-1, n_in) for t in found]
            made.words.write(floats.pack(*parts))

        self._fills.append(fill)
        return made

    def function(self, name: str, streams: int) -> Floats:
        """Of hyper-connections."""
        tensor = self._tensors[name]
        if tensor.quant not in WIDE:
            raise _unsuited([tensor], "F16, F32 or BF16")
        n_out, n_in = tensor.shape
        half = tensor.quant is Quant.F16
        kind = np.uint16 if half else np.float32
        made = Floats(self._buffers.add(name, (n_out * n_in,), kind), n_out, n_in, half)

        def fill() -> None:
            packed = hyper.pack(_values(tensor, half), streams)
            made.words.write(packed.reshape(-1).view(kind))

        self._fills.append(fill)
        return made

    def experts(self, name: str) -> Q8 | LowBit:
        """[experts, n_out, n_in], or [n_out, n_in] of the shared one."""
        tensor = self._tensors[name]
        n_out, n_in = tensor.shape[-2:]
        n = math.prod(tensor.shape[:-2])
        if tensor.quant is Quant.Q8_0:
            w_bytes, s_bytes = product.sizes_q8_0(n_out, n_in)
            made = Q8(
                self._buffers.add(f"{name} w", (n * w_bytes,), np.uint8),
                self._buffers.add(f"{name} s", (n * s_bytes // 2,), np.uint16),
                n_out,
                n_in,
            )

            def fill() -> None:
                packed = [product.pack_q8_0(raw, n_out, n_in) for raw in tensor.data.reshape(n, -1)]
                made.w.write(np.concatenate([w.reshape(-1) for w, _ in packed]))
                made.s.write(np.concatenate([s.reshape(-1) for _, s in packed]))

            self._fills.append(fill)
            return made
        if tensor.quant not in FORMATS:
            raise _unsuited([tensor], "Q8_0, IQ2_XXS, Q2_K or Q4_K")
        n_bytes = tensor.quant.n_bytes(tensor.shape)
        data = self._buffers.add(name, (n_bytes,), np.uint8)
        low = LowBit(tensor.quant, data, n_out, n_in)

        def fill_low() -> None:
            raw = tensor.data.reshape(n * n_out, n_in // 256, -1)
            data.write(FORMATS[tensor.quant].pack(raw).reshape(-1))

        self._fills.append(fill_low)
        return low

    def vector(self, name: str) -> Buffer:
        """Values as f32 [shape]."""
        tensor = self._tensors[name]
        made = self._buffers.add(name, tensor.shape, np.float32)
        self._fills.append(lambda: made.write(_values(tensor, half=False)))
        return made

    def table(self, name: str) -> tuple[Buffer, bool]:
        """The embedding [V, width], and whether it is F16; else it is f32."""
        tensor = self._tensors[name]
        half = tensor.quant is Quant.F16
        kind = np.uint16 if half else np.float32
        made = self._buffers.add(name, tensor.shape, kind)
        self._fills.append(lambda: made.write(_values(tensor, half).view(kind)))
        return made, half

    def routes(self, name: str, k: int, n_experts: int) -> Buffer:
        """The experts [V, k] of each id, of a hashed layer."""
        tensor = self._tensors[name]
        made = self._buffers.add(name, (math.prod(tensor.shape) // k, k), np.int32)

        def fill() -> None:
            values = tensor.data.view("<i4").reshape(made.shape)
            if outside := np.argwhere((values < 0) | (values >= n_experts)).tolist():
                token, place = outside[0]
                raise ModelFileError(
                    f"tensor {name} names expert {values[token, place]} for token {token}, "
                    f"expected 0..{n_experts - 1}"
                )
            made.write(values)

        self._fills.append(fill)
        return made


def _values(tensor: Tensor, half: bool) -> Array:
    """[shape] as F16, which `tensor` holds, or as f32."""
    if half:
        values = tensor.data.view("<f2").reshape(tensor.shape)
    else:
        values = np.asarray(quants.dequantize(tensor, np.float32))
    _check_finite(tensor.name, values)
    return values


def _check_finite(name: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise ModelFileError(f"tensor {name} holds a value that is not finite")


def _unsuited(found: Sequence[Tensor], expected: str) -> ModelFileError:
    kinds = ", ".join(dict.fromkeys(t.quant.name for t in found))
    return ModelFileError(
        f"tensor {found[0].name} is {kinds}: the GPU's kernels expect {expected}; run it on the CPU"
    )
