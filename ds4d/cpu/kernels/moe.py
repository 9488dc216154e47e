"""Mixture of experts: route, group rows by expert, run the experts (spec/model.md 4.10).

    s = sqrt(softplus(z)),  z = W_gate h
    chosen  the k greatest of s + bias, ties to the lowest expert, or the table's row of the id
    w_e = scale s_e / max(sum of the chosen s, 2^-14)
    mid = w_e silu(min(W_g h, c)) clip(W_u h, -c, c)          y = sum_e W_d mid_e

A row's experts are put in ascending order, the shared expert last, and y is summed in that order
from zero. `group` turns the choice around: for each expert that any row chose, its rows; a weight
tile is then read once for all of them. Row r's results for its i-th expert are row r (k + 1) + i
of the middle activation, and i = k is the shared expert.
"""

import math

import numpy as np

from ds4d.cpu.jit import F4, I8, N, R, helper, kernel, real, share
from ds4d.cpu.kernels.product import ROWS_MAX, run_tile
from ds4d.cpu.kernels.simd import (
    as_f4,
    as_i4,
    at,
    exp,
    f4,
    greater,
    lesser,
    load,
    scratch,
    splat,
    store,
)

ZERO, ONE, TWENTY = np.float32(0), np.float32(1), np.float32(20)
FLOOR = np.float32(2.0**-14)
EXPERTS_MAX = 1024
_per_expert, _tile_room = scratch(EXPERTS_MAX), scratch(ROWS_MAX * 16)


def route_ref(z, bias, k, scale):
    """Experts [k], ascending, and weights [k] f64 of scores z [experts]."""
    s = np.sqrt(np.logaddexp(0, z.astype(np.float64)))
    chosen = np.sort(np.argsort(-(s + bias), kind="stable")[:k])
    return chosen, scale * s[chosen] / max(s[chosen].sum(), FLOOR)


@kernel
def route(
    tid: N,
    n_threads: N,
    step: I8,
    z: F4,  # [rows, stride]
    stride: N,
    n_experts: N,
    k: N,
    bias: N,  # address of [experts] f32, or 0
    table: N,  # address of [V, k] i32, or 0
    token: I8,  # [rows]
    scale: R,
    expert: I8,  # [rows, k]
    weight: F4,  # [rows, k]
):
    s, rank = _per_expert(), _per_expert()
    for row in share(step[0], tid, n_threads):
        chosen, part = at(expert, row * k), at(weight, row * k)
        for e in range(n_experts):
            x = z[row * stride + e]
            soft = x if x > TWENTY else np.float32(math.log1p(math.exp(np.float64(x))))
            s[e] = np.sqrt(soft)
            rank[e] = s[e] + as_f4(bias)[e] if bias != 0 else s[e]
        if table != 0:
            for i in range(k):
                chosen[i] = np.int64(as_i4(table)[token[row] * k + i])
        else:
            for i in range(k):
                best = -1
                for e in range(n_experts):
                    if rank[e] > np.float32(-np.inf) and (best < 0 or rank[e] > rank[best]):
                        best = e
                best = max(best, 0)  # only where every score is NaN
                chosen[i] = best
                rank[best] = np.float32(-np.inf)
        for i in range(1, k):  # insertion sort
            e, j = chosen[i], i
            while j > 0 and chosen[j - 1] > e:
                chosen[j] = chosen[j - 1]
                j -= 1
            chosen[j] = e
        whole = ZERO
        for i in range(k):
            whole += s[chosen[i]]
        whole = FLOOR if whole < FLOOR else whole
        for i in range(k):
            part[i] = real(scale) * s[chosen[i]] / whole


@helper
def _lists(lists, n_experts, k):
    """The arrays behind word 0 of `lists`: active, start, row, middle row."""
    rows = at(lists, 2 * n_experts + 5)
    return at(lists, 1), at(lists, n_experts + 3), rows, at(rows, ROWS_MAX * (k + 1))


@kernel
def group(
    tid: N,
    n_threads: N,
    step: I8,
    expert: I8,  # [rows, k]
    k: N,
    n_experts: N,
    lists: I8,  # written: [2 n_experts + 5 + 2 ROWS_MAX (k + 1)]
):
    """One thread's work: some hundred words.

    word 0     n, the experts that any row chose and, last, the shared one
    active [n], start [n + 1]: whose rows are row[start[j] : start[j + 1]]
    row, middle row: of the step, and of the middle activation
    """
    if tid != 0:
        return
    active, start, rows, middle = _lists(lists, n_experts, k)
    n, filled = 0, 0
    for e in range(n_experts):
        begin = filled
        for row in range(step[0]):
            for i in range(k):
                if expert[row * k + i] == e:
                    rows[filled], middle[filled] = row, row * (k + 1) + i
                    filled += 1
        if filled > begin:
            active[n], start[n] = e, begin
            n += 1
    active[n], start[n] = n_experts, filled
    for row in range(step[0]):
        rows[filled], middle[filled] = row, row * (k + 1) + k
        filled += 1
    start[n + 1] = filled
    lists[0] = n + 1


@kernel
def experts_up(
    tid: N,
    n_threads: N,
    lists: I8,
    n_experts: N,
    k: N,
    weight: F4,  # [rows, k] of the router
    h: I8,  # an activation
    width: N,  # of the middle
    mid: I8,  # an activation, written
    clamp: R,
    shared_clamp: R,
    gate: I8,  # weights of the routed experts
    up: I8,
    shared_gate: I8,
    shared_up: I8,
):
    active, start, rows, middle = _lists(lists, n_experts, k)
    a, b = _tile_room(), _tile_room()
    x, stride = f4(mid, 0), mid[1]
    tiles = (width + 15) // 16
    for unit in range(tid, lists[0] * tiles, n_threads):  # dealt out: experts differ in rows
        j, t = unit // tiles, unit % tiles
        shared = active[j] == n_experts
        which = t if shared else active[j] * tiles + t
        high = splat(real(shared_clamp) if shared else real(clamp))
        for begin in range(start[j], start[j + 1], ROWS_MAX):
            n, who = min(start[j + 1] - begin, ROWS_MAX), at(rows, begin)
            run_tile(shared_gate if shared else gate, which, h, who, n, a, 16)
            run_tile(shared_up if shared else up, which, h, who, n, b, 16)
            for i in range(n):
                to = middle[begin + i]
                part = ONE if shared else weight[who[i] * k + to % (k + 1)]
                g = lesser(load(a, 16 * i), high)
                u = greater(lesser(load(b, 16 * i), high), splat(ZERO) - high)
                silu = g / (splat(ONE) + exp(splat(ZERO) - g))
                store(x, to * stride + 16 * t, splat(part) * (silu * u))


@kernel
def experts_down(
    tid: N,
    n_threads: N,
    step: I8,
    lists: I8,
    n_experts: N,
    k: N,
    mid: I8,  # an activation
    y: F4,  # [rows, stride]
    stride: N,  # a multiple of 16
    down: I8,
    shared_down: I8,
):
    active, start, rows, middle = _lists(lists, n_experts, k)
    part = _tile_room()
    tiles = stride // 16
    for t in share(tiles, tid, n_threads):
        for row in range(step[0]):
            store(y, row * stride + 16 * t, splat(ZERO))
        for j in range(lists[0]):
            shared = active[j] == n_experts
            which = t if shared else active[j] * tiles + t
            for begin in range(start[j], start[j + 1], ROWS_MAX):
                n, who = min(start[j + 1] - begin, ROWS_MAX), at(middle, begin)
                run_tile(shared_down if shared else down, which, mid, who, n, part, 16)
                for i in range(n):
                    to = rows[begin + i] * stride + 16 * t
                    store(y, to, load(y, to) + load(part, 16 * i))
