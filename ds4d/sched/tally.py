"""What the runner counts: Prometheus series of `ds4d.metrics`, totals, and rates of the last 10 s.

Per pass of the engine a handful of counters and one observation a lane; per request the rest. Owns
which series an event moves, and decides nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ds4d import metrics
from ds4d.errors import Refused, RequestError
from ds4d.sched.snapshot import Rates, Totals
from ds4d.sched.ticket import Done, Failed

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from prometheus_client import Counter, Histogram

    from ds4d.sched.plan import Chunk, Outcome, Step
    from ds4d.sched.session import Turn
    from ds4d.sched.ticket import Claim, Started, Stats, Ticket

WINDOW_S = 10.0  # of the rates
_BUCKETS = 20  # in it
_EXECUTOR = "target_only"  # no drafts yet
_SIZES = [int(r) for r in metrics.LABELS["ds4d_cohort_cycles"]["r"]]  # so many lanes, or fewer

# How a ticket ended, by what its reader says of it, and why it was cut, by its error's code.
_SAID = {"function_call": "tool_calls"} | {
    word: word for word in ("stop", "length", "tool_calls", "failed")
}
_CAUSES = {
    "cancelled": "operator",
    "draining": "shutdown",
    "slow_client": "slow_client",
    "timeout": "timeout",
    "queue_timeout": "timeout",
}


class Ending(NamedTuple):
    outcome: str  # stop, length, tool_calls, cancelled, failed
    cause: str | None = None  # iff cancelled: client, operator, shutdown, slow_client, timeout


def ending(ticket: Ticket, n_kept: int) -> Ending:
    """How a ticket ended that is left now by a client that has `n_kept` tokens."""
    match ticket.end:
        case Failed(error):
            code = error.code if isinstance(error, Refused | RequestError) else None
            cause = _CAUSES.get(code or "")
            return Ending("cancelled", cause) if cause else Ending("failed")
        case Done(reason, _, stats) if n_kept >= stats.n_generated:
            return Ending(_SAID.get(ticket.outcome, reason))
    if ticket.outcome in _SAID:
        return Ending(_SAID[ticket.outcome])
    slow = ticket.outcome == "slow_client"
    return Ending("cancelled", "slow_client" if slow else "client")


class Rate:
    """A mean over the last `WINDOW_S`, in buckets: constant memory, however much is counted."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque(maxlen=_BUCKETS + 1)  # (number, count)

    def add(self, n: int, now: float) -> None:
        number = _bucket(now)
        if self._buckets and self._buckets[-1][0] == number:
            n += self._buckets.pop()[1]
        self._buckets.append((number, n))

    def per_s(self, now: float) -> float:
        first = _bucket(now) - _BUCKETS + 1
        return sum(n for number, n in self._buckets if number >= first) / WINDOW_S


def _bucket(now: float) -> int:
    return int(now // (WINDOW_S / _BUCKETS))


class _Cohort:
    """The series of passes over so many lanes."""

    def __init__(self, n_lanes: int) -> None:
        r = str(next((most for most in _SIZES if n_lanes <= most), _SIZES[-1]))
        self.cycles: Counter = metrics.CYCLES.labels(r, _EXECUTOR)
        self.emitted: Counter = metrics.EMITTED.labels(r, _EXECUTOR)
        self.seconds: Histogram = metrics.CYCLE.labels(r, _EXECUTOR, "verify")
        self.gap: Histogram = metrics.INTER_TOKEN.labels(r)


class Tally:
    """Belongs to the runner, which calls it on the event loop."""

    def __init__(self) -> None:
        self._n_requests = self._n_prompt = self._n_cached = self._n_generated = 0
        self._prefill, self._decode = Rate(), Rate()
        self._leaving: dict[int, tuple[float, Histogram]] = {}  # turns with a lane: since when
        self._cohorts: dict[int, _Cohort] = {}
        self._chunks = {
            replay: metrics.CHUNKS.labels("replay" if replay else "cold")
            for replay in (False, True)
        }
        self._computed: Counter = metrics.PROMPT.labels("computed")
        self._reused: Counter = metrics.PROMPT.labels("memory")
        self._stall: Histogram = metrics.STALL.labels("prefill")

    def totals(self) -> Totals:
        return Totals(
            requests=self._n_requests,
            prompt=self._n_prompt,
            cached=self._n_cached,
            generated=self._n_generated,
        )

    def rates(self, now: float) -> Rates:
        return Rates(
            prefill_tokens_per_s=self._prefill.per_s(now),
            decode_tokens_per_s=self._decode.per_s(now),
        )

    # The engine

    def chunk(self, chunk: Chunk, outcome: Outcome, now: float) -> None:
        done = outcome.prefilled
        metrics.PREFILL_TIME.inc(outcome.ms / 1e3)
        if chunk.stalls:
            self._stall.observe(outcome.ms / 1e3)
        if done is None or done.cancelled:
            return
        n_tokens = len(chunk.work.ids)
        self._chunks[chunk.replay].inc()
        self._computed.inc(n_tokens)
        self._prefill.add(n_tokens, now)

    def step(self, step: Step, turns: Sequence[Turn], outcome: Outcome, now: float) -> None:
        """`turns` are those of `step`, after it was settled."""
        cohort = self._cohorts.get(len(turns))
        if cohort is None:
            cohort = self._cohorts[len(turns)] = _Cohort(len(turns))
        n_emitted = 0
        for turn, work in zip(turns, step.cohort, strict=True):
            n_emitted += turn.n_generated - work.position
            if turn.gap_s is not None:
                cohort.gap.observe(turn.gap_s)
            if work.position == 0:
                self._first_step(turn)
        cohort.cycles.inc()
        cohort.emitted.inc(n_emitted)
        cohort.seconds.observe(outcome.ms / 1e3)
        metrics.DECODE_TIME.inc(outcome.ms / 1e3)
        metrics.GENERATED.inc(n_emitted)
        self._n_generated += n_emitted
        self._decode.add(n_emitted, now)

    def _first_step(self, turn: Turn) -> None:
        self._computed.inc()  # the prompt's last id
        if turn.started is not None and turn.decoding is not None:
            metrics.PREFILL.observe(turn.decoding - turn.started)
        if turn.first_token is not None:
            cache = _found(turn.n_prompt, turn.n_cached, "warm", "partial", "cold")
            metrics.FIRST_TOKEN.labels(cache).observe(turn.first_token - turn.submitted)

    # Requests

    def started(self, claim: Claim, event: Started) -> None:
        self._n_prompt += event.n_prompt
        self._n_cached += event.n_cached
        self._reused.inc(event.n_cached)
        metrics.QUEUED.observe(event.wait_ms / 1e3)
        if claim.cache:
            metrics.PREFIX_QUERY.inc(event.n_prompt)
            metrics.PREFIX_HIT.labels("memory").inc(event.n_cached)
            result = _found(event.n_prompt, event.n_cached, "full", "partial", "miss")
            metrics.LOOKUPS.labels(result).inc()

    def ended(self, claim: Claim, ending: Ending, stats: Stats) -> None:
        """A ticket is over for both sides."""
        self._n_requests += 1
        metrics.REQUESTS.labels(claim.api, ending.outcome).inc()
        if ending.cause is not None:
            metrics.CANCELLED.labels(ending.cause, stats.phase).inc()
        metrics.REQUEST.labels(claim.api).observe(stats.total_ms / 1e3)
        metrics.REQUEST_PROMPT.observe(stats.n_prompt)
        metrics.REQUEST_OUTPUT.observe(stats.n_generated)
        if stats.first_token_ms is not None:
            metrics.DECODE.observe(stats.decode_ms / 1e3)

    def leaving(self, turn_id: int, stats: Stats, now: float) -> None:
        """A client has gone whose turn may have a lane."""
        if stats.phase != "queued":
            self._leaving[turn_id] = now, metrics.RELEASE.labels(stats.phase)

    def released(self, turns: Container[int], now: float) -> None:
        """Those not among `turns` have given their lanes back by now."""
        if self._leaving:
            for turn_id in [one for one in self._leaving if one not in turns]:
                left, seconds = self._leaving.pop(turn_id)
                seconds.observe(now - left)


def _found(n_prompt: int, n_cached: int, full: str, partial: str, none: str) -> str:
    """How much of a prompt was there already; its last id is always computed."""
    if not n_cached:
        return none
    return full if n_cached == n_prompt - 1 else partial
