"""The scheduler's state as one `Snapshot`: who is at work, who waits, what is held.

Pure, and cheap enough to be made anew for everybody who asks: a few microseconds a session.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ds4d.sched import snapshot
from ds4d.sched.snapshot import SESSIONS_MAX, Lanes, Pages, Queue, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ds4d.sched.scheduler import Scheduler
    from ds4d.sched.session import Session, Turn
    from ds4d.sched.snapshot import Phase
    from ds4d.sched.tally import Tally


def take(
    scheduler: Scheduler,
    tally: Tally,
    now: float,
    heartbeat_age_s: float | None,
    sessions_max: int = SESSIONS_MAX,
) -> Snapshot:
    """What there is `now`, on the scheduler's clock."""
    busy = [turn for turn in scheduler.turns.values() if turn.lane is not None]
    queue = scheduler.queue
    idle = [session for session in scheduler.sessions.values() if session.idle]
    # A free lane helps nobody while the first lacks memory; those beyond it lack a lane as well.
    short = scheduler.waits is not None and scheduler.waits.reason == "memory"
    n_memory = min(scheduler.lanes_free, len(queue)) if short else 0

    def views() -> Iterator[snapshot.Session]:
        rest_s = scheduler.rest_s(now)
        for turn in sorted(busy, key=lambda turn: turn.lane or 0):
            yield _at_work(turn, rest_s, now)
        for n_before, turn in enumerate(queue):
            wait_s = scheduler.wait_s(n_before)
            yield _queued(turn, wait_s, now, for_memory=n_before < n_memory)
        for session in sorted(idle, key=lambda session: -session.used):
            yield _idle(session, now)

    return Snapshot(
        sessions=tuple(islice(views(), sessions_max)),
        n_sessions=len(busy) + len(queue) + len(idle),
        lanes=Lanes(n=scheduler.lanes.n, n_max=scheduler.lanes_max, n_busy=len(busy)),
        queue=Queue(
            n=len(queue),
            n_max=scheduler.rules.queue_total,
            n_lane=len(queue) - n_memory,
            n_memory=n_memory,
            oldest_s=now - min((turn.submitted for turn in queue), default=now),
            wait_s=scheduler.wait_s(len(queue)),
        ),
        pages=Pages(
            n=scheduler.pages.n,
            n_free=scheduler.pages.n_free,
            n_promised=scheduler.ledger.pages_promised,
            tokens=scheduler.capacity.page_tokens,
            frontiers=scheduler.places.n,
            frontiers_free=scheduler.places.n_free,
        ),
        rates=tally.rates(now),
        totals=tally.totals(),
        heartbeat_age_s=heartbeat_age_s,
    )


def _at_work(turn: Turn, rest_s: Mapping[int, float], now: float) -> snapshot.Session:
    session = turn.session
    phase: Phase = "decode" if turn.phase == "decode" else "prefill"
    return snapshot.Session(
        id=session.id if session else None,
        request=turn.claim.label,
        phase="paused" if turn.paused is not None else phase,
        lane=turn.lane,
        n_tokens=session.n_tokens if session else 0,
        n_pages=len(session.pages) if session else 0,
        n_prompt=turn.n_prompt,
        n_cached=turn.n_cached,
        n_generated=turn.n_generated,
        n_answer_max=turn.answer_max,
        age_s=now - turn.submitted,
        remaining_s=rest_s.get(turn.id),
        tokens_per_s=turn.tokens_per_s(now),
    )


def _queued(turn: Turn, wait_s: float, now: float, *, for_memory: bool) -> snapshot.Session:
    return snapshot.Session(
        id=None,
        request=turn.claim.label,
        phase="queued",
        waits_for="memory" if for_memory else "lane",
        n_prompt=turn.n_prompt,
        n_answer_max=turn.answer_max,
        age_s=now - turn.submitted,
        remaining_s=wait_s,
    )


def _idle(session: Session, now: float) -> snapshot.Session:
    past = session.past
    if past is None:
        raise ValueError(f"session {session.id} is idle and was never used")
    return snapshot.Session(
        id=session.id,
        request=past.label,
        phase="idle",
        n_tokens=session.n_tokens,
        n_pages=len(session.pages),
        n_prompt=past.n_prompt,
        n_cached=past.n_cached,
        n_generated=past.n_generated,
        n_answer_max=past.answer_max,
        age_s=now - past.submitted,
        idle_s=now - session.used,
    )
