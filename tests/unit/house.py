"""A scheduler above a fake engine, with time as an argument and all books checked at every step."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ds4d.engine import Sampling
from ds4d.sched.plan import Chunk, Drop, Plan
from ds4d.sched.runner import execute
from ds4d.sched.scheduler import Rules, Scheduler
from ds4d.sched.ticket import Claim, Done, Event, Failed, Started, Token
from tests.fakes import EOS, FakeEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

GREEDY = Sampling(temperature=0.0)


def prompt(n: int, *, seed: int = 0, head: Iterable[int] = ()) -> np.ndarray:
    """`head`, then ids that depend on `seed`: `n` in all."""
    head = np.asarray(list(head), np.int32)
    tail = np.random.default_rng(seed).integers(16, 500, n - len(head), dtype=np.int32)
    return np.concatenate([head, tail])


def claim(ids: np.ndarray, *, max_tokens: int = 8, **more: object) -> Claim:
    fields = {"sampling": GREEDY, "stop_ids": frozenset({EOS}), "max_tokens": max_tokens} | more
    return Claim(ids=ids, **fields)


@dataclass
class Heard:
    """What one ticket was told."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [e.id for e in self.events if isinstance(e, Token)]

    @property
    def started(self) -> Started:
        (started,) = (e for e in self.events if isinstance(e, Started))
        return started

    @property
    def end(self) -> Done | Failed | None:
        return next((e for e in self.events if isinstance(e, Done | Failed)), None)


class House:
    """A scheduler and its engine; time passes by `tick` seconds a plan. Checks all books always."""

    def __init__(
        self, engine: FakeEngine | None = None, *, rules: Rules | None = None, tick: float = 0.01
    ) -> None:
        self.engine = engine or FakeEngine()
        self.scheduler = Scheduler(
            self.engine.capacity,
            n_vocab=self.engine.geometry.n_vocab,
            rows_max=self.engine.rows_max,
            rules=rules,
        )
        self.now = 0.0
        self.tick = tick
        self.heard: dict[int, Heard] = {}
        self.left: set[int] = set()
        self.busy = 0  # lanes, before the last step
        self.plans: list[Plan] = []
        self.cancel = threading.Event()
        self.meanwhile: list[int] = []  # turns that are left while the next plan is under way

    def submit(self, claim: Claim) -> int:
        turn = len(self.heard) + 1
        self.scheduler.on_submit(turn, claim, self.now)
        self.heard[turn] = Heard()
        return turn

    def leave(self, turn: int, n_kept: int | None = None) -> None:
        self.left.add(turn)
        n_kept = len(self.heard[turn].tokens) if n_kept is None else n_kept
        self.scheduler.on_leave(turn, n_kept, self.now)

    def close(self, session: int) -> None:
        """As an operator does with force: whoever works on it hears no more."""
        for turn in self.scheduler.turns.values():
            if turn.session is not None and turn.session.id == session:
                self.left.add(turn.id)
                turn_id, n_kept = turn.id, turn.n_generated
                self.scheduler.on_leave(turn_id, n_kept, self.now)
        self.scheduler.on_close(session)

    def step(self) -> Plan:
        self.now += self.tick
        self.busy = self.scheduler.lanes.n - self.scheduler.lanes.n_free
        plan = self.scheduler.plan(self.now)
        self.plans.append(plan)
        self.deliver()
        if not plan.idle:
            outcome = execute(self.engine, plan, self.cancel)
            self.cancel.clear()
            while self.meanwhile:
                self.leave(self.meanwhile.pop())
            if plan.work is not None:  # the fake takes no time: a token of prefill 1 ms, a pass 10
                n = len(plan.work.work.ids) if isinstance(plan.work, Chunk) else 10
                outcome = replace(outcome, ms=float(n))
            self.now += self.tick
            self.scheduler.settle(outcome, self.now)
        self.deliver()
        self.check()
        return plan

    def deliver(self) -> None:
        for turn, event in self.scheduler.news:
            heard = self.heard[turn]
            assert heard.end is None, "an event after the end"
            gone = turn in self.left and isinstance(event, Token | Done)
            assert not gone, "an answer for a client that has gone"
            heard.events.append(event)
        self.scheduler.news.clear()

    def run(self, *, n_max: int = 5000) -> None:
        """Until there is nothing to do."""
        for _ in range(n_max):
            if self.step().idle:
                return
        raise AssertionError("no end in sight")

    def ask(self, claim: Claim) -> Heard:
        turn = self.submit(claim)
        self.run()
        return self.heard[turn]

    def check(self) -> None:
        s = self.scheduler
        sessions = s.sessions.values()
        held = Counter(page for one in sessions for page in one.pages)
        assert all(s.pages.refs(page) == held[page] for page in range(s.pages.n))
        places = Counter(h.place for one in sessions for h in one.held.values())
        assert all(s.places.refs(place) == places[place] for place in range(s.places.n))
        dropping = sum(isinstance(move, Drop) for move in s._moves)
        made = {h.place for one in sessions for h in one.held.values() if h.frontier}
        assert self.engine.n_frontiers == len(made) + dropping
        assert s.ledger.pages_promised <= s.pages.n
        seated = {t.lane: t for t in s.turns.values() if t.lane is not None}
        assert s.lanes.n - s.lanes.n_free == len(seated)
        assert len(seated) <= max(self.busy, s.lanes_max), "more than may be busy"
        due = s.due()
        assert (due is None) == (not s.turns)
        for turn in seated.values():
            if turn.session is not None:
                assert len(turn.session.pages) <= s.ledger.promised_to(turn.id)
        size = s.capacity.page_tokens
        for one in sessions:
            assert one.n_tokens <= size * len(one.pages)
            assert all(position <= one.n_tokens for position in one.frontiers)
            assert len(one.held) <= s.rules.frontiers_per_session + 1
            assert one.idle == (one.past is not None)
            if one.idle and not s._moves:
                assert max(one.held) == one.n_tokens, "an idle session ends where it resumes"
