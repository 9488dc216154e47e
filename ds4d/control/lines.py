"""Lines over a connected Unix socket: whole ones in, whole ones out.

Owns the socket of a connection and the framing: LF ends a line, `wire.LINE_MAX` is the most. Works
on the socket itself, since anyio's stream logs an error of its own when the wait for a socket is
cancelled in the same turn of the loop in which the socket becomes ready. Knows no JSON.
"""

from __future__ import annotations

import math
import select
from typing import TYPE_CHECKING, Final

import anyio

from ds4d.wire import LINE_MAX

if TYPE_CHECKING:
    import socket

_READ_BYTES: Final = 1 << 16
_TOO_LONG: Final = f"a line has more than {LINE_MAX} bytes, which is the most"


class Broken(Exception):
    """The peer does not keep to the framing: what follows cannot be told apart any more."""


class Gone(Exception):
    """The peer has closed the connection."""


class Lines:
    def __init__(self, sock: socket.socket, *, half_line_s: float) -> None:
        """`half_line_s`: how long the end of a line may be waited for."""
        self._sock = sock
        self._half_line_s = half_line_s
        self._buffer = bytearray()
        self._seen = 0  # bytes in which no LF is

    async def next(self) -> bytes | None:
        """The next line without its LF; None when the peer has said all. Raises Broken, Gone."""
        since = anyio.current_time()
        while (end := self._buffer.find(b"\n", self._seen)) < 0:
            self._seen = len(self._buffer)
            if self._seen >= LINE_MAX:
                raise Broken(_TOO_LONG)
            deadline = since + self._half_line_s if self._buffer else math.inf
            with anyio.CancelScope(deadline=deadline) as scope:
                data = await self._receive()
            if scope.cancelled_caught:
                raise Broken(f"a line was begun and not ended within {self._half_line_s:g} s")
            if not data and self._buffer:
                raise Broken("the last line has no end: LF ends a line")
            if not data:
                return None
            if not self._buffer:
                since = anyio.current_time()
            self._buffer += data
        if end >= LINE_MAX:
            raise Broken(_TOO_LONG)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._seen = 0
        return line

    def send(self, data: memoryview) -> memoryview:
        """As much of `data` as the socket takes at once; returns the rest. Raises Gone."""
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                break
            except OSError:
                raise Gone from None
        return data

    async def writable(self) -> None:
        """Until the socket takes more, or the peer has gone."""
        await anyio.wait_writable(self._sock)

    def hung_up(self) -> bool:
        """Whether the peer has closed both directions, and has not only said all it had to."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._sock.close()

    async def _receive(self) -> bytes:
        while True:
            try:
                return self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
            except OSError:
                raise Gone from None
