"""Activations on their way into products: float32, and int8 blocks beside it.

    d[b] = max |x| / 127,  q = rint(x / d), ties to even;  an all-zero block has d = 0

An activation's table, which `encode` fills and tiles read, is eight int64: addresses but for the
width.

    0  x    [rows, width] f32           5  q   [rows, width] int8, blocks of 256
    1  width, a multiple of 16          6  d   [rows, width / 256] f32
    2  q    [rows, width] int8, of 32   7  s   [rows, width / 256] i32
    3  d    [rows, width / 32] f32
    4  s    [rows, width / 32] i32: -128 times the sum of a block's q

Address 0 in place of q: no product wants that kind. A NaN or an infinity makes d one, and with it
every output that reads the block: nothing non-finite is lost on the way to the logits.
"""

import numpy as np

from ds4d.cpu.jit import I8, N, helper, kernel, share
from ds4d.cpu.kernels.simd import (
    at,
    crest,
    f4,
    i1,
    i4,
    load,
    peak,
    rint,
    splat,
    store_bytes,
    total,
)

ZERO = np.float32(0)
MOST = np.float32(127)


def quantise_ref(x, block):
    """q [..., n] int8 and d [..., n / block] f32 of x [..., n]."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    d = np.abs(blocks).max(-1) / MOST
    q = np.rint(blocks / np.where(d > 0, d, np.float32(1))[..., None])
    return q.astype(np.int8).reshape(x.shape), d


@helper
def _quantise(x, q, d, s, n, block):
    for b in range(n // block):
        start = b * block
        high = splat(ZERO)
        for k in range(start, start + block, 16):
            high = crest(high, load(x, k))
        scale = peak(high) / MOST
        d[b] = scale
        by = splat(scale)
        if scale == ZERO:
            s[b] = np.int32(0)
            for k in range(start, start + block, 16):
                store_bytes(q, k, splat(ZERO))
        else:
            sums = splat(ZERO)
            for k in range(start, start + block, 16):
                whole = rint(load(x, k) / by)
                sums = sums + whole
                store_bytes(q, k, whole)
            s[b] = np.int32(np.float32(-128) * total(sums))


@helper
def encode(act, row):
    """Make row `row` of an activation's int8 forms from its floats."""
    n = act[1]
    x = at(f4(act, 0), row * n)
    if act[2] != 0:
        b = row * n // 32
        _quantise(x, at(i1(act, 2), row * n), at(f4(act, 3), b), at(i4(act, 4), b), n, 32)
    if act[5] != 0:
        b = row * n // 256
        _quantise(x, at(i1(act, 5), row * n), at(f4(act, 6), b), at(i4(act, 7), b), n, 256)


@kernel
def quantise(tid: N, n_threads: N, step: I8, act: I8, per_row: N):
    """The int8 forms of `act`, which has `per_row` rows for each of the step."""
    for row in share(step[0] * per_row, tid, n_threads):
        encode(act, row)
