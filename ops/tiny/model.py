"""ds4-tiny in torch, for training: the forward of spec/model.md 4 over whole rows of packed tokens.

Parameters carry the names of the GGUF tensors. Every function works on one batch of rows
[B, T, ...] whose dialogues start at multiples of 128 (`owner` names the dialogue of each block), so
masks are cheap and a dialogue sees what it would see alone. Roundings of spec/numerics.md 1 and 2
are simulated with the gradient passed straight through. The experts are computed all, as one wide
feed-forward whose middle is multiplied by the router's weights: at this size that is the fast way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds4d.model.synth import geometry
from ops.tiny.sinkhorn import sinkhorn

if TYPE_CHECKING:
    from ds4d.model.geometry import Geometry

BLOCK = 128  # = window = largest ratio
TINY = geometry("tiny")
Params = dict[str, Tensor]


class Precision:
    """How products are computed: bf16 with simulated roundings, or exact in f32 for comparison."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rounded: bool = True) -> None:
        self.dtype, self.rounded = dtype, rounded


# --- small parts ---------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def straight(x: Tensor, y: Tensor) -> Tensor:
    """The value of y with the gradient of x."""
    return x + (y - x).detach()


def int8_blocks(x: Tensor, p: Precision) -> Tensor:
    """Activations entering a Q8_0 product, blocks of 32 (spec/numerics.md 1)."""
    if not p.rounded:
        return x.to(p.dtype)
    b = x.detach().unflatten(-1, (-1, 32))
    d = (b.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-20)
    y = (torch.round(b / d) * d).flatten(-2)
    return straight(x, y).to(p.dtype)


def product(x: Tensor, w: Tensor, p: Precision) -> Tensor:
    """x [..., in] by w [out, in]; x as `int8_blocks` left it."""
    return F.linear(x, w.to(p.dtype))


def _power_of_two_above(x: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(x)))


def e4m3_row(x: Tensor, nope: int, p: Precision) -> Tensor:
    """Raw and compressed rows: the unrotated channels in blocks of 64 (spec/model.md 4.11a)."""
    if not p.rounded:
        return x
    b = x.detach()[..., :nope].unflatten(-1, (-1, 64))
    scale = _power_of_two_above(b.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
    v = b / scale
    step = torch.exp2(torch.floor(torch.log2(v.abs().clamp_min(2.0**-6))) - 3)
    y = (torch.round(v / step) * step * scale).flatten(-2)
    return torch.cat([straight(x[..., :nope], y), x[..., nope:]], -1)


def hadamard(n: int) -> Tensor:
    m = torch.ones(1, 1)
    while m.shape[0] < n:
        m = torch.cat([torch.cat([m, m], 1), torch.cat([m, -m], 1)])
    return m * n**-0.5


def fp4_row(x: Tensor, h: Tensor, p: Precision) -> Tensor:
    """Indexer rows and queries: Hadamard, then FP4 in blocks of 32 (spec/model.md 4.11b)."""
    if not p.rounded:
        return x
    x = F.linear(x, h)
    b = x.detach().unflatten(-1, (-1, 32))
    scale = _power_of_two_above(b.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6)
    v = b / scale
    a = v.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    y = (torch.round(v / step) * step * scale).flatten(-2)
    return straight(x, y)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the trailing pairs of x [..., T, heads?, d]; cos and sin [T, (1,) pairs]."""
    pairs = cos.shape[-1]
    fixed, turned = x[..., : -2 * pairs], x[..., -2 * pairs :].unflatten(-1, (pairs, 2))
    u, v = turned[..., 0], turned[..., 1]
    y = torch.stack([u * cos - v * sin, u * sin + v * cos], -1).flatten(-2)
    return torch.cat([fixed, y], -1)


# --- hyper-connections ---------------------------------------------------------------------------


def hyper_pre(p: Params, site: str, X: Tensor, g: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Sublayer input [B, T, D], post [B, T, S], M [B, T, S, S] of the streams X [B, T, S, D]."""
    S = g.streams
    scale, base = p[f"hc_{site}_scale.weight"], p[f"hc_{site}_base.weight"]
    flat = X.flatten(-2)
    z = F.linear(flat, p[f"hc_{site}_fn.weight"])
    z = z * torch.rsqrt(flat.square().mean(-1, keepdim=True) + g.rms_eps)
    pre = torch.sigmoid(z[..., :S] * scale[0] + base[:S]) + g.hyper_eps
    post = 2 * torch.sigmoid(z[..., S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = z[..., 2 * S :] * scale[2] + base[2 * S :]
    M = sinkhorn(comb.reshape(-1, S, S), g.sinkhorn_iterations).view(*X.shape[:2], S, S)
    return _mix(X, pre), post, M


def _mix(X: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the streams, written out: [B, T, D]."""
    out = X[..., 0, :] * weights[..., 0, None]
    for j in range(1, X.shape[-2]):
        out = out + X[..., j, :] * weights[..., j, None]
    return out


def hyper_post(X: Tensor, y: Tensor, post: Tensor, M: Tensor) -> Tensor:
    """X'[k] = post_k y + sum_j M[j, k] X[j]."""
    return torch.stack(
        [post[..., k, None] * y + _mix(X, M[..., k]) for k in range(X.shape[-2])], -2
    )


# --- attention -----------------------------------------------------------------------------------


def compressed_rows(
    p: Params, name: str, h: Tensor, ratio: int, first: Tensor, q: Precision
) -> Tensor:
    """Pooled, normalised rows [B, T / ratio, d], before RoPE. `first` [B, T / 128]: whether a block
    opens a dialogue, so that its first window has none before it."""
    B, T, _ = h.shape
    hb = h.to(q.dtype)
    u = F.linear(hb, p[name + "kv.weight"].to(q.dtype)).float().view(B, T // ratio, ratio, -1)
    gate = F.linear(hb, p[name + "gate.weight"].to(q.dtype)).float().view(B, T // ratio, ratio, -1)
    gate = gate + p[name + "ape.weight"]
    if ratio == 4:
        d = u.shape[-1] // 2
        alone = torch.zeros(B, T // BLOCK, BLOCK // ratio, dtype=torch.bool, device=h.device)
        alone = torch.cat([first[..., None], alone[..., 1:]], -1).view(B, T // ratio, 1, 1)
        u_before = torch.cat([torch.zeros_like(u[:, :1, :, :d]), u[:, :-1, :, :d]], 1)
        g_before = torch.cat([torch.zeros_like(gate[:, :1, :, :d]), gate[:, :-1, :, :d]], 1)
        g_before = torch.where(alone, -1e30, g_before)
        u = torch.cat([u_before, u[..., d:]], 2)
        gate = torch.cat([g_before, gate[..., d:]], 2)
    row = (torch.softmax(gate, 2) * u).sum(2)
    return rms(row, p[name + "norm.weight"])


def index_scores(
    p: Params,
    h: Tensor,
    qr: Tensor,
    ratio_first: Tensor,
    cos: Tensor,
    sin: Tensor,
    had: Tensor,
    q: Precision,
    g: Geometry,
) -> Tensor:
    """Scores [B, T, T / 4] of the indexer, unmasked. Takes no gradient into the model."""
    h, qr = h.detach(), qr.detach()
    B, T, _ = h.shape
    rows = compressed_rows(p, "indexer_compressor_", h, 4, ratio_first, q)
    rows = fp4_row(rope(rows, cos[::4], sin[::4]), had, q)
    qi = F.linear(qr.to(q.dtype), p["indexer.attn_q_b.weight"].to(q.dtype)).float()
    qi = rope(qi.view(B, T, g.index_heads, g.index_dim), cos[:, None], sin[:, None])
    qi = fp4_row(qi, had, q)
    w = F.linear(h.to(q.dtype), p["indexer.proj.weight"].to(q.dtype)).float()
    w = w * (g.index_heads * g.index_dim) ** -0.5
    dots = qi.flatten(1, 2).to(q.dtype) @ rows.to(q.dtype).transpose(1, 2)
    dots = dots.view(B, T, g.index_heads, -1)
    return (torch.relu(dots).float() * w[..., None]).sum(2)


def attention(
    p: Params,
    h: Tensor,
    owner: Tensor,
    tables: Tensor,
    had: Tensor,
    dense: Tensor,
    ratio: int,
    q: Precision,
    g: Geometry,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] and the indexer's alignment loss (0 without one).

    owner [B, T / 128]; tables [2, T, pairs] cos and sin of this kind of layer; dense [] bool:
    attend to all compressed rows instead of the selected ones."""
    B, T, _ = h.shape
    n, H, d = T // BLOCK, g.n_heads, g.head_dim
    cos, sin = tables[0], tables[1]
    h8 = int8_blocks(h, q)
    qr = rms(product(h8, p["attn_q_a.weight"], q).float(), p["attn_q_a_norm.weight"])
    qh = product(int8_blocks(qr, q), p["attn_q_b.weight"], q).float().view(B, T, H, d)
    qh = rope(rms(qh), cos[:, None], sin[:, None]).to(q.dtype)
    kv = rms(product(h8, p["attn_kv.weight"], q).float(), p["attn_kv_a_norm.weight"])
    kv = e4m3_row(rope(kv, cos, sin), g.nope_dim, q).to(q.dtype)

    # Raw rows: a block sees itself and, if it is the same dialogue, the block before it.
    scale = d**-0.5
    blocks = kv.view(B, n, BLOCK, d)
    before = torch.cat([torch.zeros_like(blocks[:, :1]), blocks[:, :-1]], 1)
    raw = torch.cat([before, blocks], 2)  # [B, n, 256, d]
    first = torch.cat(
        [torch.ones_like(owner[:, :1], dtype=torch.bool), owner[:, 1:] != owner[:, :-1]], 1
    )
    t = torch.arange(BLOCK, device=h.device)[:, None]
    j = torch.arange(2 * BLOCK, device=h.device)[None]
    band = (j > t) & (j <= t + BLOCK)
    seen = band & ((j >= BLOCK) | ~first[:, :, None, None])  # [B, n, 128, 256]
    qb = qh.view(B, n, BLOCK * H, d)
    l_raw = (qb @ raw.transpose(2, 3)).float().view(B, n, BLOCK, H, 2 * BLOCK) * scale
    l_raw = torch.where(seen[:, :, :, None], l_raw, -1e30)
    sinks = p["attn_sinks.weight"][:, None]
    top = torch.maximum(l_raw.amax(-1, keepdim=True), sinks).detach()
    loss = torch.zeros((), device=h.device)

    if ratio == 0:
        e_raw = torch.exp(l_raw - top)
        total = e_raw.sum(-1, keepdim=True) + torch.exp(sinks - top)
        o = e_raw.to(q.dtype).flatten(2, 3) @ raw
    else:
        rows = compressed_rows(p, "attn_compressor_", h, ratio, first, q)
        rows = e4m3_row(rope(rows, cos[::ratio], sin[::ratio]), g.nope_dim, q).to(q.dtype)
        S = T // ratio
        ends = torch.arange(1, S + 1, device=h.device) * ratio - 1
        same = owner[:, :, None] == owner.repeat_interleave(BLOCK // ratio, 1)[:, None]  # [B, n, S]
        now = torch.arange(T, device=h.device).view(n, BLOCK)
        visible = (ends <= now[..., None]) & same[:, :, None]  # [B, n, 128, S]
        l_rows = (qh.reshape(B, T * H, d) @ rows.transpose(1, 2)).float().view(
            B, n, BLOCK, H, S
        ) * scale
        l_rows = torch.where(visible[:, :, :, None], l_rows, -1e30)
        top = torch.maximum(top, l_rows.amax(-1, keepdim=True)).detach()
        e_raw, e_rows = torch.exp(l_raw - top), torch.exp(l_rows - top)
        total = e_raw.sum(-1, keepdim=True) + torch.exp(sinks - top)
        if ratio == 4:
            scores = index_scores(p, h, qr, first, cos, sin, had, q, g).view(B, n, BLOCK, S)
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
            if S > g.index_top_k:
                least = scores.detach().topk(g.index_top_k, -1).values[..., -1:]
                chosen = (scores >= least) | dense
                e_rows = torch.where(chosen[:, :, :, None], e_rows, 0.0)
        total = total + e_rows.sum(-1, keepdim=True)
        o = e_raw.to(q.dtype).flatten(2, 3) @ raw
        o = o + (e_rows.to(q.dtype).view(B, T * H, S) @ rows).view(o.shape)

    o = o.float().view(B, T, H, d) / total.view(B, T, H, 1)
    o = rope(o, cos[:, None], -sin[:, None])
    o8 = int8_blocks(o.view(B, T, g.out_groups, -1), q)
    w = p["attn_output_a.weight"].view(g.out_groups, g.out_rank, -1).to(q.dtype)
    low = torch.cat([F.linear(o8[:, :, i], w[i]) for i in range(g.out_groups)], -1).float()
    return product(int8_blocks(low, q), p["attn_output_b.weight"], q).float(), loss


# --- experts -------------------------------------------------------------------------------------


def experts(
    p: Params, h: Tensor, table: Tensor | None, q: Precision, g: Geometry
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] and the share of tokens of each expert [E]. `table` [B, T, E]: the chosen
    experts of a hash layer; None: the largest biased scores."""
    s = torch.sqrt(F.softplus(F.linear(h, p["ffn_gate_inp.weight"])) + 1e-12)
    if table is None:
        biased = s.detach() + p["exp_probs_b.bias"]
        rank = (biased[..., None, :] > biased[..., :, None]).float().sum(-1)
        table = (rank < g.n_experts_used).float()
    w = s * table
    w = g.expert_scale * w / w.sum(-1, keepdim=True).clamp_min(2.0**-14)
    w = F.pad(w, (0, 1), value=1.0)  # the shared expert
    width, inner = g.width, g.expert_width
    gate = torch.cat([p["ffn_gate_exps.weight"].view(-1, width), p["ffn_gate_shexp.weight"]])
    up = torch.cat([p["ffn_up_exps.weight"].view(-1, width), p["ffn_up_shexp.weight"]])
    down = torch.cat(
        [p["ffn_down_exps.weight"].permute(1, 0, 2).reshape(width, -1), p["ffn_down_shexp.weight"]],
        1,
    )
    h8 = int8_blocks(h, q)
    clamp = g.expert_clamp[0]
    a = product(h8, gate, q).float().clamp(max=clamp)
    b = product(h8, up, q).float().clamp(-clamp, clamp)
    mid = (F.silu(a) * b).unflatten(-1, (-1, inner)) * w[..., None]
    y = product(int8_blocks(mid.flatten(-2), q), down, q).float()
    return y, table.mean((0, 1))


# --- the whole -----------------------------------------------------------------------------------


def layer(
    p: Params, X: Tensor, table: Tensor | None, owner: Tensor, tables: Tensor, had: Tensor,
    dense: Tensor, ratio: int, q: Precision, g: Geometry,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Streams behind one layer, its alignment loss, the load of its experts."""
    x, post, M = hyper_pre(p, "attn", X, g)
    y, loss = attention(p, rms(x, p["attn_norm.weight"]), owner, tables, had, dense, ratio, q, g)
    X = hyper_post(X, y, post, M)
    x, post, M = hyper_pre(p, "ffn", X, g)
    y, load = experts(p, rms(x, p["ffn_norm.weight"]), table, q, g)
    return hyper_post(X, y, post, M), loss, load


def head(p: Params, X: Tensor, q: Precision, g: Geometry) -> Tensor:
    """Logits [n, V] of the streams [n, S, D]."""
    flat = X.flatten(-2)
    z = F.linear(flat, p["output_hc_fn.weight"]) * torch.rsqrt(
        flat.square().mean(-1, keepdim=True) + g.rms_eps
    )
    pre = torch.sigmoid(z * p["output_hc_scale.weight"] + p["output_hc_base.weight"]) + g.hyper_eps
    x = rms(_mix(X, pre), p["output_norm.weight"])
    return product(int8_blocks(x, q), p["output.weight"], q)


def head_loss(
    p: Params, X: Tensor, targets: Tensor, weights: Tensor, q: Precision, g: Geometry
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of weight x cross entropy, and whether the argmax is right [n]."""
    logits = head(p, X, q, g).float()
    nll = torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None])[:, 0]
    return (nll * weights).sum(), logits.detach().argmax(-1) == targets


class Tiny(nn.Module):
    """All parameters under their GGUF names, dots replaced; `compile()` compiles layer kinds."""

    def __init__(
        self, g: Geometry = TINY, precision: Precision | None = None, seed: int = 1
    ) -> None:
        super().__init__()
        self.g, self.precision = g, precision or Precision()
        self.named: Params = {}
        self.layer, self.head_loss = layer, head_loss
        random = torch.Generator().manual_seed(seed)
        for name, shape in self._shapes():
            value = _initial(name, shape, random, g)
            if name.endswith(("tid2eid.weight", "exp_probs_b.bias")):
                self.register_buffer(name.replace(".", "/"), value)
            else:
                self.register_parameter(name.replace(".", "/"), nn.Parameter(value))
        self.register_buffer("had", hadamard(g.index_dim))
        pairs = g.rope_dim // 2
        angles = (
            torch.arange(g.context, dtype=torch.float32)[:, None]
            * torch.tensor(g.frequencies)[:, None]
        )
        tables = torch.stack([angles.double().cos(), angles.double().sin()], 1).float()
        self.register_buffer("tables", tables.view(2, 2, g.context, pairs))

    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        from ds4d.model.gguf import expected_tensors

        return [(t.name, t.shape) for t in expected_tensors(self.g)]

    def tensor(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "/"))

    def names(self) -> list[str]:
        return [name for name, _ in self._shapes()]

    def params(self, prefix: str) -> Params:
        """Tensors of a layer (`blk.3.`), or those outside layers ("")."""
        return {
            n[len(prefix) :]: self.tensor(n)
            for n in self.names()
            if (n.startswith(prefix) if prefix else not n.startswith("blk."))
        }

    def compile(self) -> None:
        self.layer = torch.compile(layer, dynamic=False)
        self.head_loss = torch.compile(head_loss, dynamic=False)

    def streams(self, ids: Tensor, owner: Tensor, dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Final streams [B, T, S, D], alignment loss, loads [L, E] of ids [B, T]."""
        g, T = self.g, ids.shape[1]
        e = F.embedding(ids, self.tensor("token_embd.weight"))
        X = e[:, :, None].expand(-1, -1, g.streams, -1).contiguous()
        losses, loads = [], []
        for i, ratio in enumerate(g.ratios):
            p = self.params(f"blk.{i}.")
            table = None
            if g.hashed(i):
                chosen = p.pop("ffn_gate_tid2eid.weight")[ids].long()
                table = torch.zeros(*ids.shape, g.n_experts, device=ids.device).scatter_(
                    -1, chosen, 1.0
                )
            tables = self.tables[1 if ratio else 0][:, :T]
            X, loss, load = self.layer(
                p, X, table, owner, tables, self.had, dense, ratio, self.precision, g
            )
            losses.append(loss)
            loads.append(load)
        return X, torch.stack(losses).sum(), torch.stack(loads)

    def logits(self, ids: Tensor, owner: Tensor, dense: Tensor) -> Tensor:
        X, _, _ = self.streams(ids, owner, dense)
        return head(self.params(""), X.flatten(0, 1), self.precision, self.g).view(*ids.shape, -1)


def _initial(name: str, shape: tuple[int, ...], random: torch.Generator, g: Geometry) -> Tensor:
    def normal(deviation: float) -> Tensor:
        return torch.randn(shape, generator=random) * deviation

    own = name.split(".", 2)[-1] if name.startswith("blk.") else name
    layer_index = int(name.split(".")[1]) if name.startswith("blk.") else 0
    if own == "ffn_gate_tid2eid.weight":
        return torch.rand(shape[0], g.n_experts, generator=random).argsort(1)[:, : shape[1]].int()
    if own.endswith("norm.weight"):
        return torch.ones(shape)
    if own.endswith("ape.weight") and shape[0] == 4:
        # Every pair of channels begins by looking at one of the four tokens of its own window, so
        # that a pooled row tells its tokens apart.
        pair = torch.arange(shape[1] // 2) // 2 % 4
        own_window = 3.0 * (torch.arange(4)[:, None] == pair[None])
        return torch.cat([torch.zeros(4, shape[1] // 2), own_window], 1)
    if own.endswith(("sinks.weight", "probs_b.bias", "ape.weight")):
        return torch.zeros(shape)
    if own == "output_hc_base.weight":
        return torch.full(shape, math.log(0.25 / 0.75))
    if own.endswith("hc_scale.weight") or own in ("hc_attn_scale.weight", "hc_ffn_scale.weight"):
        return torch.full(shape, 0.3)
    if own.endswith("base.weight"):
        # A sublayer reads mostly one stream and writes mostly one; streams mix little.
        S = g.streams
        at = (2 * layer_index + ("ffn" in own)) % S
        pre, post = torch.full((S,), math.log(0.1 / 0.9)), torch.full((S,), math.log(0.4 / 0.6))
        pre[at], post[at] = math.log(0.7 / 0.3), math.log(0.75 / 0.25)
        return torch.cat([pre, post, (3 * torch.eye(S)).flatten()])
    if own.endswith("fn.weight"):
        return normal(0.02)
    if own == "token_embd.weight":
        return normal(0.5)
    if own == "output.weight":
        return normal(0.5 * shape[1] ** -0.5)
    if own in ("attn_output_b.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight"):
        return normal(0.3 * shape[-1] ** -0.5)
    return normal(shape[-1] ** -0.5)
