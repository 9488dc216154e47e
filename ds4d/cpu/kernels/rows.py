"""Cached rows in memory: encode at push, decode at use (spec/numerics.md 2, model/rows.py).

Rows live in *blocks* of planes: a page's rows of one layer, or a ring. A row format is a table of
words that says where row r of a block lies, and which blocks there are:

    0  kind: E4M3, FP4, HALF or FLOAT      4  bytes of codes a row (HALF, FLOAT: of the row)
    1  channels of the whole row           5  offset of the plane of halves
    2  coded channels                      6  offset of the plane of scales
    3  scales a row                        7  bytes of scales a row

    ring   8  address of lane 0's          9  bytes from lane to lane
           10 positions
    pages  8  address of a table [lanes, 9] of pages' addresses
           10 offset in a page             11 rows in a page

    E4M3   codes of the leading channels, blocks of 64; the others as halves
    FP4    codes of all channels in the Hadamard basis, two a byte, blocks of 32
    HALF   every channel a half            FLOAT   every channel f32 (exact mode)

A block with a NaN or an infinity gets scale byte 255, which decodes to infinity: the lane's logits
will show it.
"""

import numpy as np

from ds4d.cpu.jit import helper
from ds4d.cpu.kernels.simd import (
    as_f4,
    as_i1,
    as_i8,
    as_u1,
    as_u2,
    bits,
    from_bits,
    load,
    load_e4m3,
    magnitude,
    narrow,
    rint,
    splat,
    store,
    widen,
)
from ds4d.model.layout import E4M3, FLOAT, HALF

FORMAT_WORDS = 12

E4M3_MAX, E4M3_FLOOR = np.float32(448), np.float32(1e-4)
FP4_MAX, FP4_FLOOR = np.float32(6), np.float32(6 * 2.0**-126)
LEAST_NORMAL = np.float32(2.0**-6)
STEPS = np.float32(512)
UNDO = np.float32(256)  # load_e4m3 yields value / 256


@helper
def _scale_exponent(x, start, n, floor, most):
    """E8M0 byte of the least power of two not below max|x| / most; 255 if that is not finite."""
    high = bits(floor)
    for k in range(start, start + n):
        high = max(high, bits(magnitude(x[k])))  # as integers NaN > infinity > numbers
    if high >= 0x7F800000:
        return 255
    ratio = bits(from_bits(np.int32(high)) / most)
    return (ratio >> 23) + (1 if ratio & 0x7FFFFF else 0)


@helper
def _power(exponent):
    """2^(exponent - 127)."""
    return from_bits(np.int32(exponent << 23))


@helper
def _e4m3(y):
    """Code of a number within ±448, ties to even."""
    m = magnitude(y)
    sign = (bits(y) >> 24) & 0x80
    if m < LEAST_NORMAL:
        return np.int64(rint(m * STEPS)) | sign
    b = np.int64(bits(m))
    return ((b + 0x7FFFF + ((b >> 20) & 1)) >> 20) - (120 << 3) | sign


@helper
def _fp4(y):
    """Code of the nearest of 0 .5 1 1.5 2 3 4 6, ties to the even code; bit 3 is the sign."""
    m = magnitude(y)
    sign = 8 if bits(y) < 0 else 0
    code = 0
    code += m > np.float32(0.25)
    code += m >= np.float32(0.75)
    code += m > np.float32(1.25)
    code += m >= np.float32(1.75)
    code += m > np.float32(2.5)
    code += m >= np.float32(3.5)
    code += m > np.float32(5)
    return code | sign


@helper
def hadamard(x, n):
    """In place: butterflies with strides 1, 2, 4, ..., then n^-0.5; n a power of two."""
    stride = 1
    while stride < n:
        for base in range(0, n, 2 * stride):
            for k in range(base, base + stride):
                a, b = x[k], x[k + stride]
                x[k], x[k + stride] = a + b, a - b
        stride *= 2
    scale = np.float32(np.float64(n) ** -0.5)
    for k in range(n):
        x[k] *= scale


@helper
def block_of(form, lane, row):
    """Address of the block in which row `row` of a lane's pages lies, as row % form[11]."""
    return as_i8(form[8])[lane * form[9] + row // form[11]] + form[10]


@helper
def encode_row(form, block, r, x):
    """Write x [channels] as row r of the block at address `block`; FP4 overwrites x."""
    kind, dim, coded = form[0], form[1], form[2]
    if kind == FLOAT:
        floats = as_f4(block + r * form[4])
        for k in range(dim):
            floats[k] = x[k]
        return
    if kind == HALF:
        halves = as_u2(block + r * form[4])
        for k in range(dim):
            halves[k] = narrow(x[k])
        return
    codes, scales = as_u1(block + r * form[4]), as_u1(block + form[6] + r * form[7])
    if kind == E4M3:
        for b in range(form[3]):
            e = _scale_exponent(x, 64 * b, 64, E4M3_FLOOR, E4M3_MAX)
            scales[b] = np.uint8(e)
            by = _power(e)
            for k in range(64 * b, 64 * b + 64):
                y = x[k] / by
                y = min(max(y, -E4M3_MAX), E4M3_MAX)
                codes[k] = np.uint8(_e4m3(y))
        halves = as_u2(block + form[5] + r * 2 * (dim - coded))
        for k in range(coded, dim):
            halves[k - coded] = narrow(x[k])
        return
    hadamard(x, dim)
    for b in range(form[3]):
        e = _scale_exponent(x, 32 * b, 32, FP4_FLOOR, FP4_MAX)
        scales[b] = np.uint8(e)
        by = _power(e)
        for k in range(16 * b, 16 * b + 16):
            codes[k] = np.uint8(_fp4(x[2 * k] / by) | _fp4(x[2 * k + 1] / by) << 4)


@helper
def decode_row(form, block, r, y):
    """y [channels, padded to 16 with zeros by the caller] f32 of row r; not for FP4."""
    kind, dim, coded = form[0], form[1], form[2]
    if kind == FLOAT:
        floats = as_f4(block + r * form[4])
        for k in range(dim):
            y[k] = floats[k]
    elif kind == HALF:
        halves = as_u2(block + r * form[4])
        for k in range(dim):
            y[k] = widen(halves[k])
    else:
        codes, scales = as_i1(block + r * form[4]), as_u1(block + form[6] + r * form[7])
        for b in range(form[3]):
            by = splat(_power(np.int64(scales[b])) * UNDO)
            for k in range(64 * b, 64 * b + 64, 16):
                store(y, k, load_e4m3(codes, k) * by)
        halves = as_u2(block + form[5] + r * 2 * (dim - coded))
        rest = (dim - coded) // 16 * 16
        for k in range(0, rest, 16):
            store(y, coded + k, load(halves, k))
        for k in range(rest, dim - coded):
            y[coded + k] = widen(halves[k])
