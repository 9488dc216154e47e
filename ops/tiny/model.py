"""ds4-tiny in torch, for training: the forward of spec/model.md 4 over whole rows of packed tokens.

Parameters carry the names of the GGUF tensors. Every function works on one batch of rows
[B, T, ...] whose dialogues start at multiples of 128 (`owner` names the dialogue of each block), so
masks are cheap and a dialogue sees what it would see alone. Roundings of spec/numerics.md 1 and 2
are simulated with the gradient passed straight through. The experts are computed all, as one wide
feed-forward whose middle is multiplied by the router's weights: at this size that is the fast way.
What torch's compiler does badly is written by hand: attention and indexer in kernels.py, the
hyper-connections in sinkhorn.py, the middle of the experts in middle.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds4d.model.synth import geometry
from ops.tiny.kernels import BLOCK, Index, attend, spans
from ops.tiny.middle import middle
from ops.tiny.sinkhorn import end, mix, sinkhorn, step

if TYPE_CHECKING:
    from ds4d.model.geometry import Geometry

TINY = geometry("tiny")
Params = dict[str, Tensor]


class Precision:
    """How products are computed: in bf16 or f32; whether activations that enter a product are
    rounded to int8 blocks, and rows of the caches to e4m3 and FP4."""

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, activations: bool = True, rows: bool = True
    ) -> None:
        self.dtype, self.activations, self.rows = dtype, activations, rows


# --- small parts ---------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def straight(x: Tensor, y: Tensor) -> Tensor:
    """The value of y with the gradient of x."""
    return x + (y - x).detach()


def int8_blocks(x: Tensor, p: Precision) -> Tensor:
    """Activations entering a Q8_0 product, blocks of 32 (spec/numerics.md 1)."""
    if not p.activations:
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
    if not p.rows:
        return x
    b = x.detach()[..., :nope].unflatten(-1, (-1, 64))
    scale = _power_of_two_above(b.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
    v = b / scale
    step = torch.exp2(torch.floor(torch.log2(v.abs().clamp_min(2.0**-6))) - 3)
    y = (torch.round(v / step) * step * scale).flatten(-2)
    return x + F.pad(y - x.detach()[..., :nope], (0, x.shape[-1] - nope))


def hadamard(n: int) -> Tensor:
    m = torch.ones(1, 1)
    while m.shape[0] < n:
        m = torch.cat([torch.cat([m, m], 1), torch.cat([m, -m], 1)])
    return m * n**-0.5


def fp4_row(x: Tensor, h: Tensor, p: Precision) -> Tensor:
    """Indexer rows and queries: Hadamard, then FP4 in blocks of 32 (spec/model.md 4.11b)."""
    if not p.rows:
        return x
    x = F.linear(x, h)
    b = x.detach().unflatten(-1, (-1, 32))
    scale = _power_of_two_above(b.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6)
    v = b / scale
    a = v.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    y = (torch.round(v / step) * step * scale).flatten(-2)
    return straight(x, y)


def turned(cos: Tensor, sin: Tensor, d: int) -> Tensor:
    """Tables [2, T, d] for `rope` of cosines and sines [T, pairs]: 1 and 0 where nothing turns."""
    turn = torch.stack([cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)])
    fixed = torch.tensor([1.0, 0.0])[:, None, None].expand(2, turn.shape[1], d - turn.shape[2])
    return torch.cat([fixed, turn], -1)


def rope(x: Tensor, turn: Tensor, back: bool = False) -> Tensor:
    """Turn the trailing pairs of x [B, T, heads?, d] by the angles of turn [2, T, d], or back. No
    part of x is cut out or put together again, so that the compiler keeps it in one loop."""
    cos, sin = (turn[0], turn[1]) if x.dim() == 3 else (turn[0, :, None], turn[1, :, None])
    other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos - other * sin if back else x * cos + other * sin


# --- hyper-connections ---------------------------------------------------------------------------


State = tuple[Tensor, Tensor, Tensor, Tensor]
"""Streams X [B, T, S, D] and what enters them next, y [B, T, D], both in the type of products; post
[B, T, S] and M [B, T, S, S] in f32: X'[k] = post_k y + sum_j M[j, k] X[j]."""


def hyper(p: Params, site: str, state: State, g: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new streams X', the sublayer's normalised input [B, T, D], and post and M for what the
    sublayer will give."""
    S = g.streams
    scale, base = p[f"hc_{site}_scale.weight"], p[f"hc_{site}_base.weight"]
    X, h, z = step(
        *state, p[f"hc_{site}_fn.weight"], scale[:1], base[:S], p[f"{site}_norm.weight"],
        g.rms_eps, g.hyper_eps,
    )  # fmt: skip
    post = 2 * torch.sigmoid(z[..., S : 2 * S] * scale[1] + base[S : 2 * S])
    comb = z[..., 2 * S :] * scale[2] + base[2 * S :]
    M = sinkhorn(comb.reshape(-1, S, S), g.sinkhorn_iterations).view(*X.shape[:2], S, S)
    return X, h, post, M


# --- attention -----------------------------------------------------------------------------------


def compressed_rows(p: Params, name: str, h: Tensor, ratio: int, opens: Tensor) -> Tensor:
    """Pooled, normalised rows [B, T / ratio, d] of h in the type of products, before RoPE.
    opens [B, T / 128]: whether a block opens a dialogue, so that its first window has none before
    it."""
    B, T, _ = h.shape
    w = torch.cat([p[name + "kv.weight"], p[name + "gate.weight"]]).to(h.dtype)
    u, gate = F.linear(h, w).float().view(B, T // ratio, ratio, -1).chunk(2, -1)
    gate = gate + p[name + "ape.weight"]
    if ratio == BLOCK:
        row = (torch.softmax(gate, 2) * u).sum(2)
        return rms(row, p[name + "norm.weight"])
    # A row pools its own window by one half of the channels and the window before by the other.
    alone = torch.arange(T // ratio, device=h.device) % (BLOCK // ratio) == 0
    alone = (alone & opens.repeat_interleave(BLOCK // ratio, 1))[:, :, None]
    (u_before, u), (g_before, gate) = u.chunk(2, -1), gate.chunk(2, -1)
    top = torch.maximum(
        g_before.detach().amax(2).roll(1, 1).masked_fill(alone, -1e30), gate.detach().amax(2)
    )
    before = torch.exp(g_before.roll(1, 1) - top[:, :, None]).masked_fill(alone[:, :, None], 0.0)
    own = torch.exp(gate - top[:, :, None])
    row = (before * u_before.roll(1, 1)).sum(2) + (own * u).sum(2)
    return rms(row / (before.sum(2) + own.sum(2)), p[name + "norm.weight"])


def index_inputs(
    p: Params, h: Tensor, qr: Tensor, opens: Tensor, turn: Tensor, had: Tensor, q: Precision,
    g: Geometry,
) -> Index:  # fmt: skip
    """The indexer's queries, keys and weights. Takes no gradient into the model."""
    h, qr = h.detach(), qr.detach()
    turn = turn[..., -g.index_dim :]
    keys = compressed_rows(p, "indexer_compressor_", h, 4, opens)
    keys = fp4_row(rope(keys, turn[:, ::4]), had, q).to(q.dtype)
    qi = product(qr.to(q.dtype), p["indexer.attn_q_b.weight"], q).float()
    qi = fp4_row(rope(qi.unflatten(-1, (g.index_heads, -1)), turn), had, q).to(q.dtype)
    w = product(h, p["indexer.proj.weight"], q).float()
    return qi, keys, w * (g.index_heads * g.index_dim) ** -0.5


def attention(
    p: Params, h: Tensor, spans: Tensor, turn: Tensor, had: Tensor, dense: Tensor, ratio: int,
    q: Precision, g: Geometry,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, T, D] in the type of products and the indexer's alignment loss (0 without one).

    spans [2, B, T / 128] of `kernels.spans`; turn [2, T, d] of this kind of layer; dense [] bool:
    attend to all compressed rows instead of the selected ones."""
    B, T, _ = h.shape
    h8 = int8_blocks(h, q)
    qr = rms(product(h8, p["attn_q_a.weight"], q).float(), p["attn_q_a_norm.weight"])
    qh = product(int8_blocks(qr, q), p["attn_q_b.weight"], q).float()
    qh = rope(rms(qh.view(B, T, g.n_heads, g.head_dim)), turn).to(q.dtype)
    kv = rms(product(h8, p["attn_kv.weight"], q).float(), p["attn_kv_a_norm.weight"])
    kv = e4m3_row(rope(kv, turn), g.nope_dim, q).to(q.dtype)
    rows = index = None
    if ratio:
        opens = spans[0] == torch.arange(0, T, BLOCK, device=h.device)
        hb = h.to(q.dtype)
        rows = compressed_rows(p, "attn_compressor_", hb, ratio, opens)
        rows = e4m3_row(rope(rows, turn[:, ::ratio]), g.nope_dim, q).to(q.dtype)
        if ratio == 4:
            index = index_inputs(p, hb, qr, opens, turn, had, q, g)
    o, loss = attend(
        qh, kv, rows, p["attn_sinks.weight"], spans, ratio, index, g.index_top_k, dense
    )
    o8 = int8_blocks(rope(o.float(), turn, back=True).view(B * T, g.out_groups, -1), q)
    w = p["attn_output_a.weight"].view(g.out_groups, g.out_rank, -1).to(q.dtype)
    low = torch.bmm(o8.transpose(0, 1), w.mT).transpose(0, 1).float().reshape(B, T, -1)
    return product(int8_blocks(low, q), p["attn_output_b.weight"], q), loss


# --- experts -------------------------------------------------------------------------------------


def experts(
    p: Params, h: Tensor, table: Tensor | None, q: Precision, g: Geometry
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] in the type of products and the share of tokens of each expert [E].
    `table` [B, T, E]: the chosen experts of a hash layer; None: the largest biased scores."""
    s = torch.sqrt(F.softplus(F.linear(h, p["ffn_gate_inp.weight"])) + 1e-12)
    if table is None:
        biased = s.detach() + p["exp_probs_b.bias"]
        rank = (biased[..., None, :] > biased[..., :, None]).float().sum(-1)
        table = (rank < g.n_experts_used).float()
    w = s * table
    w = g.expert_scale * w / w.sum(-1, keepdim=True).clamp_min(2.0**-14)
    w = F.pad(w, (0, 1), value=1.0)  # the shared expert
    width = g.width
    wide = torch.cat(
        [p["ffn_gate_exps.weight"].view(-1, width), p["ffn_gate_shexp.weight"],
         p["ffn_up_exps.weight"].view(-1, width), p["ffn_up_shexp.weight"]]
    )  # fmt: skip
    down = torch.cat(
        [p["ffn_down_exps.weight"].permute(1, 0, 2).reshape(width, -1), p["ffn_down_shexp.weight"]],
        1,
    )
    ab = product(int8_blocks(h, q), wide, q)
    mid = middle(ab.flatten(0, 1), w.flatten(0, 1), g.expert_clamp[0], q.activations)
    return product(mid.view(*h.shape[:2], -1), down, q), table.mean((0, 1))


# --- the whole -----------------------------------------------------------------------------------


def layer(
    p: Params, state: State, table: Tensor | None, spans: Tensor, turn: Tensor, had: Tensor,
    dense: Tensor, ratio: int, q: Precision, g: Geometry,
) -> tuple[State, Tensor, Tensor]:  # fmt: skip
    """The state behind one layer, its alignment loss, the load of its experts."""
    X, h, post, M = hyper(p, "attn", state, g)
    y, loss = attention(p, h, spans, turn, had, dense, ratio, q, g)
    X, h, post, M = hyper(p, "ffn", (X, y, post, M), g)
    y, load = experts(p, h, table, q, g)
    return (X, y, post, M), loss, load


def head(p: Params, X: Tensor, q: Precision, g: Geometry) -> Tensor:
    """Logits [n, V] of the streams [n, S, D] of any type."""
    X = X.float()
    flat = X.flatten(-2)
    z = F.linear(flat, p["output_hc_fn.weight"]) * torch.rsqrt(
        flat.square().mean(-1, keepdim=True) + g.rms_eps
    )
    pre = torch.sigmoid(z * p["output_hc_scale.weight"] + p["output_hc_base.weight"]) + g.hyper_eps
    x = rms(mix(X, pre), p["output_norm.weight"])
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
        angles = (
            torch.arange(g.context, dtype=torch.float32)[:, None]
            * torch.tensor(g.frequencies)[:, None]
        )
        cos, sin = angles.double().cos().float(), angles.double().sin().float()
        kinds = [turned(c, s, g.head_dim) for c, s in zip(cos, sin, strict=True)]
        self.register_buffer("turns", torch.stack(kinds))

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
        """Final streams [B, T, S, D] in the type of products, alignment loss, loads [L, E] of ids
        [B, T]."""
        g, (B, T) = self.g, ids.shape
        e = F.embedding(ids, self.tensor("token_embd.weight")).to(self.precision.dtype)
        X = e[:, :, None].expand(-1, -1, g.streams, -1).contiguous()
        # Nothing enters the first layer's streams. It needs a gradient like what enters the others,
        # or that layer would be compiled once more.
        y = X.new_zeros(B, T, g.width, requires_grad=True)
        post = torch.zeros(B, T, g.streams, device=X.device, requires_grad=True)
        M = torch.eye(g.streams, device=X.device).repeat(B, T, 1, 1).requires_grad_()
        state, within = (X, y, post, M), spans(owner)
        losses, loads = [], []
        for i, ratio in enumerate(g.ratios):
            p = self.params(f"blk.{i}.")
            table = None
            if g.hashed(i):
                chosen = p.pop("ffn_gate_tid2eid.weight")[ids].long()
                table = torch.zeros(B, T, g.n_experts, device=ids.device).scatter_(-1, chosen, 1.0)
            turn = self.turns[1 if ratio else 0][:, :T]
            state, loss, load = self.layer(
                p, state, table, within, turn, self.had, dense, ratio, self.precision, g
            )
            losses.append(loss)
            loads.append(load)
        return end(*state), torch.stack(losses).sum(), torch.stack(loads)

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
