"""systemd's notification protocol: lines of KEY=value in a datagram to $NOTIFY_SOCKET.

Without a socket every call does nothing. A manager that does not listen is no reason to stop.
"""

from __future__ import annotations

import logging
import socket

from ds4d.events import emit

log = logging.getLogger(__name__)


class Notifier:
    def __init__(self, address: str | None) -> None:
        """`address`: a path, or `@name` for an abstract socket; None: nobody listens."""
        self._address = address.replace("@", "\0", 1) if address else None

    def send(self, *lines: str) -> None:
        """For example `send("READY=1", "STATUS=serving")`. Never blocks, never raises."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.setblocking(False)
                out.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            emit(log, "daemon.notify", level=logging.DEBUG, reason=str(error))
