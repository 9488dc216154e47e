"""What the training of ds4-tiny costs on a GPU, part by part: `python -m ops.tiny.probe`.

Compares every kernel with plain torch, times it in a few tile sizes and goes on with the best (to
be written into `TILES` of kernels.py, sinkhorn.py and middle.py), then times layers, the head and a
whole forward and backward of 4 rows of 8,192 tokens, captured as a CUDA graph, with the kernels
that take longest. A part that fails prints why, and the next one begins. Other processes compile
the tile sizes while this one compiles the layers.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ops.tiny import kernels, middle, model, sinkhorn
from ops.tiny.kernels import BLOCK, Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

ROWS, LENGTH = 4, 8192
COMPILERS = 10  # processes
SHOWN = 40  # kernels of the table
LAYERS = {r: model.TINY.ratios.count(r) for r in (0, 4, 128)}
began = time.monotonic()


def _tiles(*sizes: tuple[int, int, int, int]) -> list[Tile]:
    return [Tile(tokens=n, keys=k, warps=w, stages=s) for n, k, w, s in sizes]


CANDIDATES = {  # the first are those of kernels.TILES; all without spills
    "attend": _tiles((8, 32, 4, 3), (16, 32, 8, 3), (8, 64, 4, 3)),
    "attend_q": _tiles((8, 32, 4, 3), (16, 32, 8, 3), (8, 64, 4, 3)),
    "attend_raw": _tiles((8, 64, 4, 3), (4, 64, 4, 4), (8, 64, 4, 4), (8, 128, 8, 3)),
    "attend_rows": _tiles((8, 64, 4, 3), (4, 64, 4, 3), (8, 64, 4, 4)),
    "scores": _tiles((8, 64, 8, 3), (4, 64, 4, 3), (16, 64, 8, 3)),
    "choose": _tiles((4, 256, 4, 1), (2, 256, 2, 1)),
    "align": _tiles((8, 32, 4, 3), (8, 64, 4, 3)),
    "scores_q": _tiles((4, 64, 4, 3), (4, 32, 4, 3), (8, 32, 8, 3)),
    "scores_keys": _tiles((8, 64, 4, 3), (4, 64, 4, 3), (4, 64, 4, 4)),
}
STEPS = {  # of the largest sizes that do not spill
    "forward": [(16, 64, 4, 128), (16, 64, 8, 128), (32, 32, 4, 128), (32, 64, 8, 128)],
    "backward": [(16, 64, 8, 128), (16, 64, 4, 168), (16, 32, 4, 128), (32, 32, 4, 168)],
}
MIDDLES = [(8, 4), (16, 8), (16, 4)]  # both ways; 8 channels a thread, then 16
WITHIN = {  # which tiles an operation uses
    "attend": ("attend",), "attend_backward": ("attend_q", "attend_raw", "attend_rows"),
    "scores": ("scores",), "choose": ("choose",), "align": ("align",),
    "align_backward": ("scores_q", "scores_keys"),
}  # fmt: skip


@contextmanager
def part(name: str) -> Iterator[None]:
    print(f"\n== {name} [{time.monotonic() - began:.0f} s]", flush=True)
    try:
        yield
    except Exception:
        traceback.print_exc(limit=-6, file=sys.stdout)
        print(f"FAILED: {name}", flush=True)


def packed(n_rows: int, length: int, kind: str) -> Tensor:
    """The dialogue of each block [n_rows, length / 128]: of 300 to 900 tokens, or the whole row."""
    rng = random.Random(3)
    rows = []
    for _ in range(n_rows):
        row: list[int] = []
        while len(row) < length // BLOCK:
            row += [row[-1] + 1 if row else 0] * -(-rng.randint(300, 900) // BLOCK)
        rows.append(row[: length // BLOCK])
    made = torch.tensor(rows, dtype=torch.int32, device="cuda")
    return made if kind == "packed" else torch.zeros_like(made)


def inputs(ratio: int, n_rows: int, length: int, kind: str) -> dict[str, Any]:
    """Random inputs of one layer's attention, as large as they are in the model."""
    g, S = model.TINY, length // ratio if ratio else 0

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    made: dict[str, Any] = {
        "q": normal(n_rows, length, g.n_heads, g.head_dim),
        "kv": normal(n_rows, length, g.head_dim),
        "rows": normal(n_rows, S, g.head_dim),
        "sinks": normal(g.n_heads, dtype=torch.float32),
        "spans": kernels.spans(packed(n_rows, length, kind)),
        "ratio": ratio,
    }
    if ratio == 4:
        made |= {
            "qi": normal(n_rows, length, g.index_heads, g.index_dim),
            "keys": normal(n_rows, S, g.index_dim),
            "w": normal(n_rows, length, g.index_heads, dtype=torch.float32) / 32,
        }
    return made


def operations(c: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The operations of one layer on `inputs`, each by itself."""
    ops, q, spans, ratio = torch.ops.tiny, c["q"], c["spans"], c["ratio"]
    away, chosen = torch.randn_like(q), spans.new_empty(0)
    made: dict[str, Callable[[], Any]] = {}
    if ratio == 4:
        index = c["qi"], c["keys"], c["w"]
        dense = torch.tensor(False, device="cuda")
        scores = ops.scores(*index, spans)
        chosen = ops.choose(scores, spans, dense, model.TINY.index_top_k)
    heads = c["q"], c["kv"], c["rows"], c["sinks"], chosen, spans
    o, lse, full = ops.attend(*heads, ratio)
    made["attend"] = lambda: ops.attend(*heads, ratio)
    made["attend_backward"] = lambda: ops.attend_backward(away, *heads, o, lse, ratio)
    if ratio == 4:
        loss, target, mass, norm = ops.align(*index, scores, q, c["rows"], full, spans)
        ones = torch.ones_like(loss)
        made["scores"] = lambda: ops.scores(*index, spans)
        made["choose"] = lambda: ops.choose(scores, spans, dense, model.TINY.index_top_k)
        made["align"] = lambda: ops.align(*index, scores, q, c["rows"], full, spans)
        made["align_backward"] = lambda: ops.align_backward(
            ones, *index, scores, target, mass, norm, spans
        )
    return made


def step_inputs(n: int, f: int = 24) -> tuple[Any, ...]:
    """Of `sinkhorn.step` for n tokens; f = 0: of its first line alone."""
    d = model.TINY.width
    shapes = (n, 4, d), (n, d), (n, 4), (n, 4, 4), (f, 4 * d), (1,), (4,), (d,)
    X, y, post, M, fn, *rest = (torch.randn(s, device="cuda") for s in shapes)
    return X.bfloat16(), y.bfloat16(), post, M.softmax(1), fn / 32, *rest, 1e-6, 1e-6


def step_backward(args: tuple[Any, ...]) -> Callable[[], Any]:
    out, h, z, gram = torch.ops.tiny.step(*args)
    grads = [torch.randn_like(x) for x in (out, h, z)]
    return lambda: torch.ops.tiny.step_backward(*grads, *args[:8], out, z, gram, *args[8:])


def middle_inputs(n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    """Of `middle.middle` for n tokens, some beyond the clamp."""
    g = model.TINY
    n_experts, clamp = g.n_experts + 1, g.expert_clamp[0]
    ab = torch.randn(n, 2 * n_experts * g.expert_width, device="cuda") * clamp / 2
    return ab.to(dtype), torch.rand(n, n_experts, device="cuda"), clamp, True


def middle_backward(args: tuple[Any, ...]) -> Callable[[], Any]:
    grad = torch.randn_like(torch.ops.tiny.middle(*args))
    return lambda: torch.ops.tiny.middle_backward(grad, *args[:3])


# --- compiling ahead -----------------------------------------------------------------------------


def _compile(what: tuple[str, Any]) -> str:
    """In another process: have Triton's cache filled for one tile size; what went wrong, or ""."""
    name, tile = what
    try:
        if name in STEPS:
            sinkhorn.TILES[name] = tile
            step_backward(step_inputs(256))()
        elif name == "middle":
            middle.TILES.update(forward=tile, backward=tile)
            middle_backward(middle_inputs(256))()
        else:
            kernels.TILES[name] = tile
            op = next(op for op, names in WITHIN.items() if name in names)
            ratios = (
                (4,) if not op.startswith("attend") else (4, 128) if "rows" in name else (0, 4, 128)
            )
            for ratio in ratios:
                operations(inputs(ratio, 1, LENGTH, "packed"))[op]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{name} {tile}: {error}"[:600]
    return ""


# --- correctness ---------------------------------------------------------------------------------


def apart(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def check_attention(ratio: int, kind: str, is_dense: bool) -> None:
    c = inputs(ratio, 2, 1024, kind)
    names = [n for n in ("q", "kv", "rows", "sinks", "qi", "keys", "w") if n in c and c[n].numel()]
    dense, away = torch.tensor(is_dense, device="cuda"), torch.randn_like(c["q"])
    found = []
    for way, dtype in (
        (kernels.reference, torch.float32), (kernels.attend, None), (kernels.reference, None)
    ):  # fmt: skip
        v = {n: c[n].to(dtype or c[n].dtype, copy=True).requires_grad_() for n in names}
        index = (v["qi"], v["keys"], v["w"]) if ratio == 4 else None
        o, loss = way(
            v["q"], v["kv"], v.get("rows"), v["sinks"], c["spans"], ratio, index,
            model.TINY.index_top_k, dense,
        )  # fmt: skip
        grads = torch.autograd.grad((o.float() * away).sum() + 1000 * loss, list(v.values()))
        found.append({"o": o, "loss": loss, **dict(zip(names, grads, strict=True))})
    exact, got, plain = found
    text = ", ".join(
        f"{n} {apart(got[n], x):.1e} ({apart(plain[n], x):.1e})" for n, x in exact.items()
        if ratio == 4 or n != "loss"
    )  # fmt: skip
    print(f"ratio {ratio}, {kind}{', dense' if is_dense else ''}: {text}", flush=True)


def check_choice(kind: str) -> None:
    """In rows as long as they are in training, against torch's own selection."""
    k, S = model.TINY.index_top_k, LENGTH // 4
    scores = torch.randn(1, LENGTH, S, device="cuda")
    spans = kernels.spans(packed(1, LENGTH, kind))
    bits = torch.ops.tiny.choose(scores, spans, torch.tensor(False, device="cuda"), k)
    shifts = torch.arange(32, device="cuda", dtype=torch.int32)
    chosen = ((bits[..., None] >> shifts) & 1).flatten(-2).bool()
    t, s = torch.arange(LENGTH, device="cuda"), torch.arange(S, device="cuda")
    first = spans[0].repeat_interleave(BLOCK, 1)[..., None]
    seen = (s * 4 >= first) & (s * 4 + 3 <= t[:, None])
    least = torch.where(seen, scores, -torch.inf).topk(k, -1).values[..., -1:]
    wrong = ((chosen != (scores >= least)) & seen).sum().item()
    print(f"choice, {kind}: {wrong} of {seen.sum().item()} differ", flush=True)


def check_step() -> None:
    """In brackets: torch with the same roundings."""
    names = "X' h z dX dy dpost dM dfn dscale dbase dnorm".split()
    for dtype in (torch.float32, torch.bfloat16):
        args = [a.detach() for a in step_inputs(1000)[:8]]  # the last program has no full tile
        args[0] = args[0].to(dtype)
        found = []
        for way, is_exact in (
            (sinkhorn._step_reference, True), (sinkhorn.step, False),
            (sinkhorn._step_reference, False),
        ):  # fmt: skip
            v = [(a.float() if is_exact else a).clone().requires_grad_() for a in args]
            made = way(*(a[None] for a in v[:4]), *v[4:], 1e-6, 1e-6)
            torch.manual_seed(2)
            total = sum((m * torch.randn(m.shape, device="cuda")).sum() for m in made)
            found.append([*made, *torch.autograd.grad(total, v)])
        far = [
            f"{n} {apart(b, a):.1e} ({apart(c, a):.1e})"
            for n, a, b, c in zip(names, *found, strict=True)
        ]
        print(f"step, streams in {dtype}:", ", ".join(far), flush=True)


def check_middle() -> None:
    """In brackets: torch with the same roundings."""
    for dtype in (torch.float32, torch.bfloat16):
        ab, w, *how = middle_inputs(1000, dtype)  # the last program has no full tile
        away, found = torch.randn(1000, ab.shape[1] // 2, device="cuda"), []
        for way, x in (
            (middle._reference, ab.float()), (middle.middle, ab), (middle._reference, ab)
        ):  # fmt: skip
            v = x.clone().requires_grad_(), w.clone().requires_grad_()
            mid = way(*v, *how)
            found.append([mid, *torch.autograd.grad((mid * away).sum(), v)])
        far = [
            f"{n} {apart(b, a):.1e} ({apart(c, a):.1e})"
            for n, a, b, c in zip(("mid", "dab", "dw"), *found, strict=True)
        ]
        print(f"middle in {dtype}:", ", ".join(far), flush=True)


def check_model() -> None:
    """Losses and gradients with kernels and without, in bf16: they differ by roundings."""
    tiny = model.Tiny().cuda()
    ids = torch.randint(0, tiny.g.n_vocab, (2, 1024), device="cuda")
    owner, dense = packed(2, 1024, "packed"), torch.tensor(False, device="cuda")
    found = []
    for is_on in (True, False):
        sinkhorn._USE_TRITON = is_on
        try:
            total, align = _losses(tiny, ids, owner, dense)
            grads = torch.autograd.grad(total + align, _trained(tiny))
        finally:
            sinkhorn._USE_TRITON = True
        norm = torch.stack([x.norm() for x in grads]).norm().item()
        print(f"{'kernels' if is_on else 'torch'}: loss {total.item():.5f} "
              f"align {align.item():.5f} norm {norm:.4f}", flush=True)  # fmt: skip
        found.append(grads)
    flat = [torch.cat([x.flatten() for x in grads]) for grads in found]
    print(f"all gradients: {apart(*flat):.1e}", flush=True)


# --- time ----------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """`run` as a CUDA graph; what it makes is kept by the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def replay_ms(replay: Callable[[], None], n: int = 15) -> float:
    times = []
    for _ in range(n):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[n // 2]


def tune() -> None:
    """Time every operation with every tile size, and take the best for the dialogues that training
    has; ratios count as often as the model has such layers."""
    made = {
        (kind, r): operations(inputs(r, ROWS, LENGTH, kind))
        for kind in ("packed", "whole") for r in LAYERS
    }  # fmt: skip
    for op, names in WITHIN.items():
        for name in names:
            results = []
            for tile in CANDIDATES[name]:
                before, kernels.TILES[name] = kernels.TILES[name], tile
                try:
                    ms = {at: milliseconds(run[op]) for at, run in made.items() if op in run}
                except Exception as error:
                    print(f"{name} {tile}: {str(error)[:200]}", flush=True)
                    continue
                finally:
                    kernels.TILES[name] = before
                cost = sum(t * LAYERS[r] for (kind, r), t in ms.items() if kind == "packed")
                results.append((cost, ms, tile))
            for cost, ms, tile in results:
                text = ", ".join(f"{kind} r{r} {t:.3f}" for (kind, r), t in ms.items())
                size = f"({tile.tokens}, {tile.keys}, {tile.warps}, {tile.stages})"
                is_best = cost == min(results, key=lambda x: x[0])[0]
                print(f"{'*' if is_best else ' '} {op} / {name} {size}: {text}", flush=True)
            if results:
                kernels.TILES[name] = min(results, key=lambda x: x[0])[2]


def tune_parts() -> None:
    """The same for the parts into which the queries of compressed keys are cut."""
    for ratio, sizes in ((4, (256, 512, 1024)), (128, (128, 256))):
        made = {k: operations(inputs(ratio, ROWS, LENGTH, k)) for k in ("packed", "whole")}
        for op in ("attend_backward", "align_backward")[: 2 if ratio == 4 else 1]:
            kept = kernels.PARTS[ratio], kernels.KEY_PART
            best = {}
            for size in sizes:
                kernels.PARTS[ratio] = kernels.KEY_PART = size
                ms = {kind: milliseconds(run[op]) for kind, run in made.items()}
                best[ms["packed"]] = size
                text = ", ".join(f"{kind} {t:.3f}" for kind, t in ms.items())
                print(f"{op} r{ratio} in parts of {size}: {text}", flush=True)
            kernels.PARTS[ratio], kernels.KEY_PART = kept
            if op == "attend_backward":
                kernels.PARTS[ratio] = best[min(best)]
            else:
                kernels.KEY_PART = best[min(best)]


def _tune(what: str, tiles: dict[str, Any], name: str, sizes: list[Any], run: Any) -> None:
    """Time `run` with each of the sizes as tiles[name], and leave the best there."""
    results = []
    for size in sizes:
        before, tiles[name] = tiles[name], size
        try:
            results.append((milliseconds(run), size))
        except Exception as error:
            print(f"{what} {name} {size}: {str(error)[:200]}", flush=True)
        finally:
            tiles[name] = before
    for ms, size in results:
        mark = "*" if ms == min(results)[0] else " "
        print(f"{mark} {what} {name} {size}: {ms:.3f} ms", flush=True)
    if results:
        tiles[name] = min(results)[1]


def tune_middle() -> None:
    args = middle_inputs(ROWS * LENGTH)
    _tune("middle", middle.TILES, "forward", MIDDLES, lambda: torch.ops.tiny.middle(*args))
    _tune("middle", middle.TILES, "backward", MIDDLES, middle_backward(args))


def tune_step() -> None:
    args = step_inputs(ROWS * LENGTH)
    backward = step_backward(args)
    ops = {"forward": lambda: torch.ops.tiny.step(*args), "backward": backward}
    for name, sizes in STEPS.items():
        _tune("step", sinkhorn.TILES, name, sizes, ops[name])
    comb = torch.randn(ROWS * LENGTH, 4, 4, device="cuda")
    m, divisors = torch.ops.tiny.sinkhorn(comb, 20)
    f = milliseconds(lambda: torch.ops.tiny.sinkhorn(comb, 20))
    b = milliseconds(lambda: torch.ops.tiny.sinkhorn_backward(m, m, divisors, 20))
    print(f"sinkhorn forward {f:.3f} ms, backward {b:.3f} ms", flush=True)


def _trained(tiny: model.Tiny) -> list[Tensor]:
    return [p for p in tiny.parameters() if p.requires_grad]


def _losses(tiny: model.Tiny, ids: Tensor, owner: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    X, align, _ = tiny.streams(ids, owner, dense)
    weights = torch.ones(ids.numel(), device=ids.device)
    total, _ = tiny.head_loss(
        tiny.params(""), X.flatten(0, 1), ids.flatten(), weights, tiny.precision, tiny.g
    )
    return total / ids.numel(), align


class Whole:
    """The compiled model with a batch of each packing."""

    def __init__(self) -> None:
        import torch._dynamo as dynamo

        for limit in ("recompile_limit", "cache_size_limit"):
            if hasattr(dynamo.config, limit):
                setattr(dynamo.config, limit, 64)
        torch.set_float32_matmul_precision("high")
        self.tiny = model.Tiny().cuda()
        self.tiny.compile()
        self.ids = torch.randint(0, self.tiny.g.n_vocab, (ROWS, LENGTH), device="cuda")
        self.owner = {kind: packed(ROWS, LENGTH, kind) for kind in ("packed", "whole")}
        self.dense = torch.tensor(False, device="cuda")

    def step(self, kind: str) -> tuple[Tensor, ...]:
        losses = _losses(self.tiny, self.ids, self.owner[kind], self.dense)
        return torch.autograd.grad(losses[0] + losses[1], _trained(self.tiny))

    def compile(self) -> None:
        since = time.monotonic()
        self.step("packed")
        torch.cuda.synchronize()
        print(f"first forward and backward: {time.monotonic() - since:.0f} s", flush=True)

    def layers(self, kind: str) -> None:
        """One layer of each ratio, forward and backward."""
        g, tiny = self.tiny.g, self.tiny
        spans = kernels.spans(self.owner[kind])
        X, y, post, M, *_ = step_inputs(ROWS * LENGTH)
        state = tuple(a.unflatten(0, (ROWS, LENGTH)).requires_grad_() for a in (X, y, post, M))
        for ratio in LAYERS:
            i = max(i for i, r in enumerate(g.ratios) if r == ratio)
            p = tiny.params(f"blk.{i}.")
            table = None
            if g.hashed(i):
                chosen = p.pop("ffn_gate_tid2eid.weight")[self.ids].long()
                table = torch.zeros(ROWS, LENGTH, g.n_experts, device="cuda")
                table.scatter_(-1, chosen, 1.0)
            turn = tiny.turns[1 if ratio else 0][:, :LENGTH]
            wanted = [*state, *(a for a in p.values() if a.requires_grad)]

            def forward(p: Any = p, table: Any = table, turn: Any = turn, r: int = ratio) -> Any:
                return tiny.layer(
                    p, state, table, spans, turn, tiny.had, self.dense, r, tiny.precision, g
                )

            def both(forward: Any = forward, wanted: Any = wanted) -> Any:
                made, loss, _ = forward()
                total = sum((a.float() * 1e-3).sum() for a in made) + loss
                return torch.autograd.grad(total, wanted, allow_unused=True)

            one, two = replay_ms(captured(forward)), replay_ms(captured(both))
            print(f"layer of ratio {ratio}, {kind}: forward {one:.3f} ms, "
                  f"with backward and a sum {two:.3f} ms", flush=True)  # fmt: skip

    def head(self) -> None:
        tiny, n = self.tiny, ROWS * LENGTH
        X = torch.randn(n, 4, tiny.g.width, device="cuda", dtype=torch.bfloat16)
        X.requires_grad_()
        p, ids, weights = tiny.params(""), self.ids.flatten(), torch.ones(n, device="cuda")
        wanted = [X, *(a for k, a in p.items() if k.startswith("output"))]

        def both() -> Any:
            total, _ = tiny.head_loss(p, X, ids, weights, tiny.precision, tiny.g)
            return torch.autograd.grad(total, wanted)

        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        both()
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        print(f"head_loss with backward: {replay_ms(captured(both)):.3f} ms, {peak:.2f} GiB",
              flush=True)  # fmt: skip

    def whole(self, kind: str) -> None:
        torch.cuda.reset_peak_memory_stats()
        replay = captured(lambda: self.step(kind))
        ms = replay_ms(replay)
        print(f"whole step, {kind}: {ms:.2f} ms as a graph, {ROWS * LENGTH / ms:.0f}k tok/s, "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)  # fmt: skip
        if kind == "packed":
            self.table(replay, ms)

    def table(self, replay: Callable[[], None], ms: float) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            replay()
            torch.cuda.synchronize()
        rows = [e for e in seen.key_averages() if e.self_device_time_total > 0]
        rows.sort(key=lambda e: -e.self_device_time_total)
        busy = sum(e.self_device_time_total for e in rows) / 1000
        print(f"{sum(e.count for e in rows)} kernels, busy {busy:.2f} of {ms:.2f} ms")
        for e in rows[:SHOWN]:
            each = e.self_device_time_total / 1000
            print(f"{each:8.3f} ms {100 * each / busy:5.1f} % {e.count:5d} x {e.key[:100]}")
        sys.stdout.flush()

    def eager_ms(self) -> None:
        """Wall time of a step without a graph: what launches cost."""
        since = time.monotonic()
        for _ in range(5):
            self.step("packed")
        torch.cuda.synchronize()
        print(f"without a graph: {(time.monotonic() - since) * 200:.1f} ms a step", flush=True)


def main() -> None:
    if not torch.cuda.is_available() or kernels.triton is None:
        sys.exit("the probe needs a GPU that torch can use, and Triton")
    print(f"torch {torch.__version__}, triton {kernels.triton.__version__}, "
          f"{torch.cuda.get_device_name()}", flush=True)  # fmt: skip
    wanted = [(n, t) for n, sizes in CANDIDATES.items() for t in sizes]
    wanted = [(n, t) for n, sizes in STEPS.items() for t in sizes] + wanted  # slow ones first
    wanted += [("middle", t) for t in MIDDLES]
    pool = multiprocessing.get_context("spawn").Pool(COMPILERS)
    ahead = pool.map_async(_compile, wanted, chunksize=1)
    for ratio, kind, is_dense in (
        (0, "packed", False), (128, "packed", False), (128, "whole", False), (4, "packed", False),
        (4, "whole", False), (4, "whole", True),
    ):  # fmt: skip
        with part(f"attention of ratio {ratio} against f32 (in brackets: torch in bf16)"):
            check_attention(ratio, kind, is_dense)
    for kind in ("packed", "whole"):
        with part("choice of rows"):
            check_choice(kind)
    with part("hyper-connections against torch in f32 (products of f32 are in tf32)"):
        check_step()
    with part("the middle of the experts against torch in f32"):
        check_middle()
    with part("the whole model, eager"):
        check_model()
    whole = Whole()
    with part("compiling the model"):
        whole.compile()
    with part("compiling tile sizes"):
        for failure in filter(None, ahead.get(timeout=240)):
            print(failure, flush=True)
    pool.terminate()
    with part("hyper-connections (tokens, channels, warps, registers)"):
        tune_step()
    with part("the middle of the experts (tokens, warps)"):
        tune_middle()
    with part("tile sizes (tokens, keys, warps, stages), ms, * best"):
        tune()
    with part("parts of the compressed keys' queries, ms"):
        tune_parts()
    print("\nbest:", kernels.TILES, kernels.PARTS, kernels.KEY_PART, sinkhorn.TILES,
          middle.TILES)  # fmt: skip
    for kind in ("packed", "whole"):
        with part(f"whole step, {kind}"):
            whole.whole(kind)
    with part("head"):
        whole.head()
    for kind in ("packed", "whole"):
        with part(f"layers, {kind}"):
            whole.layers(kind)
    with part("launches"):
        whole.eager_ms()
    print(f"[{time.monotonic() - began:.0f} s]")


if __name__ == "__main__":
    main()
