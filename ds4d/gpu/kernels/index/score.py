"""Scores of the indexer: a row of the pass against every key its lane has (spec/model.md 4.8).

    score_s = sum_h (w_h factor) max(0, q_h . K_s),   factor = (heads dim)^-1/2

    scores  [R, stride]               f32  written for s < (pos + 1) // 4 of rows that select
    codes, scales                          of `query`, or query [R, heads, dim] f32
    w       [R, w_stride]             f32  the first `heads` are read
    pool    [pages, page_stride]      u8   at `offset` of a page: nibbles [per_page, dim / 2], at
                                           `exponents` behind it: bytes [per_page, dim / 32]
    table   [lanes, pages_per_lane]   i32  numbers of pages
    pos, lane  [R]                    i32  -1 in idle rows

grid: any number of blocks (what an SM holds at once is enough), block 256, at Flash 35 KB of shared
memory. Each warp of each block looks at `pos` and `lane` of all rows and cuts them into *groups* of
up to GROUP rows of one lane, whose keys are decoded once; all groups' keys are cut into *units* of
256, which blocks take in turn. A warp has a tile of 32 keys; lane l of it owns key l.

A tile's keys are A of `mma_s8`, heads are B: lane 4 g + t reads a quarter (t) of the words of keys
4g .. 4g + 3, decodes 8 nibbles with 4 picks out of the magnitudes 0 1 2 3 4 6 8 12, and has the
products of these keys with heads 8j + 2t and 8j + 2t + 1.

A key is level like a query (see `index`): its exponents differ by at most SHIFT_MOST and none is
255. Where the key and all heads of the row are level, q . K is one integer D below 2^22, to be
scaled by a power of two that is the head's times the key's:

    score = (sum_h (w_h factor 2^e_h) max(0, f32(D_h))) 2^e_s

else q . K is the sum of the blocks', ascending, each scaled by itself (one fma). That path does
dim / 32 times the products, and a whole tile takes it if one of its keys needs it; but which
formula a row and a key get depends on these two alone. A key with an exponent 255 scores NaN.

Order of heads: one fma each, for t = 0 .. 3 heads 2t, 2t + 1, 8 + 2t, 8 + 2t + 1, ...; the four
sums as (0 + 1) + (2 + 3). Order of channels where rows are halves: ascending, one fma each, heads
ascending too.

Floor at Flash, one row: 68 bytes a key, at 1M positions 17.8 MB, 4.5 us at 4 TB/s. Instructions of
a warp for a tile: 200 to decode, and for each row 8 times 8 mma, 3 loads of shared memory and 24
for the 8 products a lane has, 410 in all: 5M for 262,144 keys, 5.6 us at 4 a clock on 132 SMs.
Rows of one lane share the 200, up to GROUP of them.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int8, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx
from ds4d.gpu.kernels.index import SHIFT_MOST
from ds4d.gpu.kernels.index.query import DIMS, tiles_of

BLOCK = 256
WARPS = BLOCK // 32
TILE = 32  # keys of a warp
UNIT = WARPS * TILE  # keys of a block
GROUP = 4  # rows that share decoded keys, at most
ROOM = 36 * 1024  # bytes of codes in shared memory
ALL = 0xFFFFFFFF

LOW, HIGH = 0x03020100, 0x0C080604  # magnitudes in halves, by code
SIGNS, OFFSET = 0x88888888, 0x80808080
INTEGER = 0x4B400000  # bits of 1.5 * 2^23: added to an integer below 2^22, they are a float
INTEGER_F4 = 12582912.0


def score_ref(q, w, keys):
    """Scores [s] f64 of one row: q [heads, dim], w [heads] scaled, keys [s, dim]."""
    dots = q.astype(np.float64) @ keys.T.astype(np.float64)
    return w.astype(np.float64) @ np.maximum(dots, 0)


def factor_of(heads, dim):
    return float(np.float32((heads * dim) ** -0.5))


@device
def power(exponent):
    """2^(exponent - 127) of a byte; NaN for 255."""
    bits = uint32(exponent) << 23 | (0x400000 if exponent == 255 else 0)
    return ptx.as_f4(uint32(bits))


@device
def four(low, high, selector):
    """Four int8 in a word, of the four codes in the low half of `selector`: magnitudes in `low` and
    `high`, the sign in bit 3. A pick whose bit 3 is set repeats the byte's sign, which is 0 here,
    so of the two picks one is zero."""
    plus = ptx.prmt(low, high, uint32(selector))
    minus = ptx.prmt(low, high, uint32(selector ^ SIGNS))
    return uint32(uint32(OFFSET + plus - minus) ^ OFFSET)  # no borrow from byte to byte


@device
def over_quarters(x):
    """The sum over the four t of a lane's g, in each of them."""
    x += cuda.shfl_xor_sync(ALL, x, 1)
    x += cuda.shfl_xor_sync(ALL, x, 2)
    return x


@device
def pick(i, a, b, c, d):
    return (a if i == 0 else b) if i < 2 else (c if i == 2 else d)


@device
def positive(x):
    """max(0, x); a NaN stays."""
    return float32(0) if x < float32(0) else x


@device
def whole_positive(c):
    """f32(max(0, c - INTEGER)): the integer's float is its bits' low end."""
    return ptx.as_f4(uint32(max(c, int32(INTEGER)))) - float32(INTEGER_F4)


@cache
def fp4_kernel(heads, dim):
    assert dim in DIMS, f"FP4 index rows of {dim} channels"
    each, all_heads = dim // 32, 8 * tiles_of(heads)
    group = max(1, min(GROUP, ROOM // (all_heads * dim)))
    chunk = min(4, 2 * each)  # words
    chunks = 2 * each // chunk
    row_bytes, row_words = all_heads * dim, dim // 8  # of a query's codes, of a key's nibbles
    n_codes, n_weights = group * row_bytes, group * all_heads
    n_words, n_parts, n_query = 4 * each, 8 * each, 2 * each

    @device
    def query_words(out, codes, k, j, lane):
        """B of tile j of row k, for each product two words."""
        for c in range(chunks):
            at = k * row_bytes + ((j * chunks + c) * 32 + lane) * 4 * chunk
            if chunk == 4:
                p, q, r, s = ptx.load16(codes, at)
                out[4 * c] = p
                out[4 * c + 1] = q
                out[4 * c + 2] = r
                out[4 * c + 3] = s
            else:
                p, q = ptx.load8(codes, at)
                out[0] = p
                out[1] = q

    @device
    def level_score(parts, codes, weights, k, tiles, lane):
        """Of the key that the lane owns, before the key's power."""
        acc = cuda.local.array(4, float32)
        for i in range(4):
            acc[i] = float32(0)
        b, c = cuda.local.array(n_query, uint32), cuda.local.array(4, int32)
        w = cuda.local.array(2, float32)
        for j in range(tiles):
            query_words(b, codes, k, j, lane)
            v0, v1 = ptx.load8(weights, k * all_heads + 8 * j + 2 * (lane % 4))
            w[0], w[1] = ptx.as_f4(v0), ptx.as_f4(v1)
            for half in range(2):
                for i in range(4):
                    c[i] = int32(INTEGER)
                for m in range(each):
                    at = 4 * (half * each + m)
                    c[0], c[1], c[2], c[3] = ptx.mma_s8(
                        parts[at], parts[at + 1], parts[at + 2], parts[at + 3],
                        b[2 * m], b[2 * m + 1], c[0], c[1], c[2], c[3],
                    )  # fmt: skip
                for i in range(4):
                    at = 2 * half + i // 2
                    acc[at] = ptx.fma(whole_positive(c[i]), w[i % 2], acc[at])
        for i in range(4):
            acc[i] = over_quarters(acc[i])
        return pick(lane % 4, acc[0], acc[1], acc[2], acc[3])

    @device
    def block_score(parts, codes, plain, fitted, scales, scales_at, k, tiles, blocks, lane):
        """Of the key that the lane owns, whose shifted exponents are the bytes of `fitted`. A
        product has words of all blocks; those of one block are left, the others made zero."""
        g, t = lane // 4, lane % 4
        acc = cuda.local.array(4, float32)
        for i in range(4):
            acc[i] = float32(0)
        b, c = cuda.local.array(n_query, uint32), cuda.local.array(4, int32)
        w, d = cuda.local.array(2, float32), cuda.local.array(4, float32)
        for j in range(tiles):
            query_words(b, codes, k, j, lane)
            for i in range(2):
                w[i] = plain[k * all_heads + 8 * j + 2 * t + i]
            for half in range(2):
                for i in range(4):
                    d[i] = float32(0)
                for of in range(blocks):  # as many as `each`, but not unrolled
                    for i in range(4):
                        c[i] = int32(0)
                    for m in range(each):
                        at = 4 * (half * each + m)
                        mask = uint32(ALL if (t * each + m) // 4 == of else 0)
                        c[0], c[1], c[2], c[3] = ptx.mma_s8(
                            parts[at], parts[at + 1], parts[at + 2], parts[at + 3],
                            uint32(b[2 * m] & mask), uint32(b[2 * m + 1] & mask),
                            c[0], c[1], c[2], c[3],
                        )  # fmt: skip
                    at = scales_at + (8 * j + 2 * t) * each + of
                    own = power((fitted >> (8 * of)) & 255)
                    for i in range(4):
                        its = cuda.shfl_sync(ALL, own, 4 * g + 2 * half + i // 2)
                        d[i] = ptx.fma(float32(c[i]), its * scales[at + i % 2 * each], d[i])
                for i in range(4):
                    at = 2 * half + i // 2
                    acc[at] = ptx.fma(positive(d[i]), w[i % 2], acc[at])
        for i in range(4):
            acc[i] = over_quarters(acc[i])
        return pick(t, acc[0], acc[1], acc[2], acc[3])

    @device
    def key_words(out, pool, at):
        for i in range(4):
            if each >= 4:
                for c in range(each // 4):
                    p, q, r, s = ptx.load16(pool, at + i * row_words + 4 * c)
                    out[i * each + 4 * c] = p
                    out[i * each + 4 * c + 1] = q
                    out[i * each + 4 * c + 2] = r
                    out[i * each + 4 * c + 3] = s
            elif each == 2:
                p, q = ptx.load8(pool, at + i * row_words)
                out[2 * i] = p
                out[2 * i + 1] = q
            else:
                out[i] = pool[at + i * row_words]

    @kernel(
        "f4* scores, i4 stride, i1* codes, f4* scales, f4* w, i4 w_stride, f4 factor, u4* pool,"
        "i8 page_words, i4 offset, i4 exponents, i4* table, i4 pages_per_lane, i4 per_page,"
        "i4* pos, i4* lane, i4 n_rows, i4 top_k, i4 tiles, i4 blocks",
        block=BLOCK,
        resident=2,
    )
    def index_score_fp4(
        scores, stride, codes, scales, w, w_stride, factor, pool, page_words, offset, exponents,
        table, pages_per_lane, per_page, pos, lane, n_rows, top_k, tiles, blocks,
    ):  # fmt: skip
        ptx.let_next_begin()
        ptx.wait_for_front()
        tid = cuda.threadIdx.x
        l, g, t = tid % 32, tid % 32 // 4, tid % 4  # noqa: E741
        n, owner = int32(0), int32(-1)  # of row l
        if l < n_rows:
            n = int32((pos[l] + 1) >> 2)
            owner = lane[l]
            if n <= top_k:
                n = int32(0)
        if cuda.ballot_sync(ALL, n > 0) == 0:
            return

        near_n, near_owner = cuda.shfl_up_sync(ALL, n, 1), cuda.shfl_up_sync(ALL, owner, 1)
        begins = n > 0 and (l == 0 or near_n == 0 or near_owner != owner)
        runs = uint32(uint32(cuda.ballot_sync(ALL, begins)) & (ALL >> (31 - l)))
        leads = n > 0 and (l - (31 - cuda.clz(runs))) % group == 0
        ends = uint32(cuda.ballot_sync(ALL, leads or n == 0)) >> l >> 1
        size = int32(cuda.ffs(uint32(ends)) if ends else 32 - l)  # of the group that row l leads
        longest = cuda.shfl_sync(ALL, n, l + size - 1)
        units = int32((longest + UNIT - 1) // UNIT if leads else 0)
        behind = units  # units of groups up to here
        for i in range(5):
            other = cuda.shfl_up_sync(ALL, behind, 1 << i)
            behind = int32(behind + other) if l >= 1 << i else behind
        all_units = int64(cuda.shfl_sync(ALL, behind, 31))
        facts = cuda.shared.array(5 * 32, int32)
        if tid < 32:
            facts[tid] = n
            facts[32 + tid] = owner
            facts[64 + tid] = size
            facts[96 + tid] = longest
            facts[128 + tid] = behind - units

        query = cuda.shared.array(n_codes, int8, alignment=16)
        weights = cuda.shared.array(n_weights, float32, alignment=16)  # times the head's power
        plain = cuda.shared.array(n_weights, float32)
        level = cuda.shared.array(GROUP, int32)
        words = cuda.local.array(n_words, uint32)
        parts = cuda.local.array(n_parts, uint32)
        held = int32(-1)
        cuda.syncthreads()  # `facts` are whole
        for unit in range(int64(cuda.blockIdx.x), all_units, int64(cuda.gridDim.x)):
            first = int32(cuda.popc(uint32(cuda.ballot_sync(ALL, behind <= unit))))
            members, keys = facts[64 + first], facts[96 + first]
            start = int32((unit - facts[128 + first]) * UNIT + tid // 32 * TILE)

            if held != first:
                held = first
                cuda.syncthreads()  # nobody reads the last group's queries any more
                if tid < GROUP:
                    level[tid] = 1
                for i in range(16 * tid, members * row_bytes, 16 * BLOCK):
                    p, q, r, s = ptx.load16(codes, int64(first) * row_bytes + i)
                    ptx.store16(query, i, p, q, r, s)
                cuda.syncthreads()  # `level` is set
                for i in range(tid, members * all_heads, BLOCK):
                    k, h = i // all_heads, i % all_heads
                    value = float32(0)
                    if h < heads:
                        value = w[(int64(first) + k) * w_stride + h] * factor
                    at = (int64(first) * all_heads + i) * each
                    scale = scales[at]
                    plain[i] = value
                    weights[i] = value * scale
                    for b in range(each):
                        if scales[at + b] != scale or scale != scale:
                            level[k] = 0
                cuda.syncthreads()  # queries and weights are whole

            if start < keys:
                page = int64(table[int64(facts[32 + first]) * pages_per_lane + start // per_page])
                block = page * page_words + offset
                r0 = start % per_page
                key_words(words, pool, block + (r0 + 4 * g) * row_words + t * each)
                least, most, shifts, fitted = int32(255), int32(0), int32(0), int64(0)
                bytes_at = (r0 + l) * each
                for b in range(each):
                    word = pool[block + exponents + ((bytes_at + b) >> 2)]
                    e = int32((word >> (8 * ((bytes_at + b) & 3))) & 255)
                    least, most = min(least, e), max(most, e)
                for b in range(each):
                    word = pool[block + exponents + ((bytes_at + b) >> 2)]
                    e = int32((word >> (8 * ((bytes_at + b) & 3))) & 255)
                    shift = int32(0) if e == 255 else int32(min(e - least, SHIFT_MOST))
                    shifts = int32(shifts | shift << (2 * b))
                    fitted |= int64(e - shift) << (8 * b)
                mine = most - least <= SHIFT_MOST and most < 255
                levels = uint32(cuda.ballot_sync(ALL, mine or start + l >= keys))
                for i in range(4):
                    its = cuda.shfl_sync(ALL, shifts, 4 * g + i)
                    for m in range(each):
                        shift = (its >> (2 * ((t * each + m) >> 2))) & 3
                        low, high = uint32(LOW << shift), uint32(HIGH << shift)
                        word = words[i * each + m]
                        at = 4 * (i // 2 * each + m) + i % 2
                        parts[at] = four(low, high, word)
                        parts[at + 2] = four(low, high, uint32(word >> 16))
                for k in range(members):
                    own_n = facts[first + k]
                    if start < own_n:
                        is_level = level[k] == 1
                        score = float32(0)
                        if is_level:
                            score = level_score(parts, query, weights, k, tiles, l) * power(least)
                        if not is_level or levels != ALL:
                            scales_at = (int64(first) + k) * all_heads * each
                            other = block_score(
                                parts, query, plain, fitted, scales, scales_at, k, tiles, blocks, l
                            )
                            score = score if is_level and mine else other
                        if start + l < own_n:
                            scores[(int64(first) + k) * stride + start + l] = score

    return index_score_fp4


@kernel(
    "f4* scores, i4 stride, f4* query, f4* w, i4 w_stride, f4 factor, u2* pool, i8 page_halves,"
    "i4 offset, i4* table, i4 pages_per_lane, i4 per_page, i4* pos, i4* lane, i4 heads, i4 dim,"
    "i4 top_k",
    block=BLOCK,
)
def index_score_f16(
    scores, stride, query, w, w_stride, factor, pool, page_halves, offset,
    table, pages_per_lane, per_page, pos, lane, heads, dim, top_k,
):  # fmt: skip
    ptx.let_next_begin()
    ptx.wait_for_front()
    row = int64(cuda.blockIdx.y)
    n = int64((pos[row] + 1) >> 2)
    if n <= top_k:
        return
    pages = int64(lane[row]) * pages_per_lane
    begin = int64(cuda.blockIdx.x) * BLOCK + cuda.threadIdx.x
    for s in range(begin, n, int64(cuda.gridDim.x) * BLOCK):
        key = table[pages + s // per_page] * page_halves + offset + s % per_page * dim
        acc = float32(0)
        for h in range(heads):
            at, dot = (row * heads + h) * dim, float32(0)
            for k in range(dim):
                dot = ptx.fma(query[at + k], ptx.widen(pool[key + k]), dot)
            acc = ptx.fma(positive(dot), w[row * w_stride + h] * factor, acc)
        scores[row * stride + s] = acc


def index_score(
    stream, scores, codes, scales, w, pool, table, pos, lane, *,
    n_rows, n_blocks, stride, w_stride, heads, dim, page_bytes, offset, exponents,
    pages_per_lane, per_page, top_k, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`, where index rows are FP4. `offset`: bytes in front of the layer's block
    in a page; `exponents`: in front of its exponents in that block (`RowFormat.offsets`)."""
    assert n_rows <= 32, "a lane of a warp looks at each"
    assert per_page % TILE == 0, "a tile lies in one page"
    assert page_bytes % 16 == offset % 16 == exponents % 4 == 0
    fp4_kernel(heads, dim).launch(
        stream, n_blocks, BLOCK, scores, stride, codes, scales, w, w_stride, factor_of(heads, dim),
        pool, page_bytes // 4, offset // 4, exponents // 4, table, pages_per_lane, per_page, pos,
        lane, n_rows, top_k, tiles_of(heads), dim // 32, dependent=dependent,
    )  # fmt: skip


def index_score_floats(
    stream, scores, query, w, pool, table, pos, lane, *,
    n_rows, n_blocks, stride, w_stride, heads, dim, page_bytes, offset,
    pages_per_lane, per_page, top_k, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`, where index rows are halves; n_blocks of each row."""
    assert page_bytes % 2 == offset % 2 == 0
    index_score_f16.launch(
        stream, (n_blocks, n_rows), BLOCK, scores, stride, query, w, w_stride,
        factor_of(heads, dim), pool, page_bytes // 2, offset // 2, table, pages_per_lane, per_page,
        pos, lane, heads, dim, top_k, dependent=dependent,
    )  # fmt: skip
