"""One answer while it is written: token ids in, what the client may see out. Pure.

Owns stop strings, ids of calls, the end of a turn and its reason, and the counts of `usage`.
Shared by every protocol; does not know how any of them writes a delta.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from ds4d.prompt.stops import StopText
from ds4d.prompt.toolcalls import CallArguments, CallEnd, CallStart, Content, End, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ds4d.prompt.toolcalls import Event, Reader
    from ds4d.sched.ticket import Done

Delta = Reasoning | Content | CallStart | CallArguments


class Answer:
    """`finish` is None until the turn is over; from then on `push` must not be called."""

    def __init__(
        self,
        reader: Reader,
        *,
        stop: Sequence[str] = (),
        keep_stop: bool = False,
        stop_token_ids: frozenset[int] = frozenset(),
        one_call: bool = False,
        show_reasoning: bool = True,
        call_prefix: str = "call_",
    ) -> None:
        self.finish: str | None = None  # stop, length or tool_calls
        self.stop_reason: str | int | None = None  # the client's own string or id that ended it
        self.tool_parse_failed = False
        self.n_tokens = 0  # the id that ended the turn is not one
        self.call_ids: list[str] = []
        self.n_calls = 0  # complete ones
        self._reader = reader
        self._stops = StopText(stop)
        self._keep_stop = keep_stop
        self._stop_token_ids = stop_token_ids
        self._one_call = one_call
        self._show_reasoning = show_reasoning
        self._call_prefix = call_prefix

    @property
    def n_reasoning_tokens(self) -> int:
        return self._reader.n_reasoning_tokens

    def push(self, token: int) -> list[Delta]:
        """What `token` makes visible, perhaps nothing yet; may end the turn."""
        self.n_tokens += 1
        return self._pass_on(self._reader.push(token))

    def done(self, done: Done) -> list[Delta]:
        """The engine has ended the turn: the rest of what was held back."""
        deltas: list[Delta] = []
        by_client = done.stop_id is not None and done.stop_id in self._stop_token_ids
        if by_client and done.stop_id is not None:
            self.stop_reason = done.stop_id
            if self._keep_stop:
                deltas += self._pass_on(self._reader.push(done.stop_id))
        if self.finish is None:
            deltas += self._pass_on(self._reader.finish(cut=by_client or done.reason == "length"))
        if by_client and self.finish == "length":
            self.finish = "stop"
        return deltas

    def _pass_on(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            match event:
                case Reasoning():
                    if self._show_reasoning:
                        deltas.append(event)
                case Content():
                    text = self._stops.push(event.text)
                    if self._stops.matched is not None:
                        self.finish, self.stop_reason = "stop", self._stops.matched
                        text += self._stops.matched if self._keep_stop else ""
                    if text:
                        deltas.append(Content(text))
                case CallStart():
                    deltas += self._rest()
                    self.call_ids.append(self._call_prefix + secrets.token_hex(16))
                    deltas.append(event)
                case CallArguments():
                    deltas.append(event)
                case CallEnd():
                    self.n_calls += 1
                    if self._one_call:
                        self.finish = "tool_calls"
                case End():
                    deltas += self._rest()
                    self.finish = event.finish
                    self.tool_parse_failed = event.tool_parse_failed
            if self.finish is not None:
                break
        return deltas

    def _rest(self) -> list[Delta]:
        """Content is over, so nothing that was held back can become a stop string."""
        rest = self._stops.flush()
        return [Content(rest)] if rest else []


def join(deltas: Iterable[Delta]) -> list[Delta]:
    """The same text in fewer pieces: neighbours of one kind become one."""
    joined: list[Delta] = []
    for delta in deltas:
        match (joined[-1] if joined else None, delta):
            case (Reasoning(a), Reasoning(b)):
                joined[-1] = Reasoning(a + b)
            case (Content(a), Content(b)):
                joined[-1] = Content(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                joined[-1] = CallArguments(i, a + b)
            case _:
                joined.append(delta)
    return joined
