"""The loop around the scheduler: tickets on one side, the engine thread on the other.

Owns the engine thread, the tickets, and the state that the door shows (loading, ready, draining,
failed). The scheduler's state belongs to the task that runs `run`; other tasks of the same loop
reach it through `submit` and through their tickets, between two plans or while one is under way.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.lowlevel import checkpoint_if_cancelled

from ds4d.errors import DeviceError, Ds4Error, LaneError, Refused, RequestError
from ds4d.events import emit
from ds4d.sched.plan import (
    Capture,
    Chunk,
    Drop,
    Extend,
    Outcome,
    Seat,
    Step,
    Truncate,
    Vacate,
)
from ds4d.sched.scheduler import Rules, Scheduler
from ds4d.sched.thread import EngineThread
from ds4d.sched.ticket import BUFFER_EVENTS, Claim, Done, Failed, Stats, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from ds4d.engine import Cancel, Engine, Frontier
    from ds4d.sched.memory import Capacity
    from ds4d.sched.plan import Move, Plan

    Report = Callable[[str, float], None]
    """What is being loaded, and how much of all loading is done: 0 to 1. From any thread."""

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "failed"]
RETRY_LOADING_S = 5
RETRY_DRAINING_S = 10  # a restart takes about that


class Loading(NamedTuple):
    what: str
    fraction: float  # of all loading: 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneView:
    lane: int
    phase: str
    label: str
    n_tokens: int
    n_generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The daemon's state at one moment, for status and metrics. Never changes once made."""

    state: State
    loading: Loading | None
    lanes: tuple[LaneView, ...] = ()
    n_lanes: int = 0
    n_queued: int = 0
    n_sessions: int = 0
    pages_free: int = 0
    pages: int = 0
    pages_promised: int = 0
    frontiers_free: int = 0
    frontiers: int = 0


class Runner:
    """Build it, `run` it in the root task group, `submit` claims to it."""

    def __init__(
        self,
        build: Callable[[Report], tuple[Engine, Capacity]],
        *,
        rules: Rules | None = None,
        engine_stall_s: float = 120.0,
        buffer_events: int = BUFFER_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`build` runs in the engine thread, and so does the engine that it returns."""
        self.state: State = "loading"
        self.loading: Loading | None = Loading("starting", 0.0)
        self.n_ctx = 0  # tokens of prompt and answer together; 0 while loading
        self._build = build
        self._rules = rules or Rules()
        self._engine_stall_s = engine_stall_s
        self._buffer_events = buffer_events
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._tickets: dict[int, Ticket] = {}  # those that have not ended
        self._n_tickets = 0
        self._wake = anyio.Event()
        self._quiet = anyio.Event()
        self._chunk: tuple[int, threading.Event] | None = None  # under way: turn, cancel flag

    # For the API

    def submit(self, claim: Claim) -> Ticket:
        """Queue `claim`. Raises `Refused` (loading, draining, queue full), or `RequestError` when
        the prompt leaves no room for an answer."""
        scheduler = self._scheduler
        if scheduler is None or self.state != "ready":
            raise self._closed()
        if not 1 <= len(claim.ids) < self.n_ctx:
            raise RequestError(
                f"the prompt has {len(claim.ids)} tokens, expected 1 to {self.n_ctx - 1}",
                code="context_length_exceeded",
            )
        self._n_tickets += 1
        ticket = Ticket(
            self._n_tickets,
            claim,
            on_leave=self._leave,
            on_room=self._resume,
            buffer=self._buffer_events,
        )
        scheduler.on_submit(ticket.id, claim, self._clock())
        self._tickets[ticket.id] = ticket
        self._wake.set()
        return ticket

    def would_admit(self) -> bool:
        """Whether `submit` would take a claim now."""
        scheduler = self._scheduler
        return self.state == "ready" and scheduler is not None and scheduler.would_admit()

    def snapshot(self) -> Snapshot:
        scheduler = self._scheduler
        if scheduler is None:
            return Snapshot(state=self.state, loading=self.loading)
        lanes = [
            LaneView(
                lane=turn.lane,
                phase="paused" if turn.paused is not None else turn.phase,
                label=turn.claim.label,
                n_tokens=turn.session.n_tokens if turn.session else 0,
                n_generated=turn.n_generated,
            )
            for turn in scheduler.turns.values()
            if turn.lane is not None
        ]
        return Snapshot(
            state=self.state,
            loading=self.loading,
            lanes=tuple(sorted(lanes, key=lambda view: view.lane)),
            n_lanes=scheduler.lanes.n,
            n_queued=len(scheduler.queue),
            n_sessions=len(scheduler.sessions),
            pages_free=scheduler.pages.n_free,
            pages=scheduler.pages.n,
            pages_promised=scheduler.ledger.pages_promised,
            frontiers_free=scheduler.places.n_free,
            frontiers=scheduler.places.n,
        )

    # For the daemon

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Load the engine, report started, then serve until cancelled.

        Raises what `build` raised, or `DeviceError` once the engine can't be trusted any more;
        every ticket has ended by then.
        """
        thread = EngineThread("ds4d-engine")
        try:
            engine, capacity = await thread.call(self._build, self._report, abandon=True)
            try:
                scheduler = self._open(engine, capacity)
                task_status.started()
                await self._serve(scheduler, thread, engine)
            except anyio.get_cancelled_exc_class():
                await thread.call(engine.close)  # the device is well: leave it tidy
                raise
        except Exception as error:
            self.state = "failed"
            known = error if isinstance(error, Ds4Error) else DeviceError(f"the engine: {error!r}")
            self._fail_all(known)
            if known is error:
                raise
            raise known from error
        finally:
            await thread.close()

    async def drain(self, within_s: float) -> None:
        """Refuse new work, let the present work end; what is left after `within_s`, or when this
        is cancelled, ends `Failed`."""
        if self.state != "failed":
            self.state = "draining"
        try:
            with anyio.move_on_after(within_s):
                while self._tickets:
                    self._quiet = anyio.Event()
                    await self._quiet.wait()
        finally:
            self._fail_all(self._closed())

    # The loop

    def _open(self, engine: Engine, capacity: Capacity) -> Scheduler:
        self._scheduler = Scheduler(
            capacity,
            n_vocab=engine.geometry.n_vocab,
            rows_max=engine.rows_max,
            rules=self._rules,
        )
        self.n_ctx = capacity.context
        self.loading = None
        if self.state == "loading":
            self.state = "ready"
        emit(log, "daemon.state", state=self.state, lanes=capacity.lanes, pages=capacity.pages)
        return self._scheduler

    async def _serve(self, scheduler: Scheduler, thread: EngineThread, engine: Engine) -> None:
        while True:
            await checkpoint_if_cancelled()  # a hop is shielded, so busy lanes would never hear it
            self._wake = anyio.Event()
            plan = scheduler.plan(self._clock())
            self._deliver(scheduler)
            if plan.idle:
                due = scheduler.due()
                with anyio.move_on_after(None if due is None else max(due - self._clock(), 0.0)):
                    await self._wake.wait()
                continue
            cancel = threading.Event()
            self._chunk = (plan.work.turn, cancel) if isinstance(plan.work, Chunk) else None
            outcome = await thread.call(
                execute,
                engine,
                plan,
                cancel,
                heartbeat=lambda: engine.heartbeat,
                stall_s=self._engine_stall_s,
            )
            self._chunk = None
            scheduler.settle(outcome, self._clock())
            self._deliver(scheduler)

    def _deliver(self, scheduler: Scheduler) -> None:
        """Hand the scheduler's news to their tickets."""
        news, scheduler.news = scheduler.news, []
        for turn_id, event in news:
            ticket = self._tickets.get(turn_id)
            if ticket is None:
                continue  # left
            if ticket.put(event):
                scheduler.on_pause(turn_id, ticket.n_read, self._clock())
            if isinstance(event, Done | Failed):
                self._ended(ticket, event)

    def _report(self, what: str, fraction: float) -> None:
        self.loading = Loading(what, min(max(fraction, 0.0), 1.0))

    # Tickets

    def _leave(self, ticket: Ticket, n_kept: int) -> None:
        scheduler, now = self._scheduler, self._clock()
        if scheduler is None:
            return
        if ticket.stats is not None and n_kept >= ticket.stats.n_generated:
            return  # it has ended and the client has all of it
        if self._tickets.pop(ticket.id, None):
            ticket.stats = scheduler.stats(ticket.id, now)
            _log_end(ticket, ticket.outcome, ticket.stats)
            self._cancel_chunk(ticket.id)
            self._maybe_quiet()
        scheduler.on_leave(ticket.id, n_kept, now)
        self._wake.set()

    def _resume(self, ticket: Ticket) -> None:
        if self._scheduler is not None:
            self._scheduler.on_resume(ticket.id)
            self._wake.set()

    def _ended(self, ticket: Ticket, event: Done | Failed) -> None:
        del self._tickets[ticket.id]
        ticket.stats = event.stats
        _log_end(ticket, event.reason if isinstance(event, Done) else "failed", event.stats)
        self._maybe_quiet()

    def _fail_all(self, error: Ds4Error) -> None:
        for ticket in list(self._tickets.values()):
            scheduler, now = self._scheduler, self._clock()
            stats = scheduler.stats(ticket.id, now) if scheduler else None
            stats = stats or Stats(n_prompt=len(ticket.claim.ids))
            failed = Failed(error, stats)
            ticket.put(failed)
            self._cancel_chunk(ticket.id)
            if scheduler is not None:
                scheduler.on_leave(ticket.id, ticket.n_read, now)
            self._ended(ticket, failed)
        self._wake.set()

    def _cancel_chunk(self, turn_id: int) -> None:
        if self._chunk is not None and self._chunk[0] == turn_id:
            self._chunk[1].set()

    def _maybe_quiet(self) -> None:
        if not self._tickets:
            self._quiet.set()

    def _closed(self) -> Refused:
        if self.state == "loading":
            return still_loading(self.loading)
        return Refused(
            "the daemon is going down; try again once it is back",
            status=503,
            code="draining",
            retry_after_s=RETRY_DRAINING_S,
        )


def still_loading(loading: Loading | None) -> Refused:
    """What everybody is told who asks for the model before it is there."""
    what, fraction = loading or ("model", 0.0)
    return Refused(
        f"The model is loading: {what}, {math.floor(100 * fraction)} % done.",
        status=503,
        code="model_loading",
        retry_after_s=RETRY_LOADING_S,
    )


def _log_end(ticket: Ticket, outcome: str, stats: Stats | None) -> None:
    """The one line that tells a request's whole story."""
    if stats is None:
        return
    rate = 1e3 * (stats.n_generated - 1) / stats.decode_ms if stats.decode_ms > 0 else None
    emit(
        log,
        "request.done",
        req=ticket.claim.label,
        outcome=outcome,
        prompt_tokens=stats.n_prompt,
        cached_tokens=stats.n_cached,
        generated_tokens=stats.n_generated,
        drafted_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        wait_ms=round(stats.wait_ms, 1),
        first_token_ms=None if stats.first_token_ms is None else round(stats.first_token_ms, 1),
        decode_tokens_per_s=None if rate is None else round(rate, 1),
    )


# In the engine thread


def execute(engine: Engine, plan: Plan, cancel: Cancel) -> Outcome:
    """Carry out `plan`: its moves in order, then its work. One hop."""
    captured: dict[int, Frontier] = {}
    for move in plan.moves:
        _move(engine, move, captured)
    began = time.perf_counter()
    match plan.work:
        case Chunk(session=session, work=work, capture=capture):
            try:
                prefilled = engine.prefill(work, cancel)
            except LaneError as error:
                return Outcome(captured=captured, failed=str(error))
            ms = 1e3 * (time.perf_counter() - began)
            if capture and not prefilled.cancelled:
                captured[session] = engine.capture(work.lane)
            return Outcome(captured=captured, prefilled=prefilled, ms=ms)
        case Step(cohort=cohort):
            verified = engine.verify(cohort)
            ms = 1e3 * (time.perf_counter() - began)
            return Outcome(captured=captured, verified=verified, ms=ms)
        case None:
            return Outcome(captured=captured)


def _move(engine: Engine, move: Move, captured: dict[int, Frontier]) -> None:
    match move:
        case Seat(lane, pages, copy, frontier):
            if copy is not None:
                engine.copy_page(*copy)
            engine.seat(lane)
            if pages:
                engine.map_pages(lane, pages)
            if frontier is not None:
                engine.restore(lane, frontier)
        case Extend(lane, pages):
            engine.map_pages(lane, pages)
        case Truncate(lane, n_tokens):
            engine.truncate(lane, n_tokens)
        case Capture(lane, session):
            captured[session] = engine.capture(lane)
        case Vacate(lane):
            engine.vacate(lane)
        case Drop(frontier):
            engine.drop(frontier)
