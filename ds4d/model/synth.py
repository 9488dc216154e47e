"""Geometries by name, and random models of any geometry: for tests, benchmarks and admission.

The text that such a model writes means nothing, but nothing in it is idle: norms, sinks, biases,
position tables and hyper-connections are all drawn, so that a part left out shows. Scales keep
every product at about unit variance. A tensor depends on the seed and its name alone.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import numpy as np

from ds4d.model import gguf
from ds4d.model.geometry import Geometry
from ds4d.model.quants import Quant, Tensor, dequantize, quantize

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    Shape = tuple[int, ...]

Preset = Literal["q8", "f32", "2bit", "4bit", "mxfp4"]

# Products, then what the published files keep in F16; all else has one possible type.
_SMALL = {
    "token_embd.weight": Quant.F16,
    "*hc_*fn.weight": Quant.F16,
    "*ape.weight": Quant.F16,
    "*compressor_kv.weight": Quant.F16,
    "*compressor_gate.weight": Quant.F16,
    "*indexer.*": Quant.F16,
    "*ffn_gate_inp.weight": Quant.F16,
}
PRESETS: dict[Preset, dict[str, Quant]] = {
    "f32": {},
    "q8": {**_SMALL, "*": Quant.Q8_0},
    "2bit": {
        "*ffn_gate_exps.weight": Quant.IQ2_XXS,
        "*ffn_up_exps.weight": Quant.IQ2_XXS,
        "*ffn_down_exps.weight": Quant.Q2_K,
        **_SMALL,
        "*": Quant.Q8_0,
    },
    "4bit": {"*_exps.weight": Quant.Q4_K, **_SMALL, "*": Quant.Q8_0},
    "mxfp4": {"*_exps.weight": Quant.MXFP4, **_SMALL, "*": Quant.Q8_0},
}
"""Name patterns to types, the first that fits; a type that a tensor may not have is passed over.
"2bit" is the mix of the published file, "4bit" that of its larger sister."""

_POOL = 1 << 15  # blocks, or rows of 128 values, drawn before the content of a tensor repeats


def geometry(name: str) -> Geometry:
    """The geometry called `name`: flash, pro, tiny, or one of the test models micro and mini.
    Raises KeyError for another name."""
    return _GEOMETRIES[name]()


def _flash() -> Geometry:
    return Geometry(
        name="DeepSeek-V4-Flash",
        n_layers=43,
        width=4096,
        n_vocab=129_280,
        n_heads=64,
        head_dim=512,
        rope_dim=64,
        q_rank=1024,
        out_groups=8,
        out_rank=1024,
        window=128,
        ratios=(0, 0, *_alternating(41)),
        n_experts=256,
        n_experts_used=6,
        n_shared_experts=1,
        expert_width=2048,
        n_hash_layers=3,
        expert_scale=1.5,
        expert_clamp=(10.0,) * 43,
        shared_clamp=(10.0,) * 43,
        index_heads=64,
        index_dim=128,
        index_top_k=512,
        streams=4,
        sinkhorn_iterations=20,
        hyper_eps=1e-6,
        rms_eps=1e-6,
        rope_theta=10_000.0,
        rope_theta_compressed=160_000.0,
        yarn_factor=16.0,
        yarn_original_context=65_536,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        context=1_048_576,
    )


def _pro() -> Geometry:
    return replace(
        _with_layers(_flash(), (128, 128, *_alternating(59))),
        name="DeepSeek-V4-Pro",
        width=7168,
        n_heads=128,
        q_rank=1536,
        out_groups=16,
        n_experts=384,
        expert_width=3072,
        expert_scale=2.5,
        index_top_k=1024,
    )


def _tiny() -> Geometry:
    return replace(
        _with_layers(_flash(), (0, 0, *_alternating(6))),
        name="ds4-tiny",
        width=256,
        n_vocab=4096,
        n_heads=8,
        head_dim=96,
        rope_dim=32,
        q_rank=128,
        out_groups=2,
        out_rank=64,
        n_experts=8,
        n_experts_used=4,
        expert_width=128,
        n_hash_layers=2,
        index_heads=16,
        index_dim=64,
        index_top_k=64,
        context=8192,
    )


def _micro() -> Geometry:
    """Every kind of layer in the least space that Q8_0 allows; rows are F16."""
    return replace(
        _with_layers(_flash(), (0, 4, 128, 4, 0)),
        name="micro",
        width=64,
        n_vocab=320,
        n_heads=8,
        head_dim=32,
        rope_dim=8,
        q_rank=32,
        out_groups=4,
        out_rank=16,
        n_experts=12,
        n_experts_used=3,
        expert_width=32,
        n_hash_layers=2,
        index_heads=32,
        index_dim=16,
        index_top_k=8,
        context=2048,
    )


def _mini() -> Geometry:
    """Rows under the e4m3 and FP4 rules, and widths that take every block format."""
    return replace(
        _with_layers(_flash(), (0, 4, 128, 4)),
        name="mini",
        width=256,
        n_vocab=320,
        n_heads=4,
        head_dim=80,
        rope_dim=16,
        q_rank=64,
        out_groups=2,
        out_rank=32,
        n_experts=8,
        n_experts_used=3,
        expert_width=256,
        n_hash_layers=1,
        index_heads=32,
        index_dim=32,
        index_top_k=16,
        context=4096,
    )


_GEOMETRIES: dict[str, Callable[[], Geometry]] = {
    "flash": _flash,
    "pro": _pro,
    "tiny": _tiny,
    "micro": _micro,
    "mini": _mini,
}


def _alternating(n: int) -> tuple[int, ...]:
    return tuple(4 if i % 2 == 0 else 128 for i in range(n))


def _with_layers(g: Geometry, ratios: tuple[int, ...]) -> Geometry:
    clamp = (10.0,) * len(ratios)
    return replace(g, n_layers=len(ratios), ratios=ratios, expert_clamp=clamp, shared_clamp=clamp)


def vocabulary(n_vocab: int) -> gguf.Vocabulary:
    """Markers at both ends of the 256 bytes, merges of two letters as far as there is room, then
    fillers. Raises ValueError below 268 tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    tokens = [*_CONTROL, *(chars[b] for b in range(256)), *_MARKERS]
    room = n_vocab - len(tokens)
    if room < 0:
        raise ValueError(f"a vocabulary of {n_vocab} tokens, expected at least {len(tokens)}")
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    merges = [f"{a} {b}" for a in f"Ġ{letters}" for b in letters][:room]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += [f"<filler_{i}>" for i in range(n_vocab - len(tokens))]
    types = np.ones(n_vocab, np.int32)
    types[: len(_CONTROL)] = 3
    types[len(_CONTROL) + 256 :][: len(_MARKERS)] = 4
    return gguf.Vocabulary(tokens, types, merges, bos_id=0, eos_id=1, pad_id=2)


_CONTROL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_MARKERS = (
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
)


def table(
    geometry: Geometry, kinds: Mapping[str, Quant] | Preset
) -> list[tuple[str, Quant, Shape]]:
    """Name, type and shape of every tensor. `kinds` maps name patterns to types, the first that
    fits and that the tensor may have; what none fits is F32, or the one type it can have.

    Raises ValueError for rows that do not divide into the blocks of their type.
    """
    patterns = PRESETS[kinds] if isinstance(kinds, str) else kinds
    out = []
    for name, shape, quants, _ in gguf.expected_tensors(geometry):
        fallback = Quant.F32 if Quant.F32 in quants else min(quants)
        fits = (q for p, q in patterns.items() if q in quants and fnmatchcase(name, p))
        quant = next(fits, fallback)
        if shape[-1] % quant.block:
            raise ValueError(
                f"tensor {name} has rows of {shape[-1]}, "
                f"expected a multiple of {quant.block} for {quant.name}"
            )
        out.append((name, quant, shape))
    return out


def random_tensors(
    geometry: Geometry, kinds: Mapping[str, Quant] | Preset = "q8", seed: int = 0
) -> Iterator[Tensor]:
    """The tensors of `table`, one at a time."""
    for name, quant, shape in table(geometry, kinds):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if quant is Quant.I32:
            yield quantize(_experts_of_tokens(shape, geometry.n_experts, rng), quant, name)
        elif quant in (Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0):
            mean, spread = _distribution(name, shape)
            n = math.prod(shape)
            drawn = rng.standard_normal(min(n, _POOL * 128), np.float32) * spread + mean
            yield quantize(np.resize(drawn, shape), quant, name)
        else:
            yield _random_blocks(name, quant, shape, rng)


def write_model(
    path: str | os.PathLike[str],
    geometry: Geometry,
    kinds: Mapping[str, Quant] | Preset = "q8",
    seed: int = 0,
    vocabulary: gguf.Vocabulary | None = None,
    extra: Mapping[str, gguf.Typed] | None = None,
) -> None:
    """A whole model file of random weights, written tensor by tensor."""
    metadata = gguf.metadata_of(geometry, vocabulary or _own_vocabulary(geometry), extra)
    tensors = random_tensors(geometry, kinds, seed)
    gguf.write(path, metadata, tensors, table=table(geometry, kinds))


def write_sparse(
    path: str | os.PathLike[str],
    geometry: Geometry,
    vocabulary: gguf.Vocabulary | None = None,
    kinds: Mapping[str, Quant] | Preset = "2bit",
) -> None:
    """A file of full size and with a full header, whose tensors are holes: it costs no disk."""
    metadata = gguf.metadata_of(geometry, vocabulary or _own_vocabulary(geometry))
    gguf.write_header(path, metadata, table(geometry, kinds))


def _own_vocabulary(geometry: Geometry) -> gguf.Vocabulary:
    return vocabulary(geometry.n_vocab)


def _distribution(name: str, shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("hc_scale.weight") or name.endswith(("attn_scale.weight", "ffn_scale.weight")):
        return 0.7, 0.1
    if name.endswith("base.weight"):
        return 0.0, 0.5
    if name.endswith("attn_sinks.weight"):
        return 0.0, 1.0
    if name.endswith("ape.weight"):
        return 0.0, 0.5
    if name == "token_embd.weight":
        return 0.0, 1.0
    if name.endswith("exp_probs_b.bias"):
        return 0.0, 0.2
    return 0.0, shape[-1] ** -0.5  # a product of unit variance


def _experts_of_tokens(
    shape: Shape, n_experts: int, rng: np.random.Generator
) -> npt.NDArray[np.int32]:
    """[V, k], distinct in each row: a start, and a stride that has no factor in common with E."""
    strides = [s for s in range(1, n_experts + 1) if math.gcd(s, n_experts) == 1]
    start = rng.integers(0, n_experts, (shape[0], 1))
    return ((start + rng.choice(strides, (shape[0], 1)) * np.arange(shape[1])) % n_experts).astype(
        np.int32
    )


_SCALES_AT = {Quant.IQ2_XXS: (0, None), Quant.Q2_K: (80, 82), Quant.Q4_K: (0, 2)}
_MIN_RATIO = {Quant.Q2_K: 1.5, Quant.Q4_K: 7.5}  # of the two scales: so that the mean is zero


def _random_blocks(name: str, quant: Quant, shape: Shape, rng: np.random.Generator) -> Tensor:
    """Random codes under scales that give the values the deviation of `_distribution`."""
    n = math.prod(shape) // quant.block
    raw = rng.integers(0, 256, (min(n, _POOL), quant.block_bytes), dtype=np.uint8)
    target = _distribution(name, shape)[1]
    jitter = rng.uniform(0.7, 1.3, len(raw)).astype(np.float32)
    if quant is Quant.MXFP4:
        raw[:, 0] = 127
        exponent = np.rint(np.log2(target / _deviation(quant, raw) * jitter))
        raw[:, 0] = np.clip(127 + exponent, 1, 254)
    else:
        _set_scales(raw, quant, np.ones_like(jitter))
        _set_scales(raw, quant, target / _deviation(quant, raw) * jitter)
    data = np.resize(raw, (n, quant.block_bytes)).reshape(-1)
    return Tensor(name, quant, shape, data)


def _set_scales(raw: npt.NDArray[np.uint8], quant: Quant, d: npt.NDArray[np.float32]) -> None:
    at, min_at = _SCALES_AT[quant]
    raw[:, at : at + 2] = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    if min_at is not None:
        least = (d * _MIN_RATIO[quant]).astype("<f2")
        raw[:, min_at : min_at + 2] = least.view(np.uint8).reshape(-1, 2)


def _deviation(quant: Quant, raw: npt.NDArray[np.uint8]) -> float:
    some = raw[:512]
    values = dequantize(Tensor("", quant, (len(some), quant.block), some.reshape(-1)))
    return float(values.std())
