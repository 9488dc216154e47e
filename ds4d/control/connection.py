"""One connection: lines in, calls, and what goes out in the order in which it matters.

Several calls may be under way at once; those that return at once are answered in order. Replies go
out first, then how far operations are (the newest of each), then updates of subscriptions. A client
that sends faster than it reads is not read from; one that stops in mid-line, or reads nothing, is
let go. Owns the framing and the envelope of spec/serving.md 4.2, and knows no method.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio.lowlevel import checkpoint

from ds4d import __version__, wire
from ds4d.control.failure import failure
from ds4d.control.lines import Broken, Gone
from ds4d.control.methods import FEATURES, Call, Desk, check_role, find
from ds4d.control.params import decode, shown
from ds4d.errors import Declined
from ds4d.events import emit

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from ds4d.control.lines import Lines
    from ds4d.control.methods import Method
    from ds4d.control.peers import Peer
    from ds4d.control.updates import Subscription

log = logging.getLogger(__name__)

CALLS_MAX: Final = 8  # under way at once, of one connection
REPLIES_BYTES: Final = 1 << 18  # unsent; beyond it no further call is read
ID_MAX: Final = 256  # characters
_LOGGED: Final = 200  # characters of the arguments of a call

_NOTHING: Final = memoryview(b"")

_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(wire.Request).decode


class Connection:
    def __init__(self, lines: Lines, peer: Peer, desk: Desk) -> None:
        self.peer = peer
        self.role: wire.Role = peer.role
        self._lines = lines
        self._desk = desk
        self._limits = desk.limits
        self._n_calls = 0
        self._replies: deque[bytes] = deque()
        self._n_bytes = 0  # of `_replies`
        self._progress: dict[str, bytes] = {}  # by operation
        self._rest = _NOTHING  # of the line that is being sent
        self._wake = anyio.Event()  # for the writer: there is a rest, or nothing will come any more
        self._room = anyio.Event()
        self._ending = False
        self._all = anyio.CancelScope()
        self._reading = anyio.CancelScope()
        self._writing = anyio.CancelScope(shield=True)

    async def run(self) -> None:
        """Until the peer goes, `finish`, or `cut`. Raises nothing but cancellation."""
        try:
            self._say_hello()
            with self._all:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write)
                    with self._reading:
                        await self._serve()
                    self._end()
        except Exception as error:
            failure(error, "a connection")  # which logs it
        finally:
            self._desk.updates.forget(self)
            self._desk.operations.forget(self)
            self._lines.close()

    def finish(self) -> None:
        """Take no further call; send what is there, within `flush_s`, then close."""
        self._writing.deadline = anyio.current_time() + self._limits.flush_s
        self._reading.cancel()

    def cut(self, why: str) -> None:
        """Close at once."""
        emit(log, "control.cut", uid=self.peer.uid, pid=self.peer.pid, reason=why)
        self._gone()

    def fail(self, error: Exception) -> None:
        """Say what went wrong, then close: there is something that cannot be sent."""
        self._put(wire.Reply(id=None, error=failure(error, "a notification")))
        self._desk.updates.forget(self)
        self.finish()

    # In

    async def _serve(self) -> None:
        async with anyio.create_task_group() as calls:
            try:
                await self._read(calls)
            except Broken as broken:
                self._put(
                    wire.Reply(id=None, error=wire.Error(code=wire.PARSE, message=str(broken)))
                )
                calls.cancel_scope.cancel()
            except Gone:
                self._gone()
            if self._lines.hung_up():
                self._gone()
            elif self._desk.updates.of(self):  # it has said all it had to, and listens
                await anyio.sleep_forever()

    async def _read(self, calls: TaskGroup) -> None:
        """Until the peer has said all. Raises Broken."""
        while (line := await self._lines.next()) is not None:
            self._on_line(line, calls)
            while self._n_bytes > REPLIES_BYTES:
                self._room = anyio.Event()
                await self._room.wait()
            await checkpoint()  # a burst of lines is not the whole loop's turn

    def _on_line(self, line: bytes, calls: TaskGroup) -> None:
        try:
            request = _read_request(line)
        except Unreadable as error:
            self._put(wire.Reply(id=error.id, error=error.error))
            return
        method: Method | None = None
        params: wire.Params[Any] | None = None
        try:
            method = find(request.method)
            check_role(request.method, method.role, self.peer, self._desk.doors)
            params = decode(method.params, request.params)
            call = Call(self._desk, self)
            if method.waits:
                self._begin(calls, method, call, params, request)
                return
            outcome = method.function(call, params)
        except Exception as error:
            outcome = failure(error, shown(request.method))
        self._answer(request, method, params, outcome)

    def _begin(
        self,
        calls: TaskGroup,
        method: Method,
        call: Call,
        params: wire.Params[Any],
        request: wire.Request,
    ) -> None:
        if self._n_calls >= CALLS_MAX:
            raise Declined(
                f"{CALLS_MAX} calls of this connection are under way; wait for one", wire.BUSY
            )
        self._n_calls += 1
        calls.start_soon(self._call, method, call, params, request)

    async def _call(
        self, method: Method, call: Call, params: wire.Params[Any], request: wire.Request
    ) -> None:
        try:
            with anyio.CancelScope(shield=method.mutates):
                outcome = await method.function(call, params)
        except Exception as error:
            outcome = failure(error, request.method)
        finally:
            self._n_calls -= 1
        self._answer(request, method, params, outcome)

    def _answer(
        self,
        request: wire.Request,
        method: Method | None,
        params: wire.Params[Any] | None,
        outcome: object,
    ) -> None:
        if method is not None and method.mutates:
            self._log(request.method, params, outcome)
        if request.id is None:
            return
        try:
            result = msgspec.Raw(_encode(outcome))
        except Exception as error:  # a text in it that is no Unicode
            outcome = failure(error, request.method)
        if isinstance(outcome, wire.Error):
            self._put(wire.Reply(id=request.id, error=outcome))
        else:
            self._put(wire.Reply(id=request.id, result=result))

    def _log(self, method: str, params: wire.Params[Any] | None, outcome: object) -> None:
        """No parameter of any method is a secret; those that say nothing new are left out."""
        error = outcome if isinstance(outcome, wire.Error) else None
        left_out: int | None = 0
        if error is not None and error.code == wire.DENIED:
            left_out = self._desk.refusals.line()
        if left_out is None:
            return
        emit(
            log,
            "control.call",
            level=logging.INFO if error is None else logging.WARNING,
            uid=self.peer.uid,
            pid=self.peer.pid,
            role=self.peer.role,
            method=method,
            arguments=None if params is None else _arguments(params),
            op=outcome.op if isinstance(outcome, wire.Op) else None,
            error=None if error is None else error.code,
            reason=None if error is None else error.message,
            left_out=left_out or None,
        )

    # Out

    def news(self) -> None:
        """There is something to send: send it, as far as the socket takes it at once."""
        if not self._rest:
            self._pump()
        if self._rest or self._ending:
            self._wake.set()

    def progress(self, progress: wire.OpProgress) -> None:
        try:
            self._progress[progress.op] = _notification(progress)
        except Exception as error:  # a text in it that is no Unicode
            self.fail(error)
        else:
            self.news()

    def _say_hello(self) -> None:
        asks = self._desk.asks
        hello = wire.Hello(
            protocol=wire.Protocol(major=wire.MAJOR, minor=wire.MINOR),
            version=__version__,
            pid=os.getpid(),
            boot=asks.boot,
            state=asks.state(),
            role=self.role,
            features=[*FEATURES],
        )
        self._add(_notification(hello))

    def _put(self, reply: wire.Reply) -> None:
        line = _line(reply)
        if len(line) > wire.LINE_MAX:
            text = (
                f"the result has {len(line)} bytes, more than the {wire.LINE_MAX} of a line; "
                "ask for less of it"
            )
            error = wire.Error(code=wire.INTERNAL, message=text)
            line = _line(wire.Reply(id=reply.id, error=error))
        self._add(line)

    def _add(self, line: bytes) -> None:
        self._replies.append(line)
        self._n_bytes += len(line)
        self.news()

    def _end(self) -> None:
        """Nothing is added any more: the writer ends when all is sent."""
        self._ending = True
        self.news()

    def _pump(self) -> None:
        try:
            while not self._rest:
                line = self._next()
                if line is None:
                    break
                self._rest = self._lines.send(memoryview(line))
        except Gone:
            self._gone()

    def _gone(self) -> None:
        """Whoever still reads or works here does it for nobody."""
        self._rest = _NOTHING
        self._writing.cancel()
        self._all.cancel()

    async def _write(self) -> None:
        """Wait for the socket where it did not take all at once."""
        with self._writing:  # shielded: a line is sent whole, or is the last
            while self._rest or not self._ending:
                if not self._rest:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                    continue
                with anyio.move_on_after(self._limits.stall_s) as stalled:
                    await self._lines.writable()
                if stalled.cancelled_caught:
                    self.cut(f"it has read nothing for {self._limits.stall_s:g} s")
                    return
                try:
                    self._rest = self._lines.send(self._rest)
                except Gone:
                    self._gone()
                self._pump()

    def _next(self) -> bytes | None:
        if self._replies:
            line = self._replies.popleft()
            self._n_bytes -= len(line)
            self._room.set()
            return line
        if self._progress:
            return self._progress.pop(next(iter(self._progress)))
        if self._ending:
            return None
        waiting = [one for one in self._desk.updates.of(self) if one.waits]
        return self._update(min(waiting, key=lambda one: one.oldest)) if waiting else None

    def _update(self, subscription: Subscription) -> bytes:
        params = msgspec.Raw(subscription.take())
        line = _line(wire.Reply(method=wire.Update.METHOD, params=params))
        if len(line) <= wire.LINE_MAX:
            return line
        self._desk.updates.forget(self)
        self.finish()
        text = f"an update has {len(line)} bytes, more than the {wire.LINE_MAX} of a line"
        error = wire.Error(code=wire.INTERNAL, message=f"{text}; subscribe to fewer topics")
        return _line(wire.Reply(id=None, error=error))


class Unreadable(Exception):
    """A line that is no call."""

    def __init__(self, code: int, message: str, id: int | str | None = None) -> None:
        self.error = wire.Error(code=code, message=message)
        self.id = id


def _read_request(line: bytes) -> wire.Request:
    """Raises Unreadable, with the id if there is one."""
    try:
        request = _decode_request(line)
    except msgspec.ValidationError as error:
        raise _invalid(line, str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unreadable(wire.PARSE, f"not JSON: {error}") from None
    if not _is_id(request.id):
        raise Unreadable(
            wire.INVALID,
            f"id: expected a text of at most {ID_MAX} characters, or a whole number of 64 bits",
        )
    return request


def _invalid(line: bytes, why: str) -> Unreadable:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:  # behind the first thing that is wrong
        return Unreadable(wire.PARSE, f"not JSON: {error}")
    if isinstance(found, list):
        return Unreadable(wire.INVALID, "batches are not supported: send one object a line")
    id = found.get("id") if isinstance(found, dict) else None
    return Unreadable(
        wire.INVALID, f"not a JSON-RPC 2.0 request: {why}", id if _is_id(id) else None
    )


def _is_id(id: object) -> bool:
    match id:
        case None:
            return True
        case str():
            return len(id) <= ID_MAX
        case int():
            return not isinstance(id, bool) and -(1 << 63) <= id < 1 << 63
        case _:
            return False


def _arguments(params: wire.Params[Any]) -> str | None:
    """Those that are not what they are by default."""
    fields = msgspec.structs.fields(params)
    given = ((field, getattr(params, field.name)) for field in fields)
    text = " ".join(f"{field.name}={v}" for field, v in given if v != field.default)
    return text[:_LOGGED] or None


def _line(reply: wire.Reply) -> bytes:
    return _encode(reply) + b"\n"


def _notification(record: wire.Hello | wire.OpProgress) -> bytes:
    return _line(wire.Reply(method=record.METHOD, params=msgspec.Raw(_encode(record))))
