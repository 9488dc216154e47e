"""An HTTP server on loopback that does wrong what it is told to, request by request."""

from __future__ import annotations

import http.server
import re
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Act = Callable[["Exchange"], None]


class BadServer:
    """Serves `body` to every path. `acts` are what it does at the next requests, `honest` at all
    others; a probe for one byte is answered by `on_probe` and leaves them alone."""

    def __init__(self, body: bytes, *acts: Act, etag: str | None = '"v1"') -> None:
        self.body = body
        self.etag = etag
        self.modified: str | None = None
        self.acts: deque[Act] = deque(acts)
        self.on_probe: Act = honest
        self.asked: list[str | None] = []  # Range of every request but probes
        self.if_range: list[str | None] = []
        self.sent = 0  # bytes of bodies, probes apart
        self.stop = threading.Event()  # ends what would hang
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.bad = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def url(self, path: str = "model.gguf") -> str:
        return f"http://127.0.0.1:{self._http.server_port}/{path}"

    def __enter__(self) -> BadServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them, so that what they counted is complete


@dataclass
class Exchange:
    """One request and the means to answer it."""

    server: BadServer
    handler: http.server.BaseHTTPRequestHandler
    probe: bool
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> int | None:
        """The first byte of a range, if one was asked for and the version is still the same."""
        headers = self.handler.headers
        found = re.fullmatch(r"bytes=(\d+)-\d*", headers.get("Range", ""))
        same = headers.get("If-Range") in (None, self.server.etag, self.server.modified)
        return int(found[1]) if found and same else None

    def head(self, status: int, **headers: str | int | None) -> None:
        self.handler.send_response(status)
        own = {"ETag": self.server.etag, "Last-Modified": self.server.modified}
        for name, value in (own | headers | self.extra).items():
            if value is not None:
                self.handler.send_header(name.replace("_", "-"), str(value))
        self.handler.end_headers()

    def send(self, data: bytes) -> None:
        try:
            self.handler.wfile.write(data)
        except OSError:
            return  # the client has had enough
        if not self.probe:
            self.server.sent += len(data)

    def hang_up(self) -> None:
        self.handler.close_connection = True
        try:
            self.handler.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        bad: BadServer = self.server.bad  # type: ignore[attr-defined]
        asked = self.headers.get("Range")
        probe = asked == "bytes=0-0"
        if probe:
            act = bad.on_probe
        else:
            bad.asked.append(asked)
            bad.if_range.append(self.headers.get("If-Range"))
            act = bad.acts.popleft() if bad.acts else honest
        act(Exchange(bad, self, probe))

    def log_message(self, *_: object) -> None:
        pass


def honest(x: Exchange) -> None:
    _answer(x, None)


def cut(after: int) -> Act:
    """Hang up after so many bytes, though more were promised."""
    return lambda x: _answer(x, after)


def _answer(x: Exchange, after: int | None) -> None:
    body, first = x.server.body, x.asked
    if first is not None and first >= len(body):
        x.head(416, Content_Range=f"bytes */{len(body)}", Content_Length=0)
        return
    if first is None:
        x.head(200, Content_Length=len(body))
        data = body
    else:
        data = body[first : 1 if x.probe else None]
        end = first + len(data) - 1
        x.head(206, Content_Length=len(data), Content_Range=f"bytes {first}-{end}/{len(body)}")
    x.send(data[:after])
    if after is not None:
        x.hang_up()


def ignoring_range(after: int | None = None) -> Act:
    def act(x: Exchange) -> None:
        x.head(200, Content_Length=len(x.server.body))
        x.send(x.server.body[:after])
        if after is not None:
            x.hang_up()

    return act


def status(code: int, **headers: str | int) -> Act:
    return lambda x: x.head(code, Content_Length=0, **headers)


def redirect(to: str) -> Act:
    return status(302, Location=to)


def claiming(length: int) -> Act:
    """Say another length than the one that is sent."""

    def act(x: Exchange) -> None:
        x.head(200, Content_Length=length)
        x.send(x.server.body)
        x.hang_up()

    return act


def chunked(data: bytes) -> Act:
    """Send `data` without saying how much it will be."""

    def act(x: Exchange) -> None:
        x.handler.protocol_version = "HTTP/1.1"
        x.head(200, Transfer_Encoding="chunked", Connection="close")
        for start in range(0, len(data), 4096):
            part = data[start : start + 4096]
            x.send(b"%x\r\n%s\r\n" % (len(part), part))
        x.send(b"0\r\n\r\n")
        x.handler.close_connection = True

    return act


def trickling(piece: int) -> Act:
    def act(x: Exchange) -> None:
        x.head(200, Content_Length=len(x.server.body))
        for start in range(0, len(x.server.body), piece):
            x.send(x.server.body[start : start + piece])
            x.handler.wfile.flush()
            time.sleep(0.001)

    return act


def stalling(after: int) -> Act:
    """Send so many bytes, then nothing, with the connection open."""

    def act(x: Exchange) -> None:
        x.head(200, Content_Length=len(x.server.body))
        x.send(x.server.body[:after])
        x.handler.wfile.flush()
        x.server.stop.wait()

    return act


def another_version(body: bytes, etag: str | None, then: Act = honest) -> Act:
    """From now on there is another file at the same place."""

    def act(x: Exchange) -> None:
        x.server.body, x.server.etag = body, etag
        then(x)

    return act


def part_of_another(body: bytes, etag: str) -> Act:
    """Go on in the middle of another file, whatever If-Range says."""

    def act(x: Exchange) -> None:
        first = int(x.handler.headers["Range"][6:-1])
        x.server.body, x.server.etag = body, etag
        data = body[first:]
        span = f"bytes {first}-{len(body) - 1}/{len(body)}"
        x.head(206, Content_Length=len(data), Content_Range=span)
        x.send(data)

    return act


def modified_at(seconds: float) -> str:
    return formatdate(seconds, usegmt=True)
