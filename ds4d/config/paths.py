"""What the service manager or the user's session says to the process: directories, sockets.

systemd's `*_DIRECTORY`, else `XDG_*`; `NOTIFY_SOCKET`, `WATCHDOG_*`, `LISTEN_*` (sd_listen_fds(3),
sd_watchdog_enabled(3)). Opens nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ds4d.config.tree import Paths
from ds4d.config.values import shown
from ds4d.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_FD: Final = 3  # after stdin, stdout and stderr
_FDS_MAX: Final = 1024
_STDERR: Final = 2
_OURS_ALONE: Final = (  # for this process, not for its children
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),
)


def directories(environ: Mapping[str, str] | None = None) -> Paths:
    """Read `environ`, which is os.environ if not given. Of systemd's directories the first of
    several counts, of XDG's only absolute ones. Raises ConfigError."""
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME") or "/")

    def base(variable: str, default: str) -> Path:
        path = Path(environ.get(variable) or "")
        return path if path.is_absolute() else home / default

    def pick(systemd: str, otherwise: Path) -> Path:
        first = environ.get(systemd, "").split(":")[0]
        return Path(first) if first else otherwise

    state = pick("STATE_DIRECTORY", base("XDG_STATE_HOME", ".local/state") / "ds4d")
    run = Path(environ.get("XDG_RUNTIME_DIR") or "")
    notify = environ.get("NOTIFY_SOCKET") or None
    return Paths(
        config=pick("CONFIGURATION_DIRECTORY", base("XDG_CONFIG_HOME", ".config") / "ds4d"),
        state=state,
        cache=pick("CACHE_DIRECTORY", base("XDG_CACHE_HOME", ".cache") / "ds4d"),
        runtime=pick("RUNTIME_DIRECTORY", run / "ds4d" if run.is_absolute() else state / "run"),
        notify=notify,
        passed=_passed(environ),
        watchdog_us=_watchdog_us(environ),
        under_systemd=notify is not None or _is_service(environ),
        journal=_is_journal(environ.get("JOURNAL_STREAM", "")),
    )


def administered(
    environ: Mapping[str, str] | None = None, *, system: Path = Path("/"), uid: int | None = None
) -> Paths:
    """Directories of the daemon that a person at a shell looks after: for root the service's, on a
    machine where one was installed (`system`/etc/ds4d), else the person's own."""
    own = directories(environ)
    root = (os.geteuid() if uid is None else uid) == 0
    if not root or own.under_systemd or not (system / "etc/ds4d").is_dir():
        return own
    return replace(
        own,
        config=system / "etc/ds4d",
        state=system / "var/lib/ds4d",
        cache=system / "var/cache/ds4d",
        runtime=system / "run/ds4d",
    )


def forget_passed(paths: Paths) -> None:
    """Let no child believe that what was said to us was said to it."""
    for variable in _OURS_ALONE:
        os.environ.pop(variable, None)
    for fd in (fd for fds in paths.passed.values() for fd in fds):
        with suppress(OSError):  # not open: whoever uses it says so
            os.set_inheritable(fd, False)


def _is_ours(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable) == str(os.getpid())


def _passed(environ: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Descriptors by their FileDescriptorName=; those without one are called unknown."""
    if not _is_ours(environ, "LISTEN_PID"):
        return {}
    n_fds = _number(environ, "LISTEN_FDS", _FDS_MAX)
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, tuple[int, ...]] = {}
    for i in range(n_fds):
        name = (names[i] if i < len(names) else "") or "unknown"
        found[name] = (*found.get(name, ()), _FIRST_FD + i)
    return found


def _watchdog_us(environ: Mapping[str, str]) -> int | None:
    if "WATCHDOG_USEC" not in environ:
        return None
    if "WATCHDOG_PID" in environ and not _is_ours(environ, "WATCHDOG_PID"):
        return None
    return _number(environ, "WATCHDOG_USEC", 1 << 62) or None


def _number(environ: Mapping[str, str], variable: str, most: int) -> int:
    text = environ.get(variable, "")
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most:
        return int(text)
    message = f"not a number that systemd sets (got {shown(text)}, expected 0..{most})"
    raise ConfigError(f"{variable}: {message}", [(variable, "", message)])


def _is_service(environ: Mapping[str, str]) -> bool:
    """A shell in a terminal that systemd started inherits INVOCATION_ID, but is not the process
    that was executed."""
    started = environ.get("SYSTEMD_EXEC_PID")
    return "INVOCATION_ID" in environ and started in (None, str(os.getpid()))


def _is_journal(stream: str) -> bool:
    """Whether stderr still is the stream that systemd connected to the journal."""
    try:
        stat = os.fstat(_STDERR)
    except OSError:
        return False
    return stream == f"{stat.st_dev}:{stat.st_ino}"
