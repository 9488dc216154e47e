"""Mixture of experts: route, list the work, run Q8_0 experts, add (spec/model.md 4.10).

    s = sqrt(softplus(z)),  z = W_gate h
    chosen  the k greatest of s + bias, ties to the lowest expert, or the table's row of the id
    w_e = scale s_e / max(sum of the chosen s, 2^-14)
    mid = w_e silu(min(W_g h, c)) clip(W_u h, -c, c)          y = sum_e W_d mid_e

Choosing and work items, one block:

    z            [R, stride]   f32  read once, the chosen again     token, pos  [R]  i32
    bias         [n_experts]   f32  read once a row                 table  [V, k]  i32
    expert       [R, k]        i32  written whole: ascending, -1 in idle rows
    weight       [R, k]        f32  written whole: of expert[r, i]; 0 in idle rows
    item_expert  [n_items]     i32  written whole: ascending, -1 behind the last
    item_rows    [n_items, 8]  i32  written whole: the rows that chose it, ascending, then -1
    item_out     [n_items, 8]  i32  written whole: row (k + 1) + i where expert[row, i] is it

An expert that more than eight rows chose has several items. A row whose scores are NaN but for
fewer than k gets expert 0 in the places that are left, as often as need be.

Experts, Q8_0. Row r's results for its i-th expert are row r (k + 1) + i of `mid` and `parts`, and
i = k is the shared expert, which has no items: it is run for all rows.

    w       [experts, T, n_in / 32, 32, 16]      u1   T tiles of 16 outputs; each read once an item
    scales  [experts, T, n_in / 128, 8, 4, 2]    u2   F16; both as `product.pack_q8_0` makes them
    q, d    [n_in / 32, R, 32], [n_in / 32, R]   i8, f32  inputs; R (k + 1) rows of `mid` for down
    mid     [R (k + 1), mid_stride]    f32  written in rows and experts that are chosen
    parts   [R (k + 1), stride]        f32  likewise, of down
    y       [R, stride]                f32  idle rows are left as they are

    choose   grid 1                    block 32 R             shared 4 R n_experts + 3 KB at most
    up       grid (T, <= items)        block 32 warps(n_in)   shared 1024 B a warp
    down     grid (T, <= items)        block 32 warps(n_in)   shared 512 B a warp
    combine  grid (stride / 512, R)    block 128

Sums: the scores of a row's chosen experts in ascending order. A product's blocks of 32 ascending
within a warp, `fma(integer part, d_w d_x, sum)`, then the warps in ascending order; a warp has
n_in / (128 warps) groups of four neighbouring blocks. y from zero in ascending order of experts,
the shared one last.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

ALL = 0xFFFFFFFF
FLOOR = 2.0**-14
NONE = -(2**31)
ITEM_ROWS = 8  # columns of one tensor core's product
WARPS_MOST = 8
COMBINE_BLOCK = 128
GRID_MOST = 4096  # blocks: enough for any GPU; further items are taken in turn


def route_ref(z, bias, k, scale):
    """Experts [k], ascending, and weights [k] f64 of scores z [n_experts]."""
    s = np.sqrt(np.logaddexp(0, z.astype(np.float64)))
    chosen = np.sort(np.argsort(-(s + bias), kind="stable")[:k])
    return chosen, scale * s[chosen] / max(s[chosen].sum(), FLOOR)


def items_ref(expert, n_items):
    """item_expert, item_rows and item_out of expert [R, k]."""
    k = expert.shape[1]
    out = [np.full(n_items, -1, "i4"), *(np.full((n_items, ITEM_ROWS), -1, "i4") for _ in "ro")]
    item = 0
    for e in range(expert.max() + 1):
        chosen = np.argwhere(expert == e)
        for first in range(0, len(chosen), ITEM_ROWS):
            of_item = chosen[first : first + ITEM_ROWS]
            out[0][item] = e
            out[1][item, : len(of_item)] = of_item[:, 0]
            out[2][item, : len(of_item)] = of_item[:, 0] * (k + 1) + of_item[:, 1]
            item += 1
    return out


def up_ref(x, gate, up, weight, clamp):
    """mid [width] f64 of x [n] f64 for an expert's gate and up [width, n]."""
    g, u = np.minimum(gate @ x, clamp), np.clip(up @ x, -clamp, clamp)
    return weight * (g / (1 + np.exp(-g)) * u)


def products_ref(codes, factors, q, d):
    """[R, n_out] f32 of Q8_0 codes [n_out, n_in] and factors [n_out, n_in / 32], with the kernels'
    roundings in their order."""
    n_in = codes.shape[1]
    blocks = codes.reshape(len(codes), n_in // 32, 32).astype(np.int64)
    mine = -(-n_in // 128) * 4 // warps(n_in)
    y = np.zeros((q.shape[1], len(codes)), np.float32)
    for first in range(0, n_in // 32, mine):
        acc = np.zeros_like(y)
        for b in range(first, min(first + mine, n_in // 32)):
            scale = factors[:, b].astype(np.float32) * d[b][:, None]
            dot = q[b].astype(np.int64) @ blocks[:, b].T
            # float64 holds the product of two float32 exactly
            acc = (dot.astype(np.float64) * scale + acc).astype(np.float32)
        y += acc
    return y


def combine_ref(parts):
    """y [R, n_out] of parts [R, k + 1, n_out]."""
    y = np.zeros_like(parts[:, 0])
    for i in range(parts.shape[1]):
        y = y + parts[:, i]
    return y


# -- choosing ----------------------------------------------------------------------------------


def items_most(n_rows, k, n_experts):
    """As many items as `n_rows` may need: every expert chosen, and one more for each further 8."""
    n = n_rows * k
    return min(n, n_experts + max(n - n_experts, 0) // ITEM_ROWS)


@device
def _score(z):
    soft = z if z > float32(20) else math.log1p(math.exp(z))
    return math.sqrt(soft)


@device
def _before(x, lane):
    """The sum over the lanes below."""
    total = int32(x)
    for i in range(5):
        other = cuda.shfl_up_sync(ALL, total, 1 << i)
        if lane >= 1 << i:
            total = int32(total + other)
    return total - x


@cache
def choose(n_experts, k, rows):
    """Of `rows` rows, a warp each."""
    mine = -(-n_experts // 32)  # experts of a lane, neighbours
    block, padded, n = 32 * rows, 32 * mine, rows * k
    n_items = items_most(rows, k, n_experts)
    n_places = n_items * ITEM_ROWS
    n_ranks = mine * block
    if k > min(n_experts, 32) or mine > 8 or rows > 32:
        raise ValueError(f"{k} of {n_experts} experts for {rows} rows: at most 32 of 256 for 32")

    @kernel(
        "i4* expert, f4* weight, i4* item_expert, i4* item_rows, i4* item_out, f4* z, f4* bias, "
        "i4* table, i4* token, i4* pos, i4 stride, i4 biased, i4 hashed, f4 scale",
        block=block,
    )
    def choose_experts(
        expert, weight, item_expert, item_rows, item_out, z, bias, table, token, pos,
        stride, biased, hashed, scale,
    ):  # fmt: skip
        tid, lane, row = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        chosen = cuda.shared.array(n, int32)
        count = cuda.shared.array(padded, int32)
        first = cuda.shared.array(padded, int32)
        rank = cuda.shared.array(n_ranks, int32)  # of a thread: tid, block + tid, ...
        ptx.let_next_begin()
        for e in range(tid, padded, block):
            count[e] = 0
        ptx.wait_for_front()
        for j in range(tid, n_items, block):
            item_expert[j] = -1
        for j in range(tid, n_places, block):
            item_rows[j] = -1
            item_out[j] = -1

        # A row's experts, ascending, into `chosen`.
        if pos[row] < 0:
            if lane < k:
                chosen[row * k + lane] = -1
        elif hashed != 0:
            e = table[int64(token[row]) * k + lane] if lane < k else 0
            place = 0
            for i in range(k):
                other = cuda.shfl_sync(ALL, e, i)
                if other < e or (other == e and i < lane):
                    place += 1
            if lane < k:
                chosen[row * k + place] = e
        else:
            # Scores as whole numbers that compare alike; NONE for NaN, -inf and the taken.
            for j in range(mine):
                e = lane * mine + j
                rank[j * block + tid] = int32(NONE)
                if e < n_experts:
                    s = _score(z[int64(row) * stride + e])
                    if biased != 0:
                        s = s + bias[e]
                    if s > -math.inf:
                        bits = ptx.as_u4(s)
                        rank[j * block + tid] = int32(bits ^ 0x7FFFFFFF if bits >> 31 else bits)
            taken = uint32(0)
            for _ in range(k):
                best, at = int32(NONE), int32(0)
                for j in range(mine):
                    if rank[j * block + tid] > best:
                        best, at = rank[j * block + tid], int32(j)
                most = ptx.most(best)
                # The lowest lane of those that hold the greatest has the lowest expert.
                holds = cuda.ballot_sync(ALL, best == most)
                if most > NONE and lane == cuda.ffs(holds) - 1:
                    taken = uint32(taken | 1 << at)
                    for j in range(mine):
                        if j == at:
                            rank[j * block + tid] = int32(NONE)
            place = _before(int32(cuda.popc(taken)), lane)
            found = cuda.shfl_sync(ALL, int32(place + cuda.popc(taken)), 31)
            if lane < k - found:
                chosen[row * k + lane] = 0
            place += k - found
            for j in range(mine):
                if taken >> j & 1:
                    chosen[row * k + place] = lane * mine + j
                    place += 1
        cuda.syncwarp()  # the row's experts are there

        s, e = float32(0), int32(-1)
        if lane < k:
            e = chosen[row * k + lane]
            if e >= 0:
                s = _score(z[int64(row) * stride + e])
        whole = float32(0)
        for i in range(k):
            whole += cuda.shfl_sync(ALL, s, i)
        whole = float32(FLOOR) if whole < float32(FLOOR) else whole
        if lane < k:
            expert[row * k + lane] = e
            weight[row * k + lane] = scale * s / whole
        cuda.syncthreads()  # all rows' experts, `count` and the empty items are there

        # A thread for each (row, place): which of those that chose the expert is it?
        e, before, same = int32(-1), 0, 0
        if tid < n:
            e = chosen[tid]
            for i in range(n):
                if chosen[i] == e:
                    same += 1
                    if i < tid:
                        before += 1
            if e >= 0 and before == 0:
                count[e] = (same + ITEM_ROWS - 1) // ITEM_ROWS
        cuda.syncthreads()  # each expert's number of items is there
        if tid < 32:
            total = 0
            for j in range(mine):
                total += count[lane * mine + j]
            total = _before(int32(total), lane)
            for j in range(mine):
                first[lane * mine + j] = total
                total += count[lane * mine + j]
        cuda.syncthreads()  # each expert's first item is there
        if e >= 0:
            item, place = first[e] + before // ITEM_ROWS, before % ITEM_ROWS
            at_row = tid // k
            item_rows[item * ITEM_ROWS + place] = at_row
            item_out[item * ITEM_ROWS + place] = at_row * (k + 1) + tid % k
            if place == 0:
                item_expert[item] = e

    return choose_experts


# -- experts -----------------------------------------------------------------------------------


def warps(n_in):
    """Over which the inputs are split: the most, up to 8, that leave all of them alike."""
    groups = -(-n_in // 128)
    units = groups // 2 if groups % 2 == 0 else groups
    return max(n for n in range(1, WARPS_MOST + 1) if units % n == 0)


@cache
def _products(n_in, rows, tiles, mats):
    """A warp's share of one tile of 16 outputs of `mats` matrices. q has `rows` rows."""
    n_groups, n_blocks, ragged = -(-n_in // 128), n_in // 32, n_in % 128 != 0
    mine = n_groups // warps(n_in)
    # Groups whose weights are on their way at once: with many sums there is room for one only.
    step = 2 if mine % 2 == 0 and tiles == 1 else 1
    turns = mine // step
    n_words, n_scales = mats * step * 16, mats * step * 4

    @device
    def products(acc, a, a_scales, b, b_scales, tile, q, d, columns):
        """acc [mats, tiles, 4] +=. `tile`: of all of the matrices; `columns` [tiles, 3]: the rows
        of q that are the lane's column of B and its two columns of C."""
        lane, share = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        w, s = cuda.local.array(n_words, uint32), cuda.local.array(n_scales, uint32)
        for turn in range(turns):
            group = share * mine + turn * step
            first = (tile * n_groups + group) * 2048 + lane * 16
            first_scale = (tile * n_groups + group) * 64 + lane // 4 * 8
            for j in range(step):
                for m in range(mats):
                    for i in range(4):
                        place = first + (j * 4 + i) * 512
                        v = ptx.stream16(a, place) if m == 0 else ptx.stream16(b, place)
                        to = ((m * step + j) * 4 + i) * 4
                        w[to], w[to + 1], w[to + 2], w[to + 3] = v[0], v[1], v[2], v[3]
                    place = first_scale + j * 64
                    v = ptx.stream16(a_scales, place) if m == 0 else ptx.stream16(b_scales, place)
                    to = (m * step + j) * 4
                    s[to], s[to + 1], s[to + 2], s[to + 3] = v[0], v[1], v[2], v[3]
            ptx.wait_for_front()  # q and d are written; at once from the second time on
            before = group * 4 * rows
            for n in range(tiles):
                of_b = (before + columns[3 * n]) * 32 + lane % 4 * 8
                of_c, of_next = before + columns[3 * n + 1], before + columns[3 * n + 2]
                for j in range(step):
                    for i in range(4):
                        if not ragged or (group + j) * 4 + i < n_blocks:
                            block = (j * 4 + i) * rows
                            x = ptx.load8(q, of_b + block * 32)
                            d0, d1 = d[of_c + block], d[of_next + block]
                            for m in range(mats):
                                of = (m * step + j) * 4 + i
                                c = ptx.mma_s8(
                                    w[4 * of], w[4 * of + 1], w[4 * of + 2], w[4 * of + 3],
                                    x[0], x[1], int32(0), int32(0), int32(0), int32(0),
                                )  # fmt: skip
                                low, high = ptx.halves(s[of])
                                to = (m * tiles + n) * 4
                                acc[to] = ptx.fma(float32(c[0]), low * d0, acc[to])
                                acc[to + 1] = ptx.fma(float32(c[1]), low * d1, acc[to + 1])
                                acc[to + 2] = ptx.fma(float32(c[2]), high * d0, acc[to + 2])
                                acc[to + 3] = ptx.fma(float32(c[3]), high * d1, acc[to + 3])

    return products


@device
def _row_of(rows, j, n_items, tiles, n, column, per_row):
    """Row of q of a work item's column. Places without a row repeat the first: their sums are
    not used. Behind the items stands the shared expert, 8 * `tiles` rows at a time."""
    if j >= n_items:
        row = ((j - n_items) * tiles + n) * ITEM_ROWS + column
        return row * per_row + per_row - 1
    row = rows[j * ITEM_ROWS + column]
    return row if row >= 0 else rows[j * ITEM_ROWS]


def _tiles(rows, routed):
    """Of 8 rows each, that a work item has: without routed experts all rows share one item, and
    the weights are read once."""
    return 1 if routed else rows // ITEM_ROWS


@cache
def up(n_in, rows, k, routed):
    """For a pass of `rows` rows. Not `routed`: there are no items, only the shared expert."""
    tiles = _tiles(rows, routed)
    products = _products(n_in, rows, tiles, 2)
    n_warps = warps(n_in)
    block, n_acc, n_sums = 32 * n_warps, 8 * tiles, 8 * 32 * n_warps
    n_columns = 3 * tiles

    @kernel(
        "f4* mid, u1* gate, u2* gate_scales, u1* up, u2* up_scales, u1* shared_gate, "
        "u2* shared_gate_scales, u1* shared_up, u2* shared_up_scales, i1* q, f4* d, "
        "i4* item_expert, i4* item_rows, i4* item_out, f4* weight, i4* pos, i4 n_items, "
        "i4 n_shared, i4 stride, f4 clamp, f4 shared_clamp",
        block=block,
    )
    def experts_up(
        mid, gate, gate_scales, up, up_scales, shared_gate, shared_gate_scales, shared_up,
        shared_up_scales, q, d, item_expert, item_rows, item_out, weight, pos, n_items,
        n_shared, stride, clamp, shared_clamp,
    ):  # fmt: skip
        tid, lane, tile = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.blockIdx.x
        sums = cuda.shared.array(n_sums, float32)
        acc, columns = cuda.local.array(n_acc, float32), cuda.local.array(n_columns, int32)
        ptx.let_next_begin()
        if n_items > 0:
            ptx.wait_for_front()  # the lists are written
        for j in range(cuda.blockIdx.y, n_items + n_shared, cuda.gridDim.y):
            shared = j >= n_items
            e = 0 if shared else item_expert[j]
            if e >= 0:
                for i in range(n_acc):
                    acc[i] = float32(0)
                for n in range(tiles):
                    columns[3 * n] = _row_of(item_rows, j, n_items, tiles, n, lane // 4, 1)
                    for i in range(2):
                        columns[3 * n + 1 + i] = _row_of(
                            item_rows, j, n_items, tiles, n, lane % 4 * 2 + i, 1
                        )
                products(
                    acc,
                    shared_gate if shared else gate,
                    shared_gate_scales if shared else gate_scales,
                    shared_up if shared else up,
                    shared_up_scales if shared else up_scales,
                    int64(e) * cuda.gridDim.x + tile, q, d, columns,
                )  # fmt: skip
                high = shared_clamp if shared else clamp
                for n in range(tiles):
                    cuda.syncthreads()  # the sums before are read
                    for m in range(2):
                        for i in range(4):
                            to = (tid // 32 * 8 + m * 4 + i) * 32 + lane
                            sums[to] = acc[(m * tiles + n) * 4 + i]
                    cuda.syncthreads()  # every warp's sums are there
                    for at in range(tid, 128, block):
                        g, u = float32(0), float32(0)
                        for i in range(n_warps):
                            g += sums[i * 256 + at]
                            u += sums[i * 256 + 128 + at]
                        column = at % 4 * 2 + at // 32 % 2
                        share = float32(1)
                        if shared:
                            row = ((j - n_items) * tiles + n) * ITEM_ROWS + column
                            to = row * (k + 1) + k if pos[row] >= 0 else -1
                        else:
                            row = item_rows[j * ITEM_ROWS + column]
                            to = item_out[j * ITEM_ROWS + column]
                            if to >= 0:
                                share = weight[row * k + to - row * (k + 1)]
                        if to >= 0:
                            g = high if g > high else g
                            u = high if u > high else u
                            u = -high if u < -high else u
                            silu = g / (float32(1) + math.exp(-g))
                            output = tile * 16 + at % 32 // 4 + at // 64 * 8
                            mid[int64(to) * stride + output] = share * (silu * u)

    return experts_up


@cache
def down(n_in, rows, k, routed):
    """As `up`."""
    tiles = _tiles(rows, routed)
    products = _products(n_in, rows * (k + 1), tiles, 1)
    n_warps = warps(n_in)
    block, n_acc, n_sums = 32 * n_warps, 4 * tiles, 4 * 32 * n_warps
    n_columns = 3 * tiles

    # Two blocks an SM, where each has eight warps: else the compiler takes twice the registers to
    # load all activations at once.
    @kernel(
        "f4* parts, u1* w, u2* scales, u1* shared_w, u2* shared_scales, i1* q, f4* d, "
        "i4* item_expert, i4* item_out, i4* pos, i4 n_items, i4 n_shared, i4 stride",
        block=block,
        resident=16 // n_warps,
    )
    def experts_down(
        parts, w, scales, shared_w, shared_scales, q, d, item_expert, item_out, pos, n_items,
        n_shared, stride,
    ):  # fmt: skip
        tid, lane, tile = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.blockIdx.x
        sums = cuda.shared.array(n_sums, float32)
        acc, columns = cuda.local.array(n_acc, float32), cuda.local.array(n_columns, int32)
        ptx.let_next_begin()
        if n_items > 0:
            ptx.wait_for_front()  # the lists are written
        for j in range(cuda.blockIdx.y, n_items + n_shared, cuda.gridDim.y):
            shared = j >= n_items
            e = 0 if shared else item_expert[j]
            if e >= 0:
                for i in range(n_acc):
                    acc[i] = float32(0)
                for n in range(tiles):
                    columns[3 * n] = _row_of(item_out, j, n_items, tiles, n, lane // 4, k + 1)
                    for i in range(2):
                        columns[3 * n + 1 + i] = _row_of(
                            item_out, j, n_items, tiles, n, lane % 4 * 2 + i, k + 1
                        )
                products(
                    acc,
                    shared_w if shared else w,
                    shared_scales if shared else scales,
                    w, scales,
                    int64(e) * cuda.gridDim.x + tile, q, d, columns,
                )  # fmt: skip
                for n in range(tiles):
                    cuda.syncthreads()  # the sums before are read
                    for i in range(4):
                        sums[(tid // 32 * 4 + i) * 32 + lane] = acc[n * 4 + i]
                    cuda.syncthreads()  # every warp's sums are there
                    for at in range(tid, 128, block):
                        y = float32(0)
                        for i in range(n_warps):
                            y += sums[i * 128 + at]
                        column = at % 4 * 2 + at // 32 % 2
                        if shared:
                            row = ((j - n_items) * tiles + n) * ITEM_ROWS + column
                            to = row * (k + 1) + k if pos[row] >= 0 else -1
                        else:
                            to = item_out[j * ITEM_ROWS + column]
                        if to >= 0:
                            output = tile * 16 + at % 32 // 4 + at // 64 * 8
                            parts[int64(to) * stride + output] = y

    return experts_down


@cache
def combine(k):
    @kernel("f4* y, f4* parts, i4* pos, i4 stride", block=COMBINE_BLOCK)
    def combine_experts(y, parts, pos, stride):
        row = cuda.blockIdx.y
        at = (cuda.blockIdx.x * COMBINE_BLOCK + cuda.threadIdx.x) * 4
        ptx.let_next_begin()
        ptx.wait_for_front()
        if at < stride and pos[row] >= 0:
            a, b, c, d = float32(0), float32(0), float32(0), float32(0)
            for i in range(k + 1):
                v = ptx.load16(parts, (int64(row) * (k + 1) + i) * stride + at)
                a += ptx.as_f4(v[0])
                b += ptx.as_f4(v[1])
                c += ptx.as_f4(v[2])
                d += ptx.as_f4(v[3])
            ptx.store16(
                y, int64(row) * stride + at,
                ptx.as_u4(a), ptx.as_u4(b), ptx.as_u4(c), ptx.as_u4(d),
            )  # fmt: skip

    return combine_experts


# -- launchers ---------------------------------------------------------------------------------


def run_choose(
    stream, expert, weight, items, z, token, pos, *,
    bias=None, table=None, n_rows, stride, n_experts, k, scale, dependent=False,
):  # fmt: skip
    """`items`: item_expert, item_rows, item_out, for `items_most` items. A layer with `table` is
    a hashed one. z is `stride` apart from row to row."""
    choose(n_experts, k, n_rows).launch(
        stream, 1, 32 * n_rows, expert, weight, *items, z,
        z if bias is None else bias, token if table is None else table, token, pos, stride,
        int(bias is not None), int(table is not None), scale, dependent=dependent,
    )  # fmt: skip


def run_up(
    stream, mid, routed, shared, q, d, items, weight, pos, *,
    n_rows, n_experts, k, n_in, n_out, stride, clamp, shared_clamp, dependent=False,
):  # fmt: skip
    """`routed` and `shared`: gate, its scales, up, its scales; None where they are not Q8_0."""
    n_items, n_shared = _work(routed, shared, n_rows, n_experts, k)
    assert n_in % 32 == 0 and stride >= _tiles_of(n_out) * 16, (n_in, n_out, stride)
    up(n_in, n_rows, k, routed is not None).launch(
        stream, _grid(n_out, n_items + n_shared), 32 * warps(n_in),
        mid, *(routed or shared), *(shared or routed), q, d, *items, weight, pos,
        n_items, n_shared, stride, clamp, shared_clamp, dependent=dependent,
    )  # fmt: skip


def run_down(
    stream, parts, routed, shared, q, d, items, pos, *,
    n_rows, n_experts, k, n_in, n_out, stride, dependent=False,
):  # fmt: skip
    """`routed` and `shared`: weights and scales, or None. q and d have n_rows * (k + 1) rows."""
    n_items, n_shared = _work(routed, shared, n_rows, n_experts, k)
    assert n_in % 32 == 0 and stride >= _tiles_of(n_out) * 16, (n_in, n_out, stride)
    down(n_in, n_rows, k, routed is not None).launch(
        stream, _grid(n_out, n_items + n_shared), 32 * warps(n_in),
        parts, *(routed or shared), *(shared or routed), q, d, items[0], items[2], pos,
        n_items, n_shared, stride, dependent=dependent,
    )  # fmt: skip


def run_combine(stream, y, parts, pos, *, n_rows, k, stride, dependent=False):
    assert stride % 4 == 0, stride
    grid = -(-stride // (4 * COMBINE_BLOCK)), n_rows
    combine(k).launch(stream, grid, COMBINE_BLOCK, y, parts, pos, stride, dependent=dependent)


def _work(routed, shared, n_rows, n_experts, k):
    """Items, and those of the shared expert behind them."""
    assert n_rows in (8, 16, 24, 32) and (routed or shared), n_rows
    if not routed:
        return 0, 1
    return items_most(n_rows, k, n_experts), n_rows // ITEM_ROWS if shared else 0


def _tiles_of(n_out):
    return -(-n_out // 16)


def _grid(n_out, n):
    tiles = _tiles_of(n_out)
    return tiles, max(1, min(n, GRID_MOST // tiles))
