"""One token timeline with the state that the engine holds for it, and a turn that works on it.

A `Session` outlives its turns: between them it keeps pages and frontiers, but no lane. A `Turn` is
the scheduler's side of a ticket. Both are plain records with the arithmetic that belongs to them;
who gets what, and when, is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ds4d.engine import History, VerifyWork
from ds4d.sched.ticket import Stats

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.engine import Frontier
    from ds4d.sched.scheduler import Rules
    from ds4d.sched.ticket import Claim

ALIGN = 128  # prefill chunks end at multiples of it, and so do frontiers inside a prompt
_ALL = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class Held:
    """A frontier of a session: its place in the pool, counted there, and the engine's handle."""

    place: int
    frontier: Frontier | None  # None: asked for in the plan that is under way


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The last turn of an idle session, for whoever looks at it."""

    label: str
    n_prompt: int
    n_cached: int
    n_generated: int
    answer_max: int
    submitted: float


class Session:
    """`ids` are those whose state is in the pages; the pending id of a turn is not among them."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.n_tokens = 0
        self.pages: list[int] = []  # in order, `page_tokens` positions each
        self.held: dict[int, Held] = {}  # position → frontier
        self.lane: int | None = None
        self.turn: int | None = None  # the last turn that worked on it
        self.prompt_end = 0  # where that turn's prompt ends, its last id left out
        self.used = 0.0
        self.past: Past | None = None  # iff it is idle
        self._ids = np.empty(0, np.int32)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        return self._ids[: self.n_tokens]

    @property
    def idle(self) -> bool:
        return self.lane is None

    @property
    def frontiers(self) -> list[int]:
        """Positions where it can be resumed now."""
        return [p for p, held in self.held.items() if held.frontier is not None]

    def begin(self, ids: npt.NDArray[np.int32], n_tokens: int, room: int) -> None:
        """Take the first `n_tokens` of `ids` as the timeline; `room` ids may follow in all."""
        buffer = np.empty(room, np.int32)
        buffer[:n_tokens] = ids[:n_tokens]
        self._ids, self.n_tokens = buffer, n_tokens

    def extend(self, ids: npt.NDArray[np.int32] | tuple[int, ...]) -> None:
        end = self.n_tokens + len(ids)
        self._ids[self.n_tokens : end] = ids
        self.n_tokens = end


Phase = Literal["queued", "seated", "prefill", "decode", "over"]


class Turn:
    """One ticket's work. queued → seated (has a lane) → prefill → decode → over."""

    def __init__(self, id: int, claim: Claim, *, answer_max: int, rules: Rules, now: float) -> None:
        self.id = id
        self.claim = claim
        self.rules = rules  # at its submission
        self.answer_max = answer_max  # tokens: max_tokens, or where the context ends
        self.phase: Phase = "queued"
        self.lane: int | None = None
        self.session: Session | None = None
        self.n_guess = 0  # prompt tokens that looked reusable when it was seated
        self.marks: list[int] = []  # where frontiers are wanted, ascending
        self.pending = int(claim.ids[-1])
        self.n_generated = 0
        self.n_cached = 0
        self.n_common = 0  # prompt tokens that had been computed before, reusable or not
        self.drafted = 0
        self.accepted = 0
        self.stepped = 0
        self.stepped_at: float | None = None  # None: its next step follows no other at once
        self.gap_s: float | None = None  # between its last two steps, a token
        self.token_s = 0.0  # the same, a moving average
        self.paused: float | None = None  # since when the client reads nothing
        self.n_read = 0  # answer tokens that it had read by then
        self.kept: int | None = None  # it was left: answer tokens that the client has
        self.submitted = now
        self.seated: float | None = None
        self.started: float | None = None
        self.decoding: float | None = None
        self.first_token: float | None = None
        self._seen: _Seen | None = None

    @property
    def n_prompt(self) -> int:
        return len(self.claim.ids)

    @property
    def room(self) -> int:
        """Tokens that its timeline may come to hold."""
        return self.n_prompt + self.answer_max

    @property
    def bound(self) -> tuple[Session, int]:
        """Its session and lane, which it has from its first work to its end."""
        if self.session is None or self.lane is None:
            raise ValueError(f"turn {self.id} has not begun")
        return self.session, self.lane

    @property
    def past(self) -> Past:
        return Past(
            label=self.claim.label,
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_generated=self.n_generated,
            answer_max=self.answer_max,
            submitted=self.submitted,
        )

    def tokens_per_s(self, now: float) -> float | None:
        """Of the prompt while it is computed, then of the answer; None when nothing is known."""
        if self.stepped_at is not None and self.token_s > 0:
            return 1 / max(self.token_s, now - self.stepped_at)
        if self.phase == "prefill" and self.session is not None and self.started is not None:
            n_done, took_s = self.session.n_tokens - self.n_cached, now - self.started
            return n_done / took_s if n_done > 0 and took_s > 0 else None
        return None

    def draw(self, token: int, now: float) -> None:
        """Count one emitted token."""
        if self.first_token is None:
            self.first_token = now
        self.n_generated += 1
        if self._seen is not None:
            self._seen.add(token)

    def verify_work(self, n_vocab: int) -> VerifyWork:
        sampling = self.claim.sampling
        if sampling.penalised and self._seen is None:
            self._seen = _Seen(self.claim.ids)
        return VerifyWork(
            lane=self.bound[1],
            pending=self.pending,
            sampling=sampling,
            position=self.n_generated,
            history=self._seen.history if self._seen else None,
            mask=self._mask(n_vocab),
        )

    def _mask(self, n_vocab: int) -> npt.NDArray[np.uint32] | None:
        """[1, ceil(V/32)] with the ids cleared that may not come next; None if all may."""
        banned: set[int] = set()
        after = self.claim.banned_after
        if after is not None and self.pending == after[0]:
            banned.update(after[1])
        if self.n_generated < self.claim.min_tokens:
            banned.update(self.claim.stop_ids)
        if not banned:
            return None
        mask = np.full((1, -(-n_vocab // 32)), _ALL)
        for token in banned:
            mask[0, token // 32] &= ~np.uint32(1 << token % 32)
        return mask

    @property
    def _reached(self) -> Literal["queued", "prefill", "decode"]:
        if self.started is None:
            return "queued"
        return "prefill" if self.decoding is None else "decode"

    def stats(self, now: float) -> Stats:
        started = now if self.started is None else self.started
        decoding = now if self.decoding is None else self.decoding
        first = self.first_token
        return Stats(
            phase=self._reached,
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_generated=self.n_generated,
            wait_ms=1e3 * (started - self.submitted),
            prefill_ms=1e3 * (decoding - started),
            first_token_ms=None if first is None else 1e3 * (first - self.submitted),
            decode_ms=0.0 if first is None else 1e3 * (now - first),
            total_ms=1e3 * (now - self.submitted),
            drafted=self.drafted,
            accepted=self.accepted,
        )


class _Seen:
    """Distinct ids of a turn and how often each was generated, growing in place."""

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        distinct = np.unique(prompt)
        self._n = len(distinct)
        self._ids = np.concatenate([distinct, np.zeros(64, np.int32)])
        self._generated = np.zeros(len(self._ids), np.int32)
        self._row = {int(token): row for row, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        row = self._row.get(token)
        if row is None:
            if self._n == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._generated = np.concatenate([self._generated, np.zeros_like(self._ids)])
            row = self._row[token] = self._n
            self._ids[row] = token
            self._n += 1
        self._generated[row] += 1

    @property
    def history(self) -> History:
        """Views: valid until the next `add`, which comes after the engine has read them."""
        return History(ids=self._ids[: self._n], generated=self._generated[: self._n])
