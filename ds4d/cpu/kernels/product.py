"""Products with weights, sixteen outputs at a time.

    F32, F16     y[o] = (s0 + s1) + (s2 + s3),  s_c = sum_k w[o, k] x[k] over the c-th quarter
    Q8_0, MXFP4  y[o] = sum_b float(sum_{k in b} w[o, k] q[k]) (d_w[o, b] d_x[b]),   blocks of 32
    IQ2_XXS      the same with blocks of 256
    Q2_K, Q4_K   the same, with a second term for the minima: float(sum m q) (-dmin d_x)

Blocks ascend and each term is one fused multiply-add, so a row's bits depend on nothing but its
own activations: not on the rows beside it, on threads or on registers' width.

A *tile* computes 16 outputs for a list of rows:

    tile(w, n_out, n_in, act, rows, n_rows, out, stride)
        w     the packed tile (`weights.py`), or 16 rows of the file's bytes
        n_out valid outputs of the tile, 1 to 16; the others are written as zero
        act   an activation's table (`activation.py`);  rows  [n_rows] which of its rows
        out   [n_rows, stride] f32, 16 written a row

In F32, F16 and Q8_0 tiles the lanes are outputs, so no sum runs across lanes; each weight that is
loaded serves four rows. The other types read the file's own layout, a weight at a time: they are
right, and not fast.

A weight is a table of six words: 0 tile, 1 address, 2 bytes of a packed tile, 3 outputs and
4 inputs of a group, 5 groups. Groups may read slices of the input of their own, and `product`
stores their outputs at a distance of their own.
"""

import numpy as np

from ds4d.cpu.jit import F4, I8, N, helper, kernel, share, tile
from ds4d.cpu.kernels.simd import (
    as_f4,
    as_i8,
    as_u1,
    as_u2,
    at,
    call_tile,
    dot4,
    f4,
    fma,
    from_bits,
    half_at,
    i1,
    i4,
    load,
    load4,
    load64,
    scratch,
    splat,
    store,
    to_float,
)
from ds4d.model.grid import GRID
from ds4d.model.quants import Quant

ZERO = np.float32(0)
EIGHTH = np.float32(0.125)
ROWS_MAX = 32
ACT_WORDS = 8  # of an activation's table
_tile_room = scratch(ROWS_MAX * 16)
Q8_TILE_BLOCK = 32 + 512  # bytes: 16 halves, then 8 times [16 outputs, 4 inputs]


def product_ref(w, x):
    """y [n, out] f64 of the dequantised w [out, in] and x [n, in]."""
    return x.astype(np.float64) @ w.astype(np.float64).T


def product_q8_ref(d_w, w, d_x, q):
    """y [n, out] of int8 w [out, b, 32] with d_w [out, b] f32 and q [n, b, 32] with d_x [n, b]."""
    y = np.zeros((len(q), len(w)), np.float64)
    for b in range(w.shape[1]):
        dot = q[:, b].astype(np.int64) @ w[:, b].astype(np.int64).T
        y += dot.astype(np.float32) * (d_w[:, b] * d_x[:, b, None]).astype(np.float64)
    return y


# -- floats: w is [n_in, 16] --------------------------------------------------------------------


@helper
def _four_rows(w, begin, end, p, q, r, t):
    """Sums over inputs begin .. end of four rows: sixteen outputs each."""
    a = b = c = d = splat(ZERO)
    for k in range(begin, end):
        v = load(w, 16 * k)
        a, b = fma(v, splat(p[k]), a), fma(v, splat(q[k]), b)
        c, d = fma(v, splat(r[k]), c), fma(v, splat(t[k]), d)
    return a, b, c, d


@helper
def _float_rows(w, n_in, act, rows, n_rows, out, stride):
    x, width = f4(act, 0), act[1]
    quarter = (n_in + 3) // 4
    half, three = min(2 * quarter, n_in), min(3 * quarter, n_in)
    quarter = min(quarter, n_in)
    i = 0
    while i + 3 < n_rows:  # quarter after quarter, each weight read once for four rows
        p, q = at(x, rows[i] * width), at(x, rows[i + 1] * width)
        r, t = at(x, rows[i + 2] * width), at(x, rows[i + 3] * width)
        a, b, c, d = _four_rows(w, 0, quarter, p, q, r, t)
        a1, b1, c1, d1 = _four_rows(w, quarter, half, p, q, r, t)
        a, b, c, d = a + a1, b + b1, c + c1, d + d1
        a2, b2, c2, d2 = _four_rows(w, half, three, p, q, r, t)
        a3, b3, c3, d3 = _four_rows(w, three, n_in, p, q, r, t)
        y = at(out, i * stride)
        store(y, 0, a + (a2 + a3))
        store(y, stride, b + (b2 + b3))
        store(y, 2 * stride, c + (c2 + c3))
        store(y, 3 * stride, d + (d2 + d3))
        i += 4
    while i < n_rows:  # the four quarters side by side: four sums in flight
        p = at(x, rows[i] * width)
        a = b = c = d = splat(ZERO)
        for k in range(n_in - three):
            a = fma(load(w, 16 * k), splat(p[k]), a)
            b = fma(load(w, 16 * (quarter + k)), splat(p[quarter + k]), b)
            c = fma(load(w, 16 * (half + k)), splat(p[half + k]), c)
            d = fma(load(w, 16 * (three + k)), splat(p[three + k]), d)
        for k in range(n_in - three, quarter):  # of the first three, which may be longer
            a = fma(load(w, 16 * k), splat(p[k]), a)
            if quarter + k < half:
                b = fma(load(w, 16 * (quarter + k)), splat(p[quarter + k]), b)
            if half + k < three:
                c = fma(load(w, 16 * (half + k)), splat(p[half + k]), c)
        store(out, i * stride, (a + b) + (c + d))
        i += 1


@tile
def tile_f32(w, n_out, n_in, act, rows, n_rows, out, stride):
    _float_rows(as_f4(w), n_in, act, rows, n_rows, out, stride)


@tile
def tile_f16(w, n_out, n_in, act, rows, n_rows, out, stride):
    _float_rows(as_u2(w), n_in, act, rows, n_rows, out, stride)


# -- Q8_0: a block is 16 scales as halves, then [8][16 outputs][4 inputs] of weight + 128 ---------


@tile
def tile_q8_0(w, n_out, n_in, act, rows, n_rows, out, stride):
    """Weights are unsigned in the file of the tile (+ 128), as vpdpbusd wants one operand; the
    activation's table holds -128 times each block's sum, where a dot product starts."""
    q, d, s, width = i1(act, 2), f4(act, 3), i4(act, 4), act[1]
    n_blocks = n_in // 32
    i = 0
    while i + 3 < n_rows:
        r0, r1, r2, r3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        q0, q1, q2, q3 = at(q, r0 * width), at(q, r1 * width), at(q, r2 * width), at(q, r3 * width)
        b0, b1, b2, b3 = r0 * width // 32, r1 * width // 32, r2 * width // 32, r3 * width // 32
        y0 = y1 = y2 = y3 = splat(ZERO)
        for b in range(n_blocks):
            block = at(w, b * Q8_TILE_BLOCK)
            a0, a1 = splat(s[b0 + b]), splat(s[b1 + b])
            a2, a3 = splat(s[b2 + b]), splat(s[b3 + b])
            for j in range(8):
                v, k = load64(block, 32 + 64 * j), 32 * b + 4 * j
                a0, a1 = dot4(a0, v, load4(q0, k)), dot4(a1, v, load4(q1, k))
                a2, a3 = dot4(a2, v, load4(q2, k)), dot4(a3, v, load4(q3, k))
            scale = load(as_u2(block), 0)
            y0 = fma(to_float(a0), scale * splat(d[b0 + b]), y0)
            y1 = fma(to_float(a1), scale * splat(d[b1 + b]), y1)
            y2 = fma(to_float(a2), scale * splat(d[b2 + b]), y2)
            y3 = fma(to_float(a3), scale * splat(d[b3 + b]), y3)
        store(out, i * stride, y0)
        store(out, (i + 1) * stride, y1)
        store(out, (i + 2) * stride, y2)
        store(out, (i + 3) * stride, y3)
        i += 4
    while i < n_rows:
        q0, b0 = at(q, rows[i] * width), rows[i] * width // 32
        y0 = splat(ZERO)
        for b in range(n_blocks):
            block = at(w, b * Q8_TILE_BLOCK)
            a0, a1 = splat(s[b0 + b]), splat(np.int32(0))
            for j in range(0, 8, 2):  # two chains: the sum is of integers, so its order is free
                k = 32 * b + 4 * j
                a0 = dot4(a0, load64(block, 32 + 64 * j), load4(q0, k))
                a1 = dot4(a1, load64(block, 96 + 64 * j), load4(q0, k + 4))
            y0 = fma(to_float(a0 + a1), load(as_u2(block), 0) * splat(d[b0 + b]), y0)
        store(out, i * stride, y0)
        i += 1


# -- the file's own layouts: w is n_out rows of blocks ------------------------------------------


@tile
def tile_mxfp4(w, n_out, n_in, act, rows, n_rows, out, stride):
    """Codes count halves of the block's power of two: 0 1 2 3 4 6 8 12."""
    q, d, width = i1(act, 2), f4(act, 3), act[1]
    w = as_u1(w)
    n_blocks = n_in // 32
    for i in range(n_rows):
        x, dx = at(q, rows[i] * width), at(d, rows[i] * width // 32)
        for o in range(n_out):
            y = ZERO
            for b in range(n_blocks):
                block = at(w, (o * n_blocks + b) * 17)
                dot = 0
                for k in range(16):
                    low, high = int(block[1 + k]) & 15, int(block[1 + k]) >> 4
                    dot += _fp4_halves(low) * x[32 * b + k] + _fp4_halves(high) * x[32 * b + 16 + k]
                exponent = int(block[0]) - 1  # 2^(e - 127), halved
                bits = exponent << 23 if exponent > 0 else 0x400000 >> -exponent
                y = fma(np.float32(dot), from_bits(np.int32(bits)) * dx[b], y)
            out[i * stride + o] = y
        for o in range(n_out, 16):
            out[i * stride + o] = ZERO


@helper
def _fp4_halves(code):
    m = code & 7
    m += (m > 4) + (m > 5) + 3 * (m > 6)
    return -m if code > 7 else m


@tile
def tile_iq2_xxs(w, n_out, n_in, act, rows, n_rows, out, stride):
    """Per 32 weights four grid indices, four sign sets of 7 bits and a scale of 4; the eighth sign
    makes the number of minus signs even. d/8 (2s + 1) grid."""
    q, d, width = i1(act, 5), f4(act, 6), act[1]
    w = as_u1(w)
    n_blocks = n_in // 256
    for i in range(n_rows):
        x, dx = at(q, rows[i] * width), at(d, rows[i] * width // 256)
        for o in range(n_out):
            y = ZERO
            for b in range(n_blocks):
                block = at(w, (o * n_blocks + b) * 66)
                dot = 0
                for g in range(8):
                    code = 0
                    for k in range(4):
                        code |= int(block[2 + 8 * g + 4 + k]) << 8 * k
                    run = 0
                    for r in range(4):
                        entry = int(block[2 + 8 * g + r])
                        signs = (code >> 7 * r) & 127
                        odd = signs ^ signs >> 4
                        odd ^= odd >> 2
                        signs |= ((odd ^ odd >> 1) & 1) << 7
                        for k in range(8):
                            value = int(GRID[entry, k]) * int(x[256 * b + 32 * g + 8 * r + k])
                            run += -value if signs >> k & 1 else value
                    dot += (2 * (code >> 28) + 1) * run
                y = fma(np.float32(dot), (half_at(block, 0) * EIGHTH) * dx[b], y)
            out[i * stride + o] = y
        for o in range(n_out, 16):
            out[i * stride + o] = ZERO


@tile
def tile_q2_k(w, n_out, n_in, act, rows, n_rows, out, stride):
    """d sum sc q - dmin sum m, sixteen weights to a scale and a minimum."""
    q, d, width = i1(act, 5), f4(act, 6), act[1]
    w = as_u1(w)
    n_blocks = n_in // 256
    for i in range(n_rows):
        x, dx = at(q, rows[i] * width), at(d, rows[i] * width // 256)
        for o in range(n_out):
            y = ZERO
            for b in range(n_blocks):
                block = at(w, (o * n_blocks + b) * 84)
                dot, least = 0, 0
                for g in range(16):
                    part, plain = 0, 0
                    for k in range(16 * g, 16 * g + 16):
                        packed = int(block[16 + 32 * (k // 128) + k % 32])
                        value = int(x[256 * b + k])
                        part += (packed >> 2 * (k % 128 // 32) & 3) * value
                        plain += value
                    dot += (int(block[g]) & 15) * part
                    least += (int(block[g]) >> 4) * plain
                y = fma(np.float32(dot), half_at(block, 80) * dx[b], y)
                y = fma(np.float32(least), -half_at(block, 82) * dx[b], y)
            out[i * stride + o] = y
        for o in range(n_out, 16):
            out[i * stride + o] = ZERO


@tile
def tile_q4_k(w, n_out, n_in, act, rows, n_rows, out, stride):
    """d sum sc q - dmin sum m, thirty-two weights to a scale and a minimum of 6 bits each."""
    q, d, width = i1(act, 5), f4(act, 6), act[1]
    w = as_u1(w)
    n_blocks = n_in // 256
    for i in range(n_rows):
        x, dx = at(q, rows[i] * width), at(d, rows[i] * width // 256)
        for o in range(n_out):
            y = ZERO
            for b in range(n_blocks):
                block = at(w, (o * n_blocks + b) * 144)
                dot, least = 0, 0
                for g in range(8):
                    if g < 4:
                        scale, minimum = int(block[4 + g]) & 63, int(block[8 + g]) & 63
                    else:
                        scale = int(block[8 + g]) & 15 | int(block[g]) >> 6 << 4
                        minimum = int(block[8 + g]) >> 4 | int(block[4 + g]) >> 6 << 4
                    part, plain = 0, 0
                    for k in range(32):
                        packed = int(block[16 + 32 * (g // 2) + k]) >> 4 * (g % 2) & 15
                        value = int(x[256 * b + 32 * g + k])
                        part += packed * value
                        plain += value
                    dot += scale * part
                    least += minimum * plain
                y = fma(np.float32(dot), half_at(block, 0) * dx[b], y)
                y = fma(np.float32(least), -half_at(block, 2) * dx[b], y)
            out[i * stride + o] = y
        for o in range(n_out, 16):
            out[i * stride + o] = ZERO


TILES = {
    Quant.F32: tile_f32,
    Quant.F16: tile_f16,
    Quant.Q8_0: tile_q8_0,
    Quant.MXFP4: tile_mxfp4,
    Quant.IQ2_XXS: tile_iq2_xxs,
    Quant.Q2_K: tile_q2_k,
    Quant.Q4_K: tile_q4_k,
}


@helper
def run_tile(weight, which, act, rows, n_rows, out, stride):
    """Tile `which` of a weight, counted through its groups."""
    n_out = weight[3]
    n = min(n_out - which % ((n_out + 15) // 16) * 16, 16)
    w = weight[1] + which * weight[2]
    call_tile(weight[0], w, n, weight[4], act, rows, n_rows, out, stride)


@kernel
def product(
    tid: N,
    n_threads: N,
    step: I8,
    weight: I8,
    acts: N,  # address of [groups, ACT_WORDS]: each group's activation
    out: F4,  # [rows, stride]
    stride: N,
    stored: N,  # from group to group in out
    rows: I8,  # 0, 1, 2, ...
    when: N,  # the word of the step without which there is nothing to do
):
    """out = W x. Only the last tile of a group can reach beyond `stored`; then it is copied."""
    if step[when] == 0:
        return
    n_out, n_rows, spare = weight[3], step[0], _tile_room()
    per_group = (n_out + 15) // 16
    for unit in share(per_group * weight[5], tid, n_threads):
        group, t = unit // per_group, unit % per_group
        act = as_i8(acts + 8 * ACT_WORDS * group)
        y = at(out, group * stored + 16 * t)
        if 16 * t + 16 <= stored:
            run_tile(weight, unit, act, rows, n_rows, y, stride)
        else:
            run_tile(weight, unit, act, rows, n_rows, spare, 16)
            for r in range(n_rows):
                for o in range(n_out - 16 * t):
                    y[r * stride + o] = spare[16 * r + o]
