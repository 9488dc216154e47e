"""Attention of a pass's rows over their windows and their compressed rows (spec/model.md 4.9).

    q_h = turn(q_h / sqrt(mean q_h^2 + eps)),   l_r = (q_h . k_r) dim^-1/2,   p_r = exp(l_r - m)
    o_h = turned back(sum_r p_r k_r / (exp(sink_h - m) + sum_r p_r))

A row k_r of the cache is key and value of every head. A row of the pass sees the raw rows of
positions max(0, pos + 1 - window) .. pos in its lane's ring, then compressed rows of its lane's
pages: 0 .. (pos + 1) // ratio - 1, or those in `chosen` if they are more than top_k.

    q       [R, heads, dim]       f32  read by every block of the row and the head
    pos, lane  [R]                i32  -1 in idle rows, of which nothing is written
    turns   [R, 4, 2, pairs]      f32  set `turn_set` of it
    ring    [lanes, lane_bytes]   u8   the layer's, planes of `capacity` rows (model/layout.py)
    pool    [pages, page_bytes]   u8   planes of `per_page` rows at `page_offset` of each page
    table   [lanes, pages_per_lane]  i32  numbers of pages
    chosen  [R, top_k]            i32  ascending
    partial [R, slots, heads, dim]  f32  sums of p_r k_r of a span, written and read once
    stats   [R, slots, heads, 2]  f32  m and sum p_r of a span
    o       [R, heads, dim]       f32  written whole, but for idle rows

*Spans.* The rows that a row of the pass sees are cut into spans, at multiples of `span` of the
position in a ring, and of the index, or of the place in `chosen`, in pages; from `near` on every
`far`. So up to 512 compressed rows are shared by many blocks, and 8,192 make 23 partial sums
instead of 128. Where a span begins depends on nothing else, and who computes it changes nothing:
`attend` writes its maximum, mass and sum as if it stood alone, `merge` puts them together.

attend: grid (spread, heads / group, R): block (j, g, r) takes spans j, j + spread, ... of row r
        for `group` heads. block 256   at Flash: group 16, dynamic shared 75 KB + 1.3 KB
merge:  grid (heads, R)   block 128   shared 1 KB

A block decodes a tile of 16 rows into shared memory as f32 while the next tile's bytes are under
way, and each decoded row serves all its heads. For the dots a warp has an eighth of the channels
and all heads and rows of the tile, four heads by two rows a thread; for the values a thread has
four channels of eight heads.

Order. Dot: channels ascending in an eighth (one fma each), then the eighths. Mean square: a lane
takes every 32nd quad of channels, then `warp.total`. Over rows: tiles at multiples of 16 of
the position or index, ascending, with a running maximum; in a tile masses pair rows 8 apart, 4,
2, 1, and values add rows ascending, one fma each; rows of a tile that are not seen weigh 0. Over
spans: ascending, behind the sink, one fma each. A head's numbers meet no other head's, so `group`
changes no bit, nor does what else is in the pass.

Floor at Flash, a row and layer with 640 rows: 64 x 640 x 512 x 2 fma = 84 MFLOP, 1.4 us at
60 TFLOP/s; 374 KB of rows, which every group of heads reads anew from L2; 11 partial sums of
131 KB, written and read. A fma needs 6/32 (dots) and 3/32 (values) 16-byte loads of shared memory;
of about 2,200 instructions that a warp takes for a tile 1,024 are fma, 550 fetch and decode, so
the issue of instructions bounds it, at about half of what fma alone would allow.

What tensor cores would gain: a code of e4m3 has 4 significant bits and an F16 has 11, so rows are
exact in tf32, scales included, and only q and p are not. Split into three tf32 parts of 11 bits
(exact), or two (error 2^-22), `mma.m16n8k8` with sixteen heads as the rows of A makes f32 sums
of the same quality from 2 or 3 products each. It does 1,024 multiplications in one instruction of
a warp where fma takes 32, so a tile's 1,024 would become 64 to 96 and the operands in
registers would take most of the traffic of shared memory along; what remains is decoding
and the latency of a tile's steps. Sums inside an instruction are not rounded as f32 sums are, so
bits would differ from these, though not between rows.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx, warp

BLOCK = 256
WARPS = BLOCK // 32
RESIDENT = 2  # blocks an SM shall have registers for
LOOKED = 128  # rows whose places are looked up at once: one a thread, and 1 KB
PLACE_BITS = 12
PLACES = 1 << PLACE_BITS  # rows of a page or a ring, at most
MERGE = 128  # threads of `merge`, and spans of a row at most
ALL = warp.ALL


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for. `span`, `near` and `far` count rows; with `tile` they are
    part of the numbers' meaning, `group` is not."""

    heads: int
    dim: int
    rope: int  # trailing channels that are turned
    coded: int  # leading channels in e4m3, blocks of 64, the turned ones in F16; 0: all in F16
    group: int = 16  # heads of a block
    tile: int = 16
    span: int = 64
    near: int = 512
    far: int = 512

    def __post_init__(self):
        assert self.coded in (0, self.dim - self.rope) and self.coded % 64 == 0
        assert self.dim % 8 == 0 and self.rope % 8 == 0 and self.dim <= 1024
        assert self.group in (4, 8, 16) and self.tile in (8, 16, 32)
        assert self.near % self.span == 0 and self.span % self.tile == self.far % self.tile == 0

    @classmethod
    def of(cls, geometry):
        coded = geometry.nope_dim if geometry.rows_are_e4m3 else 0
        group = 16 if geometry.n_heads >= 16 else 8 if geometry.n_heads >= 8 else 4
        return cls(geometry.n_heads, geometry.head_dim, geometry.rope_dim, coded, group)

    @property
    def stored(self):
        """Channels in shared memory: every warp has whole quads of them."""
        return -(-self.dim // 32) * 32

    @property
    def shared_bytes(self):
        """Dynamic: decoded rows, queries, dots by warp, weights."""
        lines = (self.tile + self.group) * (self.stored + 4)
        return 4 * (lines + (WARPS + 1) * self.group * self.tile)

    def slots(self, window, n_compressed):
        """Spans of a row that sees up to so many compressed rows."""
        in_ring = (window + self.span - 2) // self.span + 1
        near, far = min(n_compressed, self.near), max(n_compressed - self.near, 0)
        return in_ring + -(-near // self.span) + -(-far // self.far)

    def partial_floats(self, n_rows, slots):
        return n_rows * slots * self.heads * self.dim

    def stat_floats(self, n_rows, slots):
        return n_rows * slots * self.heads * 2


def attention_ref(q, turns, seen, sinks, eps):
    """o [R, heads, dim] f64 of q [R, heads, dim]; turns [R, 2, pairs] of the layer's set; seen: for
    every row of the pass the decoded rows that it sees [n, dim]."""
    q, turns = q.astype(np.float64), turns.astype(np.float64)
    q = _turned(q / np.sqrt((q * q).mean(-1, keepdims=True) + eps), turns[:, 0], turns[:, 1])
    o = np.zeros_like(q)
    for r, rows in enumerate(seen):
        rows = rows.astype(np.float64)
        logits = q[r] @ rows.T * q.shape[-1] ** -0.5
        m = np.maximum(sinks, logits.max(1, initial=-np.inf))[:, None]
        p = np.exp(logits - m)
        o[r] = (p @ rows) / (np.exp(sinks[:, None] - m) + p.sum(1, keepdims=True))
    return _turned(o, turns[:, 0], -turns[:, 1])


def _turned(x, cos, sin):
    """x [R, heads, dim] with its trailing pairs turned; cos, sin [R, pairs]."""
    first, y = x.shape[-1] - 2 * cos.shape[-1], x.copy()
    u, v = x[..., first::2], x[..., first + 1 :: 2]
    cos, sin = cos[:, None], sin[:, None]
    y[..., first::2], y[..., first + 1 :: 2] = u * cos - v * sin, u * sin + v * cos
    return y


# -- kernels -----------------------------------------------------------------------------------


@device
def _turn(a, b, c, d, turns, at, pairs, sign):
    """Two pairs, the first by turns[at]; sign -1 turns back."""
    cos, sin = turns[at], turns[at + pairs] * sign
    cos_, sin_ = turns[at + 1], turns[at + 1 + pairs] * sign
    return a * cos - b * sin, a * sin + b * cos, c * cos_ - d * sin_, c * sin_ + d * cos_


@device
def _compressed(p, ratio, top_k):
    """How many compressed rows position p sees, and whether they are in `chosen`."""
    n = int32((p + 1) // ratio if ratio > 0 else 0)
    selected = 0 < top_k < n
    return int32(top_k if selected else n), selected


@device
def _take(acc, i, weight, v):
    """Four channels of a head and a row."""
    acc[i] = ptx.fma(weight, v[0], acc[i])
    acc[i + 1] = ptx.fma(weight, v[1], acc[i + 1])
    acc[i + 2] = ptx.fma(weight, v[2], acc[i + 2])
    acc[i + 3] = ptx.fma(weight, v[3], acc[i + 3])


@cache
def _spans(span, near, far):
    @device
    def spans(p, window, n_compressed):
        """Spans of a row at position p: those in its ring, and all."""
        in_ring = p // span - max(int64(0), p + 1 - window) // span + 1
        n_near = (min(int64(n_compressed), int64(near)) + span - 1) // span
        n_far = (max(n_compressed - near, int64(0)) + far - 1) // far
        return int32(in_ring), int32(in_ring + n_near + n_far)

    return spans


@cache
def attend(form):
    heads, dim, rope, coded = form.heads, form.dim, form.rope, form.coded
    group, tile, span, near, far = form.group, form.tile, form.span, form.near, form.far
    spans = _spans(span, near, far)
    n_near = near // span
    plain, pairs = dim - rope, rope // 2
    quads, stored_quads = dim // 4, form.stored // 4
    line = form.stored + 4  # floats from row to row: eight rows apart in eight times four banks
    query_at = tile * line
    dots_at = query_at + group * line
    weights_at = dots_at + WARPS * group * tile
    n_dots = group * tile
    # A row in memory, by planes.
    coded_quads = coded // 4
    code_bytes, half_bytes = (coded, 2 * rope) if coded else (2 * dim, 0)
    scale_bytes = 1 << (coded // 64 - 1).bit_length() if coded else 0
    at_once = BLOCK // quads  # a thread decodes one quad of channels, of every so many rows
    items = -(-tile // at_once)
    held_words = 2 * items
    # Dots: a thread's heads and rows.
    dot_heads, dot_rows = group // 4, tile // 8
    unrolled = 2 if form.stored % 64 == 0 else 1
    n_sums, q_floats = dot_heads * dot_rows, 4 * dot_heads
    # Values: how many threads share the heads of a quad of channels, and the heads of each.
    parts = group
    while parts * stored_quads > BLOCK:
        parts //= 2
    per = group // parts
    active, n_acc = parts * stored_quads, 4 * per
    halvings = tile.bit_length() - 1

    @device
    def fetch(rows, where, first, is_code, row_bytes, offset, scales_at, held):
        """Bytes of a thread's quad in its rows of a tile into registers: codes and their scale, or
        halves; zeros of rows that are not seen."""
        c, r = cuda.threadIdx.x % quads, cuda.threadIdx.x // quads
        for u in range(items):
            held[2 * u], held[2 * u + 1] = uint32(0), uint32(0)
            if r < at_once and r + u * at_once < tile:
                found = where[first + r + u * at_once]
                if found >= 0:
                    base, place = found >> PLACE_BITS, found & (PLACES - 1)
                    at = base + place * row_bytes + offset
                    if is_code:
                        held[2 * u] = ptx.load4(rows, at)[0]
                        e = rows[base + scales_at + place * scale_bytes + c // 16]
                        held[2 * u + 1] = uint32(int64(e) << 23)
                    else:
                        a = ptx.load8(rows, at)
                        held[2 * u], held[2 * u + 1] = a[0], a[1]

    @device
    def decode(room, is_code, held):
        """What `fetch` left, into shared memory."""
        c, r = cuda.threadIdx.x % quads, cuda.threadIdx.x // quads
        for u in range(items):
            if r < at_once and r + u * at_once < tile:
                at = (r + u * at_once) * line + 4 * c
                if is_code:
                    v, s = ptx.e4m3x4(held[2 * u]), ptx.as_f4(held[2 * u + 1])
                    ptx.keep(room, at, v[0] * s, v[1] * s, v[2] * s, v[3] * s)
                else:
                    a, b = ptx.halves(held[2 * u]), ptx.halves(held[2 * u + 1])
                    ptx.keep(room, at, a[0], a[1], b[0], b[1])

    @kernel(
        "f4* partial, f4* stats, f4* q, i4* pos, i4* lane, f4* turns, i4 turn_set, "
        "u1* ring, i8 lane_bytes, i4 capacity, i4 window, u1* pool, i8 page_bytes, i4* table, "
        "i4 pages_per_lane, i8 page_offset, i4 per_page, i4 ratio, i4* chosen, i4 top_k, "
        "i4 n_slots, f4 eps, f4 scale",
        block=BLOCK,
        resident=RESIDENT,
    )
    def attend_spans(
        partial, stats, q, pos, lane, turns, turn_set, ring, lane_bytes, capacity, window, pool,
        page_bytes, table, pages_per_lane, page_offset, per_page, ratio, chosen, top_k, n_slots,
        eps, scale,
    ):  # fmt: skip
        tid, thread, mine = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        row, first_head = int32(cuda.blockIdx.z), int32(cuda.blockIdx.y * group)
        room = cuda.shared.array(0, float32, alignment=16)
        where = cuda.shared.array(LOOKED, int64)  # (byte, place) of a row, or -1
        high = cuda.shared.array(group, float32)
        mass = cuda.shared.array(group, float32)
        shrink = cuda.shared.array(group, float32)
        acc = cuda.local.array(n_acc, float32)
        held = cuda.local.array(held_words, uint32)
        sums = cuda.local.array(n_sums, float32)
        qs = cuda.local.array(q_floats, float32)
        ptx.let_next_begin()
        ptx.wait_for_front()
        p = pos[row]
        if p < 0:
            return
        n_compressed, selected = _compressed(p, ratio, top_k)
        in_ring, n_spans = spans(p, window, n_compressed)
        if cuda.blockIdx.x >= n_spans:
            return
        first_seen = int32(max(int64(0), p + 1 - window))
        my_quad = int32(tid % quads)
        is_code = my_quad < coded_quads
        # A number that the compiler does not know: unrolled as a whole, the loop spills.
        slice_quads = int32(stored_quads // (cuda.blockDim.x // 32))

        # Queries, normalised and turned. Heads behind the last are zeros.
        for h in range(int32(mine), int32(group), int32(WARPS)):
            head, total = first_head + h, float32(0)
            x = (row * heads + head) * dim
            if head < heads:
                for c in range(thread, quads, 32):
                    v = ptx.floats(q, x + 4 * c)
                    total = ptx.fma(v[0], v[0], total)
                    total = ptx.fma(v[1], v[1], total)
                    total = ptx.fma(v[2], v[2], total)
                    total = ptx.fma(v[3], v[3], total)
            total = warp.total(total)
            norm = float32(1) / math.sqrt(total / float32(dim) + eps)
            for c in range(thread, stored_quads, 32):
                v = (float32(0), float32(0), float32(0), float32(0))
                if head < heads and c < quads:
                    v = ptx.floats(q, x + 4 * c)
                    v = (v[0] * norm, v[1] * norm, v[2] * norm, v[3] * norm)
                    if 4 * c >= plain:
                        at = (row * 4 + turn_set) * (2 * pairs) + (4 * c - plain) // 2
                        v = _turn(v[0], v[1], v[2], v[3], turns, at, pairs, float32(1))
                ptx.keep(room, query_at + h * line + 4 * c, v[0], v[1], v[2], v[3])
        for i in range(tid, tile * (stored_quads - quads), BLOCK):  # channels behind the last
            r, c = i // (stored_quads - quads), quads + i % (stored_quads - quads)
            ptx.keep(room, r * line + 4 * c, float32(0), float32(0), float32(0), float32(0))

        for s in range(int32(cuda.blockIdx.x), int32(n_spans), int32(cuda.gridDim.x)):
            # Rows lo .. hi - 1: positions in the ring, else indices or places in `chosen`.
            if s < in_ring:
                rows, n_block = ring, int32(capacity)
                begin = (first_seen // span + s) * span
                lo, hi = int32(max(begin, first_seen)), int32(min(begin + span, p + 1))
            else:
                rows, n_block = pool, int32(per_page)
                j = s - in_ring
                lo = int32(j * span if j < n_near else near + (j - n_near) * far)
                hi = int32(min(lo + (span if j < n_near else far), n_compressed))
            halves_at = int32((code_bytes * n_block + 15) // 16 * 16)
            scales_at = int32(halves_at + (half_bytes * n_block + 15) // 16 * 16)
            row_bytes, offset = int32(code_bytes), int32(4 * my_quad if is_code else 8 * my_quad)
            if coded_quads > 0 and not is_code:
                row_bytes = int32(half_bytes)
                offset = int32(halves_at + 8 * (my_quad - coded_quads))
            if tid < group:
                high[tid], mass[tid] = float32(-math.inf), float32(0)
            for i in range(n_acc):
                acc[i] = float32(0)
            start = int32(lo // tile * tile)
            for first in range(int32(start - tile), hi, int32(tile)):  # begins a tile early
                ahead = int32(first + tile)
                place = int32((ahead - start) % LOOKED)
                if first >= start:
                    decode(room, is_code, held)
                if place == 0 and ahead < hi and tid < LOOKED:
                    i, found = ahead + tid, int64(-1)
                    if lo <= i < hi:
                        if s < in_ring:
                            found = (int64(lane[row]) * lane_bytes << PLACE_BITS) + i % capacity
                        else:
                            if selected:
                                i = int64(chosen[row * top_k + i])
                            page = int64(table[int64(lane[row]) * pages_per_lane + i // per_page])
                            found = (page * page_bytes + page_offset << PLACE_BITS) + i % per_page
                    where[tid] = found
                cuda.syncthreads()  # the tile is there, places are known; at first also queries
                if first >= start:
                    for i in range(n_sums):
                        sums[i] = float32(0)
                    for c in range(int32(0), slice_quads, int32(unrolled)):
                        for u in range(unrolled):
                            k = 4 * (mine * slice_quads + c + u)
                            for i in range(dot_heads):
                                v = ptx.floats(room, query_at + (thread // 8 + 4 * i) * line + k)
                                qs[4 * i], qs[4 * i + 1] = v[0], v[1]
                                qs[4 * i + 2], qs[4 * i + 3] = v[2], v[3]
                            for j in range(dot_rows):
                                v = ptx.floats(room, (thread % 8 + 8 * j) * line + k)
                                for i in range(dot_heads):
                                    a = sums[i * dot_rows + j]
                                    a = ptx.fma(qs[4 * i], v[0], a)
                                    a = ptx.fma(qs[4 * i + 1], v[1], a)
                                    a = ptx.fma(qs[4 * i + 2], v[2], a)
                                    sums[i * dot_rows + j] = ptx.fma(qs[4 * i + 3], v[3], a)
                    for i in range(dot_heads):
                        for j in range(dot_rows):
                            at = (mine * group + thread // 8 + 4 * i) * tile + thread % 8 + 8 * j
                            room[dots_at + at] = sums[i * dot_rows + j]
                if ahead < hi:
                    fetch(rows, where, place, is_code, row_bytes, offset, scales_at, held)
                cuda.syncthreads()  # the eighths of all dots are there
                if first < start:
                    continue
                for i in range(tid, n_dots, BLOCK):
                    h, r = i // tile, i % tile
                    logit = float32(0)
                    for w in range(WARPS):
                        logit += room[dots_at + w * n_dots + i]
                    logit = logit * scale
                    if first + r < lo or first + r >= hi:
                        logit = float32(-math.inf)
                    before = high[h]
                    most = logit
                    for u in range(halvings):
                        other = cuda.shfl_xor_sync(ALL, most, (tile // 2) >> u)
                        most = other if other > most else most
                    most = before if before > most else most
                    weight = math.exp(logit - most)
                    room[weights_at + r * group + h] = weight
                    for u in range(halvings):
                        weight += cuda.shfl_xor_sync(ALL, weight, (tile // 2) >> u)
                    if r == 0:
                        less = math.exp(before - most)
                        high[h], mass[h], shrink[h] = most, mass[h] * less + weight, less
                cuda.syncthreads()  # weights are there
                if tid < active:
                    my_heads, c = tid // stored_quads * per, 4 * (tid % stored_quads)
                    for i in range(per):
                        less = shrink[my_heads + i]
                        for e in range(4):
                            acc[4 * i + e] *= less
                    n_rows = int32(min(hi - first, int64(tile)))
                    for few in range(int32(0), n_rows, int32(2)):
                        for u in range(2):
                            v = ptx.floats(room, (few + u) * line + c)
                            at = weights_at + (few + u) * group + my_heads
                            if per % 4 == 0:
                                for j in range(per // 4):
                                    w = ptx.floats(room, at + 4 * j)
                                    _take(acc, 16 * j, w[0], v)
                                    _take(acc, 16 * j + 4, w[1], v)
                                    _take(acc, 16 * j + 8, w[2], v)
                                    _take(acc, 16 * j + 12, w[3], v)
                            else:
                                for i in range(per):
                                    _take(acc, 4 * i, room[at + i], v)
                cuda.syncthreads()  # rows, weights and places have been read
            slot = (row * n_slots + s) * heads + first_head
            if tid < group and first_head + tid < heads:
                stats[2 * (slot + tid)], stats[2 * (slot + tid) + 1] = high[tid], mass[tid]
            if tid < active and tid % stored_quads < quads:
                my_heads, c = tid // stored_quads * per, 4 * (tid % stored_quads)
                for i in range(per):
                    if first_head + my_heads + i < heads:
                        at = (slot + my_heads + i) * dim + c
                        ptx.keep(
                            partial, at, acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]
                        )

    return attend_spans


@cache
def merge(form):
    heads, dim, rope = form.heads, form.dim, form.rope
    plain, pairs, quads = dim - rope, rope // 2, dim // 4
    spans = _spans(form.span, form.near, form.far)

    @kernel(
        "f4* o, f4* partial, f4* stats, f4* sinks, i4* pos, f4* turns, i4 turn_set, i4 window, "
        "i4 ratio, i4 top_k, i4 n_slots",
        block=MERGE,
    )
    def merge_spans(
        o, partial, stats, sinks, pos, turns, turn_set, window, ratio, top_k, n_slots
    ):  # fmt: skip
        tid, head, row = cuda.threadIdx.x, int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        weight = cuda.shared.array(MERGE, float32)
        mass = cuda.shared.array(MERGE, float32)
        v = cuda.local.array(16, float32)
        ptx.let_next_begin()
        ptx.wait_for_front()
        p = int64(pos[row])
        if p < 0:
            return
        n_compressed, _ = _compressed(p, ratio, top_k)
        _, n_spans = spans(p, window, n_compressed)
        first, sink = row * n_slots * heads + head, sinks[head]
        most = sink
        for s in range(n_spans):
            m = stats[2 * (first + s * heads)]
            most = m if m > most else most
        weight[tid], mass[tid] = float32(0), float32(0)
        if tid < n_spans:
            weight[tid] = math.exp(stats[2 * (first + tid * heads)] - most)
            mass[tid] = stats[2 * (first + tid * heads) + 1]
        cuda.syncthreads()  # weights of all spans are there
        total = math.exp(sink - most)
        for s in range(n_spans):
            total = ptx.fma(weight[s], mass[s], total)
        by = float32(1) / total
        for c in range(tid, quads, MERGE):
            a, b, c_, d = float32(0), float32(0), float32(0), float32(0)
            for s in range(0, n_spans, 4):  # four loads under way
                for u in range(4):
                    w = (float32(0), float32(0), float32(0), float32(0))
                    if s + u < n_spans:
                        w = ptx.floats(partial, (first + (s + u) * heads) * dim + 4 * c)
                    v[4 * u], v[4 * u + 1], v[4 * u + 2], v[4 * u + 3] = w[0], w[1], w[2], w[3]
                for u in range(4):
                    if s + u < n_spans:
                        x = weight[s + u]
                        a, b = ptx.fma(x, v[4 * u], a), ptx.fma(x, v[4 * u + 1], b)
                        c_, d = ptx.fma(x, v[4 * u + 2], c_), ptx.fma(x, v[4 * u + 3], d)
            y = (a * by, b * by, c_ * by, d * by)
            if 4 * c >= plain:
                at = (row * 4 + turn_set) * (2 * pairs) + (4 * c - plain) // 2
                y = _turn(y[0], y[1], y[2], y[3], turns, at, pairs, float32(-1))
            ptx.keep(o, (row * heads + head) * dim + 4 * c, y[0], y[1], y[2], y[3])

    return merge_spans


# -- launcher ----------------------------------------------------------------------------------


def attention(
    stream, form, o, q, *, partial, stats, pos, lane, turns, turn_set, sinks, ring, lane_bytes,
    capacity, window, n_rows, n_slots, eps, ratio=0, pool=None, page_bytes=0, table=None,
    pages_per_lane=0, page_offset=0, per_page=1, chosen=None, top_k=0, spread=16, dependent=False,
):  # fmt: skip
    """Enqueue both kernels. `n_slots`: what `form.slots` says of the longest context; `partial` and
    `stats` have room for it. `spread`: blocks that share the spans of a row and group of heads;
    no bit depends on it. `top_k` 0: all compressed rows, always."""
    assert n_slots <= MERGE and max(capacity, per_page) <= PLACES, (n_slots, capacity, per_page)
    assert lane_bytes % 16 == page_bytes % 16 == page_offset % 16 == 0
    if ratio == 0:
        pool = table = chosen = ring  # not looked at
    elif top_k == 0:
        chosen = ring
    groups = -(-form.heads // form.group)
    attend(form).launch(
        stream, (min(spread, n_slots), groups, n_rows), BLOCK, partial, stats, q, pos, lane, turns,
        turn_set, ring, lane_bytes, capacity, window, pool, page_bytes, table, pages_per_lane,
        page_offset, per_page, ratio, chosen, top_k, n_slots, eps, form.dim**-0.5,
        shared=form.shared_bytes, dependent=dependent,
    )  # fmt: skip
    merge(form).launch(
        stream, (form.heads, n_rows), MERGE, o, partial, stats, sinks, pos, turns, turn_set, window,
        ratio, top_k, n_slots, dependent=dependent,
    )  # fmt: skip
