"""Compressors: runs of tokens become one cached row (spec/model.md 4.7).

    push   u = W_kv h, g = W_gate h + ape[pos mod r], into the lane's ring at pos
    emit   if the row completes window w, per channel c:  p = softmax_t g_t[c],  row[c] = sum p u_t
             ratio 128   t over the window's 128 tokens
             ratio 4     series A (columns 0..) of window w - 1, then series B (`stored`..) of w;
                         A is absent at w = 0
           row = rms(row; norm), RoPE at w r, encoded as row w of the lane's pages

    u, g   [R, stride]              f32  read once; series `stored` = dim padded to 16 apart
    ape    [ratio, width]           f32  width = series * stored
    rings  [lanes, 2, capacity, width]  f32  values, gates of one layer; position p at p % capacity
    pool   u8                       pages (`rows.py`); one row written per window that is complete
    w [dim], turns [R, 4, 2, pairs]  f32 as everywhere

grid (R,) or, where an indexer's compressor goes with it, (R, 2)   block 256
shared 4 dim + 32 bytes each   ratio 4 or 128, dim even

One launch does both. A block that emits needs what rows of the same pass in front of its own push;
it pushes them itself once more: whoever comes first, the bytes are the same, and no block waits for
another. Slots do not meet: the ring is longer by the rows of a pass than two windows. Rows of a
lane are neighbours, at positions one apart.

A thread has two channels. Per channel: the maximum, then t ascending: a weight is added, a value
is added with one fused multiply-add, and at the end one is divided by the other; A before B.
Then as in `rows.py`. Ratio 128 reads 128 gates twice and as many values, sixteen at a time.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int64

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx, rope, rows
from ds4d.model.layout import RowFormat, pad

BLOCK = rows.BLOCK


class Compressor(NamedTuple):
    """One compressor of one layer: arrays by address, and where its rows go in a page."""

    form: RowFormat
    u: Any
    g: Any
    ape: Any
    w: Any
    rings: Any
    capacity: int
    offset: int  # of its block in a page


class Pages(NamedTuple):
    pool: Any
    page_stride: int
    table: Any
    pages_per_lane: int
    page_tokens: int


def pool_ref(u, g):
    """row [d] f64 of the values u and gates g [t, d] that take part, ascending."""
    p = np.exp(g.astype(np.float64) - g.max(0))
    return (p / p.sum(0) * u).sum(0)


def pool_in_order(u, g):
    """The same in f32, in the kernel's order."""
    high = g.max(0)
    weight, value = np.zeros((2, u.shape[1]), np.float32)
    for t in range(len(u)):
        p = np.exp(g[t] - high)
        weight = weight + p
        value = (p.astype(np.float64) * u[t] + value).astype(np.float32)
    return value / weight


# -- one block, one row ------------------------------------------------------------------------


@cache
def compressor(kind, dim, pairs, ratio):
    """compress(...): the push of one row by one block, and what it completes. `sources`: u and g;
    the other arguments as in `compress_kernel`."""
    stored = pad(dim)
    series = 2 if ratio == 4 else 1
    width, span, turn_set = series * stored, series * ratio, 2 if ratio == 4 else 3
    batch = min(ratio, 16)  # positions whose loads are in flight; divides the ratio
    both = 2 * batch
    normalise, encode = rows.normaliser(dim, pairs), rows.encoder(kind, dim, dim - 2 * pairs)

    @device
    def push(rings, values, gates, slot, u, g, at, ape, bias, tid):
        for k in range(2 * tid, width, 2 * BLOCK):
            to = int64(slot) * width + k
            a, b = ptx.load8(u, at + k)
            ptx.store8(rings, values + to, a, b)
            a, b = ptx.load8(g, at + k)
            rings[gates + to] = ptx.as_f4(a) + ape[bias + k]
            rings[gates + to + 1] = ptx.as_f4(b) + ape[bias + k + 1]

    @device
    def highest(rings, gates, start, capacity, h0, h1):
        """The maxima of two channels over a window's gates; start: slot of its first position."""
        x = cuda.local.array(both, float32)
        for t in range(0, ratio, batch):
            for i in range(batch):
                slot = start + t + i
                slot = slot - capacity if slot >= capacity else slot
                a, b = ptx.load8(rings, gates + int64(slot) * width)
                x[2 * i], x[2 * i + 1] = ptx.as_f4(a), ptx.as_f4(b)
            for i in range(batch):
                h0, h1 = max(h0, x[2 * i]), max(h1, x[2 * i + 1])
        return h0, h1

    @device
    def weigh(rings, values, gates, start, capacity, h0, h1, w0, w1, v0, v1):
        x, y = cuda.local.array(both, float32), cuda.local.array(both, float32)
        for t in range(0, ratio, batch):
            for i in range(batch):
                slot = start + t + i
                slot = slot - capacity if slot >= capacity else slot
                a, b = ptx.load8(rings, gates + int64(slot) * width)
                x[2 * i], x[2 * i + 1] = ptx.as_f4(a), ptx.as_f4(b)
                a, b = ptx.load8(rings, values + int64(slot) * width)
                y[2 * i], y[2 * i + 1] = ptx.as_f4(a), ptx.as_f4(b)
            for i in range(batch):
                p, q = math.exp(x[2 * i] - h0), math.exp(x[2 * i + 1] - h1)
                w0, w1 = w0 + p, w1 + q
                v0, v1 = ptx.fma(p, y[2 * i], v0), ptx.fma(q, y[2 * i + 1], v1)
        return w0, w1, v0, v1

    @device
    def compress(
        rings, capacity, u, g, stride, ape, w, eps, pos, lane, turns,
        pool, page_stride, table, pages_per_lane, per_page, offset, halves, scales,
    ):  # fmt: skip
        r, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
        p = pos[r]
        if p < 0:
            return
        mine = lane[r]
        values = int64(mine) * 2 * capacity * width
        gates = values + int64(capacity) * width
        complete = (p + 1) % ratio == 0
        n_front = 0  # rows of the pass in front that the windows take in
        if complete:
            while n_front < r and n_front < span - 1 and lane[r - n_front - 1] == mine:
                n_front += 1
        for i in range(n_front + 1):
            t = p - n_front + i
            at, bias = (r - n_front + i) * stride, t % ratio * width
            push(rings, values, gates, t % capacity, u, g, at, ape, bias, tid)
        if not complete:
            return
        cuda.syncthreads()  # columns of series B were written by other threads
        row = cuda.shared.array(dim, float32)
        start = (p + 1 - ratio) % capacity
        before = (p + 1 - span + capacity) % capacity  # the same for ratio 128
        b = width - stored  # where series B begins, or the only one
        for k in range(2 * tid, dim, 2 * BLOCK):
            h0 = h1 = float32(-math.inf)
            if series == 2 and p >= span - 1:
                h0, h1 = highest(rings, gates + k, before, capacity, h0, h1)
            h0, h1 = highest(rings, gates + b + k, start, capacity, h0, h1)
            w0 = w1 = v0 = v1 = float32(0)
            if series == 2 and p >= span - 1:
                w0, w1, v0, v1 = weigh(
                    rings, values + k, gates + k, before, capacity, h0, h1, w0, w1, v0, v1
                )
            w0, w1, v0, v1 = weigh(
                rings, values + b + k, gates + b + k, start, capacity, h0, h1, w0, w1, v0, v1
            )
            row[k] = v0 / w0
            row[k + 1] = v1 / w1
        normalise(row, w, eps, turns, rope.turn_of(r, turn_set, pairs), tid)
        cuda.syncthreads()  # the row is whole
        s = p // ratio
        page = rows.page_of(table, pages_per_lane, per_page, mine, s)
        if page >= 0:
            block = page * page_stride + offset
            encode(pool, block, s % per_page, halves, scales, row, tid)

    return compress


# -- kernels -----------------------------------------------------------------------------------


@cache
def compress_kernel(kind, dim, pairs, ratio):
    compress = compressor(kind, dim, pairs, ratio)

    @kernel(
        "f4* rings, i4 capacity, f4* u, f4* g, i4 stride, f4* ape, f4* w, f4 eps, i4* pos,"
        "i4* lane, f4* turns, u1* pool, i8 page_stride, i4* table, i4 pages_per_lane, i4 per_page,"
        "i4 offset, i4 halves, i4 scales",
        block=BLOCK,
    )
    def compress_one(
        rings, capacity, u, g, stride, ape, w, eps, pos, lane, turns,
        pool, page_stride, table, pages_per_lane, per_page, offset, halves, scales,
    ):  # fmt: skip
        ptx.let_next_begin()
        ptx.wait_for_front()
        compress(
            rings, capacity, u, g, stride, ape, w, eps, pos, lane, turns,
            pool, page_stride, table, pages_per_lane, per_page, offset, halves, scales,
        )  # fmt: skip

    return compress_one


@cache
def compress_both_kernel(kind, dim, index_kind, index_dim, pairs):
    """Of a ratio-4 layer: y = 0 its rows, 1 its index rows, whose arguments begin with i."""
    compress = compressor(kind, dim, pairs, 4)
    compress_index = compressor(index_kind, index_dim, pairs, 4)

    @kernel(
        "f4* rings, i4 capacity, f4* u, f4* g, i4 stride, f4* ape, f4* w,"
        "f4* irings, i4 icapacity, f4* iu, f4* ig, i4 istride, f4* iape, f4* iw,"
        "f4 eps, i4* pos, i4* lane, f4* turns,"
        "u1* pool, i8 page_stride, i4* table, i4 pages_per_lane, i4 per_page,"
        "i4 offset, i4 halves, i4 scales, i4 ioffset, i4 ihalves, i4 iscales",
        block=BLOCK,
    )
    def compress_both(
        rings, capacity, u, g, stride, ape, w, irings, icapacity, iu, ig, istride, iape, iw,
        eps, pos, lane, turns, pool, page_stride, table, pages_per_lane, per_page,
        offset, halves, scales, ioffset, ihalves, iscales,
    ):  # fmt: skip
        ptx.let_next_begin()
        ptx.wait_for_front()
        if cuda.blockIdx.y == 0:
            compress(
                rings, capacity, u, g, stride, ape, w, eps, pos, lane, turns,
                pool, page_stride, table, pages_per_lane, per_page, offset, halves, scales,
            )  # fmt: skip
        else:
            compress_index(
                irings, icapacity, iu, ig, istride, iape, iw, eps, pos, lane, turns,
                pool, page_stride, table, pages_per_lane, per_page, ioffset, ihalves, iscales,
            )  # fmt: skip

    return compress_both


def compress(
    stream, pos, lane, turns, pages, main, index=None, *,
    n_rows, ratio, stride, index_stride=0, pairs, eps, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`. `main`, `index`: Compressors; `pages`: Pages. The strides are those of u
    and g, even; so must be the addresses' multiples of 8 bytes."""
    assert stride % 2 == index_stride % 2 == 0, (stride, index_stride)
    per_page = pages.page_tokens // ratio
    where = (pages.pool, pages.page_stride, pages.table, pages.pages_per_lane, per_page)
    c, now = main, (eps, pos, lane, turns)
    own = (c.rings, c.capacity, c.u, c.g, stride, c.ape, c.w)
    place = (c.offset, *rows.places(c.form, per_page))
    if index is None:
        kernel_ = compress_kernel(c.form.kind, c.form.dim, pairs, ratio)
        arguments = (*own, *now, *where, *place)
    else:
        i = index
        assert ratio == 4, ratio
        kernel_ = compress_both_kernel(c.form.kind, c.form.dim, i.form.kind, i.form.dim, pairs)
        theirs = (i.rings, i.capacity, i.u, i.g, index_stride, i.ape, i.w)
        their_place = (i.offset, *rows.places(i.form, per_page))
        arguments = (*own, *theirs, *now, *where, *place, *their_place)
    grid = (n_rows, 1 if index is None else 2)
    kernel_.launch(stream, grid, BLOCK, *arguments, dependent=dependent)
