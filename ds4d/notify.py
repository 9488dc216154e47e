"""What systemd is told: lines of KEY=value in a datagram to $NOTIFY_SOCKET (sd_notify(3)).

Owns the protocol, the beat of the watchdog and when a start may take longer. Does not know what is
loaded, and what makes the daemon healthy. Without a socket every call does nothing.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING

import anyio

from ds4d.events import emit

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

EXTENSION_S = 60.0  # what each EXTEND_TIMEOUT_USEC asks for, counted from when it is sent
EXTEND_EVERY_S = 10.0
BEATS = 3  # in one interval of the watchdog, so that one may come late


class Notifier:
    def __init__(self, address: str | None) -> None:
        """`address`: a path, or `@name` for an abstract socket; None: nobody listens."""
        abstract = address is not None and address.startswith("@")
        self._address = f"\0{address[1:]}" if address and abstract else address
        self._warned = False

    def send(self, *lines: str) -> None:
        """For example `send("READY=1", "STATUS=serving")`, as one datagram. Never blocks, never
        raises: a manager that does not listen is no reason to stop."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(map(_one_line, lines)).encode(errors="replace"), self._address)
        except OSError as error:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            emit(log, "daemon.notify", level=level, reason=str(error))

    def reloading(self) -> None:
        """A reload begins; READY=1 ends it, also when it fails. systemd 253 and later tells by the
        time that this answers its own signal, and wants both in one datagram."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def _one_line(line: str) -> str:
    """A status with a line break would be read as a further assignment."""
    return " ".join(line.splitlines())


async def watchdog(notify: Notifier, interval_us: int, ailment: Callable[[], str | None]) -> None:
    """Tell systemd that all is well for as long as `ailment` has nothing to say. What it says goes
    to the log, once; systemd, left alone for `interval_us`, restarts us."""
    told: str | None = None
    while True:
        found = ailment()
        if found is None:
            notify.send("WATCHDOG=1")
            if told is not None:
                emit(log, "daemon.watchdog", level=logging.WARNING, reason="it moves again")
        elif told is None:
            emit(log, "daemon.watchdog", level=logging.ERROR, reason=found)
        told = found
        await anyio.sleep(interval_us / BEATS / 1e6)


class Patience:
    """Asks systemd for more time as long as something moves; what stands still gets none, so that
    a start that hangs ends by TimeoutStartSec."""

    def __init__(
        self, *, every_s: float = EXTEND_EVERY_S, extension_s: float = EXTENSION_S
    ) -> None:
        self._every_s = every_s
        self._line = f"EXTEND_TIMEOUT_USEC={round(extension_s * 1e6)}"
        self._asked_at: float | None = None
        self._asked_for: tuple[str, float] | None = None

    def ask(self, what: str, fraction: float, now: float) -> tuple[str, ...]:
        """Lines to send at `now` (seconds) for progress that stands at `fraction` of `what`."""
        at = (what, fraction)
        if at == self._asked_for:
            return ()
        if self._asked_at is not None and now < self._asked_at + self._every_s:
            return ()
        self._asked_at, self._asked_for = now, at
        return (self._line,)
