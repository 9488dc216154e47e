"""Compressors: runs of tokens become one cached row (spec/model.md 4.7).

    push   u = W_kv h, g = W_gate h + ape[pos mod r], into the lane's ring at pos
    emit   if the row completes window w, per channel c:  p = softmax_t g_t[c],  row[c] = sum p u_t
             ratio 128   t over the window's 128 tokens
             ratio 4     series A (columns 0..d) of window w - 1, then series B (d..2d) of window w;
                         A is absent at w = 0
           row = rms(row; norm), RoPE at w r, encoded as row w of the lane's pages

Lanes are channels and t ascends, so every channel has its own three passes: maximum, weights, sum.
The ring addresses by position and is `rows_max` longer than a window needs, hence a rollback is
setting the lane's length.
"""

import numpy as np

from ds4d.cpu.jit import F4, I8, N, R, helper, kernel, real, share
from ds4d.cpu.kernels.norm import rms_row
from ds4d.cpu.kernels.rope import rotate, turn_of
from ds4d.cpu.kernels.rows import block_of, encode_row
from ds4d.cpu.kernels.simd import (
    at,
    exp,
    fma,
    greater,
    load,
    scratch,
    splat,
    store,
)

ZERO, ONE = np.float32(0), np.float32(1)
DIM_MAX = 1024
_row_room = scratch(DIM_MAX)


def pool_ref(u, g):
    """row [d] f64 of the values u and gates g [t, d] that take part."""
    p = np.exp(g.astype(np.float64) - g.max(0))
    return (p / p.sum(0) * u).sum(0)


@kernel
def compress_push(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    lane: I8,  # [rows]
    u: F4,  # [rows, stride]
    g: F4,  # [rows, stride]
    stride: N,
    ape: F4,  # [ratio, width]
    ratio: N,
    rings: F4,  # [lanes, 2, capacity, width]: values, gates
    capacity: N,
    width: N,
):
    for row in share(step[0], tid, n_threads):
        here = (2 * lane[row] * capacity + pos[row] % capacity) * width
        bias = pos[row] % ratio * width
        for k in range(0, width, 16):
            store(rings, here + k, load(u, row * stride + k))
            gate = load(g, row * stride + k) + load(ape, bias + k)
            store(rings, here + capacity * width + k, gate)


@helper
def _pool(u, g, stride, capacity, first, n, second, m, dim, out):
    """out [dim] over positions first .. first + n of columns 0.., then second .. second + m of
    columns dim..; positions modulo capacity."""
    for c in range(0, dim, 16):
        high = splat(np.float32(-np.inf))
        for t in range(n):
            high = greater(high, load(g, (first + t) % capacity * stride + c))
        for t in range(m):
            high = greater(high, load(g, (second + t) % capacity * stride + dim + c))
        weight, value = splat(ZERO), splat(ZERO)
        for t in range(n):
            k = (first + t) % capacity * stride + c
            p = exp(load(g, k) - high)
            weight, value = weight + p, fma(p, load(u, k), value)
        for t in range(m):
            k = (second + t) % capacity * stride + dim + c
            p = exp(load(g, k) - high)
            weight, value = weight + p, fma(p, load(u, k), value)
        store(out, c, value / weight)


@kernel
def compress_emit(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    lane: I8,  # [rows]
    rings: F4,  # [lanes, 2, capacity, width]: values, gates
    capacity: N,
    width: N,
    ratio: N,
    stored: N,  # of a series in the rings
    w: F4,  # [dim]
    eps: R,
    turns: F4,  # [rows, 4, 2, pairs]
    pairs: N,
    paged: I8,  # where the rows go
):
    out, dim = _row_room(), paged[1]
    for row in share(step[0], tid, n_threads):
        p = pos[row]
        if (p + 1) % ratio != 0:
            continue
        window = p // ratio
        u = at(rings, 2 * lane[row] * capacity * width)
        g = at(u, capacity * width)
        if ratio == 4:
            now = 4 * window
            before = 4 if window > 0 else 0
            _pool(u, g, width, capacity, now - before, before, now, 4, stored, out)
        else:
            _pool(u, g, width, capacity, window * ratio, ratio, 0, 0, stored, out)
        rms_row(out, w, out, dim, real(eps))
        turn = turn_of(turns, row, 2 if ratio == 4 else 3, pairs)
        rotate(at(out, dim - 2 * pairs), turn, pairs, ONE)
        encode_row(paged, block_of(paged, lane[row], window), window % paged[11], out)
