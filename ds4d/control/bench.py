"""A load on the live daemon: prompts of random ids, straight to the runner, beside or without
others. `ds4d bench` is the one that measures the engine alone.

What is measured is the time of the engine's calls as their results arrive here. A chunk of a prompt
and a pass over decoding lanes never run together, so the time between two arrivals belongs to the
later one. Owns no engine, no lane, and no text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio
import numpy as np
from anyio import to_thread

from ds4d import wire
from ds4d.control.params import check
from ds4d.errors import Declined
from ds4d.sched.ticket import Claim, Done, Failed, Progress, Sampling, Started, Token

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.control.asks import Asks, Report

    Ids = npt.NDArray[np.int32]

KIND: Final = wire.Bench.METHOD
RUNS_MAX: Final = 100


def check_sizes(asks: Asks, p: wire.Bench) -> None:
    """Raises Declined: a size is out of range, there is no model yet, or others are at work."""
    status = asks.status()
    if status.state not in ("ready", "degraded") or status.lanes is None or status.queue is None:
        raise Declined(
            f"the daemon is {status.state}: a load needs one that takes work", wire.WRONG_STATE
        )
    check(wire.Bench, "prompt_tokens", p.prompt_tokens, 1, asks.runner.n_ctx - 1)
    check(wire.Bench, "answer_tokens", p.answer_tokens, 1, asks.runner.n_ctx - 1)
    check(wire.Bench, "depth", p.depth, 0, asks.runner.n_ctx - 2)
    check(wire.Bench, "runs", p.runs, 1, RUNS_MAX)
    total = p.depth + p.prompt_tokens + p.answer_tokens
    if total > asks.runner.n_ctx:
        raise Declined(
            f"{KIND}: depth, prompt_tokens and answer_tokens make {total}, expected at most "
            f"{asks.runner.n_ctx}, the context",
            wire.BAD_PARAMS,
        )
    most = status.lanes.n_max + status.queue.n_max
    if not 1 <= p.concurrency <= most:
        raise Declined(
            f"{KIND}: concurrency: expected 1 to {most} ({status.lanes.n_max} lanes, and "
            f"{status.queue.n_max} that may wait for one), got {p.concurrency}",
            wire.BAD_PARAMS,
        )
    n_running, n_queued = asks.runner.n_open()
    if p.exclusive and n_running + n_queued:
        raise Declined(
            f"{n_running} requests run and {n_queued} wait: try again when nothing does, or "
            "measure beside them with exclusive=false (--no-exclusive)",
            wire.BUSY,
        )


async def load(asks: Asks, p: wire.Bench, report: Report) -> list[wire.BenchRow]:
    """All runs, one after the other. Leaves every ticket, however it ends."""
    rows: list[wire.BenchRow] = []
    for run in range(1, p.runs + 1):
        report(f"run {run} of {p.runs}", (run - 1) / p.runs)
        rows.append(await _run(asks, p, run))
    return rows


async def _run(asks: Asks, p: wire.Bench, run: int) -> wire.BenchRow:
    shape = p.concurrency, p.depth + p.prompt_tokens
    prompts = await to_thread.run_sync(_random_ids, run, shape, asks.n_vocab())
    began = time.perf_counter()
    timeline = Timeline(depth=p.depth)
    async with anyio.create_task_group() as tasks:
        for ids in prompts:
            tasks.start_soon(_turn, asks, p, ids, timeline)
    return wire.BenchRow(
        run=run,
        concurrency=p.concurrency,
        depth=p.depth,
        prompt_tokens=p.prompt_tokens,
        answer_tokens=p.answer_tokens,
        prefill_tokens_per_s=timeline.prefill_tokens_per_s,
        decode_tokens_per_s=timeline.decode_tokens_per_s,
        first_token_ms=sum(timeline.first_token_ms) / p.concurrency,
        total_s=time.perf_counter() - began,
    )


def _random_ids(seed: int, shape: tuple[int, int], n_vocab: int) -> Ids:
    return np.random.default_rng(seed).integers(0, n_vocab, shape, dtype=np.int32)


async def _turn(asks: Asks, p: wire.Bench, ids: Ids, timeline: Timeline) -> None:
    claim = Claim(
        ids=ids,
        sampling=Sampling(temperature=0.0),
        max_tokens=p.answer_tokens,
        min_tokens=p.answer_tokens,
        stop_ids=frozenset(),
        cache=False,
        label=KIND,
        api=KIND,
    )
    ticket = asks.runner.submit(claim)
    try:
        n_done = n_tokens = 0
        async for event in ticket:
            now = time.perf_counter()
            match event:
                case Started():
                    timeline.mark(now)
                case Progress():
                    timeline.chunk(now, n_done, event.n_done)
                    n_done = event.n_done
                case Token():
                    n_tokens += 1
                    if not ticket.ready:  # those of one pass come together
                        timeline.drawn(now, ticket.id, n_tokens)
                        n_tokens = 0
                case Failed():
                    raise event.error
                case Done():
                    if n_tokens:
                        timeline.drawn(now, ticket.id, n_tokens)
                    timeline.first_token_ms.append(event.stats.first_token_ms or 0.0)
    finally:
        ticket.leave(outcome=KIND)


@dataclass(slots=True)
class _Pass:
    """One pass over the decoding lanes, as far as they are ours."""

    seconds: float
    n_tokens: int
    lanes: set[int]  # by their tickets


class Timeline:
    """What arrived when, of all lanes of one run. Seconds of one clock, in order."""

    def __init__(self, *, depth: int) -> None:
        """`depth`: tokens of each prompt whose prefill is not measured."""
        self.first_token_ms: list[float] = []
        self._depth = depth
        self._last = 0.0
        self._prefill_s = 0.0
        self._prefill_tokens = 0
        self._passes: list[_Pass] = []
        self._open = False  # whether lanes may still join the last pass

    def mark(self, now: float) -> None:
        """Something else began or ended: the time before it belongs to nobody here."""
        self._last = now
        self._open = False

    def chunk(self, now: float, start: int, end: int) -> None:
        """A prompt's positions `start` to `end` are done; those below the depth do not count."""
        seconds = now - self._last
        self.mark(now)
        n_counted = end - max(start, self._depth)
        if n_counted > 0:
            self._prefill_s += seconds * n_counted / (end - start)
            self._prefill_tokens += n_counted

    def drawn(self, now: float, lane: int, n_tokens: int) -> None:
        """A lane has drawn tokens; one that is heard again begins the next pass."""
        if self._open and lane not in self._passes[-1].lanes:
            self._passes[-1].lanes.add(lane)
            self._passes[-1].n_tokens += n_tokens
            return
        self._passes.append(_Pass(now - self._last, n_tokens, {lane}))
        self.mark(now)
        self._open = True

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 when the prompt was a single token, which is part of the first pass."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the widest passes only: others ran while lanes still had a prompt or had ended."""
        widest = max((len(one.lanes) for one in self._passes), default=0)
        passes = [one for one in self._passes if len(one.lanes) == widest]
        seconds = sum(one.seconds for one in passes)
        return sum(one.n_tokens for one in passes) / seconds if seconds > 0 else 0.0
