"""The Unix sockets that operators connect to: passed by systemd, or bound here.

Owns the socket files: their place, their mode, what a dead daemon has left of them, and their
removal. Every function blocks and belongs into a worker thread. Knows nobody who connects.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ds4d.errors import ConfigError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ds4d.config import Config

Name = Literal["control", "monitor"]
NAMES: tuple[Name, ...] = ("control", "monitor")

PATH_MAX = 107  # bytes of `sun_path`, its end left out
BACKLOG = 64
PROBE_S = 1.0  # a daemon that lives accepts at once, or has a full backlog


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """One listening socket, and whom its file lets in."""

    name: Name
    sock: socket.socket
    path: str
    user: str = ""  # who owns the file
    group: str | None = None  # whose members may connect too
    gid: int | None = None  # of `group`
    made: tuple[int, int] | None = None  # device and inode of the file, if it is ours to remove


def open_doors(config: Config) -> list[Door]:
    """Both sockets, those that systemd has passed and those that have to be bound. Raises
    ConfigError, and TemporaryError when another daemon answers there."""
    paths, modes = config.paths, config.control
    mode_of: dict[Name, str] = {"control": modes.socket_mode, "monitor": modes.monitor_mode}
    doors: list[Door] = []
    try:
        for name in NAMES:
            passed = paths.passed.get(name, ())
            doors += [_adopt(name, descriptor) for descriptor in passed]
            if not passed:
                _make_directory(paths.runtime, under_systemd=paths.under_systemd)
                doors.append(_bind(name, paths.runtime / f"{name}.sock", int(mode_of[name], 8)))
    except BaseException:
        close_doors(doors)
        raise
    return doors


def close_doors(doors: list[Door]) -> None:
    """Close the sockets and remove the files that are ours; those of systemd stay."""
    for door in doors:
        door.sock.close()
        if door.made is None:
            continue
        try:
            found = os.lstat(door.path)
            if (found.st_dev, found.st_ino) == door.made:  # else a daemon after us has bound it
                os.unlink(door.path)
        except OSError:
            pass  # the directory went first


def _adopt(name: Name, descriptor: int) -> Door:
    expected = (
        f"the socket that systemd passed as {name!r} is not a listening Unix stream socket; "
        "the socket unit needs ListenStream= with a path"
    )
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"{expected} ({error.strerror})") from None
    listens = sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM
    if not listens or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise ConfigError(expected)
    sock.set_inheritable(False)
    sock.setblocking(False)
    return _described(name, sock, os.fsdecode(sock.getsockname()))


def _make_directory(path: Path, *, under_systemd: bool) -> None:
    if under_systemd:
        if not path.is_dir():
            raise ConfigError(
                f"{path}: there is no such directory; the unit needs RuntimeDirectory="
            )
        return
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from None


def _bind(name: Name, path: Path, mode: int) -> Door:
    n_bytes = len(os.fsencode(path))
    if n_bytes > PATH_MAX:
        raise ConfigError(
            f"{path}: too long for a Unix socket ({n_bytes} bytes, at most {PATH_MAX}); let "
            "XDG_RUNTIME_DIR (under systemd: RuntimeDirectory=) name a shorter directory"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _clear_stale(path)
            sock.bind(str(path))
        made = os.lstat(path)
        os.chmod(path, mode)  # before listen: until then every connect is refused
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _unusable(path, error) from None
    except BaseException:
        sock.close()
        raise
    return _described(name, sock, str(path), made=(made.st_dev, made.st_ino))


def _clear_stale(path: Path) -> None:
    """Remove a socket file whose daemon is gone."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):  # a connect would be refused here too
        raise ConfigError(f"{path}: is in the way and no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
            holder = struct.unpack(
                "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            who = f"another ds4d (process {holder[0]})"
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):  # its backlog is full
            who = "another ds4d"
    raise TemporaryError(
        f"{path}: {who} answers there; stop that one (`ds4ctl --socket {path} shutdown`), or give "
        "this one a runtime directory of its own (XDG_RUNTIME_DIR)"
    )


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: cannot be made: {error.strerror or error}; let XDG_RUNTIME_DIR (under systemd: "
        "RuntimeDirectory=) name a directory that can be written"
    )


def _described(
    name: Name, sock: socket.socket, path: str, made: tuple[int, int] | None = None
) -> Door:
    """With the names of those whom the file's mode lets in: for what a refused peer is told."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # an abstract name has no file
        return Door(name=name, sock=sock, path=path, made=made)
    with_group = bool(found.st_mode & stat.S_IWGRP)
    return Door(
        name=name,
        sock=sock,
        path=path,
        made=made,
        user=_name_of(lambda: pwd.getpwuid(found.st_uid).pw_name, found.st_uid),
        group=_name_of(lambda: grp.getgrgid(found.st_gid).gr_name, found.st_gid)
        if with_group
        else None,
        gid=found.st_gid if with_group else None,
    )


def _name_of(look_up: Callable[[], str], number: int) -> str:
    try:
        return look_up()
    except KeyError:  # nobody has that number
        return str(number)
