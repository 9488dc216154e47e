"""Block formats: how a tensor's bytes become numbers (spec/model.md 3), in readable NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.model.grid import GRID, SIGNS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    U8 = npt.NDArray[np.uint8]
    Array = npt.NDArray[Any]
    Float = np.dtype[Any]


class Quant(IntEnum):
    """ggml type ids that this program reads."""

    F32 = 0
    F16 = 1
    Q8_0 = 8
    Q2_K = 10
    Q4_K = 12
    IQ2_XXS = 16
    I32 = 26
    BF16 = 30
    MXFP4 = 39

    @property
    def block(self) -> int:
        """Elements in a block."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def activation_block(self) -> int:
        """Elements per int8 activation block of a product with this type; 0: activations stay f32
        (spec/numerics.md 1)."""
        return _ACTIVATION_BLOCK.get(self, 0)

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape` (NumPy order; the last axis is a multiple of `block`)."""
        elements = 1
        for n in shape:
            elements *= n
        return elements // self.block * self.block_bytes


_BLOCKS = {
    Quant.F32: (1, 4),
    Quant.F16: (1, 2),
    Quant.Q8_0: (32, 34),
    Quant.Q2_K: (256, 84),
    Quant.Q4_K: (256, 144),
    Quant.IQ2_XXS: (256, 66),
    Quant.I32: (1, 4),
    Quant.BF16: (1, 2),
    Quant.MXFP4: (32, 17),
}
_ACTIVATION_BLOCK = {
    Quant.Q8_0: 32,
    Quant.MXFP4: 32,
    Quant.IQ2_XXS: 256,
    Quant.Q2_K: 256,
    Quant.Q4_K: 256,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor as its raw bytes. `shape` is NumPy order (the reverse of GGUF's `ne`)."""

    name: str
    quant: Quant
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # [quant.n_bytes(shape)], contiguous


def dequantize(tensor: Tensor, dtype: npt.DTypeLike = np.float32) -> Array:
    """Values of a tensor, [shape]: int32 for I32, else `dtype`, which is float32 or float64.

    In float32 every product is exact and at most one subtraction rounds, so the order of factors
    does not matter. Raises ValueError if the bytes do not suit the shape.
    """
    return _DECODERS[tensor.quant](_blocks(tensor), np.dtype(dtype)).reshape(tensor.shape)


def dequantize_rows(
    tensor: Tensor, rows: npt.ArrayLike, dtype: npt.DTypeLike = np.float32
) -> Array:
    """Values at `rows` [n] of the first axis, [n, *shape[1:]]: the embeddings of some ids, or the
    matrices of some experts. Raises IndexError for a row that the tensor does not have."""
    rows = np.asarray(rows, np.int64)
    chosen = _blocks(tensor).reshape(tensor.shape[0], -1)[rows]
    part = Tensor(tensor.name, tensor.quant, (rows.size, *tensor.shape[1:]), chosen.reshape(-1))
    return dequantize(part, dtype)


def quantize(values: npt.ArrayLike, quant: Quant, name: str = "") -> Tensor:
    """`values`, of at least one axis, as Q8_0, F32, F16, BF16 or I32.

    Q8_0: d = max|x| / 127, q = round(x / d), halves away from zero, d then rounded to F16: the
    codes are those of the unrounded d, as ggml writes them. Raises ValueError for another type,
    rows that do not divide into blocks, and values that the type cannot hold.
    """
    values = np.asarray(values)
    encode = _ENCODERS.get(quant)
    if encode is None:
        raise ValueError(
            f"tensor {name} is for {quant.name}, which is read only: F32, F16, BF16, I32 or Q8_0"
        )
    if values.ndim == 0 or values.size == 0 or values.shape[-1] % quant.block:
        raise ValueError(
            f"tensor {name} has shape {values.shape}, expected rows of a multiple of {quant.block}"
        )
    if quant is not Quant.I32 and not np.isfinite(values).all():
        raise ValueError(f"tensor {name} holds a value that is not finite")
    data = encode(values, name)
    return Tensor(name, quant, values.shape, np.ascontiguousarray(data).view(np.uint8).reshape(-1))


def _blocks(tensor: Tensor) -> U8:
    """[n_blocks, block_bytes]"""
    quant, shape = tensor.quant, tensor.shape
    if shape[-1] % quant.block or tensor.data.size != quant.n_bytes(shape):
        raise ValueError(
            f"tensor {tensor.name} of shape {shape} has {tensor.data.size} bytes, "
            f"expected {quant.n_bytes(shape)} for {quant.name}"
        )
    return np.ascontiguousarray(tensor.data).reshape(-1, quant.block_bytes)


def _half(raw: U8, at: int, dtype: Float) -> Array:
    """The F16 at byte `at` of every block, [n, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(dtype)


def _f32(raw: U8, dtype: Float) -> Array:
    return raw.view("<f4").astype(dtype)


def _f16(raw: U8, dtype: Float) -> Array:
    return raw.view("<f2").astype(dtype)


def _bf16(raw: U8, dtype: Float) -> Array:
    """The upper half of an F32."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(dtype)


def _i32(raw: U8, dtype: Float) -> Array:
    return raw.view("<i4").astype(np.int32)


def _q8_0(raw: U8, dtype: Float) -> Array:
    """f16 d, i8 q[32]:  x = d q"""
    values: Array = _half(raw, 0, dtype) * raw[:, 2:].view(np.int8)
    return values


def _q2_k(raw: U8, dtype: Float) -> Array:
    """u8 s[16], u8 q[64], f16 d, f16 m:  x = d (s & 15) q - m (s >> 4), one s for 16 elements.
    Byte 32 h + p holds elements 128 h + p + 32 j, two bits each from j = 0 on."""
    n = len(raw)
    scales, packed = raw[:, :16], raw[:, 16:80].reshape(n, 2, 1, 32)
    codes = packed >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3  # [n, 2, 4, 32]
    step = (_half(raw, 80, dtype) * (scales & 15))[..., None]  # [n, 16, 1]
    least = (_half(raw, 82, dtype) * (scales >> 4))[..., None]
    values: Array = step * codes.reshape(n, 16, 16) - least
    return values


def _q4_k(raw: U8, dtype: Float) -> Array:
    """f16 d, f16 m, u8 s[12], u8 q[128]:  x = d scale q - m least, one pair for 32 elements.
    `s` packs eight 6-bit pairs: the first four plainly, the upper bits of the last four on top."""
    n = len(raw)
    low, mid, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)  # [n, 8]
    least = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=1)
    packed = raw[:, 16:].reshape(n, 4, 1, 32)
    codes = packed >> np.array([[0], [4]], np.uint8) & 15  # [n, 4, 2, 32]
    step = (_half(raw, 0, dtype) * scale)[..., None]  # [n, 8, 1]
    offset = (_half(raw, 2, dtype) * least)[..., None]
    values: Array = step * codes.reshape(n, 8, 32) - offset
    return values


def _iq2_xxs(raw: U8, dtype: Float) -> Array:
    """f16 d, then for every 32 elements u8 index[4] and u32 c:  four runs of eight from the grid,
    their signs from seven bits of c each, and  scale = d (c >> 28 + 1/2) / 4"""
    n = len(raw)
    groups = np.ascontiguousarray(raw[:, 2:]).reshape(n, 8, 8)
    control = groups[..., 4:].copy().view("<u4")  # [n, 8, 1]
    scale = _half(raw, 0, dtype) * ((control[..., 0] >> 28).astype(dtype) * 2 + 1) / 8  # [n, 8]
    signs = SIGNS[control >> np.array([0, 7, 14, 21], np.uint32) & 127]  # [n, 8, 4]
    minus = signs[..., None] >> np.arange(8, dtype=np.uint8) & 1  # [n, 8, 4, 8]
    magnitude = GRID[groups[..., :4]].astype(dtype)
    values: Array = scale[..., None, None] * np.where(minus, -magnitude, magnitude)
    return values


def _mxfp4(raw: U8, dtype: Float) -> Array:
    """u8 e, 16 bytes of nibbles:  x = 2^(e - 127) v, low nibbles first, then the high ones."""
    scale = np.ldexp(dtype.type(1), raw[:, :1].astype(np.int32) - 128)
    codes = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], axis=1)
    with np.errstate(over="ignore"):  # e = 255 exceeds float32; such a block means nothing
        values: Array = scale * _TWICE_FP4.astype(dtype)[codes]
    return values


_TWICE_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12])
_DECODERS: dict[Quant, Callable[[U8, Float], Array]] = {
    Quant.F32: _f32,
    Quant.F16: _f16,
    Quant.BF16: _bf16,
    Quant.I32: _i32,
    Quant.Q8_0: _q8_0,
    Quant.Q2_K: _q2_k,
    Quant.Q4_K: _q4_k,
    Quant.IQ2_XXS: _iq2_xxs,
    Quant.MXFP4: _mxfp4,
}


def _to_f32(values: Array, name: str) -> Array:
    return _fitting(values, "<f4", name)


def _to_f16(values: Array, name: str) -> Array:
    return _fitting(values, "<f2", name)


def _to_bf16(values: Array, name: str) -> Array:
    """Ties to the even upper half."""
    bits: Array = _fitting(values, "<f4", name).view("<u4")
    rounded: Array = bits + (0x7FFF + (bits >> 16 & 1))
    if (rounded & 0x7F800000 == 0x7F800000).any():
        raise ValueError(f"tensor {name} holds a value beyond BF16")
    return (rounded >> 16).astype("<u2")


def _to_i32(values: Array, name: str) -> Array:
    out = values.astype("<i4")
    if values.dtype.kind not in "iu" or not np.array_equal(out, values):
        raise ValueError(f"tensor {name} holds a value that is no int32")
    return out


def _to_q8_0(values: Array, name: str) -> Array:
    x = _fitting(values, "<f4", name).reshape(-1, 32)
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    # A subnormal d has no reciprocal; such a block is zero anyway, since d is stored as F16.
    usable = d >= np.finfo(np.float32).tiny
    scaled = x * np.divide(1, d, out=np.zeros_like(d), where=usable)
    whole = np.trunc(scaled)
    # Not floor(|x| + 1/2): just below a half that sum would round up.
    codes = whole + np.copysign(np.abs(scaled - whole) >= np.float32(0.5), scaled)
    return np.concatenate(
        [_fitting(d, "<f2", name).view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1
    )


def _fitting(values: Array, dtype: str, name: str) -> Array:
    with np.errstate(over="ignore"):
        out = values.astype(dtype)
    if not np.isfinite(out).all():
        raise ValueError(f"tensor {name} holds a value beyond {np.dtype(dtype).name}")
    return out


_ENCODERS: dict[Quant, Callable[[Array, str], Array]] = {
    Quant.F32: _to_f32,
    Quant.F16: _to_f16,
    Quant.BF16: _to_bf16,
    Quant.I32: _to_i32,
    Quant.Q8_0: _to_q8_0,
}
