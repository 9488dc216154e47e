"""Server-sent events over one response: whole events, comments when the wire is silent.

Owns the wall clock of a stream: a comment every `keepalive_s` without a byte, whatever the engine
does, and the end of a reader that takes nothing for `stall_s`. Does not know what an event says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec
from aiohttp import web

from ds4d import metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp.web_request import BaseRequest

COMMENT = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that collects bytes would undo the stream
}

_encoder = msgspec.json.Encoder()  # one line, UTF-8 as it is


def event(data: object) -> bytes:
    """One unnamed event holding `data` as one line of JSON."""
    return b"data: %b\n\n" % _encoder.encode(data)


class ReaderGone(ConnectionError):
    """The client closed, or (`stalled`) took nothing for too long."""

    def __init__(self, message: str, *, stalled: bool = False) -> None:
        super().__init__(message)
        self.stalled = stalled


class Stream:
    """Status 200 from `open` on. Events and comments may come from two tasks: each write is one
    call, so they never mix."""

    def __init__(
        self,
        request: BaseRequest,
        headers: Mapping[str, str],
        *,
        keepalive_s: float,
        stall_s: float,
    ) -> None:
        self.response = web.StreamResponse(headers={**headers, **_HEADERS})
        self._request = request
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s
        self._last = 0.0  # when a byte was last written, on the loop's clock

    async def open(self) -> None:
        self.response.enable_chunked_encoding()
        await self.response.prepare(self._request)
        self._last = anyio.current_time()

    async def send(self, events: Sequence[bytes]) -> None:
        """Write `events` in one go. Blocks while the reader is slow; raises ReaderGone."""
        if not events:
            return
        self._last = anyio.current_time()
        try:
            with anyio.fail_after(self._stall_s):
                await self.response.write(b"".join(events))
        except TimeoutError:
            self._abort()
            raise ReaderGone(f"took nothing for {self._stall_s:g} s", stalled=True) from None
        except ConnectionError as error:
            raise ReaderGone(str(error)) from None

    async def keep_alive(self) -> None:
        """Runs beside the writer until cancelled; a reader that is gone ends it."""
        try:
            while True:
                silent = anyio.current_time() - self._last
                if silent >= self._keepalive_s:
                    metrics.KEEPALIVES.inc()
                    await self.send([COMMENT])
                else:
                    await anyio.sleep(self._keepalive_s - silent)
        except ReaderGone:
            self._abort()  # which cancels the handler, as any lost connection does

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
