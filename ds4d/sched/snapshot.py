"""What the scheduler shows of itself at one moment: plain records, made whole, never changed.

`ds4d.wire` sends them as they are, so ages and waits are seconds relative to the moment, and not
times of a clock that only this process has. Counts are tokens unless their name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["queued", "prefill", "decode", "paused", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session, or a turn that waits for one. Numbers of a turn are those of the last one."""

    id: int | None  # None: queued, not bound to a session yet
    request: str  # label of the turn that works on it, or was the last to
    phase: Phase
    waits_for: Literal["lane", "memory"] | None = None  # why it is queued
    lane: int | None = None
    n_tokens: int = 0  # whose state is in pages
    n_pages: int = 0
    n_prompt: int = 0
    n_cached: int = 0  # prompt tokens that were reused
    n_generated: int = 0
    n_answer_max: int = 0
    age_s: float = 0.0  # since its turn was submitted
    idle_s: float = 0.0  # since it was used last; 0 while a turn works on it
    remaining_s: float | None = None  # predicted: until the prompt is done, or a lane is free
    tokens_per_s: float | None = None  # of the prompt while it is computed, then of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    n: int  # that the engine has
    n_max: int  # of them that may be used: `lanes.max`, live
    n_busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    n: int
    n_max: int
    n_lane: int  # waiting for a lane
    n_memory: int  # waiting for pages
    oldest_s: float
    wait_s: float  # predicted for one more


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    n: int
    n_free: int
    n_promised: int  # to turns that have a lane, for their longest possible answers
    tokens: int  # in one page
    frontiers: int
    frontiers_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Means over the last 10 s."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Since the start."""

    requests: int = 0  # ended
    prompt: int = 0
    cached: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    sessions: tuple[Session, ...] = ()  # at most `SESSIONS_MAX`: those at work first
    n_sessions: int = 0  # all there are, also those left out
    lanes: Lanes
    queue: Queue
    pages: Pages
    rates: Rates
    totals: Totals
    heartbeat_age_s: float | None = None  # while a call of the engine is under way


SESSIONS_MAX = 200
