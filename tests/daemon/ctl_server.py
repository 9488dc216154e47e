"""A control socket that plays a script: what `ds4ctl` must cope with and no good daemon would do.

Plain threads, since `ds4ctl` runs in the test's own. `answers` maps a method to its result, to an
`Error`, to bytes that are sent as they are, or to a function of the parameters that gives one of
these; a list of them is sent one after another. Progress is a notification, None hangs up.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ds4d import wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = wire.Hello(
    protocol=wire.Protocol(major=wire.MAJOR, minor=wire.MINOR),
    version="0.1.0",
    pid=4242,
    boot="8f3e21c07d55",
    state="ready",
    role="admin",
    features=[],
)


def line(**fields: Any) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", **fields}) + b"\n"


def hello(**changes: Any) -> bytes:
    return line(method="hello", params=msgspec.structs.replace(HELLO, **changes))


class Scripted:
    def __init__(self, path: Path, greeting: bytes | None, answers: dict[str, Any]) -> None:
        self.calls: list[tuple[str, Any]] = []  # method, params
        self._greeting = greeting
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._streams: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._streams):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self._streams.append(stream)
            try:
                self._serve(stream)
            except OSError:
                pass

    def _serve(self, stream: socket.socket) -> None:
        if self._greeting is None:
            return
        stream.sendall(self._greeting)
        with stream.makefile("rb") as lines:
            for raw in lines:
                call = json.loads(raw)
                self.calls.append((call["method"], call["params"]))
                answer = self._answers.get(call["method"], wire.Error(code=-32601, message="what?"))
                for one in answer if isinstance(answer, list) else [answer]:
                    if callable(one):
                        one = one(call["params"])
                    if one is None:
                        stream.shutdown(socket.SHUT_RDWR)
                        return
                    stream.sendall(self._line(call["id"], one))

    def _line(self, call_id: int, answer: Any) -> bytes:
        match answer:
            case bytes():
                return answer
            case wire.Error():
                return line(id=call_id, error=answer)
            case wire.OpProgress():
                return line(method="op.progress", params=answer)
        return line(id=call_id, result=answer)


@contextmanager
def scripted(
    path: Path, answers: dict[str, Any] | None = None, *, greeting: bytes | None = hello()
) -> Iterator[Scripted]:
    server = Scripted(path, greeting, answers or {})
    try:
        yield server
    finally:
        server.close()
