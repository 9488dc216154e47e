"""Activations as int8 blocks, for products with quantised weights (spec/numerics.md 1).

    d[b] = max |x| / 127,  q = rint(x / d), ties to even;  an all-zero block has d = 0 and q = 0

    x  f32, R rows `stride` apart, n values of each from `first` on: read once
    q  [n / 32, R, 32]  i1   blocks of 32 along n, whatever B is; written whole
    d  [n / B, R]       f4   a scale for B values, B = 32 or 256; written whole

Of 32: a warp a block, a lane a value. Of 256: a warp a block, a lane eight adjacent values, so x
and q move in 16 and 8 bytes; the same warp can make the blocks of 32 beside it.
grid (blocks of a row / 4, R)   block 128   no shared memory
The greatest is taken of the bits of |x|, which order as the values do, with NaN above infinity: a
NaN or an infinity makes d one and q 0, and with it every output that reads the block. Idle rows
are treated like others; what comes of them is read by nobody.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int8, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

BLOCK = 128
WARPS = BLOCK // 32


def quantise_ref(x, block):
    """q [n / 32, R, 32] and d [n / block, R] of x [R, n]."""
    rows, n = x.shape
    blocks = x.astype(np.float32).reshape(rows, n // block, block)
    d = np.abs(blocks).max(-1) / np.float32(127)
    usable = np.isfinite(d) & (d > 0)
    whole = np.rint(blocks / np.where(usable, d, np.float32(1))[..., None])
    q = np.where(usable[..., None], whole, 0).astype(np.int8).reshape(rows, n // 32, 32)
    return np.ascontiguousarray(q.swapaxes(0, 1)), np.ascontiguousarray(d.T)


# -- of values in registers: for the end of any kernel -----------------------------------------


@device
def size(x):
    """Bits of |x|, an int32: the greater the value, the greater they are."""
    return int32(ptx.as_u4(x) & 0x7FFFFFFF)


@device
def scale(greatest):
    """d of a block, from the greatest `size` in it."""
    return ptx.as_f4(uint32(greatest)) / float32(127)


@device
def code(x, d):
    """q of a value, an int32. Infinite d: x / d is 0 or no number, and both become 0."""
    return ptx.rint(x / d) if d > float32(0) else int32(0)


@device
def block_of_lanes(x):
    """(q, d) of a block of 32 of which each lane of a warp holds a value."""
    d = scale(ptx.most(size(x)))
    return code(x, d), d


@device
def word(a, b, c, d):
    """Four codes in a word, the first in the lowest byte."""
    return uint32(a & 255 | (b & 255) << 8 | (c & 255) << 16 | (d & 255) << 24)


# -- of rows in memory -------------------------------------------------------------------------


@kernel("i1* q, f4* d, f4* x, i4 blocks, i4 stride, i4 first", block=BLOCK)
def quantise_32(q, d, x, blocks, stride, first):
    ptx.let_next_begin()
    lane, row, rows = cuda.threadIdx.x & 31, cuda.blockIdx.y, cuda.gridDim.y
    block = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
    ptx.wait_for_front()
    if block < blocks:
        whole, by = block_of_lanes(x[int64(row) * stride + first + block * 32 + lane])
        place = int64(block) * rows + row
        q[place * 32 + lane] = int8(whole)
        if lane == 0:
            d[place] = by


@cache
def quantise_256(also_32):
    """Blocks of 256 into (q, d); with `also_32` those of 32 into (q_32, d_32)."""

    @kernel("i1* q, f4* d, i1* q_32, f4* d_32, f4* x, i4 blocks, i4 stride, i4 first", block=BLOCK)
    def quantise_256(q, d, q_32, d_32, x, blocks, stride, first):
        ptx.let_next_begin()
        lane, row, rows = cuda.threadIdx.x & 31, cuda.blockIdx.y, cuda.gridDim.y
        block = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        ptx.wait_for_front()
        if block < blocks:
            values = cuda.local.array(8, float32)
            start = int64(row) * stride + first + block * 256 + lane * 8
            low, high = ptx.load16(x, start), ptx.load16(x, start + 4)
            for i in range(4):
                values[i] = ptx.as_f4(low[i])
                values[4 + i] = ptx.as_f4(high[i])
            mine = size(values[0])
            for i in range(1, 8):
                other = size(values[i])
                mine = other if other > mine else mine
            by = scale(ptx.most(mine))
            # Four lanes hold a block of 32.
            place = (int64(block) * 8 + (lane >> 2)) * rows + row
            store_eight(q, place * 32 + (lane & 3) * 8, values, by)
            if lane == 0:
                d[int64(block) * rows + row] = by
            if also_32:
                for i in range(2):
                    other = cuda.shfl_xor_sync(0xFFFFFFFF, mine, 1 << i)
                    mine = other if other > mine else mine
                by_32 = scale(mine)
                store_eight(q_32, place * 32 + (lane & 3) * 8, values, by_32)
                if lane & 3 == 0:
                    d_32[place] = by_32

    return quantise_256


@device
def store_eight(q, at, values, d):
    low = word(code(values[0], d), code(values[1], d), code(values[2], d), code(values[3], d))
    high = word(code(values[4], d), code(values[5], d), code(values[6], d), code(values[7], d))
    ptx.store8(q, at, low, high)


# -- launching ---------------------------------------------------------------------------------


def quantise(
    stream, q, d, x, *, n_rows, n, block=32, stride=None, first=0, dependent=False
):  # fmt: skip
    """x [n_rows, n] into q and d, of blocks of 32 or 256. `n_rows` is R."""
    stride = n if stride is None else stride
    assert block in (32, 256) and n % block == 0, (n, block)
    if block == 32:
        quantise_32.launch(stream, grid(n, 32, n_rows), BLOCK, q, d, x, n // 32, stride, first,
                           dependent=dependent)  # fmt: skip
        return
    assert stride % 4 == 0 and first % 4 == 0, "reads are of 16 bytes"
    quantise_256(False).launch(stream, grid(n, 256, n_rows), BLOCK, q, d, q, d, x, n // 256,
                               stride, first, dependent=dependent)  # fmt: skip


def quantise_both(
    stream, q_32, d_32, q_256, d_256, x, *, n_rows, n, stride=None, first=0, dependent=False
):
    """Both forms of x [n_rows, n], which is read once."""
    stride = n if stride is None else stride
    assert n % 256 == 0, n
    assert stride % 4 == 0 and first % 4 == 0, "reads are of 16 bytes"
    quantise_256(True).launch(stream, grid(n, 256, n_rows), BLOCK, q_256, d_256, q_32, d_32, x,
                              n // 256, stride, first, dependent=dependent)  # fmt: skip


def grid(n, block, n_rows):
    """Of either kernel."""
    return -(-n // block // WARPS), n_rows
