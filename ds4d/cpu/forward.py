"""The forward pass as a program: which kernels run, on what, and where all threads must meet.

Follows spec/model.md 4 in its order. Whose rows a pass computes, and at which positions, stands in
`Step`; what a kernel does, and in which order it adds, is written beside the kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arena import Activation, Arena, Step
from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels import (
    activation,
    attention,
    compress,
    embed,
    hyper,
    index,
    moe,
    norm,
    product,
    rope,
)
from ds4d.cpu.program import Program
from ds4d.cpu.state import table
from ds4d.cpu.weights import Weight, floats, pack, packed_bytes, vector
from ds4d.errors import ModelFileError
from ds4d.model.layout import pad
from ds4d.model.quants import Quant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from ds4d.cpu.jit import Kernel
    from ds4d.cpu.state import State
    from ds4d.model.geometry import Geometry
    from ds4d.model.layout import Compressor
    from ds4d.model.quants import Tensor

    F32 = npt.NDArray[np.float32]
    I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pool:
    """A compressor of one layer: its ring of inputs, and where its rows go."""

    kind: Compressor
    rings: F32  # [lanes, 2, capacity, width]
    paged: I64


class Forward:
    """Builds the program. `program` is complete, and to be assembled once kernels are prepared;
    operations of layer i are layer_starts[i] .. layer_starts[i + 1], then comes the head."""

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        state: State,
        *,
        n_threads: int,
        exact: bool,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self.geometry, self.state, self.exact = geometry, state, exact
        self.tensors = tensors
        self.step, self.program = Step(geometry), Program()
        self.arena = Arena(
            geometry, state.layout, pages_per_lane=state.pages_per_lane, n_threads=n_threads
        )
        self.weight_bytes = 0
        self._frequencies = [zeros((geometry.rope_dim // 2,), np.float32) for _ in range(2)]
        for array, values in zip(self._frequencies, geometry.frequencies, strict=True):
            array[:] = values
        self.query_form = table(state.layout.index, 1)

        self.layer_starts: list[int] = []
        self._embedding()
        for layer in range(geometry.n_layers):
            self.layer_starts.append(len(self.program))
            self._attention(layer)
            self._moe(layer)
            if progress is not None:
                progress("weights", (layer + 1) / geometry.n_layers)
        self.layer_starts.append(len(self.program))
        self._head()

    # -- 4.1, 4.2 ------------------------------------------------------------------------------

    def _embedding(self) -> None:
        a, g, step = self.arena, self.geometry, self.step
        tensor = self.tensors["token_embd.weight"]
        half = tensor.quant is Quant.F16
        table = floats(tensor, Quant.F16 if half else Quant.F32)
        if not np.shares_memory(table, tensor.data):
            self.weight_bytes += table.nbytes
        plain, yarn = self._frequencies
        self.program.add(
            rope.angles,
            step=step.words,
            pos=step.pos,
            plain=plain,
            yarn=yarn,
            pairs=g.rope_dim // 2,
            turns=a.turns,
        )
        self.program.add(
            embed.embed_f16 if half else embed.embed_f32,
            step=step.words,
            token=step.token,
            table=table,
            width=g.width,
            X=a.X.x,
            streams=g.streams,
            stored=a.width,
        )
        self.program.barrier()

    # -- 4.3, 4.4 ------------------------------------------------------------------------------

    def _hyper_pre(self, layer: int, sublayer: str) -> None:
        """Streams X to the normalised sublayer input h, and to what `_hyper_post` needs."""
        blk, a = f"blk.{layer}.", self.arena
        more = {"iterations": self.geometry.sinkhorn_iterations, "post": a.post, "M": a.M}
        norm_name = f"{blk}{sublayer}_norm.weight"
        self._hyper(hyper.hyper_pre, f"{blk}hc_{sublayer}", norm_name, more)

    def _hyper(self, kernel: Kernel, prefix: str, norm_name: str, more: dict[str, Any]) -> None:
        a, g = self.arena, self.geometry
        fn = self._pack(prefix + "_fn.weight")
        self._quantised(a.X, fn)
        self._product(fn, a.X, a.z)
        self.program.barrier()
        self.program.add(
            kernel,
            step=self.step.words,
            X=a.X.x,
            n=g.streams,
            width=g.width,
            stored=a.width,
            z=a.z,
            z_stride=a.z.shape[1],
            scale=self._vector(prefix + "_scale.weight"),
            base=self._vector(prefix + "_base.weight"),
            hyper_eps=g.hyper_eps,
            rms_eps=g.rms_eps,
            w=self._vector(norm_name),
            act=a.h.table,
            **more,
        )
        self.program.barrier()

    def _hyper_post(self) -> None:
        a = self.arena
        self.program.add(
            hyper.hyper_post,
            step=self.step.words,
            X=a.X.x,
            n=self.geometry.streams,
            stored=a.width,
            y=a.y,
            post=a.post,
            M=a.M,
        )
        self.program.barrier()

    # -- 4.6 to 4.9 ----------------------------------------------------------------------------

    def _attention(self, layer: int) -> None:
        a, g, step, program = self.arena, self.geometry, self.step, self.program
        blk, ratio, ring = f"blk.{layer}.", g.ratios[layer], self.state.ring(layer)
        main, indexer = self._pools(layer)
        turning = {"turns": a.turns, "pairs": g.rope_dim // 2, "turn_set": 1 if ratio else 0}
        rows = {"step": step.words, "pos": step.pos, "lane": step.lane}
        self._hyper_pre(layer, "attn")

        self._product(self._pack(blk + "attn_q_a.weight"), a.h, a.qa)
        self._product(self._pack(blk + "attn_kv.weight"), a.h, a.kv)
        if main:
            self._pool_inputs(main, blk + "attn_compressor_", a.u, a.g)
        if indexer:
            self._pool_inputs(indexer, blk + "indexer_compressor_", a.iu, a.ig)
            self._product(self._pack(blk + "indexer.proj.weight"), a.h, a.iw)
        program.barrier()

        program.add(
            norm.rmsnorm,
            step=step.words,
            x=a.qa,
            stride=a.qa.shape[1],
            w=self._vector(blk + "attn_q_a_norm.weight"),
            act=a.qr.table,
            n=g.q_rank,
            eps=g.rms_eps,
        )
        program.add(
            attention.kv_push,
            **rows,
            kv=a.kv,
            stride=a.kv.shape[1],
            w=self._vector(blk + "attn_kv_a_norm.weight"),
            eps=g.rms_eps,
            **turning,
            ring=ring,
        )
        if main:
            self._push(main, blk + "attn_compressor_ape.weight", a.u, a.g)
        if indexer:
            self._push(indexer, blk + "indexer_compressor_ape.weight", a.iu, a.ig)
        program.barrier()

        q_b = self._pack(blk + "attn_q_b.weight")
        self._product(q_b, a.qr, a.q, stored=a.head_stored)
        if main:
            self._emit(main, blk + "attn_compressor_norm.weight")
        if indexer:
            self._emit(indexer, blk + "indexer_compressor_norm.weight")
            q_b = self._pack(blk + "indexer.attn_q_b.weight")
            self._product(q_b, a.qr, a.iq, stored=pad(g.index_dim), when=index.SELECTING)
        program.barrier()
        if indexer:
            self._select(indexer)

        program.add(
            attention.attend,
            **rows,
            q=a.q,
            heads=g.n_heads,
            stored=a.head_stored,
            eps=g.rms_eps,
            **turning,
            scale=g.head_dim**-0.5,
            sinks=self._vector(blk + "attn_sinks.weight"),
            window=g.window,
            ring=ring,
            ratio=ratio,
            paged=main.paged if main else ring,
            chosen=a.chosen,
            top_k=g.index_top_k if indexer else 0,
            o=a.o.x,
            o_stride=a.o.width,
            tiles=a.tiles,
        )
        program.barrier()
        o_a = self._pack(blk + "attn_output_a.weight")
        self._quantised(a.o, o_a)
        self._product(o_a, a.o, a.low.x, step_in=o_a.n_in)
        program.barrier()
        o_b = self._pack(blk + "attn_output_b.weight")
        self._quantised(a.low, o_b)
        self._product(o_b, a.low, a.y)
        program.barrier()
        self._hyper_post()

    def _pools(self, layer: int) -> tuple[Pool | None, Pool | None]:
        """The compressor of `layer` and its indexer's, if it has them."""
        state = self.state

        def pool(i: int, *, index: bool = False) -> Pool:
            kind = state.layout.compressors[i]
            rings = state.inputs[i][kind.layers.index(layer)]
            return Pool(kind, rings, state.paged(layer, index=index))

        match self.geometry.ratios[layer]:
            case 4:
                return pool(0), pool(1, index=True)
            case 128:
                return pool(2), None
            case _:
                return None, None

    def _pool_inputs(self, pool: Pool, prefix: str, u: F32, gate: F32) -> None:
        for name, out in (("kv", u), ("gate", gate)):
            weight = self._pack(f"{prefix}{name}.weight")
            self._product(weight, self.arena.h, out, stored=pool.kind.stored)

    def _push(self, pool: Pool, name: str, u: F32, gate: F32) -> None:
        c, step, values = pool.kind, self.step, floats(self.tensors[name])
        ape = zeros((c.ratio, c.width), np.float32)
        for s in range(c.series):
            ape[:, s * c.stored : s * c.stored + c.dim] = values[:, s * c.dim : (s + 1) * c.dim]
        self.weight_bytes += ape.nbytes
        self.program.add(
            compress.compress_push,
            step=step.words,
            pos=step.pos,
            lane=step.lane,
            u=u,
            g=gate,
            stride=u.shape[1],
            ape=ape,
            ratio=c.ratio,
            rings=pool.rings,
            capacity=c.capacity,
            width=c.width,
        )

    def _emit(self, pool: Pool, norm_name: str) -> None:
        c, step, g = pool.kind, self.step, self.geometry
        self.program.add(
            compress.compress_emit,
            step=step.words,
            pos=step.pos,
            lane=step.lane,
            rings=pool.rings,
            capacity=c.capacity,
            width=c.width,
            ratio=c.ratio,
            stored=c.stored,
            w=self._vector(norm_name),
            eps=g.rms_eps,
            turns=self.arena.turns,
            pairs=g.rope_dim // 2,
            paged=pool.paged,
        )

    def _select(self, indexer: Pool) -> None:
        """4.8: rows to `chosen`, for rows of the step that see more than top_k."""
        a, g, step, program = self.arena, self.geometry, self.step, self.program
        queries = {
            "codes": a.query_codes,
            "floats": a.query_codes,
            "sums": a.query_sums,
            "scales": a.query_scales,
            "groups": a.index_groups,
        }
        program.add(
            index.index_query,
            step=step.words,
            q=a.iq,
            heads=g.index_heads,
            stored=pad(g.index_dim),
            turns=a.turns,
            pairs=g.rope_dim // 2,
            form=self.query_form,
            **queries,
        )
        program.barrier()
        program.add(
            index.index_score,
            step=step.words,
            pos=step.pos,
            lane=step.lane,
            w=a.iw,
            **queries,
            paged=indexer.paged,
            scores=a.scores,
            stride=a.scores.shape[1],
            top_k=g.index_top_k,
            factor=(g.index_heads * g.index_dim) ** -0.5,
        )
        program.barrier()
        program.add(
            index.index_choose,
            step=step.words,
            pos=step.pos,
            scores=a.scores,
            stride=a.scores.shape[1],
            top_k=g.index_top_k,
            chosen=a.chosen,
            counts=a.counts,
        )
        program.barrier()

    # -- 4.10 ----------------------------------------------------------------------------------

    def _moe(self, layer: int) -> None:
        a, g, step, program = self.arena, self.geometry, self.step, self.program
        blk, k = f"blk.{layer}.", g.n_experts_used
        self._hyper_pre(layer, "ffn")
        self._product(self._pack(blk + "ffn_gate_inp.weight"), a.h, a.router)
        program.barrier()
        bias, table = self._routing(layer)
        program.add(
            moe.route,
            step=step.words,
            z=a.router,
            stride=a.router.shape[1],
            n_experts=g.n_experts,
            k=k,
            bias=bias,
            table=table,
            token=step.token,
            scale=g.expert_scale,
            expert=a.expert,
            weight=a.share,
        )
        program.barrier()
        program.add(
            moe.group, step=step.words, expert=a.expert, k=k, n_experts=g.n_experts, lists=a.lists
        )
        program.barrier()

        gate, up, down = (
            self._pack(f"{blk}ffn_{name}_exps.weight") for name in ("gate", "up", "down")
        )
        shared_gate, shared_up, shared_down = (
            self._pack(f"{blk}ffn_{name}_shexp.weight") for name in ("gate", "up", "down")
        )
        for weight in (gate, up, shared_gate, shared_up):
            a.h.want(weight.block)
        program.add(
            moe.experts_up,
            lists=a.lists,
            n_experts=g.n_experts,
            k=k,
            weight=a.share,
            h=a.h.table,
            width=g.expert_width,
            mid=a.mid.table,
            clamp=g.expert_clamp[layer],
            shared_clamp=g.shared_clamp[layer],
            gate=gate,
            up=up,
            shared_gate=shared_gate,
            shared_up=shared_up,
        )
        program.barrier()
        self._quantised(a.mid, down, shared_down, per_row=k + 1)
        program.add(
            moe.experts_down,
            step=step.words,
            lists=a.lists,
            n_experts=g.n_experts,
            k=k,
            mid=a.mid.table,
            y=a.y,
            stride=a.width,
            down=down,
            shared_down=shared_down,
        )
        program.barrier()
        self._hyper_post()

    def _routing(self, layer: int) -> tuple[F32 | None, npt.NDArray[np.int32] | None]:
        """The bias of a scored layer, if it has one, or the table [V, k] of a hashed one."""
        g, blk = self.geometry, f"blk.{layer}."
        if not g.hashed(layer):
            name = blk + "exp_probs_b.bias"
            return self._vector(name) if name in self.tensors else None, None
        name = blk + "ffn_gate_tid2eid.weight"
        table = self.tensors[name].data.view("<i4").reshape(-1, g.n_experts_used)
        outside = np.argwhere((table < 0) | (table >= g.n_experts))
        if len(outside):
            token, place = outside[0].tolist()
            raise ModelFileError(
                f"tensor {name} names expert {table[token, place]} for token {token}, "
                f"expected 0..{g.n_experts - 1}"
            )
        return None, table

    # -- 4.12 ----------------------------------------------------------------------------------

    def _head(self) -> None:
        self._hyper(hyper.hyper_head, "output_hc", "output_norm.weight", {})
        self._product(self._pack("output.weight"), self.arena.h, self.arena.logits)
        self.program.barrier()

    # -- parts ---------------------------------------------------------------------------------

    def _product(
        self,
        weight: Weight,
        x: Activation,
        out: F32,
        *,
        stored: int = 0,
        step_in: int = 0,
        when: int = 0,
    ) -> None:
        """out = W x. Groups read the input `step_in` apart and write `stored` apart (0: as many as
        they have)."""
        x.want(weight.block)
        if weight.groups == 1:
            stored = pad(weight.n_out)  # there is nothing behind to run into
        self.program.add(
            product.product,
            step=self.step.words,
            weight=weight,
            acts=x.tables(weight.groups, step_in),
            out=out,
            stride=out.shape[1],
            stored=stored or weight.n_out,
            rows=self.step.identity,
            when=when,
        )

    def _quantised(self, x: Activation, *weights: Weight, per_row: int = 1) -> None:
        """Make the int8 forms that `weights` want of what was just written."""
        for weight in weights:
            x.want(weight.block)
        if x.blocks:
            self.program.add(
                activation.quantise, step=self.step.words, act=x.table, per_row=per_row
            )
            self.program.barrier()

    def _pack(self, name: str) -> Weight:
        tensor = self.tensors[name]
        groups, columns = cut(self.geometry, tensor)
        weight = pack(tensor, groups=groups, columns=columns, exact=self.exact)
        self.weight_bytes += weight.n_bytes
        return weight

    def _vector(self, name: str) -> F32:
        values = vector(self.tensors[name])
        self.weight_bytes += values.nbytes
        return values


def cut(geometry: Geometry, tensor: Tensor) -> tuple[int, tuple[int, int] | None]:
    """`groups` and `columns` for `weights.pack`: a group is what is stored padded to 16, or reads
    an input of its own."""
    g, name = geometry, tensor.name.removesuffix(".weight")
    if name.endswith("_fn"):  # of hyper-connections: all streams, one behind the other
        return 1, (g.width, pad(g.width))
    if name.endswith("_exps"):
        return g.n_experts, None
    if name.endswith("attn_output_a"):
        return g.out_groups, None
    if name.endswith(("compressor_kv", "compressor_gate")):
        return tensor.shape[0] // (g.index_dim if "indexer" in name else g.head_dim), None
    if name.endswith("indexer.attn_q_b"):
        return g.index_heads if g.index_dim % 16 else 1, None
    if name.endswith("attn_q_b"):
        return g.n_heads if g.head_dim % 16 else 1, None
    return 1, None


def weight_bytes(geometry: Geometry, tensors: Mapping[str, Tensor], *, exact: bool = False) -> int:
    """What the weights will hold in memory, packed. Allocates nothing."""
    total = 0
    for name, tensor in tensors.items():
        if name == "token_embd.weight":
            total += 0 if tensor.quant in (Quant.F16, Quant.F32) else 4 * math.prod(tensor.shape)
        elif tensor.quant is Quant.I32:
            continue  # the file's own bytes
        elif name.endswith("_ape.weight"):
            dim = geometry.index_dim if "indexer" in name else geometry.head_dim
            total += 4 * math.prod(tensor.shape) // dim * pad(dim)
        elif len(tensor.shape) == 1:
            total += 4 * pad(tensor.shape[0])
        else:
            groups, columns = cut(geometry, tensor)
            total += packed_bytes(tensor, groups=groups, columns=columns, exact=exact)
    return total
