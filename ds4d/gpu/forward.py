"""The forward pass as launches, in the order of spec/model.md 4.

Whose rows a pass computes, and at which positions, stands in `step`, device arrays; what a kernel
does, and in which order it adds, is written beside the kernel. `enqueue` is the same for a stream
and for a graph, and for every pass of as many padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.errors import ModelFileError
from ds4d.gpu.kernels import (
    activation,
    attention,
    compress,
    embed,
    floats,
    hyper,
    moe,
    norm,
    product,
    rope,
    rows,
)
from ds4d.gpu.kernels.index import choose, query, score
from ds4d.gpu.kernels.lowbit import experts
from ds4d.gpu.weights import Q8, Floats, LowBit, Weights
from ds4d.model.layout import FP4, pad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ds4d.gpu.buffers import Buffer, Buffers
    from ds4d.gpu.jit import Stream
    from ds4d.gpu.state import State
    from ds4d.model.geometry import Geometry
    from ds4d.model.quants import Tensor

ROWS_MAX = 32


@dataclass(frozen=True, slots=True)
class Step:
    """What differs from pass to pass, [ROWS_MAX] i32; -1 in idle rows. Rows of one lane are
    neighbours, at positions one apart; `n_rows` [1] says how many rows are not idle, the first."""

    token: Buffer
    pos: Buffer
    lane: Buffer
    n_rows: Buffer

    @classmethod
    def add(cls, buffers: Buffers) -> Step:
        names = (("token", ROWS_MAX), ("pos", ROWS_MAX), ("lane", ROWS_MAX), ("n rows", 1))
        return cls(*(buffers.add(name, (n,), np.int32) for name, n in names))

    def set(self, tokens: Any, positions: Any, lanes: Any) -> None:
        """The rows of the next pass, 1 to ROWS_MAX of them; done when it returns."""
        n = len(tokens)
        for buffer, values in ((self.token, tokens), (self.pos, positions), (self.lane, lanes)):
            whole = np.full(ROWS_MAX, -1, np.int32)
            whole[:n] = values
            buffer.write(whole)
        self.n_rows.write(np.array([n], np.int32))


@dataclass(frozen=True, slots=True)
class Blocks:
    """int8 forms of an activation: of 32 and, where a product wants it, of 256."""

    n: int
    q: Buffer
    d: Buffer
    q_256: Buffer | None
    d_256: Buffer | None

    @classmethod
    def add(cls, buffers: Buffers, name: str, n_rows: int, n: int, wide: bool) -> Blocks:
        def form(block: int) -> tuple[Buffer, Buffer]:
            return (
                buffers.add(f"{name} q {block}", (n // 32, n_rows, 32), np.int8),
                buffers.add(f"{name} d {block}", (n // block, n_rows), np.float32),
            )

        return cls(n, *form(32), *(form(256) if wide else (None, None)))


@dataclass(frozen=True, slots=True)
class Hyper:
    """Weights around one sublayer, or of the head."""

    fn: Floats
    scale: Buffer
    base: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class Indexer:
    q: Q8 | Floats
    ape: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class Attention:
    hyper: Hyper
    inputs: Q8 | Floats  # attn_q_a, attn_kv
    q_norm: Buffer
    kv_norm: Buffer
    q: Q8 | Floats
    pooled: Floats | None  # what compressors read, the indexer's too, and its weights of heads
    ape: Buffer | None
    norm: Buffer | None
    indexer: Indexer | None
    sinks: Buffer
    out_a: Q8 | Floats
    out_b: Q8 | Floats


@dataclass(frozen=True, slots=True)
class Experts:
    hyper: Hyper
    router: Q8 | Floats
    bias: Buffer | None
    table: Buffer | None
    routed: tuple[Q8 | LowBit, Q8 | LowBit, Q8 | LowBit]  # gate, up, down
    shared: tuple[Q8, Q8, Q8]


class Forward:
    """Weights, buffers and the launches of a pass. With `buffers` of a dry run nothing but their
    sizes is of use."""

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        state: State,
        buffers: Buffers,
        *,
        n_sms: int,
    ) -> None:
        """`n_sms`: of the GPU. How many blocks share some work follows from it, and no bit."""
        check(geometry)
        self.geometry, self.state, self.n_sms = geometry, state, n_sms
        self.weights = Weights(tensors, buffers)
        self._has = tensors.keys()
        self.step = Step.add(buffers)
        self.embedding, self.embedding_half = self.weights.table("token_embd.weight")
        self.layers = [(self._attention(i), self._experts(i)) for i in range(geometry.n_layers)]
        self.head = self._hyper("output_hc", "output_norm.weight")
        self.output = self.weights.matrix("output.weight")
        self._arena(buffers)

    # -- weights -------------------------------------------------------------------------------

    def _hyper(self, prefix: str, norm_name: str) -> Hyper:
        w = self.weights
        return Hyper(
            w.function(prefix + "_fn.weight", self.geometry.streams),
            w.vector(prefix + "_scale.weight"),
            w.vector(prefix + "_base.weight"),
            w.vector(norm_name),
        )

    def _attention(self, layer: int) -> Attention:
        w, blk, ratio = self.weights, f"blk.{layer}.", self.geometry.ratios[layer]
        names = [blk + f"attn_compressor_{part}.weight" for part in ("kv", "gate")]
        if ratio == 4:
            names += [blk + f"indexer_compressor_{part}.weight" for part in ("kv", "gate")]
            names.append(blk + "indexer.proj.weight")
        pooled = w.matrix(*names) if ratio else None
        if isinstance(pooled, Q8):
            raise ModelFileError(f"tensor {names[0]} is Q8_0, expected F16, F32 or BF16")
        indexer = None
        if ratio == 4:
            indexer = Indexer(
                w.matrix(blk + "indexer.attn_q_b.weight"),
                w.vector(blk + "indexer_compressor_ape.weight"),
                w.vector(blk + "indexer_compressor_norm.weight"),
            )
        return Attention(
            hyper=self._hyper(blk + "hc_attn", blk + "attn_norm.weight"),
            inputs=w.matrix(blk + "attn_q_a.weight", blk + "attn_kv.weight"),
            q_norm=w.vector(blk + "attn_q_a_norm.weight"),
            kv_norm=w.vector(blk + "attn_kv_a_norm.weight"),
            q=w.matrix(blk + "attn_q_b.weight"),
            pooled=pooled,
            ape=w.vector(blk + "attn_compressor_ape.weight") if ratio else None,
            norm=w.vector(blk + "attn_compressor_norm.weight") if ratio else None,
            indexer=indexer,
            sinks=w.vector(blk + "attn_sinks.weight"),
            out_a=w.matrix(blk + "attn_output_a.weight"),
            out_b=w.matrix(blk + "attn_output_b.weight"),
        )

    def _experts(self, layer: int) -> Experts:
        w, g, blk = self.weights, self.geometry, f"blk.{layer}."
        bias = table = None
        if g.hashed(layer):
            table = w.routes(blk + "ffn_gate_tid2eid.weight", g.n_experts_used, g.n_experts)
        elif blk + "exp_probs_b.bias" in self._has:
            bias = w.vector(blk + "exp_probs_b.bias")
        gate, up, down = (w.experts(f"{blk}ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        shared = []
        for name in ("gate", "up", "down"):
            made = w.experts(f"{blk}ffn_{name}_shexp.weight")
            if isinstance(made, LowBit):
                raise ModelFileError(
                    f"tensor {blk}ffn_{name}_shexp.weight is {made.quant.name}, expected Q8_0"
                )
            shared.append(made)
        return Experts(
            hyper=self._hyper(blk + "hc_ffn", blk + "ffn_norm.weight"),
            router=w.matrix(blk + "ffn_gate_inp.weight"),
            bias=bias,
            table=table,
            routed=(gate, up, down),
            shared=(shared[0], shared[1], shared[2]),
        )

    # -- buffers -------------------------------------------------------------------------------

    def _arena(self, buffers: Buffers) -> None:
        """What a pass writes but the state, for ROWS_MAX rows; named as in spec/model.md 4."""
        g, state, n = self.geometry, self.state, ROWS_MAX

        def f4(name: str, *shape: int) -> Buffer:
            return buffers.add(name, shape, np.float32)

        def i4(name: str, *shape: int) -> Buffer:
            return buffers.add(name, shape, np.int32)

        pairs = g.rope_dim // 2
        self.frequencies = [f4(name, pairs) for name in ("plain", "yarn")]
        self.turns = f4("turns", n, 4, 2, pairs)
        self.X = f4("X", n, g.streams, g.width)
        self.part = f4("part", hyper.n_slices(g.streams, g.width), n, 32)
        self.post, self.M = f4("post", n, g.streams), f4("M", n, g.streams, g.streams)
        low = any(isinstance(w, LowBit) for _, e in self.layers for w in e.routed)
        self.h = f4("h", n, g.width)
        self.h_blocks = Blocks.add(buffers, "h", n, g.width, low)
        self.inputs = f4("inputs", n, pad(g.q_rank + g.head_dim))
        self.qr = f4("qr", n, g.q_rank)
        self.qr_blocks = Blocks.add(buffers, "qr", n, g.q_rank, False)
        self.q = f4("q", n, g.n_heads * g.head_dim)
        wide = [a.pooled.n_out for a, _ in self.layers if a.pooled]
        self.pooled = f4("pooled", n, pad(max(wide, default=16)))
        self.form = attention.Form.of(g)
        longest = state.pages_per_lane * g.page_tokens
        ratios = [r for r in g.ratios if r]
        most = max((longest // r for r in ratios if r == 128), default=0)
        most = max([most, *(min(longest // 4, g.index_top_k) for r in ratios if r == 4)])
        self.n_slots = self.form.slots(g.window, most)
        self.partial = f4("partial", self.form.partial_floats(n, self.n_slots))
        self.stats = f4("stats", self.form.stat_floats(n, self.n_slots))
        self.o = f4("o", n, g.n_heads * g.head_dim)
        self.o_blocks = Blocks.add(buffers, "o", n, g.n_heads * g.head_dim, False)
        self.low = f4("low", n, g.out_groups * g.out_rank)
        self.low_blocks = Blocks.add(buffers, "low", n, g.out_groups * g.out_rank, False)
        self.y = f4("y", n, pad(g.width))

        self.iq = f4("iq", n, pad(g.index_heads * g.index_dim))
        heads = 8 * query.tiles_of(g.index_heads)
        self.fp4 = state.layout.index.kind == FP4
        if self.fp4:
            self.codes = buffers.add("index codes", (n, heads, g.index_dim), np.int8)
            self.scales = f4("index scales", n, heads, max(g.index_dim // 32, 1))
        else:
            self.codes = f4("index query", n, g.index_heads, g.index_dim)
        self.n_keys = pad(longest // 4) if 4 in g.ratios else 16
        self.scores = f4("scores", n, self.n_keys)
        self.chosen = i4("chosen", n, max(g.index_top_k, 1))
        kept = choose.spans_of(self.n_keys) * g.index_top_k
        self.kept = buffers.add("kept", (n, kept), np.uint32)
        self.kept_at = i4("kept at", n, kept)
        self.rows_arrived = buffers.add("rows arrived", (n,), np.uint32)

        k, per_row = g.n_experts_used, g.n_experts_used + 1
        self.router = f4("router", n, pad(g.n_experts))
        self.expert, self.share = i4("expert", n, k), f4("share", n, k)
        items = moe.items_most(n, k, g.n_experts)
        self.items = i4("item expert", items), i4("item rows", items, 8), i4("item out", items, 8)
        self.mid = f4("mid", n * per_row, pad(g.expert_width))
        self.mid_blocks = Blocks.add(buffers, "mid", n * per_row, g.expert_width, low)
        self.parts = f4("parts", n * per_row, pad(g.width))
        self.logits = f4("logits", n, pad(g.n_vocab))

        shapes = [(w.n_out, w.n_in) for w in self._all_floats()]
        sizes = [floats.product_scratch(n, *shape) for shape in shapes]
        self.sums = f4("sums", max((a for a, _ in sizes), default=0) or 1)
        self.arrived = buffers.add(
            "arrived", (max((b for _, b in sizes), default=0) or 1,), np.uint32
        )

    def _all_floats(self) -> list[Floats]:
        found: list[Any] = [self.output]
        for a, e in self.layers:
            found += [a.inputs, a.q, a.pooled, a.out_a, a.out_b, e.router]
            if a.indexer:
                found.append(a.indexer.q)
        return [w for w in found if isinstance(w, Floats)]

    def fill(self) -> None:
        """Weights and constants to the device."""
        self.weights.fill()
        for buffer, values in zip(self.frequencies, self.geometry.frequencies, strict=True):
            buffer.write(np.array(values, np.float32))
        self.state.table.write(np.full(self.state.table.shape, -1, np.int32))

    # -- the pass ------------------------------------------------------------------------------

    def enqueue(self, stream: Stream, n: int) -> None:
        """The pass over `n` padded rows: 8, 16, 24 or 32."""
        self.enqueue_start(stream, n)
        self.enqueue_meeting(stream, n, 0)
        for layer in range(len(self.layers)):
            self.enqueue_layer(stream, n, layer)
        self.enqueue_head(stream, n)

    def enqueue_start(self, stream: Stream, n: int) -> None:
        """Angles, and the streams X from the ids."""
        g, step = self.geometry, self.step
        plain, yarn = self.frequencies
        rope.angles(stream, self.turns, step.pos, plain, yarn, n_rows=n, pairs=g.rope_dim // 2)
        embed.embed(
            stream, self.X, step.token, self.embedding,
            rows=n, width=g.width, streams=g.streams, half=self.embedding_half,
        )  # fmt: skip

    def enqueue_meeting(self, stream: Stream, n: int, layer: int) -> None:
        """X meets the layer's first function, where no sublayer in front has seen to that."""
        g, fn = self.geometry, self.layers[layer][0].hyper.fn
        hyper.hyper_product(
            stream, self.part, fn.words, self.X, self.step.pos, rows=n, streams=g.streams,
            width=g.width, Z=fn.n_out, half=fn.half,
        )  # fmt: skip

    def enqueue_layer(self, stream: Stream, n: int, layer: int) -> None:
        attend, expert = self.layers[layer]
        self._enqueue_attention(stream, n, layer, attend)
        self._between(stream, n, expert.hyper)
        self._enqueue_experts(stream, n, layer, expert)
        after = self.layers[layer + 1 : layer + 2]
        self._between(stream, n, after[0][0].hyper if after else self.head)

    def enqueue_head(self, stream: Stream, n: int) -> None:
        g = self.geometry
        hyper.hyper_head(
            stream, self.h, self.part, self.X, self.head.norm, self.head.scale, self.head.base,
            self.step.pos, rows=n, streams=g.streams, width=g.width, hyper_eps=g.hyper_eps,
            rms_eps=g.rms_eps,
        )  # fmt: skip
        self._quantise(stream, n, self.h, self.h_blocks, [self.output])
        self._product(stream, n, self.logits, self.output, self.h, self.h_blocks)

    def _between(self, stream: Stream, n: int, after: Hyper) -> None:
        """The streams take a sublayer's result, and meet the next one's function."""
        g, fn = self.geometry, after.fn
        hyper.hyper_post_product(
            stream, self.part, fn.words, self.X, self.y, self.post, self.M, self.step.pos,
            rows=n, streams=g.streams, width=g.width, Z=fn.n_out, half=fn.half,
        )  # fmt: skip

    def _before(self, stream: Stream, n: int, w: Hyper) -> None:
        """The streams to the sublayer's input h."""
        g = self.geometry
        hyper.hyper_pre(
            stream, self.h, self.post, self.M, self.part, self.X, w.norm, w.scale, w.base,
            self.step.pos, rows=n, streams=g.streams, width=g.width, hyper_eps=g.hyper_eps,
            rms_eps=g.rms_eps, iterations=g.sinkhorn_iterations,
        )  # fmt: skip

    def _enqueue_attention(self, stream: Stream, n: int, layer: int, w: Attention) -> None:
        g, state, step, layout = self.geometry, self.state, self.step, self.state.layout
        ratio, pairs = g.ratios[layer], g.rope_dim // 2
        self._before(stream, n, w.hyper)
        self._quantise(stream, n, self.h, self.h_blocks, [w.inputs])
        self._product(stream, n, self.inputs, w.inputs, self.h, self.h_blocks)
        stride = pad(w.inputs.n_out)
        if w.pooled:
            self._product(stream, n, self.pooled, w.pooled, self.h, self.h_blocks)
        norm.rmsnorm(
            stream, self.qr, self.inputs, w.q_norm,
            n_rows=n, dim=g.q_rank, stride=stride, eps=g.rms_eps,
        )  # fmt: skip
        rows.kv_push(
            stream, state.ring(layer), step.pos, step.lane, self.inputs + 4 * g.q_rank, w.kv_norm,
            self.turns, form=layout.kv, n_rows=n, lane_stride=state.lane_bytes,
            capacity=layout.capacity, stride=stride, pairs=pairs, turn_set=1 if ratio else 0,
            eps=g.rms_eps,
        )  # fmt: skip
        if w.pooled:
            self._compress(stream, n, layer, w)
        wanted = [w.q, w.indexer.q] if w.indexer else [w.q]
        self._quantise(stream, n, self.qr, self.qr_blocks, wanted)
        self._product(stream, n, self.q, w.q, self.qr, self.qr_blocks)
        if w.indexer:
            self._select(stream, n, layer, w)
        paged = {}
        if ratio:
            paged = {
                "ratio": ratio, "pool": state.pool, "page_bytes": state.page_stride,
                "table": state.table, "pages_per_lane": state.pages_per_lane,
                "page_offset": layout.kv_offset[layer], "per_page": g.page_tokens // ratio,
            }  # fmt: skip
        if w.indexer:
            paged |= {"chosen": self.chosen, "top_k": g.index_top_k}
        attention.attention(
            stream, self.form, self.o, self.q, partial=self.partial, stats=self.stats,
            pos=step.pos, lane=step.lane, turns=self.turns, turn_set=1 if ratio else 0,
            sinks=w.sinks, ring=state.ring(layer), lane_bytes=state.lane_bytes,
            capacity=layout.capacity, window=g.window, n_rows=n, n_slots=self.n_slots,
            eps=g.rms_eps, **paged,
        )  # fmt: skip
        self._quantise(stream, n, self.o, self.o_blocks, [w.out_a])
        self._product(stream, n, self.low, w.out_a, self.o, self.o_blocks, groups=g.out_groups)
        self._quantise(stream, n, self.low, self.low_blocks, [w.out_b])
        self._product(stream, n, self.y, w.out_b, self.low, self.low_blocks)

    def _compress(self, stream: Stream, n: int, layer: int, w: Attention) -> None:
        """Columns of `pooled`: values and gates, then the indexer's, then weights of its heads."""
        g, state, layout = self.geometry, self.state, self.state.layout
        assert w.pooled is not None
        stride, ratio = pad(w.pooled.n_out), g.ratios[layer]
        pages = compress.Pages(
            state.pool, state.page_stride, state.table, state.pages_per_lane, g.page_tokens
        )
        kind = 0 if ratio == 4 else 2
        c = layout.compressors[kind]
        main = compress.Compressor(
            layout.kv, int(self.pooled), self.pooled + 4 * c.width, w.ape, w.norm,
            state.input(kind, layer), c.capacity, layout.kv_offset[layer],
        )  # fmt: skip
        indexed = None
        if w.indexer:
            i, at = layout.compressors[1], 2 * c.width
            indexed = compress.Compressor(
                layout.index, self.pooled + 4 * at, self.pooled + 4 * (at + i.width),
                w.indexer.ape, w.indexer.norm, state.input(1, layer), i.capacity,
                layout.index_offset[layer],
            )  # fmt: skip
        compress.compress(
            stream, self.step.pos, self.step.lane, self.turns, pages, main, indexed, n_rows=n,
            ratio=ratio, stride=stride, index_stride=stride, pairs=g.rope_dim // 2, eps=g.rms_eps,
        )  # fmt: skip

    def _select(self, stream: Stream, n: int, layer: int, w: Attention) -> None:
        """4.8: rows to `chosen`, for rows of the pass that see more than top_k."""
        g, state, step, layout = self.geometry, self.state, self.step, self.state.layout
        assert w.indexer is not None and w.pooled is not None
        self._product(stream, n, self.iq, w.indexer.q, self.qr, self.qr_blocks)
        heads = {"heads": g.index_heads, "dim": g.index_dim, "top_k": g.index_top_k}
        asked = {"n_rows": n, "stride": pad(w.indexer.q.n_out), "pairs": g.rope_dim // 2} | heads
        weights = self.pooled + 4 * 2 * (layout.compressors[0].width + layout.compressors[1].width)
        scored = {
            "n_rows": n, "n_blocks": 2 * self.n_sms, "stride": self.n_keys,
            "w_stride": pad(w.pooled.n_out), "page_bytes": state.page_stride,
            "offset": layout.index_offset[layer], "pages_per_lane": state.pages_per_lane,
            "per_page": g.page_tokens // 4,
        } | heads  # fmt: skip
        where = (state.pool, state.table, step.pos, step.lane)
        if self.fp4:
            query.index_query(
                stream, self.codes, self.scales, self.iq, self.turns, step.pos, **asked
            )
            _, exponents = layout.index.offsets(g.page_tokens // 4)
            score.index_score(
                stream, self.scores, self.codes, self.scales, weights, *where,
                exponents=exponents, **scored,
            )  # fmt: skip
        else:
            query.index_query_floats(stream, self.codes, self.iq, self.turns, step.pos, **asked)
            score.index_score_floats(stream, self.scores, self.codes, weights, *where, **scored)
        choose.index_choose(
            stream, self.chosen, self.kept, self.kept_at, self.rows_arrived, self.scores, step.pos,
            n_rows=n, stride=self.n_keys, top_k=g.index_top_k,
        )  # fmt: skip

    def _enqueue_experts(self, stream: Stream, n: int, layer: int, w: Experts) -> None:
        g, step, k = self.geometry, self.step, self.geometry.n_experts_used
        self._before(stream, n, w.hyper)
        gate, up, down = w.routed
        self._quantise(stream, n, self.h, self.h_blocks, [w.router, *w.routed[:2], *w.shared[:2]])
        self._product(stream, n, self.router, w.router, self.h, self.h_blocks)
        moe.run_choose(
            stream, self.expert, self.share, self.items, self.router, step.token, step.pos,
            bias=w.bias, table=w.table, n_rows=n, stride=pad(g.n_experts),
            n_experts=g.n_experts, k=k, scale=g.expert_scale,
        )  # fmt: skip
        sizes = {"n_rows": n, "n_experts": g.n_experts, "k": k}
        h, mid = self.h_blocks, self.mid_blocks
        shared_up = (w.shared[0].w, w.shared[0].s, w.shared[1].w, w.shared[1].s)
        routed_up = None
        if isinstance(gate, Q8) and isinstance(up, Q8):
            routed_up = (gate.w, gate.s, up.w, up.s)
        elif isinstance(gate, LowBit) and isinstance(up, LowBit) and gate.quant is up.quant:
            experts.run_up(
                stream, self.mid, gate.quant, gate.data, up.data, h.q_256, h.d_256, self.items,
                self.share, n_rows=n, n_items=moe.items_most(n, k, g.n_experts), n_in=g.width,
                width=g.expert_width, stride=pad(g.expert_width), clamp=g.expert_clamp[layer],
            )  # fmt: skip
        else:
            raise ModelFileError(f"gate and up of layer {layer} are of two types, expected one")
        moe.run_up(
            stream, self.mid, routed_up, shared_up, h.q, h.d, self.items, self.share, step.pos,
            **sizes, n_in=g.width, n_out=g.expert_width, stride=pad(g.expert_width),
            clamp=g.expert_clamp[layer], shared_clamp=g.shared_clamp[layer],
        )  # fmt: skip
        self._quantise(stream, n * (k + 1), self.mid, mid, [down, w.shared[2]])
        routed_down = None
        if isinstance(down, Q8):
            routed_down = (down.w, down.s)
        else:
            experts.run_down(
                stream, self.parts, down.quant, down.data, mid.q_256, mid.d_256,
                (self.items[0], self.items[2], self.items[2]), n_rows=n * (k + 1),
                n_items=moe.items_most(n, k, g.n_experts), n_in=g.expert_width, width=g.width,
                stride=pad(g.width),
            )  # fmt: skip
        moe.run_down(
            stream, self.parts, routed_down, (w.shared[2].w, w.shared[2].s), mid.q, mid.d,
            self.items, step.pos, **sizes, n_in=g.expert_width, n_out=g.width, stride=pad(g.width),
        )  # fmt: skip
        moe.run_combine(stream, self.y, self.parts, step.pos, n_rows=n, k=k, stride=pad(g.width))

    # -- parts ---------------------------------------------------------------------------------

    def _quantise(self, stream: Stream, n: int, x: Buffer, to: Blocks, wanted: list[Any]) -> None:
        """The int8 forms of x [n, to.n] that products want."""
        stride = x.shape[1]
        narrow = any(isinstance(w, Q8) for w in wanted)
        wide = any(isinstance(w, LowBit) for w in wanted)
        if narrow and wide:
            activation.quantise_both(
                stream, to.q, to.d, to.q_256, to.d_256, x, n_rows=n, n=to.n, stride=stride
            )
        elif narrow:
            activation.quantise(stream, to.q, to.d, x, n_rows=n, n=to.n, stride=stride)
        elif wide:
            activation.quantise(
                stream, to.q_256, to.d_256, x, n_rows=n, n=to.n, block=256, stride=stride
            )

    def _product(
        self, stream: Stream, n: int, y: Buffer, w: Q8 | Floats, x: Buffer, blocks: Blocks, *,
        groups: int = 1,
    ) -> None:  # fmt: skip
        """y [n, outputs padded to 16] = W x."""
        if isinstance(w, Q8):
            product.product(
                stream, y, w.w, w.s, blocks.q, blocks.d, n_rows=n, n_out=w.n_out, n_in=w.n_in,
                groups=groups,
            )  # fmt: skip
        else:
            assert groups == 1, "a grouped product of floats"
            floats.product(
                stream, y, w.words, x, self.step.n_rows, self.sums, self.arrived, rows=n,
                n_out=w.n_out, n_in=w.n_in, half=w.half,
            )  # fmt: skip


def check(g: Geometry) -> None:
    """Raises ModelFileError for sizes that the kernels were not written for."""
    reason = _beyond(g)
    if reason is not None:
        raise ModelFileError(f"{reason} on the GPU; run this model on the CPU")


def _beyond(g: Geometry) -> str | None:
    if g.streams not in (1, 2, 4) or g.width * g.streams % hyper.SLICE:
        return f"{g.streams} streams of {g.width}, expected 1, 2 or 4 whose product divides by 128"
    if g.width % 64 or g.q_rank % 32:
        return f"width {g.width} and q rank {g.q_rank}, expected multiples of 64 and of 32"
    if 4 in g.ratios and g.q_rank % 64:
        return f"q rank {g.q_rank} before an indexer, expected a multiple of 64"
    if g.head_dim % 16 or g.rope_dim % 8 or g.index_dim % 16:
        return f"heads of {g.head_dim} and {g.index_dim}, expected multiples of 16"
    if g.n_heads * g.head_dim // g.out_groups % 32 or g.out_rank % 16 or g.expert_width % 32:
        return "output groups or experts whose widths do not divide by 32"
    if g.n_experts > 256:
        return f"{g.n_experts} experts, expected at most 256"
    return None
