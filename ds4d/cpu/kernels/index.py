"""The indexer: which compressed rows a token of a ratio-4 layer attends to (spec/model.md 4.8).

    score_s = sum_h w_h max(0, q_h . K_s),   w = (proj h) (heads dim)^-1/2
    chosen  = the top_k greatest scores, ties to the lowest row, ascending

A token that sees no more than top_k rows attends to all of them; while no row of a step sees more,
the whole family is skipped (the step's SELECTING word is 0).

Lanes are heads, sixteen to a group. Where index rows are FP4, queries are too, so the products of
a block of 32 channels are exact integers (of twice the values) and become a float once, times the
block's two powers of two; blocks ascend, then groups of heads, then the lanes as `simd.total`
adds them. A query is laid out once per row for this:

    codes   [groups, channels / 4, 16 heads, 4] int8, channels of a block: low nibbles, then high
    sums    [groups, blocks, 16] i32: -16 times a block's sum, as key codes carry + 16
    scales  [groups, blocks, 16] f32: a quarter of the block's power of two

Otherwise queries are floats [groups, channels, 16] and each product is a fused multiply-add,
channels ascending. Top-k is exact: the k-th greatest score is found by its bits, eleven at a time,
and one pass in row order keeps what lies above it and the first few that equal it.
"""

import numpy as np

from ds4d.cpu.jit import F4, I1, I4, I8, N, R, helper, kernel, real, share
from ds4d.cpu.kernels.rope import rotate, turn_of
from ds4d.cpu.kernels.rows import block_of, decode_row, encode_row
from ds4d.cpu.kernels.simd import (
    address_of,
    as_i1,
    as_u1,
    at,
    bits,
    dot4,
    fma,
    from_bits,
    greater,
    load,
    load4,
    load64,
    load_ints,
    scratch,
    splat,
    spread_fp4,
    to_float,
    total,
)
from ds4d.model.layout import FP4

ZERO, ONE = np.float32(0), np.float32(1)
QUARTER = np.float32(0.25)
DIM_MAX = 1024
_row_room, _block_room = scratch(DIM_MAX), scratch(8)
SELECTING = 1  # word of the step
BINS = 2048  # of the eleven bits that a pass of `choose` looks at
SIGN = np.int64(0x80000000)


def index_ref(q, w, K, k):
    """Scores [s] f64 and the chosen rows of one token: q [heads, dim], w [heads], K [s, dim]."""
    scores = w.astype(np.float64) @ np.maximum(q.astype(np.float64) @ K.T.astype(np.float64), 0)
    return scores, np.sort(np.argsort(-scores, kind="stable")[:k])


@helper
def _fp4_query(x, form, unit, lane, codes, sums, scales, packed, spread):
    """Lane `lane` of a query's layout from x [dim], which is encoded like a row and then spread."""
    dim, n_blocks = form[1], form[3]
    encode_row(form, packed, 0, x)
    exponents = as_u1(packed + form[6])
    for b in range(n_blocks):
        spread_fp4(as_i1(packed), 16 * b, spread)
        s = 0
        for k in range(32):
            code = int(spread[k]) - 16
            s += code
            codes[unit * 16 * dim + ((32 * b + k) // 4 * 16 + lane) * 4 + k % 4] = np.int8(code)
        to = (unit * n_blocks + b) * 16 + lane
        sums[to] = np.int32(-16 * s)
        scales[to] = QUARTER * from_bits(np.int32(np.int64(exponents[b]) << 23))


@kernel
def index_query(
    tid: N,
    n_threads: N,
    step: I8,
    q: F4,  # [rows, heads, stored], overwritten
    heads: N,
    stored: N,
    turns: F4,  # [rows, 4, 2, pairs]
    pairs: N,
    form: I8,  # of a block of one row
    codes: I1,  # as above
    floats: F4,  # the same address
    sums: I4,
    scales: F4,
    groups: N,
):
    """Heads that fill up the last group are never written: their codes and scales stay zero."""
    if step[SELECTING] == 0:
        return
    dim = form[1]
    packed, spread = address_of(_row_room()), as_i1(address_of(_block_room()))
    for each in share(step[0] * heads, tid, n_threads):
        row, head = each // heads, each % heads
        unit, lane = row * groups + head // 16, head % 16
        x = at(q, (row * heads + head) * stored)
        rotate(at(x, dim - 2 * pairs), turn_of(turns, row, 1, pairs), pairs, ONE)
        if form[0] == FP4:
            _fp4_query(x, form, unit, lane, codes, sums, scales, packed, spread)
        else:
            for k in range(dim):
                floats[(unit * dim + k) * 16 + lane] = x[k]


@helper
def _fp4_dot(key, exponents, codes, sums, scales, n_blocks):
    """Products of a key with sixteen heads; arguments begin at theirs."""
    dot = splat(ZERO)
    for b in range(n_blocks):
        even, odd = load_ints(sums, 16 * b), splat(np.int32(0))
        for j in range(8 * b, 8 * b + 8, 2):  # integers: their order is free
            even = dot4(even, load4(key, 4 * j), load64(codes, 64 * j))
            odd = dot4(odd, load4(key, 4 * j + 4), load64(codes, 64 * j + 64))
        power = from_bits(np.int32(np.int64(exponents[b]) << 23))
        dot = fma(to_float(even + odd), load(scales, 16 * b) * splat(power), dot)
    return dot


@helper
def _float_dot(key, floats, dim):
    dot = splat(ZERO)
    for k in range(dim):
        dot = fma(load(floats, 16 * k), splat(key[k]), dot)
    return dot


@kernel
def index_score(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    lane: I8,  # [rows]
    w: F4,  # [rows, groups, 16]
    codes: I1,  # as above
    floats: F4,  # the same address
    sums: I4,
    scales: F4,
    groups: N,
    paged: I8,  # the keys
    scores: F4,  # [rows, stride]
    stride: N,
    top_k: N,
    factor: R,  # of w
):
    """Threads share the keys. One that several rows see is decoded once for them: rows of one lane
    are neighbours, at ascending positions."""
    if step[SELECTING] == 0:
        return
    dim, n_blocks, fp4 = paged[1], paged[3], paged[0] == FP4
    by, room = splat(real(factor)), _row_room()
    spread = as_i1(address_of(room))
    first = 0
    while first < step[0]:
        end = first + 1
        while end < step[0] and lane[end] == lane[first]:
            end += 1
        for s in share((pos[end - 1] + 1) // 4, tid, n_threads):
            block, r = block_of(paged, lane[first], s), s % paged[11]
            exponents = as_u1(block + paged[6] + r * paged[7])
            if fp4:
                packed = as_i1(block + r * paged[4])
                for b in range(n_blocks):
                    spread_fp4(packed, 16 * b, at(spread, 32 * b))
            else:
                decode_row(paged, block, r, room)
            for row in range(first, end):
                n = (pos[row] + 1) // 4
                if n <= top_k or s >= n:
                    continue
                acc = splat(ZERO)
                for unit in range(row * groups, (row + 1) * groups):
                    if fp4:
                        here = unit * n_blocks * 16
                        query = at(codes, unit * 16 * dim)
                        dot = _fp4_dot(
                            spread, exponents, query, at(sums, here), at(scales, here), n_blocks
                        )
                    else:
                        dot = _float_dot(room, at(floats, unit * 16 * dim), dim)
                    acc = fma(load(w, 16 * unit) * by, greater(dot, splat(ZERO)), acc)
                scores[row * stride + s] = total(acc) + ZERO
        first = end


@helper
def _order(x):
    """An integer of 32 bits that grows with the float x; -0 counts as 0."""
    b = np.int64(bits(x + ZERO)) & 0xFFFFFFFF
    return b ^ 0xFFFFFFFF if b & SIGN else b | SIGN


@helper
def choose(scores, n, k, out, count):
    """out [k] int64: rows of the k greatest of n > k scores, ascending. count: [BINS] scratch."""
    prefix, rest = np.int64(0), k  # of rows with this prefix, `rest` are to be taken
    shift = 32
    while shift > 0:
        width = 11 if shift > 10 else 10
        shift -= width
        for i in range(BINS):
            count[i] = 0
        for s in range(n):
            key = _order(scores[s])
            if key >> (shift + width) == prefix:
                count[key >> shift & ((1 << width) - 1)] += 1
        digit = np.int64((1 << width) - 1)
        while count[digit] < rest:
            rest -= count[digit]
            digit -= 1
        prefix = prefix << width | digit
    taken = 0
    for s in range(n):
        key = _order(scores[s])
        if key > prefix:
            out[taken] = s
            taken += 1
        elif key == prefix and rest > 0:
            out[taken] = s
            taken += 1
            rest -= 1


@kernel
def index_choose(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    scores: F4,  # [rows, stride]
    stride: N,
    top_k: N,
    chosen: I8,  # [rows, top_k]
    counts: I8,  # [threads, BINS]
):
    if step[SELECTING] == 0:
        return
    count = at(counts, BINS * tid)
    for row in share(step[0], tid, n_threads):
        n = (pos[row] + 1) // 4
        if n > top_k:
            choose(at(scores, row * stride), n, top_k, at(chosen, row * top_k), count)
