"""Log events: `emit(log, "kv.store", session=17, n_tokens=8192, ms=41)` is one logfmt line.

Names are those of spec/serving.md 6.2. Values are numbers, short words or None; never prompt text.
Owns where lines go, how they look there (journal, terminal, file), their numbers, and the last few
hundred of them. A number is given to every line and never twice, so a gap in what is read later
means that lines were lost; the next line that could be written also says how many. Any thread may
emit. Knows nobody who emits.
"""

from __future__ import annotations

import logging
import sys
import traceback
import uuid
from collections import deque
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Value = str | int | float | bool | None
Level = Literal["debug", "info", "warning", "error"]

LEVELS: Final[dict[Level, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
INHERIT: Final = "inherit"  # a logger's level when it has none of its own
BOOT: Final = uuid.uuid4().hex[:12]  # of this process; lines of two starts are told apart by it
KEPT: Final = 500  # lines that `recent` and `since` still know
RESERVED: Final = frozenset({"seq", "boot", "dropped"})  # fields that only this module adds
MORE: Final = "| "  # begins each further line of one event: a traceback's

_ROOT = logging.getLogger("ds4d")
_TEXT_MAX = 2000  # characters of a value; journald splits lines of more than 48 KiB
_COLOUR = {"warning": "\033[33m", "error": "\033[31m", "debug": "\033[2m"}
_RESET = "\033[0m"
_PRIORITY: Mapping[Level, str] = {"debug": "<7>", "info": "<6>", "warning": "<4>", "error": "<3>"}


class Line(NamedTuple):
    """One event as it was logged."""

    seq: int
    at: float  # seconds since 1970
    level: Level
    text: str  # the event and its fields, logfmt


def emit(log: logging.Logger, event: str, /, *, level: int = logging.INFO, **fields: Value) -> None:
    """Log `event` with `fields`; fields that are None are left out."""
    assert RESERVED.isdisjoint(fields), f"{event}: {RESERVED} are not the caller's to give"
    if log.isEnabledFor(level):
        parts = [event, *(f"{k}={_value(v)}" for k, v in fields.items() if v is not None)]
        log.log(level, "%s", " ".join(parts))


def recent() -> list[Line]:
    """The last lines, at most `KEPT`, oldest first."""
    return since(0)


def since(seq: int) -> list[Line]:
    """The lines after number `seq` that are still known, oldest first."""
    return _LINES.since(seq)


def set_level(logger: str, level: str) -> str:
    """Let `logger` and those below it log from `level` on, now; returns what it was.

    `level` is one of `LEVELS`, or `inherit` for that of the logger above: what is returned can
    always be set again. Raises ValueError for another level and for a logger that no loaded module
    has.
    """
    known = (*LEVELS, INHERIT)
    if level not in known:
        raise ValueError(f"{level}: no such log level; expected one of {', '.join(known)}")
    loggers = sorted(name for name in list(logging.root.manager.loggerDict) if _ours(name))
    if logger not in loggers:
        raise ValueError(f"{logger}: no such logger; there are {', '.join(loggers)}")
    log = logging.getLogger(logger)
    previous = INHERIT if log.level == logging.NOTSET else _level(log.level)
    log.setLevel(logging.NOTSET if level == INHERIT else level.upper())
    return previous


def tell(text: str) -> None:
    """Say `text` to a person: written where the log goes if that is a terminal, else nowhere."""
    if _LINES in _ROOT.handlers:
        _LINES.tell(text)


def configure(level: str = "info", stream: TextIO | None = None, *, journal: bool = False) -> None:
    """Send every `ds4d.*` logger to `stream` (stderr) from `level` on: debug, info, warning, error.

    With `journal` lines carry the priority that journald reads, and leave the time to it. What
    other libraries have to say goes there too, from warnings on.
    """
    _LINES.write_to(stream or sys.stderr, journal=journal)
    _ROOT.handlers[:] = [_LINES]
    _ROOT.propagate = False
    _ROOT.setLevel(level.upper())
    logging.lastResort = _LINES  # used only where no other handler is


def _ours(name: str) -> bool:
    return name == _ROOT.name or name.startswith(f"{_ROOT.name}.")


def _level(number: int) -> Level:
    """The name of the highest of our levels that `number` reaches."""
    return next((name for name in reversed(LEVELS) if number >= LEVELS[name]), "debug")


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if len(text) > _TEXT_MAX:
        text = f"{text[:_TEXT_MAX]}…"
    if text and not any(c in ' "=\\' or not c.isprintable() for c in text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


def _lines(record: logging.LogRecord) -> tuple[str, list[str]]:
    """The event, and what cannot be in one line with it."""
    try:
        text, *more = record.getMessage().splitlines() or [""]
    except Exception as error:  # a library's own mistake in its format string
        text, more = f"cannot be formatted: {error!r}", []
    if not _ours(record.name):
        text = f"log.foreign logger={_value(record.name)} text={_value(text)}"
    if record.exc_info and record.exc_info[0] is not None:
        more += "".join(traceback.format_exception(*record.exc_info)).splitlines()
    return _printable(text), [_printable(line) for line in more]


def _printable(line: str) -> str:
    """An exception's text may be a client's, and must not speak to the terminal."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class _Lines(logging.Handler):
    """Numbers, keeps and writes lines. `handle` holds the lock around `emit`, so the order of the
    numbers is the order in the stream, whichever thread emits."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: TextIO | None = None
        self._journal = self._terminal = False
        self._seq = 0
        self._dropped = 0  # lines that could not be written since one that could
        self._kept: deque[Line] = deque(maxlen=KEPT)

    def write_to(self, stream: TextIO, *, journal: bool) -> None:
        with self._held():
            self._stream = stream
            self._journal = journal
            self._terminal = not journal and stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        text, more = _lines(record)
        self._seq += 1
        line = Line(self._seq, record.created, _level(record.levelno), text)
        self._kept.append(line)
        if self._write([self._written(line), *(f"{MORE}{one}" for one in more)], line.level):
            self._dropped = 0
        else:
            self._dropped += 1

    def since(self, seq: int) -> list[Line]:
        with self._held():
            n_new = min(max(self._seq - seq, 0), len(self._kept))
            return list(islice(self._kept, len(self._kept) - n_new, None))

    def tell(self, text: str) -> None:
        with self._held():
            if self._terminal:
                self._write([text], "info")

    def _written(self, line: Line) -> str:
        text = line.text
        if self._terminal:
            clock = datetime.fromtimestamp(line.at).strftime("%H:%M:%S")
            return f"{clock} {line.level.upper()} {text}"
        text = f"{text} seq={line.seq} boot={BOOT}"
        if self._dropped:
            text = f"{text} dropped={self._dropped}"
        if self._journal:
            return text
        clock = datetime.fromtimestamp(line.at).astimezone().isoformat(timespec="milliseconds")
        return f"{clock} {line.level.upper()} {text}"

    def _write(self, lines: Sequence[str], level: Level) -> bool:
        """Whether the stream took all of it."""
        if self._stream is None:
            return False
        colour = _COLOUR.get(level) if self._terminal else None
        before, after = (colour, _RESET) if colour else ("", "")
        if self._journal:
            before = _PRIORITY[level]
        try:
            self._stream.write("".join(f"{before}{line}{after}\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a reader that went; a stream that is closed
            return False
        return True

    @contextmanager
    def _held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


_LINES = _Lines()
