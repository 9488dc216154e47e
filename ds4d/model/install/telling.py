"""Notes and progress for a person, on stderr: a bar on a terminal, a line now and then elsewhere.

Knows neither what is done nor where it is written to. Not thread-safe; one bar at a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REDRAW_S = 0.1
LINE_S = 10.0  # between two lines where no terminal is
RECENT_S = 15.0  # what the rate is measured over
CELLS = 12


class Teller:
    """Says things while work goes on. `clock` is in seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.terminal = stream.isatty()
        self.clock = clock
        self._stream = stream
        self._drawn = False  # whether the cursor stands behind a bar

    def note(self, text: str) -> None:
        """A line of its own; a bar goes on below it."""
        self._stream.write(f"{self._erased()}{text}\n")
        self._stream.flush()

    def draw(self, what: str, state: str) -> None:
        """The one line that the next one replaces; a long `what` is cut, so that both fit."""
        room = max(self._columns() - len(state) - 3, 8)
        what = what if len(what) <= room else f"{what[: room - 1]}…"
        self._stream.write(f"{self._erased()}{what}  {state}")
        self._stream.flush()
        self._drawn = True

    def keep(self) -> None:
        """Leave the line as it is and go on below."""
        self._stream.write("\n")
        self._stream.flush()
        self._drawn = False

    @contextmanager
    def bar(self, what: str, total: int | None, done: int = 0) -> Iterator[Bar]:
        """Progress of `what` in bytes: `done` of them are there already. Its last state stays."""
        bar = Bar(self, what, total, done)
        try:
            yield bar
        finally:
            bar.end()

    def _erased(self) -> str:
        erase = "\r\033[K" if self._drawn else ""
        self._drawn = False
        return erase

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80


class Bar:
    def __init__(self, teller: Teller, what: str, total: int | None, done: int) -> None:
        self.total = total
        self._teller = teller
        self._what = what
        self._done = done
        now = teller.clock()
        self._recent = deque([(now, done)])
        self._next = now + (REDRAW_S if teller.terminal else LINE_S)

    def at(self, done: int) -> None:
        """`done` bytes are there now; fewer than before if something had to start over."""
        now = self._teller.clock()
        if done < self._done:
            self._recent = deque([(now, done)])
        self._done = done
        if now < self._next:
            return
        self._recent.append((now, done))
        while now - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        self._show()
        self._next = now + (REDRAW_S if self._teller.terminal else LINE_S)

    def end(self) -> None:
        self._show()
        if self._teller.terminal:
            self._teller.keep()

    def _show(self) -> None:
        if self._teller.terminal:
            self._teller.draw(self._what, self._state())
        else:
            self._teller.note(f"{self._what}  {self._state()}")

    def _state(self) -> str:
        parts = []
        if self.total:
            share = min(self._done / self.total, 1.0)
            if self._teller.terminal:
                full = int(share * CELLS)
                parts.append(f"[{'#' * full}{'-' * (CELLS - full)}]")
            parts += [f"{int(100 * share):3d} %", f"{size(self._done)} of {size(self.total)}"]
        else:
            parts.append(size(self._done))
        rate = self._rate()
        if rate:
            parts.append(f"{size(round(rate))}/s")
            if self.total and self._done < self.total:
                parts.append(f"{span((self.total - self._done) / rate)} left")
        return "  ".join(parts)

    def _rate(self) -> float | None:
        """Bytes a second of late; None before there is anything to measure."""
        began, done = self._recent[0]
        seconds = self._recent[-1][0] - began
        gained = self._recent[-1][1] - done
        return gained / seconds if seconds > 0 and gained > 0 else None


def size(n_bytes: int) -> str:
    """Short, for reading: `80.76 GiB`."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= step:
            return f"{n_bytes / step:.2f} {unit}"
    return f"{n_bytes} B"


def span(seconds: float) -> str:
    """`6:58`, or `1:02:03`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
