"""The lines of the control socket, folded into one picture: what is shown is a `View` of the feed.

Owns the histories behind sparklines (decoration: the daemon does not send them), the log lines that
have arrived, and how old all of it is. Knows neither sockets, files nor widgets; time is an
argument. Snapshots come whole, so nothing here can go wrong for longer than one update.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from ds4d import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ds4d.wire import Session, Status

Trend = tuple[float | None, ...]

STEP_S = 2.0  # of a history: rates are means over 10 s
HISTORY = 300  # steps: ten minutes
TREND = 24
LOG_LINES = 500
STALE_S = 2.0  # at least; else as long as three updates take
MISSED_S = 30.0  # for so long it is told that updates were left out
REMARK = -1  # the number of a line that is ours
MONITOR = (
    "this is the read-only monitor socket; to act, connect to control.sock "
    "(root, the daemon's user, or the group that owns it)"
)


class Garbled(Exception):
    """A line that is not of the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How we stand to the daemon."""

    state: Literal["connecting", "live", "lost"] = "connecting"
    place: str = ""  # which socket or file
    why: str = ""  # it is lost
    retry_at: float | None = None
    read_only: str = ""  # why nothing can be changed from here; empty: it can
    no_log: str = ""  # why there are no log lines


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that is on the screen, at one moment."""

    link: Link = Link()
    at: float | None = None  # when the newest update came, by the clock of the source
    stale_s: float = STALE_S  # older than this, and something is wrong
    status: Status | None = None
    sessions: tuple[Session, ...] = ()
    n_sessions: int = 0  # all there are; `sessions` may hold only some
    n_missed: int = 0  # updates that the daemon left out because we read too slowly
    missed_at: float = 0.0  # the last of them
    prefill: Trend = ()  # tokens/s
    decode: Trend = ()
    trends: Mapping[str, Trend] = field(default_factory=dict)
    log: tuple[wire.LogLine, ...] = ()

    def age_s(self, now: float) -> float | None:
        return None if self.at is None else max(now - self.at, 0.0)

    def n_missed_lately(self, now: float) -> int:
        return self.n_missed if now - self.missed_at < MISSED_S else 0

    def is_stale(self, now: float) -> bool:
        age_s = self.age_s(now)
        return age_s is not None and (self.link.state == "lost" or age_s > self.stale_s)


def key(session: Session) -> str:
    """What stays the same about a row of the table: the session, or the turn that waits for one."""
    return f"turn {session.request}" if session.id is None else f"session {session.id}"


class History:
    """A value for each step of time, the newest last; None where none came."""

    def __init__(self, n_max: int, step_s: float) -> None:
        self._values: deque[float | None] = deque(maxlen=n_max)
        self._step_s = step_s
        self._step = 0

    def add(self, value: float, now: float) -> None:
        step = int(now / self._step_s)
        gap = step - self._step
        if self._values and gap <= 0:
            self._values[-1] = value
            return
        if self._values and gap > 1:  # one step may be missed by a late update, more is a hole
            fill = self._values[-1] if gap == 2 else None
            self._values.extend([fill] * min(gap - 1, HISTORY))
        self._values.append(value)
        self._step = step

    def values(self) -> Trend:
        return tuple(self._values)


class Feed:
    """See the module. `hz` is how often updates are to come."""

    def __init__(self, hz: float, *, place: str = "", read_only: str = "") -> None:
        self.hz = hz
        self.link = Link(place=place)
        self.n_updates = 0
        self._read_only = read_only
        self._at: float | None = None
        self._status: Status | None = None
        self._sessions: tuple[Session, ...] = ()
        self._n_sessions = 0
        self._n_missed = 0
        self._missed_at = 0.0
        self._step_s = max(STEP_S, 1 / hz)
        self._prefill = History(HISTORY, self._step_s)
        self._decode = History(HISTORY, self._step_s)
        self._trends: dict[str, History] = {}
        self._log: deque[wire.LogLine] = deque(maxlen=LOG_LINES)
        self._boot = ""
        self._log_seq: int | None = None  # of the newest line of this boot

    def view(self) -> View:
        return View(
            link=self.link,
            at=self._at,
            stale_s=max(STALE_S, 3 / self.hz),
            status=self._status,
            sessions=self._sessions,
            n_sessions=self._n_sessions,
            n_missed=self._n_missed,
            missed_at=self._missed_at,
            prefill=self._prefill.values(),
            decode=self._decode.values(),
            trends={name: trend.values() for name, trend in self._trends.items()},
            log=tuple(self._log),
        )

    # What can happen

    def line(self, raw: bytes, now: float) -> wire.Reply:
        """Take in one line of the daemon. Returns it decoded: an answer is the caller's matter.
        Raises `Garbled`."""
        try:
            reply = _REPLY.decode(raw)
            if isinstance(reply.params, msgspec.Raw):
                if reply.method == wire.Hello.METHOD:
                    self._greet(_HELLO.decode(reply.params))
                elif reply.method == wire.Update.METHOD:
                    self._update(_UPDATE.decode(reply.params), now)
        except msgspec.MsgspecError as error:
            raise Garbled(f"a line that is not of the protocol came: {error}") from error
        return reply

    def at_place(self, place: str) -> None:
        self.link = replace(self.link, place=place)

    def lost(self, why: str, retry_at: float | None = None) -> None:
        self.link = replace(self.link, state="lost", why=why, retry_at=retry_at)

    def without_log(self, why: str) -> None:
        self.link = replace(self.link, no_log=why)

    def _greet(self, hello: wire.Hello) -> None:
        read_only = self._read_only or (MONITOR if hello.role == "monitor" else "")
        self.link = Link(state="live", place=self.link.place, read_only=read_only)
        if self._boot and hello.boot != self._boot:
            self._remark(f"the daemon was started anew: pid {hello.pid}")
            self._log_seq = None
        self._boot = hello.boot

    def _update(self, update: wire.Update, now: float) -> None:
        self.n_updates += 1
        if update.dropped:
            before = self._n_missed if now - self._missed_at < MISSED_S else 0
            self._n_missed, self._missed_at = before + update.dropped, now
        if update.status is not None:
            self._at = now  # log lines alone do not make the picture newer
            self._status = update.status
            if rates := update.status.rates:
                self._prefill.add(rates.prefill_tokens_per_s, now)
                self._decode.add(rates.decode_tokens_per_s, now)
        if update.sessions is not None:
            self._sessions = tuple(update.sessions)
            n = update.n_sessions
            self._n_sessions = len(update.sessions) if n is None else n
            self._trends = {key(session): self._trend(session, now) for session in self._sessions}
        for line in update.log or ():
            self._add(line)

    def _trend(self, session: Session, now: float) -> History:
        trend = self._trends.get(key(session)) or History(TREND, self._step_s)
        trend.add(session.tokens_per_s or 0.0, now)
        return trend

    def _add(self, line: wire.LogLine) -> None:
        """Lines come again after a new connection; a gap in their numbers is told."""
        if self._log_seq is not None:
            if line.seq <= self._log_seq:
                return
            if (n := line.seq - self._log_seq - 1) > 0:
                self._remark(f"{n} lines are missing here", line.at)
        self._log_seq = line.seq
        self._log.append(line)

    def _remark(self, text: str, at: float | None = None) -> None:
        """A line of our own among those of the daemon."""
        at = at if at is not None else self._log[-1].at if self._log else 0.0
        self._log.append(wire.LogLine(seq=REMARK, at=at, level="warning", text=text))


_REPLY = msgspec.json.Decoder(wire.Reply)
_HELLO = msgspec.json.Decoder(wire.Hello)
_UPDATE = msgspec.json.Decoder(wire.Update)
