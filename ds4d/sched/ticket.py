"""A request's claim on a session: events out, `leave()` in.

Owns the records that the API and the scheduler exchange (`Claim` in; `Started`, `Progress`,
`Token`, then exactly one `Done` or `Failed` out) and the bounded buffer between them. Knows neither
HTTP nor text nor lanes. A ticket belongs to the event loop's thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anyio

from ds4d.engine import Logprobs, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from ds4d.errors import Ds4Error

__all__ = [
    "Claim",
    "Done",
    "Event",
    "Failed",
    "Logprobs",
    "Progress",
    "Sampling",
    "Started",
    "Stats",
    "Ticket",
    "Token",
]

BUFFER_EVENTS = 256  # unread tokens of one ticket, before its lane pauses: a few seconds of text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Claim:
    """What one request wants computed. Ids, not text; the API has rendered and counted already."""

    ids: npt.NDArray[np.int32]  # [n], the whole prompt, n at least 1
    starts: tuple[int, ...] = ()  # offsets where messages begin: candidates for frontiers
    sampling: Sampling
    max_tokens: int  # at least 1; the end of the context may come first
    stop_ids: frozenset[int]  # drawing one ends the answer; it is not emitted
    min_tokens: int = 0  # stop ids are masked before this many were emitted
    banned_after: tuple[int, tuple[int, ...]] | None = None  # (id, those masked right behind it)
    cache: bool = True  # False: neither read nor keep state
    priority: int = 0  # higher goes first in the queue
    label: str = ""  # the request's id, for logs and for whoever cancels it
    api: str = "chat"  # through which endpoint it came, for metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One turn in numbers. Times are wall-clock milliseconds."""

    phase: Literal["queued", "prefill", "decode"] = "decode"  # how far it came
    n_prompt: int
    n_cached: int = 0  # prompt tokens whose state was reused; always below n_prompt
    n_generated: int = 0  # tokens emitted; the stop id is not one
    wait_ms: float = 0.0  # from submit to the first work
    prefill_ms: float = 0.0  # from the first work until the first token could be drawn
    first_token_ms: float | None = None  # from submit to the first token
    decode_ms: float = 0.0  # from the first token to the end
    total_ms: float = 0.0  # from submit to the end
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The claim has a lane and its first work is planned."""

    n_prompt: int
    n_cached: int
    wait_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens whose state is there, reused ones included. Unread ones are replaced."""

    n_done: int
    n_total: int


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    index: int  # 0 for the first token of the answer
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Done:
    reason: Literal["stop", "length"]
    stop_id: int | None  # iff reason is stop
    stats: Stats


@dataclass(frozen=True, slots=True)
class Failed:
    error: Ds4Error
    stats: Stats


Event = Started | Progress | Token | Done | Failed


class Ticket:
    """An async iterator of events that ends after exactly one `Done` or `Failed`.

        ticket = runner.submit(claim)         # may raise Refused
        try:
            async for event in ticket: ...
        finally:
            ticket.leave()

    One reader at a time. When `full`, the lane pauses until half of the buffer was read.
    """

    def __init__(
        self,
        id: int,
        claim: Claim,
        *,
        on_leave: Callable[[Ticket, int], None],
        on_room: Callable[[Ticket], None],
        buffer: int = BUFFER_EVENTS,
    ) -> None:
        self.id = id
        self.claim = claim
        self.stats: Stats | None = None  # once it has ended or was left
        self.end: Done | Failed | None = None  # lies in the buffer, or was read
        self._on_leave = on_leave
        self._on_room = on_room
        self._limit = buffer
        self._unread: deque[Event] = deque()
        self.n_read = 0  # tokens handed to the reader
        self.outcome = "left"  # what its reader says of its end
        self._left = False
        self._paused = False
        self._news = anyio.Event()

    @property
    def ended(self) -> bool:
        """Whether no event will follow those that are unread."""
        return self.end is not None

    @property
    def ready(self) -> bool:
        """Whether the next event is there: the tokens of one step are read, and sent, as one."""
        return bool(self._unread)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> Event:
        while not self._unread:
            if self.ended or self._left:
                raise StopAsyncIteration
            self._news = anyio.Event()
            await self._news.wait()
        event = self._unread.popleft()
        if isinstance(event, Token):
            self.n_read += 1
        if self._paused and len(self._unread) <= self._limit // 2:
            self._paused = False
            self._on_room(self)
        return event

    def leave(self, n_kept: int | None = None, *, outcome: str = "left") -> None:
        """Give up the claim: no event comes any more and the lane is free within one step.

        Synchronous, idempotent, and callable from anywhere in the loop's thread, the `finally` of
        a cancelled handler included. `n_kept` is how many tokens of the answer the client has got
        or uses (None: those read from this ticket); state of later ones is not kept.

        `outcome` is for log and metrics, since only the reader knows that a stop string or a whole
        call has ended the answer: stop, length, tool_calls or function_call; slow_client if its
        client took nothing for too long; failed if the answer could not be told. "left" means that
        the client has gone, unless it has got a whole answer.
        """
        if self._left:
            return
        self._left = True
        self.outcome = outcome
        self._unread.clear()
        self._news.set()
        self._on_leave(self, self.n_read if n_kept is None else n_kept)

    # The runner's side

    def put(self, event: Event) -> bool:
        """Append `event`; True when this filled the buffer, so that the lane must pause."""
        if self._left or self.ended:
            return False
        if isinstance(event, Progress) and self._unread and isinstance(self._unread[-1], Progress):
            self._unread.pop()
        self._unread.append(event)
        if isinstance(event, Done | Failed):
            self.end = event
        self._news.set()
        if self.ended or self._paused or len(self._unread) < self._limit:
            return False
        self._paused = True
        return True
