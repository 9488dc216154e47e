"""Routed experts with weights of IQ2_XXS, Q2_K or Q4_K (spec/model.md 4.10, numerics.md 1, 3).

    up      mid[to] = weight silu(min(W_g x, c)) clip(W_u x, -c, c)
    down    y[to] = W_d x

    W x [o] = sum over blocks b of 256 inputs:  float(sum w q) (d_w[o, b] d[b])
                                              + float(sum m q) (-dmin[o, b] d[b])

    gate, up, w  [experts, tiles, n_in / 256, RECORD]  u1  a tile is 16 outputs; read once an item
    q       [n_in / 32, R_in, 32]   i1   activations, quantised in blocks of 256: from the caches
    d       [n_in / 256, R_in]      f4   their scales, likewise
    expert  [n_items]     i4  whose weights an item takes; -1: there is no item
    rows    [n_items, 8]  i4  which of the R_in rows are its columns; -1: none
    to      [n_items, 8]  i4  and where a column's results go
    weight  [R, k]        f4  of the router; up's rows are those of the pass, its `to` is
                              row (k + 1) + i for the row's i-th expert
    mid, y  [.., stride]  f4  written in rows `to`

The formats' modules say how a record becomes a tensor core's operands. A block takes two tiles of
16 outputs, which share their inputs: the same of gate and up, or two neighbours of down (a last one
without a neighbour is computed twice and written once). Its warps divide the blocks of 256.

    up      grid (tiles, n_items)        block 32 warps(n_in)
    down    grid (tiles / 2, n_items)    block 32 warps(n_in)
    shared  1,280 bytes a warp, and for IQ2_XXS 32 KiB of tables

Order: a warp adds its blocks in ascending order to 0, a fused multiply-add each, the minimum's
behind; then the warps' sums are added in ascending order. `warps` depends on n_in alone and columns
of a tensor core's product on nothing beside them, so a row's bits depend on nothing but itself.
A column without a row costs nothing and is not written.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint8, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx
from ds4d.gpu.kernels.lowbit import iq2_xxs, q2_k, q4_k
from ds4d.model.quants import Quant

FORMATS = {Quant.IQ2_XXS: iq2_xxs, Quant.Q2_K: q2_k, Quant.Q4_K: q4_k}
COLUMNS = 8
WARPS_MOST = 8
RESIDENT = 2  # blocks on an SM: one waits for weights while the other computes
COLUMN = 20  # words from column to column of a tile's sums: 16, and 4 so that no banks collide
SUMS = 2 * COLUMNS * COLUMN  # words of a warp's


# -- reference ---------------------------------------------------------------------------------


def product_ref(quant, raw, q, d):
    """y [R, n_out] f32 of a matrix [n_out, n_in / 256, bytes], with the kernels' roundings."""
    w, m, d_w, least = FORMATS[quant].weights_ref(raw)
    blocks = raw.shape[1]
    x = q.astype(np.int64).reshape(blocks, 8, q.shape[1], 32).swapaxes(1, 2)
    x = x.reshape(blocks, q.shape[1], 256)
    y = np.zeros((q.shape[1], len(raw)), np.float32)
    mine = blocks // warps(256 * blocks)
    for first in range(0, blocks, mine):
        acc = np.zeros_like(y)
        for b in range(first, first + mine):
            of = slice(256 * b, 256 * b + 256)
            terms = [(w, d_w)] if m is None else [(w, d_w), (m, -least)]
            for whole, by in terms:
                dot = (x[b] @ whole[:, of].T).astype(np.float32)
                scale = by[:, b] * d[b][:, None]
                # float64 holds the product of two float32 exactly
                acc = (dot.astype(np.float64) * scale + acc).astype(np.float32)
        y += acc
    return y


def up_ref(quant, gate, up, q, d, weight, clamp):
    """mid [R, width] f32 of one expert for rows with `weight` [R]."""
    g = np.minimum(product_ref(quant, gate, q, d), np.float32(clamp))
    u = np.clip(product_ref(quant, up, q, d), -np.float32(clamp), np.float32(clamp))
    return weight[:, None] * (g / (np.float32(1) + np.exp(-g)) * u)


# -- products ----------------------------------------------------------------------------------


def warps(n_in):
    """Over which the blocks of 256 inputs are divided: 8, or the most of 4, 2, 1 that leave each
    warp as many."""
    blocks = n_in // 256
    return min(blocks & -blocks, WARPS_MOST)


@cache
def _products(quant, n_in):
    """Sums of two tiles for an item's columns, of all warps."""
    of = FORMATS[quant]
    load, add, fill, record, n_words = of.load, of.add, of.fill, of.RECORD, of.WORDS
    n_blocks = n_in // 256
    mine = n_blocks // warps(n_in)
    ahead = max(n for n in range(1, of.AHEAD + 1) if mine % n == 0)
    room, n_table = 2 * ahead * n_words, of.TABLE

    @device
    def products(sums, v, tile_v, w, tile_w, q, d, rows, item, n_rows):
        """sums [warps, 2, 8, COLUMN]: of tile `tile_v` of v and `tile_w` of w."""
        tid = cuda.threadIdx.x
        lane, warp = tid & 31, tid >> 5
        g, t = lane >> 2, lane & 3
        table = cuda.shared.array(n_table, uint8, alignment=16)
        words = cuda.local.array(room, uint32)
        b = cuda.local.array(16, uint32)
        acc = cuda.local.array(8, float32)
        for i in range(8):
            acc[i] = float32(0)
        # A column without a row repeats row 0: its sums are not written.
        none = int32(0)
        row = max(rows[item * COLUMNS + g], none)
        row0 = max(rows[item * COLUMNS + 2 * t], none)
        row1 = max(rows[item * COLUMNS + 2 * t + 1], none)
        step = uint32(n_rows * 32)
        for turn in range(0, mine, ahead):
            first = int64(warp * mine + turn)
            for j in range(ahead):
                place = (tile_v * n_blocks + first + j) * record
                load(words, 2 * j * n_words, v, place, lane)
                place = (tile_w * n_blocks + first + j) * record
                load(words, (2 * j + 1) * n_words, w, place, lane)
            if turn == 0:
                fill(table, tid)  # while the weights are on their way
                cuda.syncthreads()  # the table is whole
            for j in range(ahead):
                at = ((first + j) * 8 * n_rows + row) * 32 + 8 * t
                for i in range(8):
                    b[2 * i], b[2 * i + 1] = ptx.load8(q, at)
                    at += step
                d0 = d[(first + j) * n_rows + row0]
                d1 = d[(first + j) * n_rows + row1]
                for m in range(2):
                    add(acc, 4 * m, words, (2 * j + m) * n_words, b, d0, d1, table)
        for i in range(8):
            column, output = 2 * t + (i & 1), g + 8 * (i >> 1 & 1)
            sums[warp * SUMS + ((i >> 2) * COLUMNS + column) * COLUMN + output] = acc[i]
        cuda.syncthreads()  # every warp's sums are there

    return products


@cache
def up(quant, n_in):
    products, n_warps = _products(quant, n_in), warps(n_in)
    block, n_sums = 32 * n_warps, n_warps * SUMS

    @kernel(
        "f4* mid, u1* gate, u1* up, i1* q, f4* d, i4* expert, i4* rows, i4* to, f4* weight, "
        "i4 n_rows, i4 stride, f4 clamp",
        block=block,
        resident=RESIDENT,
    )
    def experts_up(mid, gate, up, q, d, expert, rows, to, weight, n_rows, stride, clamp):
        tid, item, tile = cuda.threadIdx.x, int64(cuda.blockIdx.y), cuda.blockIdx.x
        sums = cuda.shared.array(n_sums, float32)
        ptx.let_next_begin()
        ptx.wait_for_front()  # the items are written
        e = expert[item]
        if e < 0:
            return
        at = int64(e) * cuda.gridDim.x + tile
        products(sums, gate, at, up, at, q, d, rows, item, n_rows)
        for at in range(tid, 16 * COLUMNS, block):
            column, output = at >> 4, at & 15
            row, out = rows[item * COLUMNS + column], to[item * COLUMNS + column]
            if row >= 0:
                g, u = float32(0), float32(0)
                for i in range(n_warps):
                    place = i * SUMS + column * COLUMN + output
                    g += sums[place]
                    u += sums[place + COLUMNS * COLUMN]
                g = clamp if g > clamp else g  # NaN stays
                u = clamp if u > clamp else u
                u = -clamp if u < -clamp else u
                silu = g / (float32(1) + math.exp(-g))
                # out - row = row k + i
                mid[int64(out) * stride + tile * 16 + output] = weight[out - row] * (silu * u)

    return experts_up


@cache
def down(quant, n_in):
    products, n_warps = _products(quant, n_in), warps(n_in)
    block, n_sums = 32 * n_warps, n_warps * SUMS

    @kernel(
        "f4* y, u1* w, i1* q, f4* d, i4* expert, i4* rows, i4* to, i4 n_rows, i4 stride, i4 tiles",
        block=block,
        resident=RESIDENT,
    )
    def experts_down(y, w, q, d, expert, rows, to, n_rows, stride, tiles):
        tid, item, tile = cuda.threadIdx.x, int64(cuda.blockIdx.y), 2 * cuda.blockIdx.x
        sums = cuda.shared.array(n_sums, float32)
        ptx.let_next_begin()
        ptx.wait_for_front()  # the items are written
        e = expert[item]
        if e < 0:
            return
        at, n = int64(e) * tiles + tile, min(2, tiles - tile)
        products(sums, w, at, w, at + n - 1, q, d, rows, item, n_rows)
        for at in range(tid, 32 * COLUMNS, block):
            column, which, output = at >> 5, at >> 4 & 1, at & 15
            row, out = rows[item * COLUMNS + column], to[item * COLUMNS + column]
            if row >= 0 and which < n:
                total = float32(0)
                for i in range(n_warps):
                    total += sums[i * SUMS + (which * COLUMNS + column) * COLUMN + output]
                y[int64(out) * stride + (tile + which) * 16 + output] = total

    return experts_down


# -- launchers ---------------------------------------------------------------------------------


def run_up(
    stream, mid, quant, gate, up_, q, d, items, weight, *,
    n_rows, n_items, n_in, width, stride, clamp, dependent=False,
):  # fmt: skip
    """`items`: expert, rows and to. `n_rows` are q's and d's."""
    assert n_in % 256 == 0 and width % 16 == 0 and stride >= width, (n_in, width, stride)
    up(quant, n_in).launch(
        stream, (width // 16, n_items), 32 * warps(n_in), mid, gate, up_, q, d, *items, weight,
        n_rows, stride, clamp, dependent=dependent,
    )  # fmt: skip


def run_down(
    stream, y, quant, w, q, d, items, *,
    n_rows, n_items, n_in, width, stride, dependent=False,
):  # fmt: skip
    """As `run_up`. Rows of q may be rows of `mid`: then `rows` and `to` are the same."""
    assert n_in % 256 == 0 and width % 16 == 0 and stride >= width, (n_in, width, stride)
    tiles = width // 16
    down(quant, n_in).launch(
        stream, (-(-tiles // 2), n_items), 32 * warps(n_in), y, w, q, d, *items,
        n_rows, stride, tiles, dependent=dependent,
    )  # fmt: skip


def run_repack(stream, quant, out, raw, *, n_out, n_in):
    """Records of the file's bytes, on the device. `n_out` counts all experts' outputs; `out` may
    not be `raw`. For another stretch give other addresses: a tile is as long in both."""
    assert n_in % 256 == 0 and n_out % 16 == 0, (n_out, n_in)
    grid = n_out // 16, n_in // 256
    FORMATS[quant].repack.launch(stream, grid, 32, out, raw, n_in // 256)
