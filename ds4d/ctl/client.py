"""The control socket, seen from outside: find it, greet, call, wait.

Owns the search for a daemon, the sentences for one that is absent or silent, and the exit codes of
spec/serving.md 4.3. Synchronous, on the standard library's sockets: one call at a time is all that
a command needs. Does not know what the methods mean.
"""

from __future__ import annotations

import errno
import grp
import math
import os
import pwd
import socket
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ds4d import __version__, wire
from ds4d.errors import Ds4Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")

OK, ERROR, USAGE, NOT_RUNNING, DENIED, DEADLINE, WRONG_STATE, CONFIG_INVALID = range(8)

EXIT_OF = {
    wire.BAD_PARAMS: USAGE,
    wire.BUSY: WRONG_STATE,
    wire.WRONG_STATE: WRONG_STATE,
    wire.DENIED: DENIED,
    wire.DEADLINE: DEADLINE,
    wire.CONFIG_INVALID: CONFIG_INVALID,
}

SYSTEM = Path("/run/ds4d")
CONTROL, MONITOR = "control.sock", "monitor.sock"
_INIT = 1  # the process that listens for a service which is still to come


class Failure(Ds4Error):
    """A command that did not succeed. `error` is what the daemon sent, if it was the daemon."""

    def __init__(self, message: str, exit_code: int, error: wire.Error | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.error = error


class _Nobody(Exception):
    """There is no daemon at this place; a later place may have one."""

    def __init__(self, text: str, remedy: str, exit_code: int = NOT_RUNNING) -> None:
        super().__init__(text)
        self.text = text
        self.remedy = remedy
        self.exit_code = exit_code


def places(user: Path, *, reads: bool) -> tuple[Path, ...]:
    """Where to look, in this order: the user's daemon, then the system's; what only reads may use
    their monitor sockets. `user` is the runtime directory of this user's daemon."""
    folders = tuple(dict.fromkeys((user, SYSTEM)))
    names = (CONTROL, MONITOR) if reads else (CONTROL,)
    return tuple(folder / name for name in names for folder in folders)


def connect(paths: Sequence[Path], timeout_s: float) -> Client:
    """A client of the first place where a daemon answers. Raises Failure: nobody does, access is
    denied, no answer within `timeout_s`, or a protocol of another major."""
    found: list[_Nobody] = []
    absent: list[Path] = []
    for path in paths:
        try:
            stream = _dial(path, timeout_s)
        except (FileNotFoundError, NotADirectoryError):
            absent.append(path)
            continue
        except _Nobody as nobody:
            found.append(nobody)
            continue
        try:
            return Client(path, stream, timeout_s)
        except BaseException:
            stream.close()
            raise
    if not found:
        looked = "\n".join(f"  {path}" for path in absent)
        what = "such socket" if len(absent) == 1 else "socket at any of these places"
        raise Failure(
            f"ds4d is not running: there is no {what}:\n{looked}\n"
            "`systemctl start ds4d` or `ds4d serve` starts it; --socket names another place",
            NOT_RUNNING,
        )
    # Of several, the one that is nearest to a running daemon: no access, then a stale file.
    worst = max(found, key=lambda nobody: nobody.exit_code)
    raise Failure(f"{worst.text}\n{worst.remedy}", worst.exit_code)


def _dial(path: Path, timeout_s: float) -> socket.socket:
    """Raises FileNotFoundError, NotADirectoryError or _Nobody."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout_s)
    try:
        stream.connect(os.fspath(path))
    except OSError as error:
        stream.close()
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                raise
            case errno.EACCES | errno.EPERM:
                raise _no_access(path) from None
            case errno.ECONNREFUSED if not _is_socket(path):
                raise _Nobody(f"{path} is not a socket", "--socket names another place") from None
            case errno.ECONNREFUSED:
                raise _stale(path) from None
            case errno.EAGAIN:  # its queue of connections is full, and a Unix socket won't wait
                raise Failure(
                    f"whoever listens on {path} takes no connections any more: it hangs, or the "
                    f"machine is overloaded\n`fuser {path}` names the process",
                    DEADLINE,
                ) from None
            case _:  # such as a path that is too long for a socket
                raise Failure(f"{path}: {error.strerror or error}", ERROR) from None
    return stream


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return True  # it went away meanwhile, as a stale one does


def _stale(path: Path) -> _Nobody:
    return _Nobody(
        f"ds4d is not running: {path} is there, but nobody listens on it "
        "(a daemon that was killed leaves it behind; the next start replaces it)",
        _look(path),
    )


def _look(path: Path) -> str:
    if SYSTEM in path.parents:
        return "`systemctl status ds4d` and `journalctl -u ds4d -n 20` tell more"
    return "`ds4d serve` starts one; its last lines tell why the previous one ended"


def _unhang(path: Path, pid: int) -> str:
    if SYSTEM in path.parents:
        return (
            "`systemctl status ds4d` and `journalctl -u ds4d -n 20` tell more; `systemctl restart "
            "ds4d` starts it anew"
        )
    return f"its log tells more; `kill {pid}` ends it, `kill -9 {pid}` does so in any case"


def _no_access(path: Path) -> _Nobody:
    """Says who has it."""
    closed = path
    try:
        facts = path.stat()
    except OSError:  # one of the folders is closed already
        closed = next(p for p in path.parents if _can_stat(p))
        facts = closed.stat()
    owner, group = _user_name(facts.st_uid), _group_name(facts.st_gid)
    enough = stat.S_IXGRP if closed is not path else stat.S_IWGRP
    if facts.st_mode & enough and facts.st_gid != 0:
        remedy = (
            f"the group {group} may: `sudo usermod -aG {group} {_user_name(os.getuid())}`, then "
            "log in again; or use sudo"
        )
    else:
        sudo = "sudo" if owner == "root" else f"sudo -u {owner}"
        remedy = f"only {owner} may: use `{sudo}`"
    return _Nobody(f"permission denied for {closed} (owner {owner}, group {group})", remedy, DENIED)


def _can_stat(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


@dataclass(frozen=True, slots=True)
class Answer:
    """`raw` is one JSON object as it came, `kind` what is to be read from it."""

    raw: bytes
    kind: Any

    def read(self) -> Any:
        """Raises Failure if this `kind` does not know what the daemon sends."""
        return read(self.raw, self.kind)


class _Ended(Answer):
    """Of an operation: `kind` is that of its result."""

    def read(self) -> Any:
        return converted(read(self.raw, wire.OpProgress).result, self.kind)


class Client:
    """A connection that has been greeted. Every method raises Failure."""

    def __init__(self, path: Path, stream: socket.socket, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s  # for one answer
        self._stream = stream
        self._unread = bytearray()
        self._last_id = 0
        self.hello = self._greeting()

    def ask(self, params: wire.Params[Any]) -> Answer:
        return Answer(self._reply(self._send(params)), params.RESULT)

    def wait(
        self,
        op: wire.Op,
        kind: Any,
        heard: Callable[[wire.OpProgress], None],
        timeout_s: float | None,
    ) -> Answer:
        """The end of an operation that this connection has begun and whose result is of `kind`;
        `heard` gets what comes before it. Raises TimeoutError after `timeout_s`; with None only a
        daemon that hangs ends the wait, since it has a limit of its own."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            reply = self._news(until)
            if reply.error is not msgspec.UNSET:
                raise _failure(reply.error)
            if reply.method != wire.OpProgress.METHOD or reply.params is msgspec.UNSET:
                continue
            progress = read(reply.params, wire.OpProgress)
            if progress.op != op.op:
                continue
            if not progress.ended:
                heard(progress)
            elif progress.error is not None:
                raise _failure(progress.error)
            else:
                return _Ended(bytes(reply.params), kind)

    def _news(self, until: float) -> wire.Reply:
        """The next line of a daemon that may be silent for long: then it is asked whether it is
        still there. Raises TimeoutError after `until`."""
        asked = False
        while True:
            try:
                return self._next(min(until, time.monotonic() + self.timeout_s))
            except TimeoutError:
                if time.monotonic() >= until:
                    raise
                if asked:
                    raise self._hung(self.hello.pid) from None
                self._send(wire.Ping())
                asked = True
            except EOFError:
                raise self._gone() from None

    def close(self) -> None:
        self._stream.close()

    def _greeting(self) -> wire.Hello:
        try:
            reply = self._next(time.monotonic() + self.timeout_s)
        except TimeoutError:
            raise self._silent() from None
        except EOFError:
            raise Failure(
                f"ds4d ended before it answered on {self.path}: its start has failed, or it is "
                f"ending\n{_look(self.path)}",
                NOT_RUNNING,
            ) from None
        except _Strange:
            raise self._foreign() from None
        if reply.error is not msgspec.UNSET:
            raise _failure(reply.error)
        if reply.method != wire.Hello.METHOD:
            raise self._foreign()
        hello = read(reply.params or b"", wire.Hello)
        theirs = hello.protocol
        if theirs.major != wire.MAJOR:
            raise Failure(
                f"ds4d {hello.version} (process {hello.pid}) speaks protocol {theirs.major}, this "
                f"ds4ctl {__version__} speaks {wire.MAJOR}: use the ds4ctl that came with it, or "
                "restart the daemon after the upgrade",
                ERROR,
            )
        return hello

    def _silent(self) -> Failure:
        """No greeting: the listener's process tells why."""
        pid = self._listener()
        if pid != _INIT:
            return self._hung(pid)
        return Failure(
            f"ds4d is still starting: systemd holds {self.path} and nothing has answered on it "
            f"for {self.timeout_s:g} s\n{_look(self.path)}",
            NOT_RUNNING,
        )

    def _hung(self, pid: int) -> Failure:
        return Failure(
            f"process {pid} listens on {self.path} and has not answered for {self.timeout_s:g} s: "
            f"it hangs, or the machine is overloaded\n{_unhang(self.path, pid)}",
            DEADLINE,
        )

    def _listener(self) -> int:
        """The process that called listen(), which for systemd's sockets is systemd."""
        raw = self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", raw)[0]
        return pid

    def _send(self, params: wire.Params[Any]) -> int:
        self._last_id += 1
        call = {
            "jsonrpc": "2.0",
            "id": self._last_id,
            "method": params.METHOD,
            "params": params,
        }
        try:
            line = msgspec.json.encode(call) + b"\n"
        except UnicodeEncodeError:
            raise Failure("an argument is not text in UTF-8", USAGE) from None
        if len(line) > wire.LINE_MAX:
            raise Failure(f"the command is longer than {wire.LINE_MAX} bytes", USAGE)
        self._stream.settimeout(self.timeout_s)
        try:
            self._stream.sendall(line)
        except TimeoutError:
            raise self._late() from None
        except OSError:
            raise self._gone() from None
        return self._last_id

    def _reply(self, call_id: int) -> bytes:
        """The result of a call."""
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                reply = self._next(until)
            except TimeoutError:
                raise self._late() from None
            except EOFError:
                raise self._gone() from None
            if reply.error is not msgspec.UNSET and reply.id in (call_id, None):
                raise _failure(reply.error)
            if reply.id == call_id and reply.result is not msgspec.UNSET:
                return bytes(reply.result)

    def _next(self, until: float) -> wire.Reply:
        """Raises TimeoutError, or EOFError when the daemon has hung up."""
        while (end := self._unread.find(b"\n")) < 0:
            if len(self._unread) > wire.LINE_MAX:
                raise self._foreign()
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._stream.settimeout(left_s)
            try:
                more = self._stream.recv(1 << 16)
            except ConnectionError:
                more = b""
            if not more:
                raise EOFError
            self._unread += more
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return read(line, wire.Reply)

    def _late(self) -> Failure:
        return Failure(
            f"no answer within {self.timeout_s:g} s (--timeout); what was asked for may still "
            "happen",
            DEADLINE,
        )

    def _foreign(self) -> Failure:
        return Failure(
            f"whoever listens on {self.path} does not speak the control protocol of ds4d; "
            "--socket names another place",
            ERROR,
        )

    def _gone(self) -> Failure:
        return Failure(
            f"the daemon (process {self.hello.pid}) ended before it answered\n{_look(self.path)}",
            ERROR,
        )


def read(raw: bytes | msgspec.Raw, kind: type[R]) -> R:
    """Raises Failure: the daemon is of another version, or is none."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise _Strange(error) from None


def converted(value: Any, kind: type[R]) -> R:
    """The same for what has been read as plain JSON."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _Strange(error) from None


class _Strange(Failure):
    """What the daemon sends cannot be read."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"ds4ctl {__version__} cannot read what the daemon answers: {error}; --json shows it "
            "as it came",
            ERROR,
        )


def _failure(error: wire.Error) -> Failure:
    return Failure(error.message, EXIT_OF.get(error.code, ERROR), error)
