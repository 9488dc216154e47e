"""Cached rows: the canonical bytes of a key-value row and of an indexer row (spec/model.md 4.11).

    row        e4m3 codes of the unrotated channels in blocks of 64, one scale exponent a block,
               the rotated channels as F16
    index row  Hadamard, then FP4 codes in blocks of 32, one scale exponent a block
    else       where the geometry fits neither rule, the whole row as F16 (spec/numerics.md 2)

A scale exponent is E8M0: byte b stands for 2^(b - 127). A row is encoded once, when it is pushed;
every later use decodes those bytes. Encoding decoded values again gives the same values, but not
always the same scale byte. Vectorised over leading axes; knows neither pages nor lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ds4d.model.geometry import E4M3_BLOCK, FP4_BLOCK

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.model.geometry import Geometry

    F32 = npt.NDArray[np.float32]
    U8 = npt.NDArray[np.uint8]
    Array = npt.NDArray[Any]

E4M3_MAX = 448.0
E4M3_FLOOR = np.float32(1e-4)  # least amax of a block of 64
FP4_MAX = 6.0
FP4_FLOOR = np.float32(6 * 2.0**-126)  # least amax of a block of 32

_FP4_STEPS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([_FP4_STEPS, -_FP4_STEPS])
"""[16] f32: the value of each code; bit 3 is the sign."""


def _e4m3_values() -> F32:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    positive = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""[256] f32: the value of each code. 0x7F and 0xFF are NaN and are never written."""

# Code i becomes i + 1 above the midpoint; on the midpoint the even code wins, so behind an odd code
# the threshold lies one float lower.
_FP4_MIDPOINTS = (_FP4_STEPS[1:] + _FP4_STEPS[:-1]) / 2
_FP4_MIDPOINTS[1::2] = np.nextafter(_FP4_MIDPOINTS[1::2], np.float32(0))


class Planes(NamedTuple):
    """Encoded rows, as the planes that pages hold. A plane the rule does not use has width 0."""

    codes: U8  # [..., nope_dim] e4m3, or [..., index_dim / 2] of two FP4 codes each
    scales: U8  # [..., blocks] E8M0
    halves: npt.NDArray[np.float16]  # [..., rope_dim], 0, or the whole row


def row_widths(geometry: Geometry) -> tuple[int, int, int]:
    """Elements of one key-value row in (codes, scales, halves)."""
    if geometry.rows_are_e4m3:
        return geometry.nope_dim, geometry.nope_dim // E4M3_BLOCK, geometry.rope_dim
    return 0, 0, geometry.head_dim


def index_row_widths(geometry: Geometry) -> tuple[int, int, int]:
    """Elements of one indexer row in (codes, scales, halves)."""
    if geometry.index_rows_are_fp4:
        return geometry.index_dim // 2, geometry.index_dim // FP4_BLOCK, 0
    return 0, 0, geometry.index_dim


def encode_row(geometry: Geometry, x: Array) -> Planes:
    """`x` [..., head_dim] after RoPE, taken as f32."""
    x = x.astype(np.float32)
    coded = row_widths(geometry)[0]
    codes, scales = encode_e4m3(x[..., :coded])
    return Planes(codes, scales, x[..., coded:].astype(np.float16))


def decode_row(planes: Planes) -> F32:
    """[..., head_dim] f32."""
    values = decode_e4m3(planes.codes, planes.scales)
    return np.concatenate([values, planes.halves.astype(np.float32)], axis=-1)


def encode_index_row(geometry: Geometry, x: Array) -> Planes:
    """`x` [..., index_dim] after RoPE, taken as f32. FP4 rows are held in the Hadamard basis, so
    a query meets them through `round_index_query`."""
    x = x.astype(np.float32)
    if geometry.index_rows_are_fp4:
        codes, scales = encode_fp4(hadamard(x))
        return Planes(codes, scales, np.empty((*x.shape[:-1], 0), np.float16))
    none = np.empty((*x.shape[:-1], 0), np.uint8)
    return Planes(none, none, x.astype(np.float16))


def decode_index_row(planes: Planes) -> F32:
    """[..., index_dim] f32, in the basis in which it was encoded."""
    values = decode_fp4(planes.codes, planes.scales)
    return np.concatenate([values, planes.halves.astype(np.float32)], axis=-1)


def round_index_query(geometry: Geometry, q: Array) -> F32:
    """`q` [..., index_dim] after RoPE, rounded like the rows it meets if those are FP4."""
    q = q.astype(np.float32)
    return decode_fp4(*encode_fp4(hadamard(q))) if geometry.index_rows_are_fp4 else q


def encode_e4m3(x: F32) -> tuple[U8, U8]:
    """Codes [..., n] and scale exponents [..., n / 64] of `x` [..., n]; ties to the even code."""
    blocks = x.reshape(*x.shape[:-1], -1, E4M3_BLOCK)
    amax = np.maximum(np.abs(blocks).max(-1, initial=0), E4M3_FLOOR)
    scales = _scale_exponent(amax / np.float32(E4M3_MAX))
    magnitude = np.minimum(np.abs(blocks / power_of_two(scales)[..., None]), np.float32(E4M3_MAX))
    # A binade of e4m3 holds 8 steps; below 2^-6 the step stays 2^-9, and codes count steps.
    binade = np.maximum((magnitude.view(np.uint32) >> 23).astype(np.int32) - 127, -6)
    steps = np.rint(np.ldexp(magnitude, 3 - binade)).astype(np.int32)
    codes = ((binade + 6) * 8 + steps) | np.signbit(blocks) * 128
    return codes.astype(np.uint8).reshape(x.shape), scales


def decode_e4m3(codes: U8, scales: U8) -> F32:
    """[..., n] f32 of `codes` [..., n] and `scales` [..., n / 64]."""
    return E4M3_VALUES[codes] * np.repeat(power_of_two(scales), E4M3_BLOCK, axis=-1)


def encode_fp4(x: F32) -> tuple[U8, U8]:
    """Codes [..., n / 2] and scale exponents [..., n / 32] of `x` [..., n]; ties to the even code.
    Byte j holds element 2j in its low and 2j + 1 in its high nibble."""
    blocks = x.reshape(*x.shape[:-1], -1, FP4_BLOCK)
    amax = np.maximum(np.abs(blocks).max(-1, initial=0), FP4_FLOOR)
    scales = _scale_exponent(amax / np.float32(FP4_MAX))
    magnitude = np.abs(blocks / power_of_two(scales)[..., None])
    codes = np.searchsorted(_FP4_MIDPOINTS, magnitude) | np.signbit(blocks) * 8
    codes = codes.astype(np.uint8).reshape(x.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def decode_fp4(codes: U8, scales: U8) -> F32:
    """[..., n] f32 of `codes` [..., n / 2] and `scales` [..., n / 32]."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
    values = FP4_VALUES[nibbles].reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return values * np.repeat(power_of_two(scales), FP4_BLOCK, axis=-1)


def hadamard(x: F32) -> F32:
    """Sylvester's matrix times n^-0.5 on the last axis of `x` [..., n], n a power of two: f32
    butterflies with strides 1, 2, 4, ..., then the scale. Symmetric and orthonormal."""
    n = x.shape[-1]
    y, stride = x, 1
    while stride < n:
        pairs = y.reshape(*x.shape[:-1], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2)
        stride *= 2
    return y.reshape(x.shape) * x.dtype.type(n**-0.5)


def power_of_two(scales: U8) -> F32:
    """2^(b - 127) of E8M0 bytes, 1 at least: the byte is the exponent field of the float."""
    return (scales.astype(np.uint32) << 23).view(np.float32)


def _scale_exponent(ratio: F32) -> U8:
    """E8M0 byte of the least power of two that is not below `ratio`, from the float's bits: its
    exponent field, and one more if the mantissa is not zero. (`amax / 448` and `amax * (1 / 448)`
    agree in this exponent for every f32, and so do 6 and 1 / 6.)"""
    bits = ratio.view(np.uint32)
    exponent: U8 = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8)
    return exponent
