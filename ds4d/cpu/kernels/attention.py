"""Attention of a token over its window of raw rows and its compressed rows (spec/model.md 4.9).

    l_r = (q . row_r) dim^-1/2,  p_r = exp(l_r - m)
    o = sum_r p_r row_r / (exp(sink - m) + sum_r p_r)

Rows are keys and values alike. One running softmax per head starts at the sink (maximum `sink`,
mass 1, no value) and takes the rows in tiles: first the ring, then the compressed rows, both
ascending. Ring tiles begin at absolute positions that are multiples of TILE; tiles of compressed
rows at multiples of TILE of the row's index, or of its place among the chosen. So which rows share
a tile, and with that every rounding, depends on the token's own position alone.

Four heads go together, and share each decoded row. Per tile: dot products (channels in sixteen
lanes, then `simd.total`'s order), the maximum, weights, their sum (every fourth row in a lane, then
the lanes in pairs), and the values (rows ascending, one fused multiply-add each). Before, each head
is normalised and rotated; behind, its rotated channels are turned back.
"""

import numpy as np

from ds4d.cpu.jit import F4, I8, N, R, helper, kernel, real, share
from ds4d.cpu.kernels.norm import rms_row, rms_scale
from ds4d.cpu.kernels.rope import rotate, turn_of
from ds4d.cpu.kernels.rows import block_of, decode_row, encode_row
from ds4d.cpu.kernels.simd import (
    at,
    exchange_4,
    exchange_8,
    exp,
    fma,
    greater,
    load,
    scratch,
    splat,
    store,
    totals,
)

ZERO, ONE = np.float32(0), np.float32(1)
TILE = 64
HEADS = 4  # heads that a unit of work handles together
DIM_MAX = 1024
_weights, _per_head, _heads = scratch(HEADS * (TILE + 4)), scratch(16), scratch(HEADS * DIM_MAX)


def attention_ref(q, rows, sinks):
    """o [heads, dim] f64 of q [heads, dim] over rows [r, dim]."""
    logits = q.astype(np.float64) @ rows.T.astype(np.float64) * q.shape[1] ** -0.5
    m = np.maximum(sinks, logits.max(1, initial=-np.inf))[:, None]
    p = np.exp(logits - m)
    return (p @ rows) / (np.exp(sinks[:, None] - m) + p.sum(1, keepdims=True))


@helper
def _query(q, mine, dim, stored, eps, turn, pairs):
    """mine [stored] = a head of q over its root mean square, then RoPE."""
    scale = splat(rms_scale(q, stored, dim, eps))
    for k in range(0, stored, 16):
        store(mine, k, load(q, k) * scale)
    rotate(at(mine, dim - 2 * pairs), turn, pairs, ONE)


@helper
def _take(q, stored, dim, n, tile, room, m, mass, o, scale):
    """Let the four running softmaxes take the n rows of `tile` [TILE, stored].

    room [TILE + 4, 4] holds logits, then weights, by row and head; m and mass [4, 4] have the heads
    four times over.
    """
    by = splat(scale)
    for r in range(n):
        a = b = c = d = splat(ZERO)
        for k in range(0, dim, 16):
            v = load(tile, r * stored + k)
            a, b = fma(v, load(q, k), a), fma(v, load(q, stored + k), b)
            c, d = fma(v, load(q, 2 * stored + k), c), fma(v, load(q, 3 * stored + k), d)
        store(room, HEADS * r, totals(a, b, c, d) * by)
    store(room, HEADS * n, splat(np.float32(-np.inf)))
    high = load(m, 0)
    for r in range(0, n, 4):
        high = greater(high, load(room, HEADS * r))
    high = greater(high, exchange_4(high))
    high = greater(high, exchange_8(high))
    shrink = exp(load(m, 0) - high)
    sums = splat(ZERO)
    for r in range(0, n, 4):
        p = exp(load(room, HEADS * r) - high)
        store(room, HEADS * r, p)
        sums = sums + p
    sums = sums + exchange_4(sums)
    store(mass, 0, load(mass, 0) * shrink + (sums + exchange_8(sums)))
    store(m, 0, shrink)
    s0, s1, s2, s3 = splat(m[0]), splat(m[1]), splat(m[2]), splat(m[3])
    store(m, 0, high)
    for k in range(0, dim, 16):
        a, b = load(o, k) * s0, load(o, stored + k) * s1
        c, d = load(o, 2 * stored + k) * s2, load(o, 3 * stored + k) * s3
        for r in range(n):
            v = load(tile, r * stored + k)
            a, b = fma(splat(room[4 * r]), v, a), fma(splat(room[4 * r + 1]), v, b)
            c, d = fma(splat(room[4 * r + 2]), v, c), fma(splat(room[4 * r + 3]), v, d)
        store(o, k, a)
        store(o, stored + k, b)
        store(o, 2 * stored + k, c)
        store(o, 3 * stored + k, d)


@helper
def _finish(o, mass, turn, pairs, dim, out):
    """out [dim] = o over its mass, its rotated channels turned back."""
    by = splat(ONE / mass)
    for k in range(0, dim, 16):
        store(o, k, load(o, k) * by)
    rotate(at(o, dim - 2 * pairs), turn, pairs, -ONE)
    for k in range(dim):
        out[k] = o[k]


@kernel
def attend(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    lane: I8,  # [rows]
    q: F4,  # [rows, heads, stored]
    heads: N,
    stored: N,
    eps: R,
    turns: F4,  # [rows, 4, 2, pairs]
    pairs: N,
    turn_set: N,
    scale: R,
    sinks: F4,  # [heads]
    window: N,
    ring: I8,  # raw rows
    ratio: N,  # 0: there are no others
    paged: I8,  # compressed rows
    chosen: I8,  # [rows, top_k]
    top_k: N,  # 0: all rows, always
    o: F4,  # [rows, o_stride], heads one behind the other
    o_stride: N,
    tiles: F4,  # [threads, TILE, stored]
):
    dim, by = ring[1], real(scale)
    tile = at(tiles, tid * TILE * stored)
    for k in range(TILE * stored):  # channels behind `dim` stay zero
        tile[k] = ZERO
    room, m, mass = _weights(), _per_head(), _per_head()
    query, acc = _heads(), _heads()
    groups = (heads + HEADS - 1) // HEADS
    for unit in share(step[0] * groups, tid, n_threads):
        row, first = unit // groups, unit % groups * HEADS
        n_heads = min(HEADS, heads - first)
        turn = turn_of(turns, row, turn_set, pairs)
        for h in range(HEADS):
            head = first + min(h, n_heads - 1)  # a group that is not full repeats its last head
            for lane_ in range(h, 16, HEADS):
                m[lane_], mass[lane_] = sinks[head], ONE
            x = at(q, (row * heads + head) * stored)
            _query(x, at(query, h * stored), dim, stored, real(eps), turn, pairs)
            for k in range(0, stored, 16):
                store(acc, h * stored + k, splat(ZERO))
        p = pos[row]
        start = max(0, p + 1 - window)
        while start <= p:
            end = min((start // TILE + 1) * TILE, p + 1)
            for t in range(start, end):
                block = ring[8] + lane[row] * ring[9]
                decode_row(ring, block, t % ring[10], at(tile, (t - start) * stored))
            _take(query, stored, dim, end - start, tile, room, m, mass, acc, by)
            start = end
        visible = (p + 1) // ratio if ratio > 0 else 0
        selected = 0 < top_k < visible
        n = top_k if selected else visible
        for start in range(0, n, TILE):
            end = min(start + TILE, n)
            for t in range(start, end):
                s = chosen[row * top_k + t] if selected else t
                block = block_of(paged, lane[row], s)
                decode_row(paged, block, s % paged[11], at(tile, (t - start) * stored))
            _take(query, stored, dim, end - start, tile, room, m, mass, acc, by)
        for h in range(n_heads):
            out = at(o, row * o_stride + (first + h) * dim)
            _finish(at(acc, h * stored), mass[h], turn, pairs, dim, out)


@kernel
def kv_push(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    lane: I8,  # [rows]
    kv: F4,  # [rows, stride], overwritten
    stride: N,
    w: F4,  # [dim]
    eps: R,
    turns: F4,  # [rows, 4, 2, pairs]
    pairs: N,
    turn_set: N,
    ring: I8,  # where the rows go
):
    """kv = rms(kv; w), RoPE, encoded into the lane's ring at the row's position."""
    dim = ring[1]
    for row in share(step[0], tid, n_threads):
        x = at(kv, row * stride)
        rms_row(x, w, x, dim, real(eps))
        rotate(at(x, dim - 2 * pairs), turn_of(turns, row, turn_set, pairs), pairs, ONE)
        encode_row(ring, ring[8] + lane[row] * ring[9], pos[row] % ring[10], x)
