"""The daemon at the other end of a Unix socket: found, greeted, listened to, asked, found again.

Owns the connection and the calls under way on it. What arrives goes into the feed; the app is told
by messages. A daemon that restarts is waited for; one that speaks another major version is not.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import msgspec

from ds4d import wire
from ds4d_tui.feed import Feed, Garbled
from ds4d_tui.messages import Frame, OpNews, Stop, Told

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from textual.message import Message

    from ds4d_tui.tape import Tape

R = TypeVar("R")
T = TypeVar("T")

BACKOFF_FIRST_S, BACKOFF_LAST_S = 0.2, 5.0
# Exit codes, as those of ds4ctl (spec/serving.md 4.3).
OK, FAILED, USAGE, ABSENT, DENIED = 0, 1, 2, 3, 4

WHO = "root, the daemon's user and the group that owns the socket may connect"
SYSTEM = Path("/run/ds4d")


class Source(Protocol):
    """Where the data comes from: a daemon, or a file."""

    feed: Feed

    def clock(self) -> float:
        """Seconds, of the clock that the feed's times are of."""
        ...

    def label(self) -> str:
        """What it is doing, in a few words."""
        ...

    async def run(self, tell: Callable[[Message], object]) -> None: ...

    async def call(self, params: wire.Params[R]) -> R:
        """Raises `CallError`."""
        ...

    def hold(self, on: bool) -> None:
        """The picture is frozen, or goes on."""
        ...


class CallError(Exception):
    """Why a call was not answered as it was meant. `code` is one of `wire`."""

    def __init__(self, message: str, code: int, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


class Broken(Exception):
    """The connection cannot go on; a new one may."""

    exit_code = FAILED


class Absent(Broken):
    """Nobody listens."""

    exit_code = ABSENT


class Denied(Broken):
    """Not for us: another socket may be."""

    exit_code = DENIED


class Foreign(Broken):
    """Another major version of the protocol: there is no point in trying again."""


def places(socket: Path | None, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The sockets to try, best first: the given one, or the user's and then the system's; those
    that only show come last."""
    if socket is not None:
        control = [socket]
        monitor = [socket.with_name("monitor.sock")] if socket.name == "control.sock" else []
    else:
        folders = (_user_folder(environ), SYSTEM)
        control = [folder / "control.sock" for folder in folders]
        monitor = [folder / "monitor.sock" for folder in folders]
    return (*control, *monitor)


def _user_folder(environ: Mapping[str, str]) -> Path:
    """As the daemon chooses its own; of XDG's folders only absolute ones count."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or "")
    if runtime.is_absolute():
        return runtime / "ds4d"
    state = Path(environ.get("XDG_STATE_HOME") or "")
    if not state.is_absolute():
        state = Path(environ.get("HOME") or "/") / ".local/state"
    return state / "ds4d/run"


class Client:
    """See the module; it is a `Source`. `hz` is how often the daemon shall tell; `hello_s` is what
    it may take to say who it is, `call_s` to answer: long operations answer at once."""

    def __init__(
        self,
        places: Sequence[Path],
        hz: float,
        tape: Tape | None = None,
        *,
        hello_s: float = 5.0,
        call_s: float = 30.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._hello_s = hello_s
        self._call_s = call_s
        self._sleep = sleep
        self.feed = Feed(hz)
        self._places = places
        self._tape = tape
        self._tell: Callable[[Message], object] = lambda message: None
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._n_calls = 0
        self._subscriptions: list[int] = []  # the calls for them, the vital one first

    def clock(self) -> float:
        return time.monotonic()

    def label(self) -> str:
        return f"{'read-only' if self.feed.link.read_only else 'live'} {self.feed.hz:g} Hz"

    def hold(self, on: bool) -> None:
        pass  # data goes on

    async def run(self, tell: Callable[[Message], object]) -> None:
        """Stay connected until cancelled, or until there is a reason to stop."""
        wait_s = BACKOFF_FIRST_S
        while True:
            n_updates = self.feed.n_updates
            try:
                await self.attend(tell)
            except Foreign as error:
                tell(Stop(str(error)))
                return
            except Broken as error:
                why = str(error)
            if self.feed.n_updates > n_updates:
                wait_s = BACKOFF_FIRST_S
            self.feed.lost(why, self.clock() + wait_s)
            await self._record_loss(why)
            tell(Frame())
            await self._sleep(wait_s)
            wait_s = min(2 * wait_s, BACKOFF_LAST_S)

    async def call(self, params: wire.Params[R]) -> R:
        """Ask the daemon. Raises `CallError`, also when the connection ends before the answer."""
        if self._writer is None:
            raise CallError("there is no connection to the daemon now", wire.IO)
        id = self._write(self._writer, params)
        answer = self._calls[id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._call_s):
                raw = await answer
        except TimeoutError:
            raise CallError(f"no answer came within {self._call_s:g} s", wire.DEADLINE) from None
        finally:
            self._calls.pop(id, None)
        try:
            result: R = msgspec.json.decode(raw, type=params.RESULT)
        except msgspec.MsgspecError as error:
            raise CallError(f"the answer could not be read: {error}", wire.IO) from error
        return result

    # One connection

    async def attend(self, tell: Callable[[Message], object]) -> NoReturn:
        """Listen to the first place that lets us in, until that breaks. Raises `Broken`."""
        self._tell = tell
        absent: list[Path] = []
        denied: list[str] = []
        for place in self._places:
            try:
                await self._attend(place)
            except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
                absent.append(place)
            except (PermissionError, Denied) as error:
                denied.append(f"{place}: {_reason(error)}")
            except (OSError, Garbled) as error:
                raise Broken(_reason(error)) from error
        if denied:
            raise Denied(f"{'; '.join(denied)}; {WHO}")
        told = [place for place in absent if place.name != "monitor.sock"] or absent
        raise Absent(
            f"no daemon listens at {' or '.join(map(str, told))}: "
            "`systemctl start ds4d` or `ds4d serve` starts one"
        )

    async def _attend(self, place: Path) -> NoReturn:
        reader, writer = await asyncio.open_unix_connection(place, limit=wire.LINE_MAX)
        try:
            await self._greet(reader, place)
            self._writer = writer
            topics: tuple[list[wire.Topic], ...] = (["status", "sessions"], ["log"])
            self._subscriptions = [
                self._write(writer, wire.Subscribe(topics=wanted, hz=self.feed.hz))
                for wanted in topics
            ]
            while True:
                await self._take(await _line(reader))
        finally:
            self._writer = None
            self._give_up_calls()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, place: Path) -> None:
        try:
            async with asyncio.timeout(self._hello_s):
                raw = await _line(reader)
        except TimeoutError:
            raise Broken(
                f"nothing came from {place} for {self._hello_s:g} s: the daemon hangs, "
                "or systemd holds the socket while it starts"
            ) from None
        if version := _foreign(raw):
            raise Foreign(
                f"the daemon at {place} speaks version {version} of the protocol and this ds4top "
                f"{wire.MAJOR}.{wire.MINOR}: use the ds4top that came with the daemon"
            )
        self.feed.at_place(str(place))
        reply = await self._take(raw)
        if reply.method != wire.Hello.METHOD:
            raise Broken(f"what listens at {place} is not a ds4d: its first line is no hello")

    async def _take(self, raw: bytes) -> wire.Reply:
        await self._record(raw)
        reply = self.feed.line(raw, self.clock())
        if isinstance(reply.id, int):
            self._answer(reply.id, reply)
        elif isinstance(reply.error, wire.Error):  # of no call: why the connection will end
            raise _refusal(reply.error)
        elif reply.method == wire.OpProgress.METHOD and isinstance(reply.params, msgspec.Raw):
            self._tell(OpNews(_decode(reply.params, wire.OpProgress)))
        else:
            self._tell(Frame())
        return reply

    def _answer(self, id: int, reply: wire.Reply) -> None:
        error = reply.error if isinstance(reply.error, wire.Error) else None
        if id in self._subscriptions:
            if error and id == self._subscriptions[0]:
                raise _refusal(error)
            if error:
                self.feed.without_log(error.message)
        elif (call := self._calls.pop(id, None)) and not call.done():
            if error:
                call.set_exception(CallError(error.message, error.code, error.data))
            elif isinstance(reply.result, msgspec.Raw):
                call.set_result(reply.result)
            else:
                call.set_exception(CallError("the answer is empty", wire.IO))

    def _write(self, writer: asyncio.StreamWriter, params: wire.Params[Any]) -> int:
        """Send a call; returns its number."""
        self._n_calls += 1
        request = wire.Request(
            jsonrpc="2.0",
            method=params.METHOD,
            id=self._n_calls,
            params=msgspec.Raw(msgspec.json.encode(params)),
        )
        writer.write(msgspec.json.encode(request) + b"\n")
        return self._n_calls

    def _give_up_calls(self) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(CallError("the connection was lost before the answer", wire.IO))
        self._calls.clear()

    # The recording

    async def _record(self, raw: bytes) -> None:
        await self._on_tape(lambda tape: tape.line(raw))

    async def _record_loss(self, why: str) -> None:
        await self._on_tape(lambda tape: tape.lost(why))

    async def _on_tape(self, write: Callable[[Tape], None]) -> None:
        if self._tape is None:
            return
        try:
            await asyncio.to_thread(write, self._tape)
        except OSError as error:
            self._tell(Told(f"the recording has ended: {error.strerror}", "error"))
            self._tape = None


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        raw = await reader.readline()
    except ValueError:
        raise Broken(f"a line of more than {wire.LINE_MAX} bytes came") from None
    if not raw.endswith(b"\n"):
        raise Broken("the daemon closed the connection")
    return raw


class _Greeting(msgspec.Struct):
    """All that a hello of any version must have."""

    class Params(msgspec.Struct):
        protocol: wire.Protocol

    params: Params


def _foreign(raw: bytes) -> str:
    """The version in a hello if we do not speak it."""
    try:
        protocol = msgspec.json.decode(raw, type=_Greeting).params.protocol
    except msgspec.MsgspecError:
        return ""  # not a hello at all: the caller says so
    return "" if protocol.major == wire.MAJOR else f"{protocol.major}.{protocol.minor}"


def _decode(raw: msgspec.Raw, type: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=type)
    except msgspec.MsgspecError as error:
        raise Garbled(f"a line that is not of the protocol came: {error}") from error


def _refusal(error: wire.Error) -> Broken:
    if error.code == wire.DENIED:
        return Denied(error.message)
    return Broken(error.message)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error)
