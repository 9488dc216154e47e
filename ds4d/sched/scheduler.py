"""The lane scheduler: events in, one plan out, its outcome back in. Pure: no clock, no thread.

    plan = scheduler.plan(now)           who runs, in which lane, prefill or verify
    outcome = execute(engine, plan)      the runner's hop to the engine thread
    scheduler.settle(outcome, now)       tokens out, turns ended, state kept

The work of a plan (`plan.py`) is a chunk of one prompt, or a pass over the lanes that decode.

How lanes share the engine. After each chunk the decoding lanes get as many passes as give the
prompts `prefill_share` of the time, at least one; while anybody decodes, chunks shrink until one
takes no longer than `stall_target_s`. Among waiting prompts the one with the shortest predicted
rest goes first, less the time it has waited already: a long prompt overtakes newcomers once it has
waited as long as it takes itself.

How state is reused. A turn looks for the longest known prefix not when it gets its lane but when
its first chunk is planned, so that four agents who arrive together with one system prompt compute
it once. If the prompt extends an idle session to its end, that session goes on in place; otherwise
a new session shares the full pages below the fork and copies the page in which it lies.

A turn ends by itself, because its client has left, or because its time is up (`Rules`). Whichever
it is, what it has computed stays as an idle session, but for what its client has not got.

Every page and frontier that an idle session holds can be taken from it, the least recently used
first; `memory.Ledger` makes sure that this is enough for every turn that has a lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ds4d.engine import Prefill
from ds4d.errors import LaneError, Refused
from ds4d.kv.pages import Pool
from ds4d.kv.prefix import best_match, spread
from ds4d.sched.admission import (
    Admit,
    Refuse,
    ServiceTime,
    Wait,
    at_the_door,
    at_the_lane,
    retry_after_s,
)
from ds4d.sched.cohort import form
from ds4d.sched.memory import Ledger, pages_for
from ds4d.sched.plan import Capture, Chunk, Drop, Extend, Plan, Seat, Step, Truncate, Vacate
from ds4d.sched.session import ALIGN, Held, Session, Turn
from ds4d.sched.ticket import Done, Event, Failed, Progress, Started, Token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4d.engine import Frontier, Verified, VerifyWork
    from ds4d.kv.prefix import Match
    from ds4d.sched.memory import Capacity
    from ds4d.sched.plan import Move, Outcome
    from ds4d.sched.ticket import Claim, Stats

CYCLES_MAX = 16  # passes between two chunks, however slow a chunk is
CHUNK_MIN = 256  # below it a chunk costs more than it spares the others
_WEIGHT = 0.25  # of the newest measurement in the moving averages of speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    # What a turn may take, by the rules at its submission: a reload cuts nobody short.
    send_stall_s: float = 60.0  # a client that reads nothing for so long is cancelled
    queue_deadline_s: float = 1800.0  # a turn that waits longer for its lane fails
    request_max_s: float = 7200.0  # from submit; a turn that takes longer fails
    # What holds for all from the next plan on.
    queue_total: int = 32  # turns waiting for a lane; beyond: 429
    stall_target_s: float = 2.0  # longest pause of decoding lanes for a chunk; 0: no bound
    prefill_share: float = 0.8  # of the time while both prompts and decoders wait
    frontiers_per_session: int = 8


class Waits(NamedTuple):
    """Why the first in the queue, and so everybody behind it, has to wait."""

    turn: int
    reason: Literal["lane", "memory"]


class Scheduler:
    """Belongs to the runner's task. `on_…` may be called while a plan is under way, and `rules`,
    `lanes_max` and `chunk` may be set: the next plan follows them."""

    def __init__(
        self, capacity: Capacity, *, n_vocab: int, rows_max: int, rules: Rules | None = None
    ) -> None:
        self.capacity = capacity
        self.rules = rules or Rules()
        self.lanes_max = capacity.lanes  # busy at once; those beyond a lower number finish
        self.chunk = capacity.chunk  # at most that: a multiple of 128
        self.ledger = Ledger(capacity.pages, capacity.frontiers)
        self.lanes = Pool(capacity.lanes)
        self.pages = Pool(capacity.pages)
        self.places = Pool(capacity.frontiers)
        self.turns: dict[int, Turn] = {}  # from submit to the end
        self.sessions: dict[int, Session] = {}
        self.news: list[tuple[int, Event]] = []  # for tickets; the runner empties it
        self.waits: Waits | None = None  # as of the last plan; None: nobody does
        self._n_vocab = n_vocab
        self._rows_max = rows_max
        self._service = ServiceTime()
        self._moves: list[Move] = []
        self._under_way: Plan | None = None
        self._left_late: list[tuple[int, int]] = []  # turns that were over: (id, tokens kept)
        self._closing: set[int] = set()  # sessions, as soon as no turn works on them
        self._owed = 0  # passes that the decoding lanes get before the next chunk
        self._token_s = 0.0  # of prefill
        self._pass_s = 0.0
        self._n_steps = 0
        self._n_sessions = 0

    # Events

    def on_submit(self, id: int, claim: Claim, now: float) -> None:
        """Queue a turn. Raises `Refused` when the queue is full."""
        match self._at_the_door():
            case Refuse(retry_after_s):
                raise Refused(
                    f"{len(self.queue)} requests are waiting already, which is all that may; "
                    f"try again in {retry_after_s} s",
                    status=429,
                    code="queue_full",
                    retry_after_s=retry_after_s,
                )
            case Admit():
                pass
        room = self.capacity.context - len(claim.ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(claim.ids)} tokens leaves no room for an answer")
        answer_max = max(min(claim.max_tokens, room), 1)
        turn = Turn(id, claim, answer_max=answer_max, rules=self.rules, now=now)
        self.turns[id] = turn

    def on_leave(self, id: int, n_kept: int, now: float) -> None:
        """The client needs no more; it has `n_kept` tokens. Takes effect in the next plan."""
        turn = self.turns.get(id)
        if turn is None:
            self._left_late.append((id, n_kept))
        elif turn.phase == "queued":
            self._over(turn, now)
        else:
            turn.kept = min(n_kept, turn.n_generated)

    def on_pause(self, id: int, n_read: int, now: float) -> None:
        """The client reads too slowly, `n_read` tokens so far: leave it out until `on_resume`."""
        if turn := self.turns.get(id):
            turn.paused = now
            turn.n_read = n_read
            turn.stepped_at = turn.gap_s = None  # the pause is no slowness of ours

    def on_resume(self, id: int) -> None:
        if turn := self.turns.get(id):
            turn.paused = None

    def on_close(self, session_id: int) -> None:
        """Drop a session with all of its state, once the turn that works on it is over. Takes
        effect in the next plan."""
        self._closing.add(session_id)

    # The heart

    def plan(self, now: float) -> Plan:
        """The next thing to do. Call `settle` before the next `plan`, unless it was idle."""
        if self._under_way is not None:
            raise ValueError("the last plan has not been settled")
        if not self._moves:
            self._sweep(now)
        work = None
        # A turn's end is a plan of its own: its frontier must be known before others look for it.
        if not self._moves:
            self._seat(now)
            work = self._choose(now)
        plan = Plan(tuple(self._moves), work)
        self._moves.clear()
        if not plan.idle:
            self._under_way = plan
        return plan

    def settle(self, outcome: Outcome, now: float) -> None:
        plan, self._under_way = self._under_way, None
        if plan is None:
            raise ValueError("no plan is under way")
        for session_id, frontier in outcome.captured.items():
            self._captured(self.sessions[session_id], frontier)
        match plan.work:
            case Chunk() as chunk:
                self._settle_chunk(chunk, outcome, now)
            case Step() as step:
                self._settle_step(step, outcome, now)
            case None:
                pass

    def due(self) -> float | None:
        """When an idle plan has to be looked at again, if no event comes before."""
        return min((self._patience(turn)[0] for turn in self.turns.values()), default=None)

    # Views

    @property
    def queue(self) -> list[Turn]:
        """Turns without a lane, in the order in which they will get one."""
        waiting = [t for t in self.turns.values() if t.phase == "queued"]
        return sorted(waiting, key=lambda t: (-t.claim.priority, t.id))

    @property
    def lanes_free(self) -> int:
        """Lanes that turns may still get, which is none while too many are busy."""
        return max(self.lanes_max - (self.lanes.n - self.lanes.n_free), 0)

    def wait_s(self, n_before: int) -> float:
        """Predicted wait for a lane behind `n_before` others, from now."""
        if self.waits is None:  # else the first in the queue can make no use of a free one
            n_before -= self.lanes_free
        return self._service.wait_s(n_before, self.lanes_max) if n_before >= 0 else 0.0

    def rest_s(self, now: float) -> dict[int, float]:
        """Predicted time until each prompt that has a lane is computed, by turn. They go one after
        the other, with passes of the lanes that decode between their chunks. Empty as long as no
        speed has been measured."""
        if self._token_s == 0:
            return {}
        token_s = self._token_s
        if any(turn.phase == "decode" and turn.paused is None for turn in self._seated()):
            chunk_s = self._chunk_size(decoding=True) * token_s
            token_s *= 1 + self._cycles(chunk_s) * self._pass_s / chunk_s
        rest, total_s = {}, 0.0
        for turn in sorted(self._prompts(), key=lambda turn: self._rank(turn, now)):
            total_s += self._n_left(turn) * token_s
            rest[turn.id] = total_s
        return rest

    def stats(self, id: int, now: float) -> Stats | None:
        """Of a turn that is not over, so far."""
        turn = self.turns.get(id)
        return turn.stats(now) if turn else None

    def would_admit(self) -> bool:
        return isinstance(self._at_the_door(), Admit)

    def _at_the_door(self) -> Admit | Refuse:
        n_queued = len(self.queue)
        return at_the_door(
            n_queued=n_queued,
            n_queue_max=self.rules.queue_total,
            lanes_free=self.lanes_free,
            wait_s=self.wait_s(n_queued),
        )

    def _seated(self) -> Iterator[Turn]:
        return (t for t in self.turns.values() if t.lane is not None)

    def _prompts(self) -> list[Turn]:
        """Turns that have a lane and whose prompt is not computed yet."""
        return [t for t in self._seated() if t.phase in ("seated", "prefill")]

    def _idle_sessions(self) -> list[Session]:
        """Least recently used first."""
        return sorted((s for s in self.sessions.values() if s.idle), key=lambda s: (s.used, s.id))

    # Who gets a lane

    def _seat(self, now: float) -> None:
        self.waits = None
        for turn in self.queue:
            n_pages = pages_for(turn.room, self.capacity.page_tokens)
            verdict = at_the_lane(lanes_free=self.lanes_free, ledger=self.ledger, n_pages=n_pages)
            if isinstance(verdict, Wait):
                self.waits = Waits(turn.id, verdict.reason)
                return
            self.ledger.promise(turn.id, n_pages)
            (turn.lane,) = self.lanes.take(1)
            turn.phase = "seated"
            turn.seated = now
            known = self._match(turn)
            turn.n_guess = known.usable if known else 0

    def _match(self, turn: Turn) -> Match[Session] | None:
        if not turn.claim.cache:
            return None
        return best_match(turn.claim.ids, self.sessions.values())

    # What runs next

    def _choose(self, now: float) -> Chunk | Step | None:
        ready = [t for t in self._seated() if t.phase == "decode" and t.paused is None]
        prompts = self._prompts()
        while prompts and not (ready and self._owed > 0):
            turn = min(prompts, key=lambda t: self._rank(t, now))
            if turn.session is None:
                self._bind(turn, now)
            if chunk := self._chunk(turn, decoding=bool(ready)):
                return chunk
            self._begin_decode(turn, now)
            prompts.remove(turn)
            ready.append(turn)
        if not ready:
            return None
        self._owed -= 1
        cohort = form(ready, self._rows_max)
        for turn in cohort:
            self._n_steps += 1
            turn.stepped = self._n_steps
            self._cover(turn, 1)
        return Step(
            tuple(t.id for t in cohort), tuple(t.verify_work(self._n_vocab) for t in cohort)
        )

    def _rank(self, turn: Turn, now: float) -> tuple[int, float, int]:
        rest_s = self._n_left(turn) * self._token_s
        return -turn.claim.priority, rest_s - (now - turn.submitted), turn.id

    def _n_left(self, turn: Turn) -> int:
        """Tokens of its prompt that are still to be computed, as far as one can tell."""
        done = turn.session.n_tokens if turn.session else turn.n_guess
        return turn.n_prompt - 1 - done

    def _chunk(self, turn: Turn, *, decoding: bool) -> Chunk | None:
        """The next chunk of `turn`'s prompt; None when only its last id is left.

        It ends at a multiple of 128, at the latest where a frontier is wanted.
        """
        session, lane = turn.bound
        start, last = session.n_tokens, turn.n_prompt - 1
        if start >= last:
            return None
        end = min((start + self._chunk_size(decoding=decoding)) // ALIGN * ALIGN, last)
        end = min((mark for mark in turn.marks if start < mark < end), default=end)
        capture = end in turn.marks and end not in session.held
        if capture:
            self._hold(session, end)
        self._cover(turn, end - start)
        work = Prefill(lane=lane, ids=turn.claim.ids[start:end])
        replay = start < turn.n_common
        return Chunk(turn.id, session.id, work, capture, replay=replay, stalls=decoding)

    def _chunk_size(self, *, decoding: bool) -> int:
        """Tokens; fewer while lanes decode, so that they don't wait too long."""
        size = self.chunk
        if decoding and self.rules.stall_target_s > 0:
            while size >= 2 * CHUNK_MIN and size * self._token_s > self.rules.stall_target_s:
                size //= 2
        return size

    def _begin_decode(self, turn: Turn, now: float) -> None:
        turn.phase = "decode"
        turn.decoding = now

    # Binding a turn to a session

    def _bind(self, turn: Turn, now: float) -> None:
        """Give `turn` its timeline: nothing, an idle session, or a fork of any."""
        match = self._match(turn)
        n = match.usable if match else 0
        source = match.known if match else None
        in_place = match is not None and match.extends
        page_tokens = self.capacity.page_tokens
        n_full, n_part = divmod(n, page_tokens)
        frontier = source.held[n].frontier if source else None

        def must_copy() -> bool:
            # The page in which the fork lies will be written to, so nobody else may map it.
            return (
                source is not None
                and n_part > 0
                and (not in_place or self.pages.refs(source.pages[n_full]) > 1)
            )

        if must_copy() and not self._free_pages(1, keep=source) and source and source.idle:
            in_place = True  # no page to copy into: the source gives up what lies behind the fork
        copy = None
        if source is not None and in_place:
            session = source
            self._cut(session, n)
            if must_copy():
                copy = self._copy_last(session)
        else:
            session = self._open()
            if source is not None:
                session.pages = source.pages[: n_full + (n_part > 0)]
                self.pages.share(session.pages)
                session.held = {
                    p: Held(h.place, h.frontier)
                    for p, h in source.held.items()
                    if p <= n and h.frontier is not None
                }
                self.places.share(h.place for h in session.held.values())
                source.used = now
                if n_part:
                    copy = self._copy_last(session)
        session.begin(turn.claim.ids, n, turn.room)
        session.lane = turn.lane
        session.turn = turn.id
        session.prompt_end = turn.n_prompt - 1
        session.used = now
        session.past = None
        turn.session = session
        turn.phase = "prefill"
        turn.started = now
        turn.n_cached = n
        turn.n_common = match.common if match else 0
        turn.marks = self._marks(turn)
        self._moves.append(Seat(turn.bound[1], tuple(session.pages), copy, frontier))
        self.news.append((turn.id, Started(turn.n_prompt, n, 1e3 * (now - turn.submitted))))

    def _copy_last(self, session: Session) -> tuple[int, int]:
        """Replace the last page of `session`, which others map too, by one of its own."""
        source = session.pages[-1]
        (target,) = self.pages.take(1)
        session.pages[-1] = target
        self.pages.give_back([source])
        return source, target

    def _marks(self, turn: Turn) -> list[int]:
        """Positions of the prompt where a frontier is wanted, beyond those that it has."""
        session, _ = turn.bound
        if not turn.claim.cache:
            return []
        end = session.prompt_end
        starts = {s // ALIGN * ALIGN for s in turn.claim.starts}
        places = self.rules.frontiers_per_session - 2
        wanted = spread((p for p in starts | session.held.keys() if 0 < p < end), end, places)
        return sorted(p for p in {*wanted, end} if p > session.n_tokens)

    def _cover(self, turn: Turn, n_more: int) -> None:
        """Map pages for `n_more` tokens of `turn`."""
        session, lane = turn.bound
        wanted = pages_for(session.n_tokens + n_more, self.capacity.page_tokens)
        n = wanted - len(session.pages)
        if n <= 0:
            return
        if wanted > self.ledger.promised_to(turn.id) or not self._free_pages(n):
            raise ValueError("the ledger promised pages that are not there")
        pages = self.pages.take(n)
        session.pages += pages
        self._moves.append(Extend(lane, tuple(pages)))

    # What came of it

    def _settle_chunk(self, chunk: Chunk, outcome: Outcome, now: float) -> None:
        turn, session = self.turns[chunk.turn], self.sessions[chunk.session]
        done = outcome.prefilled
        if done is None:
            self._poisoned(turn, outcome.failed or "the engine gave no reason", now)
            return
        if done.cancelled:
            self._forget_unmade(session)
            return
        session.extend(chunk.work.ids)
        if done.n_tokens != session.n_tokens:
            raise ValueError(
                f"lane {done.lane} holds {done.n_tokens} tokens, expected {session.n_tokens}"
            )
        self._thin(session, self.rules.frontiers_per_session - 1)
        self._token_s = _mixed(self._token_s, outcome.ms / 1e3 / len(chunk.work.ids))
        self._owed = self._cycles(outcome.ms / 1e3)
        self.news.append((turn.id, Progress(session.n_tokens, turn.n_prompt)))
        if session.n_tokens == turn.n_prompt - 1:
            self._begin_decode(turn, now)

    def _cycles(self, chunk_s: float) -> int:
        """Passes after a chunk, so that prompts get their share of the time and no more."""
        if self._pass_s <= 0:
            return 1
        share = self.rules.prefill_share
        wanted = (1 - share) / share * chunk_s / self._pass_s
        return max(1, min(math.ceil(wanted), CYCLES_MAX))

    def _settle_step(self, step: Step, outcome: Outcome, now: float) -> None:
        self._pass_s = _mixed(self._pass_s, outcome.ms / 1e3)
        by_lane = {verified.lane: verified for verified in outcome.verified}
        for turn_id, work in zip(step.turns, step.cohort, strict=True):
            self._settle_lane(self.turns[turn_id], work, by_lane[work.lane], now)

    def _settle_lane(self, turn: Turn, work: VerifyWork, verified: Verified, now: float) -> None:
        since, turn.gap_s = turn.stepped_at, None
        if verified.failed is not None:
            self._poisoned(turn, verified.failed, now)
            return
        turn.bound[0].extend((turn.pending, *verified.ids[:-1]))
        turn.pending = verified.ids[-1]
        turn.drafted += len(work.draft)
        turn.accepted += verified.n_accepted
        if since is not None:
            turn.gap_s = (now - since) / len(verified.ids)
            turn.token_s = _mixed(turn.token_s, turn.gap_s)
        turn.stepped_at = now
        if turn.kept is not None:
            return  # it was left meanwhile: nobody reads these
        for i, token in enumerate(verified.ids):
            if token in turn.claim.stop_ids:
                self._done(turn, Done("stop", token, turn.stats(now)), now)
                return
            logprobs = verified.logprobs[i] if verified.logprobs else None
            self.news.append((turn.id, Token(token, turn.n_generated, logprobs)))
            turn.draw(token, now)
            if turn.n_generated == turn.answer_max:
                self._done(turn, Done("length", None, turn.stats(now)), now)
                return

    def _done(self, turn: Turn, done: Done, now: float) -> None:
        self.news.append((turn.id, done))
        turn.kept = turn.n_generated
        self._finish(turn, now)

    # Ends

    def _sweep(self, now: float) -> None:
        """End turns that were left and those whose time is up, then close sessions."""
        for turn in list(self.turns.values()):
            if turn.kept is None:
                ends, code = self._patience(turn)
                if now < ends:
                    continue
                error = self._time_is_up(turn, code)
                self.news.append((turn.id, Failed(error, turn.stats(now))))
                turn.kept = turn.n_generated if turn.paused is None else turn.n_read
            self._finish(turn, now)
        late, self._left_late = self._left_late, []
        for turn_id, n_kept in late:
            self._trim_answer(turn_id, n_kept)
        if self._closing:
            for session in [s for s in self.sessions.values() if s.id in self._closing]:
                if session.idle:
                    self._close(session)
            self._closing &= self.sessions.keys()

    def _patience(self, turn: Turn) -> tuple[float, str]:
        """When it ends, and for what reason."""
        rules = turn.rules
        ends = [(turn.submitted + rules.request_max_s, "timeout")]
        if turn.phase == "queued":
            ends.append((turn.submitted + rules.queue_deadline_s, "queue_timeout"))
        if turn.paused is not None:
            ends.append((turn.paused + rules.send_stall_s, "slow_client"))
        return min(ends)

    def _time_is_up(self, turn: Turn, code: str) -> Refused:
        rules, again_s = turn.rules, 1
        match code:
            case "slow_client":
                why = f"the client has read nothing for {rules.send_stall_s:.0f} s"
            case "queue_timeout":
                again_s = retry_after_s(self.wait_s(len(self.queue)))
                why = (
                    f"no lane became free within the {rules.queue_deadline_s:.0f} s that a "
                    f"request may wait; try again in {again_s} s"
                )
            case _:
                why = f"the request took longer than the {rules.request_max_s:.0f} s that one may"
        return Refused(why, status=503, code=code, retry_after_s=again_s)

    def _finish(self, turn: Turn, now: float) -> None:
        """Free the lane of a turn; its session stays as an idle one as far as the client knows it.

        Tokens that the client has not got are no part of what is kept. The engine rolls back
        `rows_max` tokens at most: beyond that the session falls back to an earlier frontier.
        """
        session, lane = turn.session, turn.lane
        if session is not None and lane is not None:
            keep = turn.claim.cache and session.id not in self._closing
            if keep:
                end = min(session.n_tokens, turn.n_prompt + (turn.kept or 0))
                if session.n_tokens - end > self._rows_max:
                    end = max((p for p in session.frontiers if p <= end), default=0)
                elif end not in session.held and end > 0:
                    if end < session.n_tokens:
                        self._moves.append(Truncate(lane, end))
                    self._hold(session, end)
                    self._moves.append(Capture(lane, session.id))
                self._cut(session, end)
            self._moves.append(Vacate(lane))
            session.lane = None
            session.used = now
            session.past = turn.past
            if not keep or not session.held:
                self._close(session)
        self._over(turn, now)

    def _poisoned(self, turn: Turn, why: str, now: float) -> None:
        """End a turn whose lane failed alone, and drop all of its state."""
        error = LaneError(f"the model failed on this prompt: {why}")
        self.news.append((turn.id, Failed(error, turn.stats(now))))
        session, lane = turn.session, turn.lane
        if session is not None and lane is not None:
            self._moves.append(Vacate(lane))
            self._close(session)
        self._over(turn, now)

    def _over(self, turn: Turn, now: float) -> None:
        if turn.lane is not None:
            self.lanes.give_back([turn.lane])
            self.ledger.release(turn.id)
        if turn.seated is not None:
            self._service.saw(now - turn.seated)
        turn.phase = "over"
        turn.lane = turn.session = None
        del self.turns[turn.id]

    def _trim_answer(self, turn_id: int, n_kept: int) -> None:
        """A client left after its turn had ended, with less than all of the answer."""
        for session in self.sessions.values():
            if session.turn == turn_id and session.idle:
                end = session.prompt_end + 1 + n_kept
                if end < session.n_tokens:
                    self._cut(session, max((p for p in session.held if p <= end), default=0))
                    if not session.held:
                        self._close(session)
                return

    # Sessions, their pages and frontiers

    def _open(self) -> Session:
        self._n_sessions += 1
        session = Session(self._n_sessions)
        self.sessions[session.id] = session
        return session

    def _close(self, session: Session) -> None:
        self._cut(session, 0)
        del self.sessions[session.id]

    def _cut(self, session: Session, n_tokens: int) -> None:
        """Forget what lies behind `n_tokens`: ids, pages, frontiers."""
        self._release(session, [p for p in session.held if p > n_tokens])
        n_pages = pages_for(n_tokens, self.capacity.page_tokens)
        self.pages.give_back(session.pages[n_pages:])
        del session.pages[n_pages:]
        session.n_tokens = n_tokens

    def _hold(self, session: Session, position: int) -> None:
        """Take a place for a frontier that the plan under construction will capture."""
        while not self.places.can_take(1):
            self._evict_frontier()
        (place,) = self.places.take(1)
        session.held[position] = Held(place, None)

    def _captured(self, session: Session, frontier: Frontier) -> None:
        session.held[frontier.n_tokens].frontier = frontier
        if session.idle:
            self._thin(session, self.rules.frontiers_per_session)

    def _forget_unmade(self, session: Session) -> None:
        """Give back the places of frontiers that a cancelled chunk did not capture."""
        self._release(session, [p for p, held in session.held.items() if held.frontier is None])

    def _release(self, session: Session, positions: list[int]) -> None:
        for position in positions:
            held = session.held.pop(position)
            if self.places.give_back([held.place]) and held.frontier is not None:
                self._moves.append(Drop(held.frontier))

    def _thin(self, session: Session, n_max: int) -> None:
        if len(session.held) > n_max:
            kept = spread(session.held, session.prompt_end, n_max)
            self._release(session, [p for p in session.held if p not in kept])

    def _free_pages(self, n: int, keep: Session | None = None) -> bool:
        """Make `n` pages free, if need be by closing idle sessions other than `keep`."""
        for session in self._idle_sessions():
            if self.pages.can_take(n):
                break
            if session is not keep:
                self._close(session)
        return self.pages.can_take(n)

    def _evict_frontier(self) -> None:
        """Take the least useful frontier of the session that can best spare one.

        Idle sessions give first, the least recently used down to its last one, with which it
        closes; then living ones, those that have most. As there are two places a lane, nobody is
        asked for the end of its prompt.
        """
        living = sorted(
            (s for s in self.sessions.values() if not s.idle), key=lambda s: (-len(s.held), s.id)
        )
        for session in (*self._idle_sessions(), *living):
            if made := session.frontiers:
                kept = spread(made, session.prompt_end, len(made) - 1)
                self._release(session, [p for p in made if p not in kept])
                if session.idle and not session.held:
                    self._close(session)
                return
        raise ValueError("the ledger promised a frontier that is not there")


def _mixed(mean: float, newest: float) -> float:
    return newest if mean == 0 else mean + _WEIGHT * (newest - mean)
