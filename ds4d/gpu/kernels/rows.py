"""Cached rows in memory: encode at push, decode at use (spec/model.md 4.11, numerics.md 2).

    row = rms(kv; w), RoPE, encoded into the ring of the row's lane at its position

    E4M3   codes of the leading channels in blocks of 64, one scale byte a block; the others halves
    FP4    Hadamard, then codes of all channels in blocks of 32, two codes a byte
    HALF   every channel a half, where the geometry fits neither rule

The bytes are those of `model/rows.py`, bit for bit. Scale byte b stands for 2^(b - 127); a block
with a NaN or an infinity gets 255, which decodes to no number (its codes say nothing), so the
lane's logits will show it.

Rows lie in *blocks* of n rows, as planes that begin at multiples of 16 (`model/layout.py`):

    codes   [n, coded], FP4 [n, dim / 2], HALF [n, 2 dim] bytes    at 0 of the block
    halves  [n, dim - coded] f16, E4M3 alone                       at `halves`
    scales  [n, scale_bytes] of which the last may be padding, 0   at `scales`

    ring    one block of `capacity` rows per lane and layer: address of the layer's for lane 0, plus
            lane * lane_stride; position p is row p % capacity
    pages   pool + page * page_stride + offset (of the layer's block in a page), `per_page` rows;
            `page` is an i32 of the table [lanes, pages_per_lane] of page numbers, entry
            s // per_page for row s of the lane; a negative one: no page, and nothing is written

A row is encoded by one block of 256 threads out of shared memory: a warp takes 128 channels, four a
lane; FP4 rows are one warp's, which holds dim / 32 adjacent channels a lane. Decoding is up to who
reads: 8 or 16 codes a lane.

    ring   u8                  one row per row of the pass written, idle rows skipped
    kv     [R, stride]  f32    read once                w  [dim]  f32
    turns  [R, 4, 2, pairs]    one set of each row read

grid (R,)   block 256   shared 4 dim + 32 bytes   dim even, at most 1024; FP4: a power of two
Sums of squares are f32: thread i adds channels 2i, 2i + 1, 2i + 512, ..., each with one fused
multiply-add, then lanes as `warp.total` does, then the eight warps in order. Hadamard: strides 1,
2, 4, ..., then the scale.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx, rope, warp
from ds4d.model import rows as model_rows
from ds4d.model.layout import E4M3, FP4, HALF, PLANE, pad

BLOCK = 256
WARPS = BLOCK // 32
ALL = 0xFFFFFFFF

INFINITY = 0x7F800000  # bits; NaNs are above
E4M3_FLOOR = 0x38D1B717  # 1e-4, the least maximum of a block
FP4_FLOOR = 0x01C00000  # 6 * 2^-126
# amax / 448 and amax * f32(1 / 448) have the same exponent for every f32, likewise 6.
E4M3_SHARE, FP4_SHARE = 1 / 448, 1 / 6


def rms_turn_ref(x, w, eps, turns):
    """[n, dim] f32 of x [n, dim] and turns [n, 2, pairs], in the order of the kernels."""
    n, dim = x.shape
    squares = np.zeros((n, pad(dim, 2 * BLOCK)), np.float32)
    squares[:, :dim] = x
    acc = np.zeros((n, BLOCK), np.float32)
    for k in range(0, squares.shape[1], 2 * BLOCK):
        for i in range(2):
            each = squares[:, k + i : k + 2 * BLOCK : 2].astype(np.float64)
            acc = (each * each + acc).astype(np.float32)
    acc = acc.reshape(n, WARPS, 32)
    for i in range(5):
        acc = acc + acc[..., np.arange(32) ^ 16 >> i]
    total = np.zeros(n, np.float32)
    for i in range(WARPS):
        total = total + acc[:, i, 0]
    scale = np.float32(1) / np.sqrt(total / np.float32(dim) + np.float32(eps))
    return rope.turn_ref(x * scale[:, None] * w, turns)


def encode_ref(kind, coded, x):
    """Planes of x [n, dim]: codes, halves, scales, each [n, bytes] u8, padded as they lie."""
    x, n = x.astype(np.float32), len(x)
    none = np.empty((n, 0), np.uint8)
    if kind == HALF:
        return x.astype(np.float16).view(np.uint8), none, none
    if kind == FP4:
        codes, scales = model_rows.encode_fp4(model_rows.hadamard(x))
        return codes, none, scales
    codes, scales = model_rows.encode_e4m3(x[:, :coded])
    padded = np.zeros((n, _power(scales.shape[1])), np.uint8)
    padded[:, : scales.shape[1]] = scales
    return codes, np.ascontiguousarray(x[:, coded:]).astype(np.float16).view(np.uint8), padded


def _power(n):
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def places(form, n_rows):
    """(halves, scales): where these planes of a block of n rows begin. `form`: a RowFormat."""
    halves = pad(form.code_bytes * n_rows, PLANE)
    return halves, halves + pad(form.half_bytes * n_rows, PLANE)


# -- where rows lie ----------------------------------------------------------------------------


@device
def page_of(page_table, pages_per_lane, per_page, lane, s):
    """Number of the page that holds row s of a lane, as its row s % per_page."""
    return page_table[int64(lane) * pages_per_lane + s // per_page]


# -- decoding ----------------------------------------------------------------------------------


@device
def power(exponent):
    """2^(exponent - 127) of a scale byte; 255: infinity."""
    return ptx.as_f4(uint32(uint32(exponent) << 23))


@device
def e4m3x8(rows, at, by):
    """Eight channels times `by`, of the eight codes at rows[at], a multiple of 8."""
    p, q = ptx.load8(rows, at)
    a, b, c, d = ptx.e4m3x4(p)
    e, f, g, h = ptx.e4m3x4(q)
    return a * by, b * by, c * by, d * by, e * by, f * by, g * by, h * by


@device
def e4m3x16(rows, at, by):
    """Sixteen channels times `by`, of the sixteen codes at rows[at], a multiple of 16."""
    p, q, r, s = ptx.load16(rows, at)
    a, b, c, d = ptx.e4m3x4(p)
    e, f, g, h = ptx.e4m3x4(q)
    i, j, k, l = ptx.e4m3x4(r)  # noqa: E741
    m, n, o, z = ptx.e4m3x4(s)
    return (
        a * by, b * by, c * by, d * by, e * by, f * by, g * by, h * by,
        i * by, j * by, k * by, l * by, m * by, n * by, o * by, z * by,
    )  # fmt: skip


@device
def halves4(rows, at):
    """Four channels, of the halves at rows[at], a multiple of 8."""
    p, q = ptx.load8(rows, at)
    a, b = ptx.halves(p)
    c, d = ptx.halves(q)
    return a, b, c, d


@device
def halves8(rows, at):
    """Eight channels, of the halves at rows[at], a multiple of 16."""
    p, q, r, s = ptx.load16(rows, at)
    a, b = ptx.halves(p)
    c, d = ptx.halves(q)
    e, f = ptx.halves(r)
    g, h = ptx.halves(s)
    return a, b, c, d, e, f, g, h


@device
def fp4x8(word):
    """Two words of four int8 each, which count halves: twice the values of the eight FP4 codes of
    `word`, in order. The channel is count * power(exponent) / 2.

    Magnitudes 0 1 2 3 4 6 8 12 and their negatives are bytes that `prmt` picks; a third pick makes
    the masks of the signs."""
    index, sign = uint32(word & 0x77777777), uint32((word >> 3) & 0x11111111)
    lo, hi = _four_counts(index, sign), _four_counts(uint32(index >> 16), uint32(sign >> 16))
    return lo, hi


@device
def _four_counts(index, sign):
    plus = ptx.prmt(uint32(0x03020100), uint32(0x0C080604), index)
    minus = ptx.prmt(uint32(0xFDFEFF00), uint32(0xF4F8FAFC), index)
    mask = ptx.prmt(uint32(0x0000FF00), uint32(0), sign)
    return uint32((plus & ~mask) | (minus & mask))


@device
def fp4x16(rows, at):
    """Four words of counts, of the sixteen FP4 codes at rows[at], a multiple of 8."""
    p, q = ptx.load8(rows, at)
    a, b = fp4x8(p)
    c, d = fp4x8(q)
    return a, b, c, d


@device
def fp4x32(rows, at):
    """Eight words of counts, of the block of 32 FP4 codes at rows[at], a multiple of 16."""
    p, q, r, s = ptx.load16(rows, at)
    a, b = fp4x8(p)
    c, d = fp4x8(q)
    e, f = fp4x8(r)
    g, h = fp4x8(s)
    return a, b, c, d, e, f, g, h


# -- encoding ----------------------------------------------------------------------------------


@device
def magnitude(x):
    """Bits of |x|, i32: as integers NaN > infinity > numbers."""
    return int32(ptx.as_u4(x) & 0x7FFFFFFF)


@device
def _exponent(high, floor, share):
    """Scale byte: the least power of two that is not below max|x| * share; 255 if that is no
    number. `high` and `floor` are bits."""
    ratio = ptx.as_u4(ptx.as_f4(uint32(max(high, floor))) * float32(share))
    least = (ratio >> 23) + (1 if ratio & 0x7FFFFF else 0)
    return int32(255) if high >= INFINITY else int32(least)


@device
def _one_over(exponent):
    """1 / power(exponent), exact for every byte that occurs; infinity for 255."""
    return ptx.as_f4(uint32(uint32((254 - exponent) & 255) << 23))


@device
def to_e4m3(a, b, c, d):
    """(four codes, scale byte) of four adjacent channels a lane; 16 lanes of the warp make a block
    of 64."""
    high = max(max(magnitude(a), magnitude(b)), max(magnitude(c), magnitude(d)))
    for i in range(4):
        high = max(high, cuda.shfl_xor_sync(ALL, high, 8 >> i))
    exponent = _exponent(high, E4M3_FLOOR, E4M3_SHARE)
    by = _one_over(exponent)
    lo, hi = ptx.to_e4m3x2(a * by, b * by), ptx.to_e4m3x2(c * by, d * by)
    return uint32(uint32(lo) | uint32(hi) << 16), exponent


@device
def fp4_magnitude(y):
    """Index of the nearest of 0 .5 1 1.5 2 3 4 6 to |y|, ties to the even index."""
    m = abs(y)
    code = int32(m > float32(0.25)) + int32(m >= float32(0.75)) + int32(m > float32(1.25))
    code += int32(m >= float32(1.75)) + int32(m > float32(2.5)) + int32(m >= float32(3.5))
    return int32(code + int32(m > float32(5)))


@device
def fp4_code(y):
    """FP4 code of y; bit 3 is the sign."""
    return int32(fp4_magnitude(y) | ((ptx.as_u4(y) >> 28) & 8))


@device
def fp4_count(y):
    """Twice the value that y is rounded to: what `fp4x8` makes of its code."""
    count = int32((0xC8643210 >> (4 * fp4_magnitude(y))) & 15)
    return -count if y < float32(0) else count


@cache
def hadamard(dim):
    """transform(x, lane): the vector of which each lane of a warp holds dim / 32 adjacent channels,
    in place."""
    each, inside, scale = dim // 32, (dim // 32).bit_length() - 1, dim**-0.5

    @device
    def transform(x, lane):
        for level in range(inside):
            for i in range(each):
                if i & (1 << level) == 0:
                    a, b = x[i], x[i + (1 << level)]
                    x[i] = a + b
                    x[i + (1 << level)] = a - b
        for level in range(5):
            for i in range(each):
                other = cuda.shfl_xor_sync(ALL, x[i], 1 << level)
                x[i] = other - x[i] if (lane >> level) & 1 else x[i] + other
        for i in range(each):
            x[i] *= float32(scale)

    return transform


@cache
def fp4_scaling(dim):
    """scaling(x): the scale byte of the block of 32 in which a lane's dim / 32 channels lie; they
    are multiplied by the inverse of its power, ready for `fp4_code` or `fp4_count`."""
    each, beyond = dim // 32, 5 - ((dim // 32).bit_length() - 1)

    @device
    def scaling(x):
        high = int32(0)
        for i in range(each):
            high = max(high, magnitude(x[i]))
        for i in range(beyond):
            high = max(high, cuda.shfl_xor_sync(ALL, high, 1 << i))
        exponent = _exponent(high, FP4_FLOOR, FP4_SHARE)
        by = _one_over(exponent)
        for i in range(each):
            x[i] *= by
        return exponent

    return scaling


@cache
def encoder(kind, dim, coded):
    """encode(out, block, r, halves, scales, row, tid): `row` [dim] f32 of shared memory becomes row
    r of the block at out[block], by all 256 threads. In front of it stands a barrier."""
    assert dim % 2 == 0, f"rows of {dim} channels"
    if kind == E4M3:
        return _e4m3_encoder(dim, coded)
    return _fp4_encoder(dim) if kind == FP4 else _half_encoder(dim)


def _e4m3_encoder(dim, coded):
    chunks, n_words = -(-coded // 128), (dim - coded) // 2
    n_scales, scale_bytes = coded // 64, _power(coded // 64)

    @device
    def encode(out, block, r, halves, scales, row, tid):
        lane = tid % 32
        scales_at = block + scales + int64(r) * scale_bytes
        for chunk in range(tid // 32, chunks, WARPS):
            k = 128 * chunk + 4 * lane
            a = b = c = d = float32(0)
            if k < coded:  # true or false for a whole block of 64
                a, b, c, d = row[k], row[k + 1], row[k + 2], row[k + 3]
            codes, exponent = to_e4m3(a, b, c, d)
            if k < coded:
                ptx.store4(out, block + int64(r) * coded + k, codes)
                if lane % 16 == 0:
                    out[scales_at + k // 64] = exponent
        if n_scales <= tid < scale_bytes:
            out[scales_at + tid] = 0
        halves_at = block + halves + int64(r) * (4 * n_words)
        for i in range(BLOCK - 1 - tid, n_words, BLOCK):  # warps that have no codes go first
            k = coded + 2 * i
            ptx.store4(out, halves_at + 4 * i, _two_halves(row[k], row[k + 1]))

    return encode


def _fp4_encoder(dim):
    assert dim % 32 == 0 and dim & (dim - 1) == 0, f"FP4 rows of {dim} channels"
    each = dim // 32
    transform, scaling = hadamard(dim), fp4_scaling(dim)

    @device
    def encode(out, block, r, halves, scales, row, tid):
        if tid < 32:
            x = cuda.local.array(each, float32)
            for i in range(each):
                x[i] = row[each * tid + i]
            transform(x, tid)
            exponent = scaling(x)
            codes = block + int64(r) * (dim // 2)
            if each == 1:
                code = fp4_code(x[0])
                other = cuda.shfl_xor_sync(ALL, code, 1)
                if tid % 2 == 0:
                    out[codes + tid // 2] = code | other << 4
            else:
                for i in range(each // 2):
                    both = fp4_code(x[2 * i]) | fp4_code(x[2 * i + 1]) << 4
                    out[codes + tid * (each // 2) + i] = both
            if tid * each % 32 == 0:
                out[block + scales + int64(r) * (dim // 32) + tid * each // 32] = exponent

    return encode


def _half_encoder(dim):
    @device
    def encode(out, block, r, halves, scales, row, tid):
        for i in range(tid, dim // 2, BLOCK):
            at = block + int64(r) * (2 * dim) + 4 * i
            ptx.store4(out, at, _two_halves(row[2 * i], row[2 * i + 1]))

    return encode


@device
def _two_halves(a, b):
    return uint32(uint32(ptx.narrow(a)) | uint32(ptx.narrow(b)) << 16)


# -- raw rows ----------------------------------------------------------------------------------


@cache
def normaliser(dim, pairs):
    """normalise(row, w, eps, turns, at, tid): row = rms(row; w), its trailing pairs turned by the
    set at turns[at]. `row` [dim] is shared memory of which thread i has written, and finds again,
    the channels 2i, 2i + 1, 2i + 512, ..."""
    plain = dim - 2 * pairs

    @device
    def normalise(row, w, eps, turns, at, tid):
        partial = cuda.shared.array(WARPS, float32)
        acc = float32(0)
        for k in range(2 * tid, dim, 2 * BLOCK):
            acc = ptx.fma(row[k], row[k], acc)
            acc = ptx.fma(row[k + 1], row[k + 1], acc)
        acc = warp.total(acc)
        if tid % 32 == 0:
            partial[tid // 32] = acc
        cuda.syncthreads()  # all partials are visible
        total = float32(0)
        for i in range(WARPS):
            total += partial[i]
        scale = float32(1) / math.sqrt(total / float32(dim) + eps)
        for k in range(2 * tid, dim, 2 * BLOCK):
            u, v = row[k] * scale * w[k], row[k + 1] * scale * w[k + 1]
            if k >= plain:
                i = at + (k - plain) // 2
                u, v = rope.turn(u, v, turns[i], turns[i + pairs])
            row[k] = u
            row[k + 1] = v

    return normalise


@cache
def pusher(kind, dim, pairs):
    """push(...): one row by one block; arguments as `kv_push` has them."""
    normalise, encode = normaliser(dim, pairs), encoder(kind, dim, dim - 2 * pairs)

    @device
    def push(
        ring, lane_stride, capacity, halves, scales, pos, lane, kv, stride, w, eps, turns, turn_set
    ):
        r, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
        p = pos[r]
        if p < 0:
            return
        row = cuda.shared.array(dim, float32)
        for k in range(2 * tid, dim, 2 * BLOCK):
            row[k] = kv[r * stride + k]
            row[k + 1] = kv[r * stride + k + 1]
        normalise(row, w, eps, turns, rope.turn_of(r, turn_set, pairs), tid)
        cuda.syncthreads()  # the row is whole
        encode(ring, lane[r] * lane_stride, p % capacity, halves, scales, row, tid)

    return push


@cache
def kv_push_kernel(kind, dim, pairs):
    push = pusher(kind, dim, pairs)

    @kernel(
        "u1* ring, i8 lane_stride, i4 capacity, i4 halves, i4 scales, i4* pos, i4* lane, f4* kv,"
        "i4 stride, f4* w, f4 eps, f4* turns, i4 turn_set",
        block=BLOCK,
    )
    def kv_push(
        ring, lane_stride, capacity, halves, scales, pos, lane, kv, stride, w, eps, turns, turn_set
    ):
        ptx.let_next_begin()
        ptx.wait_for_front()
        push(
            ring, lane_stride, capacity, halves, scales,
            pos, lane, kv, stride, w, eps, turns, turn_set,
        )  # fmt: skip

    return kv_push


def kv_push(
    stream, ring, pos, lane, kv, w, turns, *,
    form, n_rows, lane_stride, capacity, stride, pairs, turn_set, eps, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`. `ring`: the layer's block for lane 0. `turn_set`: 0 for a sliding layer,
    1 for one with compressed rows."""
    halves, scales = places(form, capacity)
    kv_push_kernel(form.kind, form.dim, pairs).launch(
        stream, n_rows, BLOCK, ring, lane_stride, capacity, halves, scales, pos, lane, kv, stride,
        w, eps, turns, turn_set, dependent=dependent,
    )  # fmt: skip
