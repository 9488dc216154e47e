"""Log events: `emit(log, "kv.store", session=17, n_tokens=8192, ms=41)` is one logfmt line.

Names are those of spec/serving.md 6.2. Values are numbers, short words or None; never prompt text.
Colour on a terminal, plain elsewhere; level and stream are set once by `configure`.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

Value = str | int | float | bool | None

_COLOUR = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.DEBUG: "\033[2m"}
_RESET = "\033[0m"


def emit(log: logging.Logger, event: str, /, *, level: int = logging.INFO, **fields: Value) -> None:
    """Log `event` with `fields`; fields that are None are left out."""
    if log.isEnabledFor(level):
        parts = [event, *(f"{k}={_value(v)}" for k, v in fields.items() if v is not None)]
        log.log(level, "%s", " ".join(parts))


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and not any(c in ' "=\\' or not c.isprintable() for c in text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


class _Line(logging.Formatter):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
        self.terminal = terminal

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        prefix = _COLOUR.get(record.levelno, "") if self.terminal else ""
        return f"{prefix}{line}{_RESET}" if prefix else line


def tell(text: str) -> None:
    """Say `text` to a person: written where the log goes if that is a terminal, else nowhere."""
    for handler in logging.getLogger("ds4d").handlers:
        if (
            isinstance(handler, logging.StreamHandler)
            and isinstance(handler.formatter, _Line)
            and handler.formatter.terminal
        ):
            handler.stream.write(f"{text}\n")
            handler.flush()


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send every `ds4d.*` logger to `stream` (stderr) at `level`: debug, info, warning or error."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Line(terminal=stream.isatty()))
    root = logging.getLogger("ds4d")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
