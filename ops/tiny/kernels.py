"""Attention over packed dialogues and the indexer that chooses for it, tile by tile.

A row of T tokens holds dialogues that begin at multiples of 128 and do not see each other. With
`first` the first token of the dialogue of query t, and K = V = one row for all heads h:

    raw rows         max(first, t - 127) <= j <= t
    compressed rows  first <= s ratio  and  (s + 1) ratio - 1 <= t: a range of s
    o[t, h]          softmax over both and a sink without a value, of q[t, h] . k d^-1/2
    scores[t, s]     sum_h relu(qi[t, h] . key[s]) w[t, h]            (ratio 4)
    chosen[t, s]     scores[t, s] >= the k-th largest of those in sight, if there are more than k
    target[t, s]     sum_h of the probability that h would give s if all were chosen
    loss[t]          sum_s target (log(target / mass) - log softmax_s scores),  mass = sum_s target

`attend` is all of that with its gradients; `reference` is the same in plain torch, with every score
in memory: for the CPU, and to compare with. The kernels visit only tiles in sight, so that time
goes with the length of the dialogues, not of the rows. What lies out of sight in [B, T, S] arrays
need not be written, and is never used. No kernel adds with atomics: two runs agree bit by bit.
Operands have the type of q (bf16, or f32 to compare), sums are f32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.tiny.sinkhorn import ready

BLOCK = 128  # = window = largest ratio; dialogues begin at multiples of it
LOG2E = 1.4426950408889634

Index = tuple[Tensor, Tensor, Tensor]  # queries [B, T, heads, d], keys [B, S, d], w [B, T, heads]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a kernel cuts its work: tokens, keys, warps of a program and stages of its loads."""

    tokens: int
    keys: int
    warps: int
    stages: int


# `python -m ops.tiny.probe` finds the best. Tokens divide 128; compressed keys are 32 or 64, so
# that a tile's bits are one or two words. With fewer than 3 stages a load is waited for as soon as
# it was begun; a tile's side that is the first of a product needs 64 rows for Hopper's wgmma.
TILES = {
    "attend": Tile(tokens=8, keys=32, warps=4, stages=3),
    "attend_q": Tile(tokens=8, keys=32, warps=4, stages=3),
    "attend_raw": Tile(tokens=8, keys=64, warps=4, stages=3),
    "attend_rows": Tile(tokens=8, keys=64, warps=4, stages=3),
    "scores": Tile(tokens=8, keys=64, warps=8, stages=3),
    "scores_q": Tile(tokens=4, keys=64, warps=4, stages=3),
    "scores_keys": Tile(tokens=8, keys=64, warps=4, stages=3),
    "choose": Tile(tokens=4, keys=256, warps=4, stages=1),
    "align": Tile(tokens=8, keys=32, warps=4, stages=3),
}
FEW = 16  # keys of a tile where a compressed row is as long as a block
PARTS = {4: 256, 128: 128}  # tokens after which the sums of compressed keys are cut, by ratio
KEY_PART = 256  # the same for the indexer's keys

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def spans(owner: Tensor) -> Tensor:
    """[2, B, n] int32: first token of the dialogue of each block, and the first behind it, of the
    dialogue's number of each block [B, n]. Those of one row differ."""
    same = owner[:, :, None] == owner[:, None]
    first = same.int().argmax(-1)
    return torch.stack([first, first + same.sum(-1)]).int() * BLOCK


# --- the reference -------------------------------------------------------------------------------


def reference(
    q: Tensor, kv: Tensor, rows: Tensor | None, sinks: Tensor, spans: Tensor, ratio: int,
    index: Index | None, top_k: int, dense: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `attend` computes, with all scores in memory."""
    B, T, H, d = q.shape
    n, scale = T // BLOCK, d**-0.5
    first = spans[0]
    # Raw rows: a block sees itself and, if it is the same dialogue, the block before it.
    blocks = kv.view(B, n, BLOCK, d)
    raw = torch.cat([torch.cat([torch.zeros_like(blocks[:, :1]), blocks[:, :-1]], 1), blocks], 2)
    at = torch.arange(T, device=q.device)
    t, j = at[:BLOCK, None], torch.arange(2 * BLOCK, device=q.device)[None]
    opens = first == at[::BLOCK]
    seen = (j > t) & (j <= t + BLOCK) & ((j >= BLOCK) | ~opens[:, :, None, None])
    qb = q.reshape(B, n, BLOCK * H, d)
    l_raw = (qb @ raw.transpose(2, 3)).float().view(B, n, BLOCK, H, 2 * BLOCK) * scale
    l_raw = torch.where(seen[:, :, :, None], l_raw, -1e30)
    sinks = sinks[:, None]
    top = torch.maximum(l_raw.amax(-1, keepdim=True), sinks).detach()
    loss = torch.zeros((), device=q.device)
    if rows is None:
        e_raw = torch.exp(l_raw - top)
        total = e_raw.sum(-1, keepdim=True) + torch.exp(sinks - top)
        o = (e_raw.to(q.dtype).flatten(2, 3) @ raw).float()
        return (o.view(B, T, H, d) / total.view(B, T, H, 1)).to(q.dtype), loss

    S = T // ratio
    s = torch.arange(S, device=q.device)
    visible = ((s + 1) * ratio - 1 <= at.view(n, BLOCK)[..., None]) & (
        s * ratio >= first[:, :, None, None]
    )  # [B, n, 128, S]
    l_rows = (q.reshape(B, T * H, d) @ rows.transpose(1, 2)).float().view(B, n, BLOCK, H, S) * scale
    l_rows = torch.where(visible[:, :, :, None], l_rows, -1e30)
    top = torch.maximum(top, l_rows.amax(-1, keepdim=True)).detach()
    e_raw, e_rows = torch.exp(l_raw - top), torch.exp(l_rows - top)
    total = e_raw.sum(-1, keepdim=True) + torch.exp(sinks - top)
    if index is not None:
        qi, keys, w = index
        dots = (qi.flatten(1, 2) @ keys.transpose(1, 2)).view(B, T, -1, S)
        scores = (torch.relu(dots).float() * w[..., None]).sum(2).view(B, n, BLOCK, S)
        scores = torch.where(visible, scores, -1e30)
        share = e_rows / (total + e_rows.sum(-1, keepdim=True))
        target = share.detach().sum(3)
        mass = target.sum(-1, keepdim=True)
        log_p = torch.log_softmax(scores, -1)
        gap = target * (
            torch.log(target.clamp_min(1e-20)) - torch.log(mass.clamp_min(1e-20)) - log_p
        )
        # Weighted by how much the layer looks there at all (mass is at most H).
        loss = torch.where(visible, gap, 0.0).sum() / (B * T)
        if top_k < S:
            least = scores.detach().topk(top_k, -1).values[..., -1:]
            e_rows = torch.where(((scores >= least) | dense)[:, :, :, None], e_rows, 0.0)
    total = total + e_rows.sum(-1, keepdim=True)
    o = (e_raw.to(q.dtype).flatten(2, 3) @ raw).view(B, T, H, d)
    o = o + (e_rows.to(q.dtype).view(B, T * H, S) @ rows).view(B, T, H, d)
    return (o.float() / total.view(B, T, H, 1)).to(q.dtype), loss


# --- the kernels ---------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _bits(BITS, at, s0, S, N: tl.constexpr):
        """Whether keys s0 .. s0 + N of the queries at word `at` are chosen: [queries, N]."""
        i = tl.arange(0, N)
        word = tl.load(BITS + at + s0 // 32)[:, None]
        if N == 64:
            last = tl.minimum(s0 // 32 + 1, S // 32 - 1)  # behind it nothing is in sight
            word = tl.where((i < 32)[None, :], word, tl.load(BITS + at + last)[:, None])
        return ((word >> (i % 32)[None, :]) & 1) != 0

    @triton.jit
    def _place(N: tl.constexpr):
        """First of N tokens, and the row. Late tokens start first: in a long dialogue they have
        most in sight."""
        return (tl.num_programs(1) - 1 - tl.program_id(1)) * N, tl.program_id(0)

    @triton.jit
    def _first(FIRST, b, t, T, W: tl.constexpr):
        """First token of the dialogue of token t; told to be a multiple of W, so loads are wide."""
        return tl.multiple_of(tl.load(FIRST + b * (T // W) + t // W), W)

    @triton.jit
    def _row(X, row, D: tl.constexpr, P: tl.constexpr):
        """Rows of D channels as two tiles, the first P wide: 96 is no power of two, 64 + 32 are."""
        at = X + row[:, None] * D
        wide, narrow = tl.arange(0, P), P + tl.arange(0, D - P)
        return tl.load(at + wide[None, :]), tl.load(at + narrow[None, :])

    @triton.jit
    def _store(X, row, a, a2, D: tl.constexpr, P: tl.constexpr, mask=None):
        """Writes rows that are two tiles, as `_row` reads them."""
        at = X + row[:, None] * D
        wide, narrow = tl.arange(0, P), P + tl.arange(0, D - P)
        tl.store(at + wide[None, :], a.to(X.dtype.element_ty), mask=mask)
        tl.store(at + narrow[None, :], a2.to(X.dtype.element_ty), mask=mask)

    @triton.jit
    def _dots(a, a2, b, b2):
        """All products of rows of a with rows of b."""
        return tl.dot(a2, tl.trans(b2), tl.dot(a, tl.trans(b)))

    @triton.jit
    def _spread(x, H: tl.constexpr):
        """[keys, tokens] for each head: [keys, tokens H]."""
        return tl.reshape(
            tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], H]),
            [x.shape[0], x.shape[1] * H],
        )

    @triton.jit
    def _attend(
        Q, KV, ROWS, SINKS, BITS, FIRST, OUT, LSE, FULL, T, S, scale2,
        H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, RATIO: tl.constexpr,
        CHOSEN: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    ):  # fmt: skip
        """A program has N tokens of all heads; logarithms are of base 2 until they are stored."""
        t0, b = _place(N)
        first = _first(FIRST, b, t0, T, W)
        r = tl.arange(0, N * H)
        t = t0 + r // H
        at = (b * T + t0) * H + r
        q, q2 = _row(Q, at, D, P)
        m = tl.load(SINKS + r % H) * 1.4426950408889634  # the sink opens every sum
        total = tl.full([N * H], 1.0, tl.float32)
        full = tl.full([N * H], 1.0, tl.float32)
        acc = tl.zeros([N * H, P], tl.float32)
        acc2 = tl.zeros([N * H, D - P], tl.float32)
        for j0 in range(tl.maximum(first, t0 - W + 1) // K * K, t0 + N, K):
            j = j0 + tl.arange(0, K)
            k, k2 = _row(KV, b * T + j, D, P)
            s = _dots(q, q2, k, k2) * scale2
            # K divides W, so no tile begins before the dialogue.
            s = tl.where((j[None, :] <= t[:, None]) & (j[None, :] > t[:, None] - W), s, -1e30)
            top = tl.maximum(m, tl.max(s, 1))
            shrink = tl.exp2(m - top)
            p = tl.exp2(s - top[:, None])
            e = tl.sum(p, 1)
            total = total * shrink + e
            if CHOSEN:
                full = full * shrink + e
            p = p.to(k.dtype)
            acc = tl.dot(p, k, acc * shrink[:, None])
            acc2 = tl.dot(p, k2, acc2 * shrink[:, None])
            m = top
        if RATIO > 0:
            for s0 in range(first // RATIO, (t0 + N) // RATIO, R):
                j = s0 + tl.arange(0, R)
                k, k2 = _row(ROWS, b * S + tl.minimum(j, S - 1), D, P)
                s = _dots(q, q2, k, k2) * scale2
                s = tl.where(j[None, :] * RATIO + (RATIO - 1) <= t[:, None], s, -1e30)
                top = tl.maximum(m, tl.max(s, 1))
                shrink = tl.exp2(m - top)
                p = tl.exp2(s - top[:, None])
                if CHOSEN:
                    full = full * shrink + tl.sum(p, 1)
                    p = tl.where(_bits(BITS, (b * T + t) * (S // 32), s0, S, R), p, 0.0)
                total = total * shrink + tl.sum(p, 1)
                p = p.to(k.dtype)
                acc = tl.dot(p, k, acc * shrink[:, None])
                acc2 = tl.dot(p, k2, acc2 * shrink[:, None])
                m = top
        _store(OUT, at, acc / total[:, None], acc2 / total[:, None], D, P)
        tl.store(LSE + at, (m + tl.log2(total)) * 0.6931471805599453)
        if not CHOSEN:
            full = total
        tl.store(FULL + at, (m + tl.log2(full)) * 0.6931471805599453)

    @triton.jit
    def _attend_q(
        Q, KV, ROWS, BITS, FIRST, OUT, D_OUT, LSE, DELTA, DQ, T, S, scale2, scale,
        H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, RATIO: tl.constexpr,
        CHOSEN: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    ):  # fmt: skip
        """Gradient of q, and delta = o . do for the kernels of the keys."""
        t0, b = _place(N)
        first = _first(FIRST, b, t0, T, W)
        r = tl.arange(0, N * H)
        t = t0 + r // H
        at = (b * T + t0) * H + r
        q, q2 = _row(Q, at, D, P)
        g, g2 = _row(D_OUT, at, D, P)
        o, o2 = _row(OUT, at, D, P)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
        delta += tl.sum(o2.to(tl.float32) * g2.to(tl.float32), 1)
        tl.store(DELTA + at, delta)
        lse = tl.load(LSE + at) * 1.4426950408889634
        acc = tl.zeros([N * H, P], tl.float32)
        acc2 = tl.zeros([N * H, D - P], tl.float32)
        for j0 in range(tl.maximum(first, t0 - W + 1) // K * K, t0 + N, K):
            j = j0 + tl.arange(0, K)
            k, k2 = _row(KV, b * T + j, D, P)
            s = _dots(q, q2, k, k2) * scale2
            seen = (j[None, :] <= t[:, None]) & (j[None, :] > t[:, None] - W)
            p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
            ds = (p * (_dots(g, g2, k, k2) - delta[:, None])).to(k.dtype)
            acc = tl.dot(ds, k, acc)
            acc2 = tl.dot(ds, k2, acc2)
        if RATIO > 0:
            for s0 in range(first // RATIO, (t0 + N) // RATIO, R):
                j = s0 + tl.arange(0, R)
                k, k2 = _row(ROWS, b * S + tl.minimum(j, S - 1), D, P)
                s = _dots(q, q2, k, k2) * scale2
                seen = j[None, :] * RATIO + (RATIO - 1) <= t[:, None]
                if CHOSEN:
                    seen = seen & _bits(BITS, (b * T + t) * (S // 32), s0, S, R)
                p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
                ds = (p * (_dots(g, g2, k, k2) - delta[:, None])).to(k.dtype)
                acc = tl.dot(ds, k, acc)
                acc2 = tl.dot(ds, k2, acc2)
        _store(DQ, at, acc * scale, acc2 * scale, D, P)

    @triton.jit
    def _attend_keys(
        Q, D_OUT, KEYS, BITS, FIRST, END, LSE, DELTA, OUT, T, S, PART, scale2, scale,
        H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, RATIO: tl.constexpr, RAW: tl.constexpr,
        CHOSEN: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Gradient of a tile of keys (as keys and as values) from one part of the row's queries.
        Raw rows are compressed rows of ratio 1 that a query loses sight of after W tokens."""
        s0, part, b = tl.program_id(0) * K, tl.program_id(1), tl.program_id(2)
        end = tl.load(END + b * (T // W) + (tl.minimum(s0 + K, S) * RATIO - 1) // W)
        if RAW:
            end = tl.minimum(end, s0 + K + W - 1)
        start, end = tl.maximum(s0 * RATIO, part * PART), tl.minimum(end, (part + 1) * PART)
        if start < end:
            j, n, r = s0 + tl.arange(0, K), tl.arange(0, N), tl.arange(0, N * H)
            k, k2 = _row(KEYS, b * S + tl.minimum(j, S - 1), D, P)
            # A sum for each product: that none waits for another is worth the registers.
            dv, dv2 = tl.zeros([K, P], tl.float32), tl.zeros([K, D - P], tl.float32)
            dk, dk2 = tl.zeros([K, P], tl.float32), tl.zeros([K, D - P], tl.float32)
            for t0 in range(start, end, N):
                t = t0 + n
                at = (b * T + t0) * H + r
                q, q2 = _row(Q, at, D, P)
                g, g2 = _row(D_OUT, at, D, P)
                lse = tl.load(LSE + at) * 1.4426950408889634
                delta = tl.load(DELTA + at)
                seen = j[:, None] * RATIO + (RATIO - 1) <= t[None, :]  # [keys, tokens]
                if RAW:  # all keys are of the queries' dialogue
                    seen = seen & (t[None, :] - j[:, None] < W)
                else:
                    first = _first(FIRST, b, t0, T, W)
                    seen = seen & (j * RATIO >= first)[:, None]
                if CHOSEN:
                    seen = seen & tl.trans(_bits(BITS, (b * T + t) * (S // 32), s0, S, K))
                s = _dots(k, k2, q, q2) * scale2
                p = tl.where(_spread(seen, H), tl.exp2(s - lse[None, :]), 0.0)
                ds = (p * (_dots(k, k2, g, g2) - delta[None, :])).to(q.dtype)
                p = p.to(q.dtype)
                dv, dv2 = tl.dot(p, g, dv), tl.dot(p, g2, dv2)
                dk, dk2 = tl.dot(ds, q, dk), tl.dot(ds, q2, dk2)
            row = (part * tl.num_programs(2) + b) * S + j
            _store(OUT, row, dv + dk * scale, dv2 + dk2 * scale, D, P, (j < S)[:, None])

    @triton.jit
    def _scores(
        QI, KEYS, WEIGHTS, FIRST, OUT, T, S,
        H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """The indexer's scores of N tokens."""
        t0, b = _place(N)
        first = _first(FIRST, b, t0, T, W)
        c, row = tl.arange(0, D), b * T + t0 + tl.arange(0, N)
        at = (b * T + t0) * H + tl.arange(0, N * H)
        q = tl.load(QI + at[:, None] * D + c[None, :])
        w = tl.load(WEIGHTS + at)
        for s0 in range(first // 4, (t0 + N) // 4, K):
            j = s0 + tl.arange(0, K)
            k = tl.load(KEYS + (b * S + tl.minimum(j, S - 1))[:, None] * D + c[None, :])
            x = tl.maximum(tl.dot(k, tl.trans(q)), 0.0) * w[None, :]
            x = tl.sum(tl.reshape(x, [K, N, H]), 2)
            tl.store(OUT + row[None, :] * S + j[:, None], x, mask=(j < S)[:, None])

    @triton.jit
    def _pick(SCORES, BITS, t, row, low, S, TOP: tl.constexpr, N: tl.constexpr, SPAN: tl.constexpr):
        """Bits of the TOP largest of each query's scores in sight, of which there are SPAN at most:
        the TOP-th largest is found bit by bit, as integers in the order of the scores."""
        i = tl.arange(0, SPAN)
        j = low + i
        seen = (j[None, :] * 4 + 3 <= t[:, None]) & (j < S)[None, :]
        near = j < tl.minimum((tl.max(t, 0) // 4 // 32 + 1) * 32, S)  # all in sight, in whole words
        score = tl.load(SCORES + row[:, None] * S + j[None, :], mask=near[None, :], other=0.0)
        bits = score.to(tl.uint32, bitcast=True)
        order = tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
        order = tl.where(seen, order, 0)
        least = tl.zeros([N], tl.uint32)
        bit = tl.full([N], 0x80000000, tl.uint32)
        for _ in range(32):
            n = tl.sum((order >= (least + bit)[:, None]).to(tl.int32), 1)
            least = tl.where(n >= TOP, least + bit, least)
            bit = bit >> 1
        chosen = (order >= least[:, None]).to(tl.uint32) << (i % 32).to(tl.uint32)[None, :]
        words = tl.sum(tl.reshape(chosen, [N, SPAN // 32, 32]), 2).to(tl.int32)
        at = low // 32 + tl.arange(0, SPAN // 32)
        tl.store(BITS + row[:, None] * (S // 32) + at[None, :], words, mask=(at < S // 32)[None, :])

    @triton.jit
    def _choose(
        SCORES, FIRST, DENSE, BITS, T, S, TOP: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
        FEW: tl.constexpr, MANY: tl.constexpr,
    ):  # fmt: skip
        t0, b = _place(N)
        low = _first(FIRST, b, t0, T, W) // 4
        t = t0 + tl.arange(0, N)
        n = (t0 + N) // 4 - low  # in sight of the last query
        if (tl.load(DENSE) != 0) | (n <= TOP):
            for at in range(low // 32, (low + n + 31) // 32):
                tl.store(BITS + (b * T + t) * (S // 32) + at, tl.full([N], -1, tl.int32))
        else:
            if n <= FEW:
                _pick(SCORES, BITS, t, b * T + t, low, S, TOP, N, FEW)
            else:
                _pick(SCORES, BITS, t, b * T + t, low, S, TOP, N, MANY)

    @triton.jit
    def _align(
        Q, ROWS, FULL, SCORES, FIRST, TARGET, LOSS, MASS, NORM, T, S, scale2,
        H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr,
        N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Where the heads look, and how far the scores' softmax (whose log-sum is NORM) is off."""
        t0, b = _place(N)
        first = _first(FIRST, b, t0, T, W)
        t = t0 + tl.arange(0, N)
        at = (b * T + t0) * H + tl.arange(0, N * H)
        q, q2 = _row(Q, at, D, P)
        lse = tl.load(FULL + at) * 1.4426950408889634
        # One sum for each place in a tile of keys: they meet behind the loop.
        top = tl.full([K, N], -1e30, tl.float32)
        total = tl.zeros([K, N], tl.float32)
        mass = tl.zeros([K, N], tl.float32)
        entropy = tl.zeros([K, N], tl.float32)  # of the target less its cross entropy
        for s0 in range(first // 4, (t0 + N) // 4, K):
            j = s0 + tl.arange(0, K)
            cell = (b * T + t)[None, :] * S + j[:, None]  # [keys, tokens]
            score = tl.load(SCORES + cell, mask=(j < S)[:, None], other=0.0)
            k, k2 = _row(ROWS, b * S + tl.minimum(j, S - 1), D, P)
            p = tl.exp2(_dots(k, k2, q, q2) * scale2 - lse[None, :])
            seen = j[:, None] * 4 + 3 <= t[None, :]
            share = tl.where(seen, tl.sum(tl.reshape(p, [K, N, H]), 2), 0.0)
            tl.store(TARGET + cell, share, mask=(j < S)[:, None])
            score = tl.where(seen, score, -1e30)
            new = tl.maximum(top, score)
            total = total * tl.exp(top - new) + tl.where(seen, tl.exp(score - new), 0.0)
            top = new
            mass += share
            gain = share * (tl.log(tl.maximum(share, 1e-20)) - score)
            entropy += tl.where(seen, gain, 0.0)
        best = tl.max(top, 0)
        total = tl.sum(total * tl.exp(top - best[None, :]), 0)
        mass, entropy = tl.sum(mass, 0), tl.sum(entropy, 0)
        norm = tl.where(total > 0, best + tl.log(tl.maximum(total, 1e-20)), 0.0)
        loss = entropy - mass * tl.log(tl.maximum(mass, 1e-20)) + mass * norm
        tl.store(LOSS + b * T + t, loss)
        tl.store(MASS + b * T + t, mass)
        tl.store(NORM + b * T + t, norm)

    @triton.jit
    def _gap(
        GRAD, SCORES, TARGET, MASS, NORM, FIRST, OUT, T, S,
        W: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Gradient of the scores: mass softmax(scores) - target."""
        t0, b = _place(N)
        first = _first(FIRST, b, t0, T, W)
        at = b * T + t0 + tl.arange(0, N)
        mass, norm = tl.load(MASS + at)[:, None], tl.load(NORM + at)[:, None]
        grad = tl.load(GRAD + at)[:, None]
        for s0 in range(first // 4, (t0 + N) // 4, K):
            j = s0 + tl.arange(0, K)
            cell, inside = at[:, None] * S + j[None, :], (j < S)[None, :]
            score = tl.load(SCORES + cell, mask=inside, other=0.0)
            target = tl.load(TARGET + cell, mask=inside, other=0.0)
            gap = (mass * tl.exp(score - norm) - target) * grad
            tl.store(OUT + cell, gap.to(OUT.dtype.element_ty), mask=inside)

    @triton.jit
    def _scores_q(
        QI, KEYS, WEIGHTS, GAP, FIRST, DQ, DW, T, S,
        H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Gradient of the indexer's queries and weights."""
        t0, b = _place(N)
        first = _first(FIRST, b, t0, T, W)
        t, c = t0 + tl.arange(0, N), tl.arange(0, D)
        at = (b * T + t0) * H + tl.arange(0, N * H)
        q = tl.load(QI + at[:, None] * D + c[None, :])
        acc = tl.zeros([N * H, D], tl.float32)
        dw = tl.zeros([N * H], tl.float32)
        for s0 in range(first // 4, (t0 + N) // 4, K):
            j = s0 + tl.arange(0, K)
            k = tl.load(KEYS + (b * S + tl.minimum(j, S - 1))[:, None] * D + c[None, :])
            gap = tl.load(GAP + (b * T + t)[:, None] * S + j[None, :],
                          mask=(j < S)[None, :], other=0.0)  # fmt: skip
            gap = tl.where(j[None, :] * 4 + 3 <= t[:, None], gap, 0.0)
            gap = tl.reshape(tl.broadcast_to(gap[:, None, :], [N, H, K]), [N * H, K])
            dots = tl.dot(q, tl.trans(k))
            gap = tl.where(dots > 0, gap, 0.0)
            dw += tl.sum(gap.to(tl.float32) * dots, 1)
            acc = tl.dot(gap.to(k.dtype), k, acc)
        acc = acc * tl.load(WEIGHTS + at)[:, None]
        tl.store(DQ + at[:, None] * D + c[None, :], acc.to(q.dtype))
        tl.store(DW + at, dw)

    @triton.jit
    def _scores_keys(
        QI, KEYS, WEIGHTS, GAP, FIRST, END, OUT, T, S, PART,
        H: tl.constexpr, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Gradient of a tile of the indexer's keys from one part of the row's queries."""
        s0, part, b = tl.program_id(0) * K, tl.program_id(1), tl.program_id(2)
        end = tl.load(END + b * (T // W) + (tl.minimum(s0 + K, S) * 4 - 1) // W)
        start, end = tl.maximum(s0 * 4, part * PART), tl.minimum(end, (part + 1) * PART)
        if start < end:
            j, c = s0 + tl.arange(0, K), tl.arange(0, D)
            k = tl.load(KEYS + (b * S + tl.minimum(j, S - 1))[:, None] * D + c[None, :])
            acc = tl.zeros([K, D], tl.float32)
            for t0 in range(start, end, N):
                first = _first(FIRST, b, t0, T, W)
                t = t0 + tl.arange(0, N)
                at = (b * T + t0) * H + tl.arange(0, N * H)
                q = tl.load(QI + at[:, None] * D + c[None, :])
                gap = tl.load(GAP + (b * T + t)[None, :] * S + j[:, None],
                              mask=(j < S)[:, None], other=0.0)  # fmt: skip
                seen = (j[:, None] * 4 + 3 <= t[None, :]) & (j * 4 >= first)[:, None]
                gap = _spread(tl.where(seen, gap.to(tl.float32), 0.0), H)
                gap *= tl.load(WEIGHTS + at)[None, :]
                gap = tl.where(tl.dot(k, tl.trans(q)) > 0, gap, 0.0)
                acc = tl.dot(gap.to(q.dtype), q, acc)
            out = OUT + ((part * tl.num_programs(2) + b) * S + j)[:, None] * D + c[None, :]
            tl.store(out, acc, mask=(j < S)[:, None])

    @triton.jit
    def _add(
        PARTS, END, OUT, T, S, PART, D: tl.constexpr, P: tl.constexpr, RATIO: tl.constexpr,
        W: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """Sums of the parts whose queries may see a tile of keys; the others were not written."""
        s0, b = tl.program_id(0) * K, tl.program_id(1)
        end = tl.load(END + b * (T // W) + (tl.minimum(s0 + K, S) * RATIO - 1) // W)
        j = s0 + tl.arange(0, K)
        acc, acc2 = tl.zeros([K, P], tl.float32), tl.zeros([K, D - P], tl.float32)
        for part in range(s0 * RATIO // PART, tl.cdiv(end, PART)):
            row = (part * tl.num_programs(1) + b) * S + tl.minimum(j, S - 1)
            a, a2 = _row(PARTS, row, D, P)
            acc, acc2 = acc + a, acc2 + a2
        _store(OUT, b * S + j, acc, acc2, D, P, (j < S)[:, None])


# --- the operations ------------------------------------------------------------------------------
# Empty tensors stand for what a kind of layer does not have: an operation always returns tensors.


def _shape(tile: Tile) -> dict[str, int]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _wide(d: int) -> int:
    """Channels of the first of two tiles; d is a power of two, or three times one."""
    return triton.next_power_of_2(d) // 2


def _sum(parts: Tensor, spans: Tensor, like: Tensor, ratio: int, part: int, keys: int) -> Tensor:
    """Gradient of `like` from parts [n, B, S, d] f32, written by tiles of so many keys."""
    _, B, S, d = parts.shape
    T, out = S * ratio, torch.empty_like(like)
    _add[(triton.cdiv(S, keys), B)](
        parts, spans[1], out, T, S, part, d, _wide(d), ratio, BLOCK, keys
    )
    return out


def _few(tile: Tile, ratio: int) -> int:
    """Compressed rows of a tile: few where few are ever in sight."""
    return FEW if ratio == BLOCK else tile.keys


@torch.library.custom_op("tiny::attend", mutates_args=())
def _attend_op(
    q: Tensor, kv: Tensor, rows: Tensor, sinks: Tensor, chosen: Tensor, spans: Tensor, ratio: int
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, H, d], and per query and head the log of the sum over what was chosen and over all
    that is in sight [B, T, H] f32."""
    q, kv, rows, spans = q.contiguous(), kv.contiguous(), rows.contiguous(), spans.contiguous()
    B, T, H, d = q.shape
    out = torch.empty_like(q)
    lse, full = (q.new_empty(B, T, H, dtype=torch.float32) for _ in range(2))
    tile = TILES["attend"]
    _attend[(B, T // tile.tokens)](
        q, kv, rows, sinks, chosen, spans, out, lse, full, T, rows.shape[1], d**-0.5 * LOG2E,
        H, d, _wide(d), ratio, chosen.numel() > 0, BLOCK,
        tile.tokens, tile.keys, _few(tile, ratio), **_shape(tile),
    )  # fmt: skip
    return out, lse, full


@torch.library.custom_op("tiny::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, q: Tensor, kv: Tensor, rows: Tensor, sinks: Tensor, chosen: Tensor,
    spans: Tensor, out: Tensor, lse: Tensor, ratio: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, kv, rows, spans = q.contiguous(), kv.contiguous(), rows.contiguous(), spans.contiguous()
    grad = grad.contiguous()
    B, T, H, d = q.shape
    S, P, selected = rows.shape[1], _wide(d), chosen.numel() > 0
    scale = d**-0.5
    dq, dkv, delta = torch.empty_like(q), torch.empty_like(kv), torch.empty_like(lse)
    tile = TILES["attend_q"]
    _attend_q[(B, T // tile.tokens)](
        q, kv, rows, chosen, spans, out, grad, lse, delta, dq, T, S, scale * LOG2E, scale,
        H, d, P, ratio, selected, BLOCK, tile.tokens, tile.keys, _few(tile, ratio), **_shape(tile),
    )  # fmt: skip
    tile = TILES["attend_raw"]
    _attend_keys[(T // tile.keys, 1, B)](
        q, grad, kv, chosen, spans, spans[1], lse, delta, dkv, T, T, T, scale * LOG2E, scale,
        H, d, P, 1, True, False, BLOCK, tile.tokens, tile.keys, **_shape(tile),
    )  # fmt: skip
    drows = torch.empty_like(rows)
    if ratio:
        tile, part = TILES["attend_rows"], min(T, PARTS[ratio])
        n, keys = triton.cdiv(T, part), _few(tile, ratio)
        parts = q.new_empty(n, B, S, d, dtype=torch.float32)
        _attend_keys[(triton.cdiv(S, keys), n, B)](
            q, grad, rows, chosen, spans, spans[1], lse, delta, parts, T, S, part,
            scale * LOG2E, scale, H, d, P, ratio, False, selected, BLOCK, tile.tokens, keys,
            **_shape(tile),
        )  # fmt: skip
        drows = _sum(parts, spans, rows, ratio, part, keys)
    dsinks = -(torch.exp(sinks - lse) * delta).sum((0, 1))
    return dq, dkv, drows, dsinks


@torch.library.custom_op("tiny::scores", mutates_args=())
def _scores_op(qi: Tensor, keys: Tensor, w: Tensor, spans: Tensor) -> Tensor:
    """The indexer's scores [B, T, S] f32. Takes no gradient: `tiny::align` gives it."""
    qi, keys, w, spans = qi.contiguous(), keys.contiguous(), w.contiguous(), spans.contiguous()
    B, T, H, d = qi.shape
    S = keys.shape[1]
    out = qi.new_empty(B, T, S, dtype=torch.float32)
    tile = TILES["scores"]
    _scores[(B, T // tile.tokens)](
        qi, keys, w, spans, out, T, S, H, d, BLOCK, tile.tokens, tile.keys, **_shape(tile)
    )
    return out


@torch.library.custom_op("tiny::choose", mutates_args=())
def _choose_op(scores: Tensor, spans: Tensor, dense: Tensor, top_k: int) -> Tensor:
    """Bits [B, T, S / 32] int32 of the rows in sight that are chosen: all if `dense` [] is true or
    no more than `top_k` are in sight, else those that score at least as much as the top_k-th."""
    spans = spans.contiguous()
    B, T, S = scores.shape
    bits = scores.new_empty(B, T, S // 32, dtype=torch.int32)
    tile = TILES["choose"]
    _choose[(B, T // tile.tokens)](
        scores, spans, dense.view(torch.uint8), bits, T, S, top_k, BLOCK, tile.tokens, tile.keys,
        max(32, triton.next_power_of_2(S)), **_shape(tile),
    )  # fmt: skip
    return bits


@torch.library.custom_op("tiny::align", mutates_args=())
def _align_op(
    qi: Tensor, keys: Tensor, w: Tensor, scores: Tensor, q: Tensor, rows: Tensor, full: Tensor,
    spans: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss [B, T]; target [B, T, S], its mass and the log-sum of the scores [B, T] for later."""
    q, rows, spans = q.contiguous(), rows.contiguous(), spans.contiguous()
    B, T, H, d = q.shape
    S = rows.shape[1]
    target = torch.empty_like(scores)
    loss, mass, norm = (scores.new_empty(B, T) for _ in range(3))
    tile = TILES["align"]
    _align[(B, T // tile.tokens)](
        q, rows, full, scores, spans, target, loss, mass, norm, T, S, d**-0.5 * LOG2E,
        H, d, _wide(d), BLOCK, tile.tokens, tile.keys, **_shape(tile),
    )  # fmt: skip
    return loss, target, mass, norm


@torch.library.custom_op("tiny::align_backward", mutates_args=())
def _align_backward(
    grad: Tensor, qi: Tensor, keys: Tensor, w: Tensor, scores: Tensor, target: Tensor,
    mass: Tensor, norm: Tensor, spans: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    qi, keys, w, spans = qi.contiguous(), keys.contiguous(), w.contiguous(), spans.contiguous()
    B, T, H, d = qi.shape
    S = keys.shape[1]
    gap = torch.empty_like(scores, dtype=qi.dtype)
    tile = TILES["scores"]
    _gap[(B, T // tile.tokens)](
        grad.contiguous(), scores, target, mass, norm, spans, gap, T, S, BLOCK, tile.tokens,
        tile.keys, **_shape(tile),
    )  # fmt: skip
    dq, dw = torch.empty_like(qi), torch.empty_like(w)
    tile = TILES["scores_q"]
    _scores_q[(B, T // tile.tokens)](
        qi, keys, w, gap, spans, dq, dw, T, S, H, d, BLOCK, tile.tokens, tile.keys, **_shape(tile)
    )
    tile, part = TILES["scores_keys"], min(T, KEY_PART)
    n = triton.cdiv(T, part)
    parts = qi.new_empty(n, B, S, d, dtype=torch.float32)
    _scores_keys[(triton.cdiv(S, tile.keys), n, B)](
        qi, keys, w, gap, spans, spans[1], parts, T, S, part, H, d, BLOCK, tile.tokens, tile.keys,
        **_shape(tile),
    )  # fmt: skip
    return dq, _sum(parts, spans, keys, 4, part, tile.keys), dw


@_attend_op.register_fake
def _(q, kv, rows, sinks, chosen, spans, ratio):
    sums = q.new_empty(q.shape[:3], dtype=torch.float32)
    return q.new_empty(q.shape), sums, torch.empty_like(sums)


@_attend_backward.register_fake
def _(grad, q, kv, rows, sinks, chosen, spans, out, lse, ratio):
    made = (x.new_empty(x.shape) for x in (q, kv, rows))
    return (*made, sinks.new_empty(sinks.shape))


@_scores_op.register_fake
def _(qi, keys, w, spans):
    return qi.new_empty(*qi.shape[:2], keys.shape[1], dtype=torch.float32)


@_choose_op.register_fake
def _(scores, spans, dense, top_k):
    B, T, S = scores.shape
    return scores.new_empty(B, T, S // 32, dtype=torch.int32)


@_align_op.register_fake
def _(qi, keys, w, scores, q, rows, full, spans):
    loss, mass, norm = (scores.new_empty(scores.shape[:2]) for _ in range(3))
    return loss, torch.empty_like(scores), mass, norm


@_align_backward.register_fake
def _(grad, qi, keys, w, scores, target, mass, norm, spans):
    return tuple(x.new_empty(x.shape) for x in (qi, keys, w))


def _attend_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output[:2])
    ctx.ratio = inputs[6]


def _attend_gradient(ctx, grad, d_lse, d_full):
    made = torch.ops.tiny.attend_backward(grad, *ctx.saved_tensors, ctx.ratio)
    return (*made, None, None, None)


def _align_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output[1:], inputs[7])


def _align_gradient(ctx, grad, d_target, d_mass, d_norm):
    made = torch.ops.tiny.align_backward(grad, *ctx.saved_tensors)
    return (*made, None, None, None, None, None)


_attend_op.register_autograd(_attend_gradient, setup_context=_attend_setup)
_align_op.register_autograd(_align_gradient, setup_context=_align_setup)


def attend(
    q: Tensor, kv: Tensor, rows: Tensor | None, sinks: Tensor, spans: Tensor, ratio: int,
    index: Index | None, top_k: int, dense: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention [B, T, H, d] in the type of q, and the alignment loss of the indexer (0 without).

    q [B, T, H, d], kv [B, T, d]; rows [B, T / ratio, d], or None with ratio 0; sinks [H] f32;
    `spans` as above; index: queries [B, T, heads, d'], keys [B, S, d'] in the type of q and w
    [B, T, heads] f32 (ratio 4); dense [] bool: attend to all compressed rows in sight instead of
    the `top_k` that the indexer chooses. The loss takes no gradient to q and rows."""
    if not ready(q):
        return reference(q, kv, rows, sinks, spans, ratio, index, top_k, dense)
    B, T = q.shape[:2]
    if rows is None:
        rows = kv.new_empty(B, 0, kv.shape[2])
    chosen = spans.new_empty(0)
    if index is None:
        return torch.ops.tiny.attend(q, kv, rows, sinks, chosen, spans, ratio)[0], sinks.new_zeros(
            ()
        )
    scores = torch.ops.tiny.scores(*(x.detach() for x in index), spans)
    if top_k < rows.shape[1]:
        chosen = torch.ops.tiny.choose(scores, spans, dense, top_k)
    o, _, full = torch.ops.tiny.attend(q, kv, rows, sinks, chosen, spans, ratio)
    loss = torch.ops.tiny.align(*index, scores, q.detach(), rows.detach(), full.detach(), spans)[0]
    return o, loss.sum() / (B * T)
