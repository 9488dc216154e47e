"""The forward pass, in the order and with the names of spec/model.md 4.

Shapes: n tokens of a chunk, S streams, D width, H heads of d, V vocabulary. `h` [n, D] is a
normalised sublayer input, `X` [n, S, D] the residual streams. A chunk's products are taken
together; rows, windows, selection and attention go token by token, as a decode would.

Two modes (spec/numerics.md 1). *Rounded* is what engines compute: int8 activation blocks at
quantised weights, cached rows as their canonical bytes, and no token's bits depend on how the
prompt was cut into chunks. *Exact* leaves both roundings out, for comparison with transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.model import quants, rows
from ds4d.model.reference.products import (
    WHOLE,
    integer_terms,
    part_of,
    plain_product,
    rounded_product,
)
from ds4d.model.reference.state import LayerState, Partial, Rows, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from ds4d.model.geometry import Geometry
    from ds4d.model.quants import Tensor

    Array = npt.NDArray[Any]
    Ids = npt.NDArray[np.integer[Any]]
    Terms = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]]

ROUTER_FLOOR = 2.0**-14
"""Least sum of the chosen experts' scores; never reached by a trained model."""


class Reference:
    """One model. `tensors` by GGUF name (spec/model.md 2.3); their quants decide the rounding.

    `dtype` is float32, what engines compute in, or float64. Weights are dequantised when first
    used and kept.
    """

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        *,
        dtype: npt.DTypeLike = np.float32,
        exact: bool = False,
    ) -> None:
        self.geometry = geometry
        self.tensors = tensors
        self.dtype = np.dtype(dtype)
        self.exact = exact
        self._weights: dict[tuple[str, tuple[int, int]], Array] = {}
        self._terms: dict[tuple[str, tuple[int, int]], Terms] = {}

    # -- whole model ---------------------------------------------------------------------------

    def new_state(self) -> State:
        return State(self.geometry, self.dtype, self.exact)

    def prefill(self, state: State, ids: Sequence[int] | Ids, *, all_logits: bool = False) -> Array:
        """Run `ids` behind the state's end; logits of the last [V], or of all [n, V]."""
        ids = np.asarray(ids)
        if not len(ids):
            raise ValueError("prefill got no ids, expected at least one")
        X = self.embed(ids)
        for layer in range(self.geometry.n_layers):
            X = self.layer(layer, X, ids, state, state.n_tokens)
        state.n_tokens += len(ids)
        logits = self.head(X if all_logits else X[-1:])
        return logits if all_logits else logits[0]

    def step(self, state: State, token: int) -> Array:
        """Logits [V] behind one more id."""
        return self.prefill(state, [token])

    # -- 4.1 embedding and stream expansion ----------------------------------------------------

    def embed(self, ids: Ids) -> Array:
        """X [n, S, D]: every stream begins as the embedding."""
        e = quants.dequantize_rows(self.tensors["token_embd.weight"], ids, self.dtype)
        return np.repeat(e[:, None], self.geometry.streams, axis=1)

    # -- 4.2 one layer -------------------------------------------------------------------------

    def layer(self, layer: int, X: Array, ids: Ids, state: State, pos0: int) -> Array:
        """X [n, S, D] behind layer `layer` of tokens at `pos0` and after; extends that layer's
        part of `state` (but not `state.n_tokens`)."""
        x, post, M = self.hyper_pre(layer, "attn", X)
        h = self.rms(x, f"blk.{layer}.attn_norm.weight")
        X = hyper_post(X, self.attention(layer, h, state, pos0), post, M)
        x, post, M = self.hyper_pre(layer, "ffn", X)
        h = self.rms(x, f"blk.{layer}.ffn_norm.weight")
        return hyper_post(X, self.moe(layer, h, ids), post, M)

    # -- 4.3 hyper-connections, before a sublayer ----------------------------------------------

    def hyper_pre(self, layer: int, kind: str, X: Array) -> tuple[Array, Array, Array]:
        """Sublayer input x [n, D], post [n, S] and mixing matrix M [n, S, S] of `X` [n, S, D];
        `kind` is attn or ffn."""
        g, S, hc = self.geometry, self.geometry.streams, f"blk.{layer}.hc_{kind}_"
        scale, base = self.weight(hc + "scale.weight"), self.weight(hc + "base.weight")
        f = self.rms(X.reshape(len(X), -1))  # over all streams jointly
        z = self.product(hc + "fn.weight", f)  # [pre S | post S | comb S*S]
        pre = sigmoid(z[:, :S] * scale[0] + base[:S]) + g.hyper_eps
        post = 2 * sigmoid(z[:, S : 2 * S] * scale[1] + base[S : 2 * S])
        comb = (z[:, 2 * S :] * scale[2] + base[2 * S :]).reshape(-1, S, S)
        M = sinkhorn(comb, g.sinkhorn_iterations, g.hyper_eps)
        return np.sum(pre[..., None] * X, axis=1), post, M

    # -- 4.5 RoPE ------------------------------------------------------------------------------

    def rope(self, layer: int, x: Array, pos: Ids, *, inverse: bool = False) -> Array:
        """Turn the trailing channels of `x` [n, ..., dim] by the layer's angles at `pos` [n]."""
        g = self.geometry
        return rope(x, pos, g.frequencies[1 if g.ratios[layer] else 0], inverse=inverse)

    # -- 4.6 attention projections -------------------------------------------------------------

    def projections(self, layer: int, h: Array, pos: Ids) -> tuple[Array, Array, Array]:
        """qr [n, q_rank] (which also feeds the indexer), q [n, H, d] and kv [n, d], the last two
        after RoPE."""
        g, blk = self.geometry, f"blk.{layer}."
        qr = self.rms(self.product(blk + "attn_q_a.weight", h), blk + "attn_q_a_norm.weight")
        q = self.product(blk + "attn_q_b.weight", qr).reshape(len(h), g.n_heads, g.head_dim)
        kv = self.rms(self.product(blk + "attn_kv.weight", h), blk + "attn_kv_a_norm.weight")
        return qr, self.rope(layer, self.rms(q), pos), self.rope(layer, kv, pos)

    def attention(self, layer: int, h: Array, state: State, pos0: int) -> Array:
        """Attention output [n, D] of `h` [n, D] at positions `pos0` and after. Extends that layer's
        part of `state`, which must end at `pos0`."""
        g, blk, ratio = self.geometry, f"blk.{layer}.", self.geometry.ratios[layer]
        own = state.layers[layer]
        pos = np.arange(pos0, pos0 + len(h))
        qr, q, kv = self.projections(layer, h, pos)
        compress, select = [], None
        if ratio:
            name = blk + "attn_compressor_"
            compress += [self.compressor(layer, name, h, pos0, own.partial, own.compressed)]
        if ratio == 4:
            name = blk + "indexer_compressor_"
            compress += [self.compressor(layer, name, h, pos0, own.index_partial, own.index)]
            select = self.indexer(layer, h, qr, pos, own)

        # Order inside a token: push the raw row, the compressors (which may emit a row that this
        # very token sees), selection, attention.
        sinks = self.weight(blk + "attn_sinks.weight")
        o = np.empty_like(q)
        for t, p in enumerate(range(pos0, pos0 + len(h))):
            own.ring.push(p % g.window, kv[t])
            for emit in compress:
                emit(t)
            recent = np.arange(max(0, p - g.window + 1), p + 1) % g.window
            seen = [own.ring.values[recent]]
            if ratio:
                visible = (p + 1) // ratio
                chosen = select(t, visible) if select else np.arange(visible)
                seen.append(own.compressed.values[chosen])
            o[t] = attend(q[t], np.concatenate(seen), sinks)
        return self.grouped_output(layer, self.rope(layer, o, pos, inverse=True))

    # -- 4.7 compressor ------------------------------------------------------------------------

    def compressor(
        self, layer: int, prefix: str, h: Array, pos0: int, partial: Partial, out: Rows
    ) -> Callable[[int], None]:
        """Project a chunk; the function returned takes token t of it into the partial window and,
        when that completes the window, pushes its row to `out`."""
        ratio = self.geometry.ratios[layer]
        u = self.product(prefix + "kv.weight", h)
        g = self.product(prefix + "gate.weight", h)
        ape = self.weight(prefix + "ape.weight")
        dim = out.values.shape[1]

        def take(t: int) -> None:
            window, m = divmod(pos0 + t, ratio)
            at = ratio + m if ratio == 4 else m
            partial.values[at] = u[t]
            partial.gates[at] = g[t] + ape[m]
            if m < ratio - 1:
                return
            if ratio == 4:  # series A of the window before, series B of this one
                values = np.concatenate([partial.values[:4, :dim], partial.values[4:, dim:]])
                gates = np.concatenate([partial.gates[:4, :dim], partial.gates[4:, dim:]])
                partial.values[:4], partial.gates[:4] = partial.values[4:], partial.gates[4:]
            else:
                values, gates = partial.values, partial.gates
            row = np.sum(softmax(gates, axis=0) * values, axis=0)
            row = self.rms(row[None], prefix + "norm.weight")
            out.push(window, self.rope(layer, row, np.array([window * ratio]))[0])

        return take

    # -- 4.8 indexer ---------------------------------------------------------------------------

    def indexer(
        self, layer: int, h: Array, qr: Array, pos: Ids, own: LayerState
    ) -> Callable[[int, int], Ids]:
        """The function returned gives, for token t of the chunk, the indices of the compressed
        rows it attends to among the `visible` first ones, ascending."""
        g, blk = self.geometry, f"blk.{layer}."
        if (pos[-1] + 1) // 4 <= g.index_top_k:  # skip rule: nothing to choose in this chunk
            return lambda t, visible: np.arange(visible)
        qi = self.product(blk + "indexer.attn_q_b.weight", qr)
        qi = qi.reshape(len(h), g.index_heads, g.index_dim)
        qi = self.rope(layer, qi, pos)
        if not self.exact:
            qi = rows.round_index_query(g, qi).astype(self.dtype)
        scale = float((g.index_heads * g.index_dim) ** -0.5)
        w = self.product(blk + "indexer.proj.weight", h) * scale

        def select(t: int, visible: int) -> Ids:
            if visible <= g.index_top_k:
                return np.arange(visible)
            scores = w[t] @ np.maximum(qi[t] @ own.index.values[:visible].T, 0)
            return np.sort(largest(scores, g.index_top_k))

        return select

    # -- 4.9 grouped output (the attention core is `attend`) -------------------------------------

    def grouped_output(self, layer: int, o: Array) -> Array:
        """[n, D] of head outputs `o` [n, H, d]: a low-rank product per group of heads, then one
        over all groups."""
        g, blk = self.geometry, f"blk.{layer}."
        o = o.reshape(len(o), g.out_groups, -1)
        name = blk + "attn_output_a.weight"
        low = [self.product(name, o[:, i], part=(i, g.out_groups)) for i in range(g.out_groups)]
        return self.product(blk + "attn_output_b.weight", np.concatenate(low, axis=1))

    # -- 4.10 mixture of experts ---------------------------------------------------------------

    def router(self, layer: int, h: Array, ids: Ids) -> tuple[Ids, Array]:
        """Chosen experts [n, k] in ascending order and their weights [n, k]."""
        g, blk = self.geometry, f"blk.{layer}."
        s = np.sqrt(softplus(self.product(blk + "ffn_gate_inp.weight", h)))
        if g.hashed(layer):
            chosen = self.weight(blk + "ffn_gate_tid2eid.weight")[ids]
        else:
            bias = blk + "exp_probs_b.bias"  # decides who is chosen, not what they weigh
            biased = s + self.weight(bias) if bias in self.tensors else s
            chosen = np.stack([largest(row, g.n_experts_used) for row in biased])
        chosen = np.sort(chosen, axis=1)
        weights = np.take_along_axis(s, chosen, axis=1)
        total = np.maximum(weights.sum(axis=1, keepdims=True), ROUTER_FLOOR)
        return chosen, g.expert_scale * weights / total

    def moe(self, layer: int, h: Array, ids: Ids) -> Array:
        """[n, D] of `h` [n, D] and the input ids [n] at those positions: the chosen experts in
        ascending order, the shared expert last."""
        g, blk = self.geometry, f"blk.{layer}."
        chosen, weights = self.router(layer, h, np.asarray(ids))
        y = np.zeros_like(h)
        for e in range(g.n_experts):
            tokens = np.flatnonzero((chosen == e).any(axis=1))
            if len(tokens):
                w = np.where(chosen == e, weights, 0).sum(axis=1)[tokens, None]
                part = (e, g.n_experts)
                y[tokens] += self.expert(blk, "exps", h[tokens], w, g.expert_clamp[layer], part)
        return y + self.expert(blk, "shexp", h, 1.0, g.shared_clamp[layer])

    def expert(
        self,
        blk: str,
        kind: str,
        h: Array,
        w: Array | float,
        clamp: float,
        part: tuple[int, int] = WHOLE,
    ) -> Array:
        """One expert's output [n, D], times the router's weight `w` [n, 1]. The weight acts before
        the down projection, so it is part of what is rounded there."""
        a = np.minimum(self.product(f"{blk}ffn_gate_{kind}.weight", h, part=part), clamp)
        b = np.clip(self.product(f"{blk}ffn_up_{kind}.weight", h, part=part), -clamp, clamp)
        return self.product(f"{blk}ffn_down_{kind}.weight", w * (a * sigmoid(a) * b), part=part)

    # -- 4.12 head -----------------------------------------------------------------------------

    def head(self, X: Array) -> Array:
        """Logits [n, V] of the final streams `X` [n, S, D]."""
        scale, base = self.weight("output_hc_scale.weight"), self.weight("output_hc_base.weight")
        z = self.product("output_hc_fn.weight", self.rms(X.reshape(len(X), -1)))
        pre = sigmoid(z * scale[0] + base) + self.geometry.hyper_eps
        x = np.sum(pre[..., None] * X, axis=1)
        return self.product("output.weight", self.rms(x, "output_norm.weight"))

    # -- weights and norms ---------------------------------------------------------------------

    def product(self, name: str, x: Array, *, part: tuple[int, int] = WHOLE) -> Array:
        """y [n, out] of `x` [n, in]. `part` (i, m) takes the i-th of m equal parts of the weight's
        rows: an expert of all, or a group of the output projection."""
        block = self.tensors[name].quant.activation_block
        if self.exact or not block:
            return plain_product(self.weight(name, part=part), x)
        if (name, part) not in self._terms:
            self._terms[name, part] = integer_terms(part_of(self.tensors[name], part))
        return rounded_product(self._terms[name, part], x, block)

    def weight(self, name: str, *, part: tuple[int, int] = WHOLE) -> Array:
        """A tensor, or a part of one as a matrix, dequantised to dtype."""
        if (name, part) not in self._weights:
            tensor = self.tensors[name]
            if len(tensor.shape) > 1:
                tensor = part_of(tensor, part)
            self._weights[name, part] = quants.dequantize(tensor, self.dtype)
        return self._weights[name, part]

    def rms(self, x: Array, name: str | None = None) -> Array:
        """`x` [..., n] over its root mean square, times the weight `name` if there is one."""
        y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.geometry.rms_eps)
        return y if name is None else y * self.weight(name)


def sinkhorn(comb: Array, iterations: int, eps: float) -> Array:
    """4.3: mixing matrix M [n, S, S] of the logits `comb`, [source, destination]. Rows sum to
    about 1 and columns to 1."""
    M: Array = softmax(comb, axis=2) + eps
    M = M / (M.sum(axis=1, keepdims=True) + eps)
    for _ in range(iterations - 1):
        M = M / (M.sum(axis=2, keepdims=True) + eps)
        M = M / (M.sum(axis=1, keepdims=True) + eps)
    return M


def hyper_post(X: Array, y: Array, post: Array, M: Array) -> Array:
    """4.4: X'[k] = post_k y + sum_j M[j, k] X[j], for `X` [n, S, D] and `y` [n, D]."""
    mixed: Array = np.swapaxes(M, 1, 2) @ X
    return post[..., None] * y[:, None] + mixed


def rope(x: Array, pos: Ids, frequencies: Sequence[float], *, inverse: bool = False) -> Array:
    """4.5: turn the trailing pairs of `x` [n, ..., dim] by `pos` [n] times `frequencies` [pairs].

    The angle is a product of two f32, as the model was made; its sine and cosine are exact.
    """
    pairs = len(frequencies)
    angle = pos.astype(np.float32)[:, None] * np.array(frequencies, np.float32)
    angle = angle.reshape(len(pos), *[1] * (x.ndim - 2), pairs).astype(np.float64)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    if inverse:
        sin = -sin
    y = x.copy()
    u, v = x[..., -2 * pairs :: 2], x[..., -2 * pairs + 1 :: 2]
    y[..., -2 * pairs :: 2] = u * cos - v * sin
    y[..., -2 * pairs + 1 :: 2] = u * sin + v * cos
    return y


def attend(q: Array, seen: Array, sinks: Array) -> Array:
    """4.9: o [H, d] of one token's `q` [H, d] over the rows it sees, `seen` [r, d], which are keys
    and values alike. A head's sink is a logit that takes its share and adds no value."""
    logits = q @ seen.T * float(q.shape[1] ** -0.5)
    m = np.maximum(sinks, logits.max(axis=1))[:, None]
    p: Array = np.exp(logits - m)
    o: Array = (p @ seen) / (np.exp(sinks[:, None] - m) + p.sum(axis=1, keepdims=True))
    return o


def largest(scores: Array, k: int) -> Ids:
    """Indices of the `k` largest of `scores` [n], best first; ties go to the lowest index."""
    return np.argsort(-scores, kind="stable")[:k]


def softmax(x: Array, axis: int) -> Array:
    e: Array = np.exp(x - x.max(axis=axis, keepdims=True))
    e /= e.sum(axis=axis, keepdims=True)
    return e


def sigmoid(x: Array) -> Array:
    y: Array = np.exp(-softplus(-x))
    return y


def softplus(x: Array) -> Array:
    y: Array = np.logaddexp(0, x)
    return y
