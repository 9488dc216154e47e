"""Subscriptions: whole snapshots at a steady rate, never deltas (spec/serving.md 4.3).

Subscribers of one rate are due at the same moments, and what they are sent is built and encoded
once a moment, however many there are. A reader that is too slow loses the oldest of its snapshots
and is told how many; one that has stopped reading is let go. Log lines are not in the snapshots:
they are taken from the log when an update is sent, each once. Nothing happens while nobody has
subscribed. Knows neither sockets nor what a snapshot means.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import msgspec
from msgspec import UNSET, UnsetType

from ds4d import events, metrics, wire
from ds4d.errors import Declined

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ds4d.control.asks import Asks
    from ds4d.control.limits import Limits
    from ds4d.sched.snapshot import Session

HZ_MIN, HZ_MAX = 0.2, 20.0
QUEUE_MAX: Final = 64  # updates of one subscription that wait for its reader
QUEUE_BYTES: Final = 1 << 20  # of them; with many sessions an update has 80 KiB
SUBSCRIPTIONS_MAX: Final = 4  # of one connection
LOG_CHARS: Final = 65_536  # of log lines in one update; the others come with the next
_SLACK_S: Final = 1e-3  # an update may be early by so much: uvloop's clock counts milliseconds

_encode = msgspec.json.Encoder().encode


class Reader(Protocol):
    """A connection, as its subscriptions see it."""

    @property
    def role(self) -> wire.Role: ...

    def news(self) -> None:
        """There is something to take."""
        ...

    def fail(self, error: Exception) -> None:
        """End the connection: it cannot get what it has subscribed to."""
        ...

    def cut(self, why: str) -> None:
        """End the connection, whose peer does not read any more."""
        ...


class Masks:
    """Hides who works on what from monitors: the same id is hidden alike until the next start."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)

    def sessions(self, sessions: Iterable[Session]) -> list[Session]:
        return [
            replace(
                one,
                id=None if one.id is None else int(self._hash(f"session {one.id}"), 16),
                request=one.request and self._hash(f"request {one.request}"),
            )
            for one in sessions
        ]

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=6).hexdigest()


def view(asks: Asks, masks: Masks, role: wire.Role) -> wire.Sessions:
    """The sessions, as `role` may see them."""
    found = asks.sessions()
    if role == "monitor":
        return wire.Sessions(sessions=masks.sessions(found.sessions), n_sessions=found.n_sessions)
    return found


class _Encoded(msgspec.Struct, omit_defaults=True, kw_only=True):
    """`wire.Update`, whose large fields are encoded already."""

    sub: int
    seq: int
    at: float
    dropped: int
    status: msgspec.Raw | UnsetType = UNSET
    sessions: msgspec.Raw | UnsetType = UNSET
    n_sessions: int | UnsetType = UNSET
    log: list[wire.LogLine] | UnsetType = UNSET

    @property
    def n_bytes(self) -> int:
        parts = self.status, self.sessions
        return sum(memoryview(part).nbytes for part in parts if isinstance(part, msgspec.Raw))


class _Moment:
    """What subscribers of one tick share. Made when the first of them wants it."""

    def __init__(self, asks: Asks, masks: Masks) -> None:
        self.at = time.time()
        self._asks = asks
        self._masks = masks
        self._status: msgspec.Raw | None = None
        self._sessions: dict[bool, tuple[msgspec.Raw, int]] = {}  # by whether ids are hidden

    def status(self) -> msgspec.Raw:
        if self._status is None:
            self._status = msgspec.Raw(_encode(self._asks.status()))
        return self._status

    def sessions(self, role: wire.Role) -> tuple[msgspec.Raw, int]:
        hidden = role == "monitor"
        if hidden not in self._sessions:
            found = view(self._asks, self._masks, role)
            self._sessions[hidden] = msgspec.Raw(_encode(found.sessions)), found.n_sessions
        return self._sessions[hidden]


class Subscription:
    """One of a connection's. The connection takes updates when it can send them."""

    def __init__(
        self, id: int, reader: Reader, topics: frozenset[wire.Topic], hz: float, full_s: float
    ) -> None:
        """`full_s`: a reader that leaves the queue full for so long has stopped reading."""
        self.id = id
        self.reader = reader
        self.period_s = 1 / hz
        self.due = -math.inf  # on the loop's clock; the first update comes at once
        self._topics = topics
        self._full_s = full_s
        self._queue: deque[_Encoded] = deque()
        self._n_bytes = 0  # of it
        self._full_since: float | None = None
        self._seq = 0
        self._dropped = 0  # before the oldest that waits
        self._log_seq = 0  # of the last line sent

    def push(self, moment: _Moment, now: float) -> None:
        """Add the update of this moment."""
        if self._topics == {"log"} and (self._queue or not events.since(self._log_seq)):
            return  # nothing to say, or said as soon as the reader takes what waits
        update = _Encoded(sub=self.id, seq=0, at=moment.at, dropped=0)
        if "status" in self._topics:
            update.status = moment.status()
        if "sessions" in self._topics:
            update.sessions, update.n_sessions = moment.sessions(self.reader.role)
        if self._make_room(update.n_bytes):
            since = self._full_since = now if self._full_since is None else self._full_since
            if now - since >= self._full_s:
                self.reader.cut(f"its queue of updates was full for {self._full_s:g} s")
                return
        self._queue.append(update)
        self._n_bytes += update.n_bytes
        self.reader.news()

    def _make_room(self, n_bytes: int) -> bool:
        """For an update of that size. Returns whether others had to go."""
        n_dropped = 0
        while self._queue and (
            len(self._queue) >= QUEUE_MAX or self._n_bytes + n_bytes > QUEUE_BYTES
        ):
            self._n_bytes -= self._queue.popleft().n_bytes
            n_dropped += 1
        self._dropped += n_dropped
        metrics.DROPPED.labels(role=self.reader.role).inc(n_dropped)
        return n_dropped > 0

    @property
    def waits(self) -> bool:
        return bool(self._queue)

    @property
    def oldest(self) -> float:
        """When the update was made that `take` returns next."""
        return self._queue[0].at

    def take(self) -> bytes:
        """The oldest update that waits, as `params` of its notification."""
        update = self._queue.popleft()
        self._n_bytes -= update.n_bytes
        self._seq += 1
        update.seq = self._seq
        update.dropped, self._dropped, self._full_since = self._dropped, 0, None
        if "log" in self._topics:
            update.log = self._log_lines()
        return _encode(update)

    def _log_lines(self) -> list[wire.LogLine]:
        lines, room = [], LOG_CHARS
        for line in events.since(self._log_seq):
            text = line.text if len(line.text) <= LOG_CHARS else f"{line.text[: LOG_CHARS - 1]}…"
            if not text.isascii():  # a file name in it may be no Unicode
                text = text.encode(errors="backslashreplace").decode()
            room -= len(text)
            if room < 0:
                break
            lines.append(wire.LogLine(seq=line.seq, at=line.at, level=line.level, text=text))
            self._log_seq = line.seq
        return lines


class Updates:
    def __init__(self, asks: Asks, masks: Masks, limits: Limits) -> None:
        self._asks = asks
        self._masks = masks
        self._limits = limits
        self._n = 0
        self._of: dict[Reader, list[Subscription]] = {}
        self._nap = anyio.CancelScope()  # until something is due

    def add(self, reader: Reader, topics: frozenset[wire.Topic], hz: float) -> Subscription:
        """The first update follows in the next turn of the loop."""
        self._n += 1
        subscription = Subscription(self._n, reader, topics, hz, self._limits.full_s)
        self._of.setdefault(reader, []).append(subscription)
        self._nap.cancel()
        return subscription

    def of(self, reader: Reader) -> list[Subscription]:
        return self._of.get(reader, [])

    def remove(self, id: int, reader: Reader) -> None:
        """Raises Declined (NOT_FOUND) unless it is one of `reader`'s."""
        mine = self.of(reader)
        left = [one for one in mine if one.id != id]
        if len(left) == len(mine):
            has = ", ".join(str(one.id) for one in mine) or "none"
            raise Declined(
                f"this connection has no subscription {id}; it has {has}", wire.NOT_FOUND
            )
        if left:
            self._of[reader] = left
        else:
            del self._of[reader]

    def forget(self, reader: Reader) -> None:
        self._of.pop(reader, None)

    async def run(self) -> None:
        """Push what is due, until cancelled."""
        while True:
            due = min((one.due for one in self._all()), default=None)
            with anyio.CancelScope() as self._nap:  # without a deadline: a plain sleep is cheaper
                if due is None:
                    await anyio.sleep_forever()
                else:
                    await anyio.sleep_until(due)
            self._push(anyio.current_time())

    def _all(self) -> list[Subscription]:
        return [one for mine in self._of.values() for one in mine]

    def _push(self, now: float) -> None:
        moment = _Moment(self._asks, self._masks)
        for subscription in self._all():
            if subscription.due > now + _SLACK_S:
                continue
            # On a grid that all share, so that those of one rate are due together.
            period_s = subscription.period_s
            subscription.due = (math.floor((now + _SLACK_S) / period_s) + 1) * period_s
            try:
                subscription.push(moment, now)
            except Exception as error:
                subscription.reader.fail(error)
