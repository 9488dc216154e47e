"""`ds4d bench`: the engine alone, without daemon or prompts, next to what the machine could do.

Decode is greedy, each lane behind its own random ids; prefill is measured per chunk size. Beside
each rate stand two floors, both measured in the same run with as many threads:

    memory       the bytes that a pass must read, at the rate at which a buffer of that size is read
    instruction  its products, at the rate of bare int8 and float32 multiply-adds in registers

The higher floor binds, and the share is that floor over the measured time: 100 % is a program that
does nothing but the products. The bytes and products are those of spec/model.md 7, computed from
the file's tensors: every weight once a pass, of routed experts as many as evenly spread choices
would touch, cached rows once a token.

Talks to the engine through the contract only. Which engine it is, `_measure_cpu` alone knows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ds4d import __version__
from ds4d.engine import Prefill, Sampling, VerifyWork
from ds4d.errors import LaneError, UsageError
from ds4d.model import embedded, gguf
from ds4d.model.rows import index_row_widths, row_widths
from ds4d.program import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from ds4d.engine import Engine, Verified
    from ds4d.model.geometry import Geometry

    Ids = npt.NDArray[np.int32]

Kind = Literal["decode", "prefill"]

GREEDY = Sampling(temperature=0.0)
WARM_STEPS = 4
PREFILL_TOKENS = 1024  # of each measured prompt


class Ceilings(Protocol):
    """What the machine reaches with as many threads as the engine has."""

    n_threads: int

    def read_bytes_s(self, n_bytes: int) -> float: ...

    def int8_macs_s(self) -> float: ...

    def f32_macs_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. Depths beyond the context are cut to what fits into it."""

    depths: tuple[int, ...] = (128, 2048, 8192)
    lanes: tuple[int, ...] = (1, 2, 4)
    chunks: tuple[int, ...] = (32, 128, 256, 512)
    steps: int = 32  # of one measurement
    repeats: int = 5
    seed: int = 0  # of the prompts

    def fitted(self, geometry: Geometry) -> Plan:
        """Raises UsageError if a depth of 1 with its steps is already too long."""
        deepest = geometry.context - WARM_STEPS - self.steps - 1
        if deepest < 1:
            raise UsageError(
                f"{self.steps} steps do not fit a context of {geometry.context} tokens, "
                f"expected at most {geometry.context - WARM_STEPS - 2}"
            )
        return dataclasses.replace(
            self,
            depths=tuple(sorted({min(depth, deepest) for depth in self.depths})),
            chunks=tuple(sorted({min(chunk, geometry.context) for chunk in self.chunks})),
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """What one pass must do, whoever does it."""

    weight_bytes: float
    row_bytes: float
    int8_macs: float
    f32_macs: float

    @property
    def n_bytes(self) -> float:
        return self.weight_bytes + self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table. A pass is a step of all lanes, or a chunk."""

    kind: Kind
    lanes: int
    rows: int  # of one pass
    depth: int  # positions before the pass; of prefill, the mean
    tok_s: float  # median of the repeats
    tok_s_least: float
    tok_s_most: float
    pass_ms: float  # the median's
    cost: Cost
    gb_s: float  # bytes of `cost` over the time that was needed
    read_gb_s: float  # what the machine reads, at this size
    memory_ms: float
    instruction_ms: float

    @property
    def binds(self) -> str:
        return "memory" if self.memory_ms >= self.instruction_ms else "instruction"

    @property
    def share(self) -> float:
        """Of the floor that binds: 1 is perfect."""
        return max(self.memory_ms, self.instruction_ms) / self.pass_ms


@dataclass(frozen=True, slots=True)
class _Times:
    rows: int
    seconds: tuple[float, ...]  # of a pass, in each repeat


@dataclass(frozen=True, slots=True)
class _Raw:
    """A case before the run's best ceilings are known."""

    kind: Kind
    lanes: int
    depth: int
    cost: Cost
    times: _Times
    read_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    int8_gmacs_s: float  # bare products, the best of the run
    f32_gmacs_s: float
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    model: str
    engine: str
    plan: Plan
    machine: dict[str, str | int]
    load_average: tuple[float, float, float]  # when it ended; a busy machine explains much
    figures: Figures

    def json(self) -> str:
        tree = dataclasses.asdict(self)
        for each, case in zip(tree["figures"]["cases"], self.figures.cases, strict=True):
            each |= {"binds": case.binds, "share": case.share}
        return json.dumps(tree, indent=1) + "\n"


# -- what a pass costs -----------------------------------------------------------------------------


def cost_of_pass(
    geometry: Geometry,
    tensors: Iterable[gguf.TensorInfo],
    *,
    rows: int,
    depth: float,
    lanes: int,
    head: bool = True,
) -> Cost:
    """Of `rows` rows in all, `depth` positions deep, in `lanes` lanes; `head`: with logits."""
    g = geometry
    used = {t.name for t in gguf.expected_tensors(g)}
    share = g.n_experts_used / g.n_experts
    touched = 1 - (1 - share) ** rows  # of the experts, if rows choose independently
    selects = depth // 4 > g.index_top_k  # below, every row is visible and nothing is scored
    weight_bytes = int8 = f32 = 0.0
    for t in tensors:
        elements = float(np.prod(t.shape))
        if t.name not in used:
            continue
        if t.name == "token_embd.weight" or t.name.endswith("tid2eid.weight"):
            weight_bytes += rows * t.n_bytes / t.shape[0]
            continue
        if not head and t.name.startswith("output"):
            continue
        if not selects and ".indexer." in t.name:
            continue
        part, each = (touched, share) if "_exps." in t.name else (1.0, 1.0)
        weight_bytes += part * t.n_bytes
        if len(t.shape) < 2 or t.name.endswith("ape.weight"):
            continue
        if t.quant.activation_block:
            int8 += rows * each * elements
        else:
            f32 += rows * each * elements
    read, products = _attention(g, depth, selects)
    return Cost(weight_bytes, lanes * read, int8, f32 + rows * products)


def _attention(g: Geometry, depth: float, selects: bool) -> tuple[float, float]:
    """Bytes of cached rows and products of one token behind `depth` positions."""
    row_bytes, index_bytes = (
        codes + scales + 2 * halves
        for codes, scales, halves in (row_widths(g), index_row_widths(g))
    )
    n_bytes = macs = 0.0
    for ratio in g.ratios:
        visible = min(depth + 1, g.window)
        if ratio == 4:
            visible += min(depth // 4, g.index_top_k)
            if selects:
                n_bytes += depth // 4 * index_bytes
                macs += depth // 4 * g.index_heads * g.index_dim
        elif ratio:
            visible += depth // ratio
        n_bytes += visible * row_bytes
        macs += visible * g.n_heads * g.head_dim * 2  # scores, then values
    return n_bytes, macs


# -- measuring -------------------------------------------------------------------------------------


class Bench:
    """Drives one engine that has `max(plan.lanes)` lanes and the pages that `n_pages` counts."""

    def __init__(
        self,
        engine: Engine,
        tensors: Sequence[gguf.TensorInfo],
        ceilings: Ceilings,
        plan: Plan,
        tick: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.engine = engine
        self.geometry = engine.geometry
        self.tensors = tensors
        self.ceilings = ceilings
        self.plan = plan.fitted(engine.geometry)
        self.tick = tick
        self._int8 = self._f32 = 0.0  # products per second: the best seen so far
        self._raw: list[_Raw] = []
        self._rng = np.random.default_rng(self.plan.seed)

    def run(self) -> Figures:
        """Raises LaneError if a lane fails: a rate of wrong answers is none."""
        prefill = [self._prefill(chunk) for chunk in self.plan.chunks]
        decode = [raw for depth in self._deeper() for raw in self._decode(depth)]
        self._raw = [*decode, *prefill]
        return Figures(
            int8_gmacs_s=self._int8 / 1e9,
            f32_gmacs_s=self._f32 / 1e9,
            cases=tuple(self._case(raw) for raw in self._raw),
        )

    def _prefill(self, chunk: int) -> _Raw:
        n = min(max(PREFILL_TOKENS // chunk, 1) * chunk, self.geometry.context)
        self.tick(f"prefill in chunks of {chunk}")
        seconds = []
        for _ in range(self.plan.repeats + 1):
            self._seat(0)
            ids = self._ids(n)
            began = time.perf_counter()
            self._extend(0, ids, chunk)
            seconds.append(time.perf_counter() - began)
            self.engine.vacate(0)
        cost = cost_of_pass(
            self.geometry, self.tensors, rows=chunk, depth=n // 2, lanes=1, head=False
        )
        times = _Times(chunk, tuple(s * chunk / n for s in seconds[1:]))
        return self._measured("prefill", 1, n // 2, cost, times)

    def _deeper(self) -> Iterable[int]:
        """Fills every lane to each depth in turn."""
        lanes = range(max(self.plan.lanes))
        for lane in lanes:
            self._seat(lane)
        before = 0
        for depth in self.plan.depths:
            self.tick(f"filling {len(lanes)} lanes to {depth}")
            for lane in lanes:
                self._extend(lane, self._ids(depth - before), max(self.plan.chunks))
            yield depth
            before = depth
        for lane in lanes:
            self.engine.vacate(lane)

    def _decode(self, depth: int) -> list[_Raw]:
        frontiers = [self.engine.capture(lane) for lane in range(max(self.plan.lanes))]
        raw = []
        for n in self.plan.lanes:
            self.tick(f"decode of {n} lanes at {depth}")
            seconds = []
            for _ in range(self.plan.repeats):
                for lane in range(n):
                    self.engine.restore(lane, frontiers[lane])
                pending = self._ids(n).tolist()
                for position in range(WARM_STEPS):
                    pending = self._step(pending, position)
                began = time.perf_counter()
                for position in range(WARM_STEPS, WARM_STEPS + self.plan.steps):
                    pending = self._step(pending, position)
                seconds.append((time.perf_counter() - began) / self.plan.steps)
            cost = cost_of_pass(self.geometry, self.tensors, rows=n, depth=depth, lanes=n)
            raw.append(self._measured("decode", n, depth, cost, _Times(n, tuple(seconds))))
        for lane, frontier in enumerate(frontiers):
            self.engine.restore(lane, frontier)
            self.engine.drop(frontier)
        return raw

    def _measured(self, kind: Kind, lanes: int, depth: int, cost: Cost, times: _Times) -> _Raw:
        """The ceilings are measured beside every case, so that load meets both alike."""
        self._int8 = max(self._int8, self.ceilings.int8_macs_s())
        self._f32 = max(self._f32, self.ceilings.f32_macs_s())
        read = self.ceilings.read_bytes_s(int(cost.n_bytes))
        return _Raw(kind, lanes, depth, cost, times, read)

    def _case(self, raw: _Raw) -> Case:
        rows, seconds, cost = raw.times.rows, raw.times.seconds, raw.cost
        middle = statistics.median(seconds)
        # What reads a larger buffer that fast reads this one so too.
        read = max(r.read_bytes_s for r in self._raw if r.cost.n_bytes >= cost.n_bytes)
        instruction_s = cost.int8_macs / self._int8 + cost.f32_macs / self._f32
        return Case(
            kind=raw.kind,
            lanes=raw.lanes,
            rows=rows,
            depth=raw.depth,
            tok_s=rows / middle,
            tok_s_least=rows / max(seconds),
            tok_s_most=rows / min(seconds),
            pass_ms=1e3 * middle,
            cost=cost,
            gb_s=cost.n_bytes / middle / 1e9,
            read_gb_s=read / 1e9,
            memory_ms=1e3 * cost.n_bytes / read,
            instruction_ms=1e3 * instruction_s,
        )

    # -- the engine's verbs

    def _seat(self, lane: int) -> None:
        self.engine.seat(lane)
        n = n_pages(self.geometry)
        self.engine.map_pages(lane, range(lane * n, (lane + 1) * n))

    def _ids(self, n: int) -> Ids:
        return self._rng.integers(0, self.geometry.n_vocab, n, dtype=np.int32)

    def _extend(self, lane: int, ids: Ids, chunk: int) -> None:
        for start in range(0, len(ids), chunk):
            work = Prefill(lane=lane, ids=ids[start : start + chunk])
            self.engine.prefill(work, threading.Event())

    def _step(self, pending: Sequence[int], position: int) -> list[int]:
        """One greedy id for each of the first lanes."""
        cohort = [
            VerifyWork(lane=lane, pending=token, sampling=GREEDY, position=position)
            for lane, token in enumerate(pending)
        ]
        return [_drawn(verified) for verified in self.engine.verify(cohort)]


def _drawn(verified: Verified) -> int:
    if verified.failed is not None:
        raise LaneError(f"lane {verified.lane} failed: {verified.failed}")
    return verified.ids[0]


def n_pages(geometry: Geometry) -> int:
    """Pages of one lane with a full context."""
    return -(-geometry.context // geometry.page_tokens)


# -- as text ---------------------------------------------------------------------------------------


def table(report: Report) -> str:
    lines = [
        f"{report.model}, {report.engine}: decode is greedy, tok/s are of all lanes together; "
        f"median of {report.plan.repeats} (least to most)",
        f"bare products: int8 {report.figures.int8_gmacs_s:.0f}, "
        f"float32 {report.figures.f32_gmacs_s:.0f} G/s; "
        f"load average {report.load_average[0]:.1f}",
        f"{'':8}{'lanes':>6}{'rows':>6}{'depth':>7}{'tok/s':>9}{'(least to most)':>22}"
        f"{'ms':>9}{'weights MB':>12}{'rows MB':>9}{'GB/s':>7}{'of':>7}"
        f"{'memory ms':>11}{'instr. ms':>11}{'share':>7}  bound by",
    ]
    for c in report.figures.cases:
        spread = f"({c.tok_s_least:.0f} to {c.tok_s_most:.0f})"
        lines.append(
            f"{c.kind:8}{c.lanes:6}{c.rows:6}{c.depth:7}{c.tok_s:9.1f}{spread:>22}"
            f"{c.pass_ms:9.3f}{c.cost.weight_bytes / 1e6:12.2f}{c.cost.row_bytes / 1e6:9.2f}"
            f"{c.gb_s:7.1f}{c.read_gb_s:7.1f}{c.memory_ms:11.3f}{c.instruction_ms:11.3f}"
            f"{c.share:7.0%}  {c.binds}"
        )
    return "\n".join(lines) + "\n"


# -- the verb --------------------------------------------------------------------------------------


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ds4d bench`, for `run`."""
    plan = Plan()
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="what to measure (default: the model served)"
    )
    parser.add_argument(
        "--threads", type=count, metavar="N", help="of the engine (default: as the daemon's)"
    )
    for name, about in (
        ("depths", "tokens of context before the decode steps"),
        ("lanes", "how many lanes decode together"),
        ("chunks", "tokens of a chunk of the prompt"),
    ):
        default: tuple[int, ...] = getattr(plan, name)
        listed = ",".join(map(str, default))
        parser.add_argument(
            f"--{name}", type=_counts, default=default, metavar="N,N", help=f"{about} ({listed})"
        )
    for name, about in (
        ("steps", "decode steps that are measured together"),
        ("repeats", "measurements of each, whose median counts"),
    ):
        parser.add_argument(
            f"--{name}",
            type=count,
            default=getattr(plan, name),
            metavar="N",
            help=f"{about} (%(default)s)",
        )
    parser.add_argument(
        "--seed",
        type=int,
        default=plan.seed,
        metavar="N",
        help="of the random prompts (%(default)s)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures into this file, too"
    )


def run(args: argparse.Namespace) -> int:
    """`ds4d bench`: the table on stdout, progress on stderr. Raises Ds4Error."""
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: {args.json.parent} is not a folder")
    plan = Plan(
        depths=args.depths,
        lanes=args.lanes,
        chunks=args.chunks,
        steps=args.steps,
        repeats=args.repeats,
        seed=args.seed,
    )
    report = _measure_cpu(args.model, args.threads, plan)
    sys.stdout.write(table(report))
    if args.json is not None:
        args.json.write_text(report.json())
    return 0


def _measure_cpu(model: Path | None, n_threads: int | None, plan: Plan) -> Report:
    """Open the CPU engine as the daemon would, and measure it."""
    from ds4d import config
    from ds4d.cpu.engine import CpuEngine, default_threads
    from ds4d.cpu.floor import CpuCeilings
    from ds4d.sched.host import processors

    settings = config.load()
    path = model or settings.model.path or embedded.path()
    n_threads = n_threads or settings.runtime.engine_threads or default_threads(processors())
    lanes = max(plan.lanes)
    with gguf.open_model(path) as file:
        engine = CpuEngine(
            file.geometry,
            {name: file.tensor(name) for name in file.tensors},
            lanes=lanes,
            pages=lanes * n_pages(file.geometry),
            frontiers=lanes,
            threads=n_threads,
            cache_dir=settings.paths.cache,
            progress=lambda what, share: _tick(f"{what} {share:.0%}"),
        )
        try:
            ceilings = CpuCeilings(n_threads, settings.paths.cache)
            bench = Bench(engine, list(file.tensors.values()), ceilings, plan, _tick)
            figures = bench.run()
        finally:
            engine.close()
    _tick("")
    return Report(
        model=file.geometry.name or Path(file.path).name,
        engine=f"cpu engine {__version__}, {n_threads} thread{'s' if n_threads > 1 else ''}",
        plan=bench.plan,
        machine={
            "cpu": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
        load_average=os.getloadavg(),
        figures=figures,
    )


def _tick(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text:60}\r{text}")
        sys.stderr.flush()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
