"""The loop around the scheduler: tickets on one side, the engine thread on the other.

Owns the engine thread, the tickets, and the state that the door shows (loading, ready, draining,
drained, failed). The scheduler's state belongs to the task that runs `run`; other tasks of the same
loop reach it through `submit`, their tickets and the operator's verbs, between two plans or while
one is under way.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.lowlevel import checkpoint_if_cancelled

from ds4d import wire
from ds4d.errors import Declined, DeviceError, Ds4Error, LaneError, Refused, RequestError
from ds4d.events import emit
from ds4d.sched import view
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
from ds4d.sched.session import ALIGN
from ds4d.sched.snapshot import SESSIONS_MAX
from ds4d.sched.tally import Tally, ending
from ds4d.sched.thread import EngineThread
from ds4d.sched.ticket import BUFFER_EVENTS, Claim, Done, Failed, Started, Stats, Ticket, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anyio.abc import TaskStatus

    from ds4d.engine import Cancel, Engine, Frontier, Need
    from ds4d.sched.memory import Capacity
    from ds4d.sched.plan import Move, Plan
    from ds4d.sched.scheduler import Waits
    from ds4d.sched.snapshot import Snapshot
    from ds4d.sched.tally import Ending

    Report = Callable[[str, float], None]
    """What is being loaded, and how much of all loading is done: 0 to 1. From any thread."""

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "drained", "failed"]
Drained = Literal["drained", "deadline", "undrained", "failed"]
RETRY_LOADING_S = 5
RETRY_DRAINING_S = 10  # a restart takes about that


class Loading(NamedTuple):
    what: str
    fraction: float  # of all loading: 0 to 1


class _Drain:
    """One drain, of all who have asked for it before it ended."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.how: Drained = "drained"

    def end(self, how: Drained) -> None:
        self.how = how
        self.ended.set()


class Runner:
    """Build it, `run` it in the root task group, `submit` claims to it."""

    def __init__(
        self,
        build: Callable[[Report], tuple[Engine, Capacity]],
        *,
        rules: Rules | None = None,
        engine_stall_s: float = 60.0,
        buffer_events: int = BUFFER_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`build` runs in the engine thread, and so does the engine that it returns."""
        self.state: State = "loading"
        self.loading: Loading | None = Loading("starting", 0.0)
        self.n_ctx = 0  # tokens of prompt and answer together; 0 while loading
        self.engine_stall_s = engine_stall_s  # may be set at any time
        self.engine_need: Need | None = None  # what was allocated; None while loading
        self.capacity: Capacity | None = None
        self._build = build
        self._rules = rules or Rules()
        self._buffer_events = buffer_events
        self._clock = clock
        self.n_vocab = 0
        self._scheduler: Scheduler | None = None
        self._thread: EngineThread | None = None
        self._tally = Tally()
        self._tickets: dict[int, Ticket] = {}  # those that have not ended
        self._unread: set[int] = set()  # tickets that have, and whose readers are still at it
        self._n_tickets = 0
        self._wake = anyio.Event()
        self._drain: _Drain | None = None  # under way
        self._chunk: tuple[int, threading.Event] | None = None  # under way: turn, cancel flag
        self._waits: Waits | None = None  # last told to the log

    # For the API

    def submit(self, claim: Claim) -> Ticket:
        """Queue `claim`. Raises `Refused` (loading, draining, queue full), or `RequestError` when
        the prompt leaves no room for an answer or an id is not in the vocabulary."""
        scheduler = self._scheduler
        if scheduler is None or self.state != "ready":
            raise self._closed()
        if not 1 <= len(claim.ids) < self.n_ctx:
            raise RequestError(
                f"the prompt has {len(claim.ids)} tokens, expected 1 to {self.n_ctx - 1}",
                code="context_length_exceeded",
            )
        for token in _ids_of(claim):
            if not 0 <= token < self.n_vocab:
                raise RequestError(
                    f"{token} is not a token id of this model, expected 0 to {self.n_vocab - 1}",
                    code="invalid_token_id",
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
        _log_move(ticket, "received", "queued")
        return ticket

    def would_admit(self) -> bool:
        """Whether `submit` would take a claim now."""
        scheduler = self._scheduler
        return self.state == "ready" and scheduler is not None and scheduler.would_admit()

    # For the operator

    @property
    def rules(self) -> Rules:
        """May be set at any time: the next plan follows them, and how long a turn may take is what
        they said when it was submitted."""
        return self._rules

    @rules.setter
    def rules(self, rules: Rules) -> None:
        self._rules = rules
        if self._scheduler is not None:
            self._scheduler.rules = rules

    def set_lanes(self, n_max: int) -> None:
        """Use at most `n_max` lanes; turns in lanes beyond it finish. Raises `Declined`."""
        scheduler = self._opened()
        n = scheduler.capacity.lanes
        if not 1 <= n_max <= n:
            raise Declined(
                f"lanes.max {n_max}: expected 1 to {n}, which were allocated at start",
                wire.BAD_PARAMS,
            )
        scheduler.lanes_max = n_max
        self._wake.set()

    def set_chunk(self, n_tokens: int) -> None:
        """Compute prompts in chunks of at most `n_tokens`, from the next one on. Raises
        `Declined`."""
        scheduler = self._opened()
        most = scheduler.capacity.chunk
        if not ALIGN <= n_tokens <= most or n_tokens % ALIGN:
            raise Declined(
                f"prefill.chunk {n_tokens}: expected a multiple of {ALIGN} up to {most}, which "
                "was allocated at start",
                wire.BAD_PARAMS,
            )
        scheduler.chunk = n_tokens

    def close_session(self, id: int, force: bool = False) -> None:
        """Drop an idle session and its state; with `force` also one at work, whose request ends
        `Failed`. Raises `Declined`."""
        scheduler = self._opened()
        session = scheduler.sessions.get(id)
        if session is None:
            raise Declined(
                f"there is no session {id}: it was closed, or its memory went to others",
                wire.NOT_FOUND,
            )
        ticket = None if session.idle else self._tickets.get(session.turn or 0)
        if ticket is not None:
            if not force:
                raise Declined(
                    f"request {ticket.claim.label} is at work in session {id}; with force it is "
                    "ended as well",
                    wire.BUSY,
                )
            self._fail(ticket, _cancelled())
        scheduler.on_close(id)
        self._wake.set()
        moved = {"from": "idle" if session.idle else "busy", "to": "closed"}
        emit(log, "session.state", level=logging.INFO, sess=id, **moved, tokens=session.n_tokens)

    def cancel(self, label: str) -> None:
        """End the requests with this id. Raises `Declined` when there is none."""
        self._opened()
        tickets = [one for one in self._tickets.values() if one.claim.label == label]
        if not tickets:
            raise Declined(
                f"no request {label} is queued or running: it has ended, or the id is another",
                wire.NOT_FOUND,
            )
        for ticket in tickets:
            self._fail(ticket, _cancelled())

    def n_open(self) -> tuple[int, int]:
        """Turns that run, answers still being read among them; and those that wait for a lane."""
        turns = self._scheduler.turns.values() if self._scheduler else ()
        n_queued = sum(turn.phase == "queued" for turn in turns)
        n_unread = len(self._unread - self._scheduler.turns.keys()) if self._scheduler else 0
        return len(turns) - n_queued + n_unread, n_queued

    def snapshot(self, sessions_max: int = SESSIONS_MAX) -> Snapshot | None:
        """Everything at this moment; None while loading. Sessions cost by far the most of it."""
        scheduler = self._scheduler
        if scheduler is None:
            return None
        now, age_s = self._clock(), self.heartbeat_age_s()
        return view.take(scheduler, self._tally, now, age_s, sessions_max)

    def heartbeat_age_s(self) -> float | None:
        """For how long the engine has not moved, to within a second; None when it has nothing to
        do or is being built."""
        return self._thread.still_s if self._thread is not None else None

    # For the daemon

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Load the engine, report started, then serve until cancelled. However this ends, every
        ticket has ended by then.

        Raises what `build` raised, or `DeviceError` once the engine can't be trusted any more.
        """
        self._thread = thread = EngineThread("ds4d-engine")
        try:
            engine, capacity = await thread.call(self._build, self._report, abandon=True)
            try:
                self.engine_need = await thread.call(_need, engine, capacity)
                scheduler = self._open(engine, capacity)
                task_status.started()
                await self._serve(scheduler, thread, engine)
            except anyio.get_cancelled_exc_class():
                self._cut(self._drain or _Drain())
                await thread.call(engine.close)  # the device is well: leave it tidy
                raise
        except Exception as error:
            self.state = "failed"
            self._end_drain("failed")
            known = error if isinstance(error, Ds4Error) else DeviceError(f"the engine: {error!r}")
            self._fail_all(known)
            if known is error:
                raise
            raise known from error
        finally:
            await thread.close()

    async def drain(self, within_s: float, *, hard: bool = True) -> Drained:
        """Refuse new work and let the present work end, until its readers have all of it; what is
        left after `within_s` ends `Failed`. Returns how it came out, "undrained" if `undrain` was
        called meanwhile.

        When this is cancelled what is left ends as well if `hard`, else nothing changes. Several
        may run at once: the earliest deadline counts.
        """
        if self.state in ("drained", "failed"):
            return self.state
        self.state = "draining"
        drain = self._drain = self._drain or _Drain()
        self._maybe_quiet()
        try:
            with anyio.move_on_after(within_s):
                await drain.ended.wait()
        except anyio.get_cancelled_exc_class():
            if hard:
                self._cut(drain)
            raise
        self._cut(drain)
        return drain.how

    def undrain(self) -> None:
        """Take new work again. Raises `Declined` when no drain was asked for."""
        if self.state not in ("draining", "drained"):
            raise Declined(f"the daemon is {self.state}, not draining", wire.WRONG_STATE)
        self.state = "ready" if self._scheduler is not None else "loading"
        self._end_drain("undrained")

    def _maybe_quiet(self) -> None:
        """A drain is over when nobody has anything left to do or to read."""
        if self.state == "draining" and not self._tickets and not self._unread:
            self.state = "drained"
            self._end_drain("drained")

    def _cut(self, drain: _Drain) -> None:
        """End what still runs, unless `drain` is over."""
        if drain.ended.is_set():
            return
        self.state = "drained"
        self._end_drain("deadline" if self._tickets else "drained")
        self._fail_all(_going("the daemon had to end this request before it was answered"))

    def _end_drain(self, how: Drained) -> None:
        if self._drain is not None:
            self._drain.end(how)
            self._drain = None

    # The loop

    def _open(self, engine: Engine, capacity: Capacity) -> Scheduler:
        self._scheduler = Scheduler(
            capacity,
            n_vocab=engine.geometry.n_vocab,
            rows_max=engine.rows_max,
            rules=self._rules,
        )
        self.n_ctx = capacity.context
        self.n_vocab = engine.geometry.n_vocab
        self.capacity = capacity
        self.loading = None
        if self.state == "loading":
            self.state = "ready"
        return self._scheduler

    async def _serve(self, scheduler: Scheduler, thread: EngineThread, engine: Engine) -> None:
        while True:
            await checkpoint_if_cancelled()  # a hop is shielded, so busy lanes would never hear it
            self._wake = anyio.Event()
            plan = scheduler.plan(self._clock())
            self._deliver(scheduler)
            self._log_waits(scheduler)
            if plan.idle:
                self._tally.released(scheduler.turns, self._clock())
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
                stall_s=lambda: self.engine_stall_s,
            )
            self._chunk = None
            self._settle(scheduler, plan, outcome)
            self._deliver(scheduler)

    def _settle(self, scheduler: Scheduler, plan: Plan, outcome: Outcome) -> None:
        now = self._clock()
        match plan.work:
            case Chunk() as chunk:
                scheduler.settle(outcome, now)
                self._tally.chunk(chunk, outcome, now)
            case Step() as step:
                turns = [scheduler.turns[turn] for turn in step.turns]  # some end by it
                scheduler.settle(outcome, now)
                self._tally.step(step, turns, outcome, now)
            case None:
                scheduler.settle(outcome, now)
        self._tally.released(scheduler.turns, now)

    def _deliver(self, scheduler: Scheduler) -> None:
        """Hand the scheduler's news to their tickets."""
        news, scheduler.news = scheduler.news, []
        for turn_id, event in news:
            ticket = self._tickets.get(turn_id)
            if ticket is None:
                continue  # left
            if ticket.put(event):
                scheduler.on_pause(turn_id, ticket.n_read, self._clock())
            match event:
                case Token(index=0):
                    _log_move(ticket, "prefill", "decode")
                case Started():
                    self._tally.started(ticket.claim, event)
                    _log_move(ticket, "queued", "prefill")
                case Done() | Failed():
                    self._ended(ticket, event)
                case _:
                    pass

    def _log_waits(self, scheduler: Scheduler) -> None:
        """Say why the first in the queue waits, once."""
        if scheduler.waits == self._waits:
            return
        self._waits = scheduler.waits
        if self._waits is not None and (ticket := self._tickets.get(self._waits.turn)):
            emit(
                log,
                "admission.decision",
                level=logging.DEBUG,
                action="wait",
                req=ticket.claim.label,
                reason=self._waits.reason,
                queued=len(scheduler.queue),
                pages_promised=scheduler.ledger.pages_promised,
            )

    def _report(self, what: str, fraction: float) -> None:
        self.loading = Loading(what, min(max(fraction, 0.0), 1.0))

    # Tickets

    def _leave(self, ticket: Ticket, n_kept: int) -> None:
        scheduler, now = self._scheduler, self._clock()
        if scheduler is None:
            return
        ended = ending(ticket, n_kept)
        lives = self._tickets.pop(ticket.id, None) is not None
        self._unread.discard(ticket.id)
        self._maybe_quiet()
        if lives:
            ticket.stats = scheduler.stats(ticket.id, now)
            self._cancel_chunk(ticket.id)
        stats = ticket.stats or Stats(n_prompt=len(ticket.claim.ids))
        self._tally.ended(ticket.claim, ended, stats)
        _log_end(ticket, ended, stats)
        if not lives and n_kept >= stats.n_generated:
            return  # it has ended and the client has all of it
        if lives and ended.outcome == "cancelled":
            self._tally.leaving(ticket.id, stats, now)
        scheduler.on_leave(ticket.id, n_kept, now)
        self._wake.set()

    def _resume(self, ticket: Ticket) -> None:
        if self._scheduler is not None:
            self._scheduler.on_resume(ticket.id)
            self._wake.set()

    def _ended(self, ticket: Ticket, event: Done | Failed) -> None:
        """No event comes any more; its story is told when its reader leaves."""
        del self._tickets[ticket.id]
        self._unread.add(ticket.id)
        ticket.stats = event.stats

    def _fail(self, ticket: Ticket, error: Ds4Error) -> None:
        """End a ticket from this side; its turn goes as if the client had left."""
        scheduler, now = self._scheduler, self._clock()
        stats = scheduler.stats(ticket.id, now) if scheduler else None
        failed = Failed(error, stats or Stats(n_prompt=len(ticket.claim.ids)))
        ticket.put(failed)
        self._cancel_chunk(ticket.id)
        if scheduler is not None:
            scheduler.on_leave(ticket.id, ticket.n_read, now)
        self._ended(ticket, failed)
        self._wake.set()

    def _fail_all(self, error: Ds4Error) -> None:
        for ticket in list(self._tickets.values()):
            self._fail(ticket, error)

    def _cancel_chunk(self, turn_id: int) -> None:
        if self._chunk is not None and self._chunk[0] == turn_id:
            self._chunk[1].set()

    def _opened(self) -> Scheduler:
        """Raises `Declined` while there is nothing to operate on."""
        if self._scheduler is None or self.state == "failed":
            raise Declined(f"the daemon is {self.state}, not ready", wire.WRONG_STATE)
        return self._scheduler

    def _closed(self) -> Refused:
        if self.state == "loading":
            return still_loading(self.loading)
        return _going("the daemon takes no new requests at present")


def still_loading(loading: Loading | None) -> Refused:
    """What everybody is told who asks for the model before it is there."""
    what, fraction = loading or ("model", 0.0)
    return Refused(
        f"The model is loading: {what}, {math.floor(100 * fraction)} % done.",
        status=503,
        code="model_loading",
        retry_after_s=RETRY_LOADING_S,
    )


def _going(what: str) -> Refused:
    return Refused(
        f"{what}; try again in {RETRY_DRAINING_S} s",
        status=503,
        code="draining",
        retry_after_s=RETRY_DRAINING_S,
    )


def _cancelled() -> RequestError:
    """Not `Refused`, after which clients send by themselves again what the operator has ended."""
    return RequestError("an operator has cancelled this request", code="cancelled")


def _ids_of(claim: Claim) -> Iterator[int]:
    """Token ids that the engine will meet; of the prompt only the lowest and the highest."""
    yield int(claim.ids.min())
    yield int(claim.ids.max())
    yield from claim.stop_ids
    yield from (token for token, _ in claim.sampling.bias)
    if claim.banned_after is not None:
        yield from claim.banned_after[1]


def _log_move(ticket: Ticket, before: str, after: str) -> None:
    label = ticket.claim.label
    emit(log, "request.state", level=logging.DEBUG, req=label, **{"from": before, "to": after})


def _log_end(ticket: Ticket, ended: Ending, stats: Stats) -> None:
    """The one line that tells a request's whole story."""
    n_more = stats.n_generated - 1  # than the first, whose time is the prompt's
    rate = 1e3 * n_more / stats.decode_ms if n_more > 0 and stats.decode_ms > 0 else None
    emit(
        log,
        "request.done",
        req=ticket.claim.label,
        outcome=ended.outcome,
        cause=ended.cause,
        prompt_tokens=stats.n_prompt,
        cached_tokens=stats.n_cached,
        generated_tokens=stats.n_generated,
        drafted_tokens=stats.drafted,
        accepted_tokens=stats.accepted,
        wait_ms=round(stats.wait_ms, 1),
        first_token_ms=None if stats.first_token_ms is None else round(stats.first_token_ms, 1),
        total_ms=round(stats.total_ms, 1),
        decode_tokens_per_s=None if rate is None else round(rate, 1),
    )


# In the engine thread


def _need(engine: Engine, capacity: Capacity) -> Need:
    return engine.need(
        lanes=capacity.lanes,
        pages=capacity.pages,
        frontiers=capacity.frontiers,
        chunk=capacity.chunk,
    )


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
