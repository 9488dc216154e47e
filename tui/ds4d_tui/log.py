"""The tail of the daemon's log. It follows what comes until it is held or scrolled back."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content

from ds4d_tui.colours import LEVELS
from ds4d_tui.draw import FAINT, MUTED, text
from ds4d_tui.feed import LOG_LINES, REMARK, View
from ds4d_tui.pane import Pane, Rows

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from ds4d import wire

_FIELD = re.compile(r'\s+([\w.]+=)("(?:[^"\\]|\\.)*"|\S*)|\s*\S+')
_ORDER = tuple(LEVELS)


class Tail(Rows):
    """`follows`: the end is in sight and stays so."""

    DEFAULT_CSS = """
    Tail { overflow-x: auto; scrollbar-size-horizontal: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll(-1)", "Up", show=False),
        Binding("down,j", "scroll(1)", "Down", show=False),
        Binding("left", "shift(-16)", "Left", show=False),
        Binding("right", "shift(16)", "Right", show=False),
    ]

    follows = True

    def action_scroll(self, n: int) -> None:
        self.scroll_to(y=self.scroll_y + n, animate=False, force=True)

    def action_shift(self, n: int) -> None:
        self.scroll_to(x=self.scroll_x + n, animate=False, force=True)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self.follows = round(new_value) >= self.max_scroll_y

    def on_resize(self) -> None:
        if self.follows:
            self.to_end()

    def to_end(self) -> None:
        self.follows = True
        self.scroll_to(y=self.max_scroll_y, animate=False, force=True)  # also before layout


class Log(Pane):
    NAME = "log"

    def __init__(self) -> None:
        super().__init__()
        self._view = View()
        self._put: tuple[wire.LogLine, ...] = ()  # lines of the view that is on the screen
        self._least = 0  # place of the lowest level that is shown

    def compose(self) -> ComposeResult:
        yield Tail()

    def show(self, view: View, now: float) -> None:
        self._view = view
        if self.query_one(Tail).follows and view.log is not self._put:
            self._draw()
        self._entitle()

    def hold_or_follow(self) -> None:
        tail = self.query_one(Tail)
        if tail.follows:
            tail.follows = False
        else:
            tail.follows = True
            self._draw()
        self._entitle()

    def next_level(self) -> None:
        """Leave out the lowest level that is shown, or show all again."""
        self._least = (self._least + 1) % len(_ORDER)
        self._draw()
        self._entitle()

    def _draw(self) -> None:
        tail = self.query_one(Tail)
        if tail.follows:
            self._put = self._view.log
        shown = [line for line in self._put if _ORDER.index(line.level) >= self._least]
        width = max((_row(line).cell_length for line in shown), default=0)
        tail.put(len(shown), lambda row: _row(shown[row]), width)
        if tail.follows:
            tail.to_end()

    def _entitle(self) -> None:
        level = f"{_ORDER[self._least]} and above" if self._least else ""
        if self._view.link.no_log:
            told = self._view.link.no_log
        elif self.query_one(Tail).follows:
            told = ""
        else:
            n = self._n_new()
            told = f"held, {n} new" if n else "held"
        self.entitle(level, told)

    def _n_new(self) -> int:
        """Lines that have come since those that are shown."""
        log = self._view.log
        last = self._put[-1] if self._put else None
        return next((n for n, line in enumerate(reversed(log)) if line is last), len(log))


@lru_cache(maxsize=2 * LOG_LINES)
def _row(line: wire.LogLine) -> Content:
    style, mark = LEVELS[line.level]
    head = text(f" {_time(line.at)} ", FAINT) + text(f"{mark} ", style)
    if line.seq == REMARK:
        return head + text(line.text, f"italic {style}")
    return head + _fields(line.text, style if line.level in ("warning", "error") else "")


def _time(at: float) -> str:
    """Of the day, in the local zone."""
    try:
        return datetime.fromtimestamp(at).strftime("%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "--:--:--"  # no time of this world


def _fields(told: str, style: str) -> Content:
    """logfmt: the event stands out, names step back, values are plain."""
    parts: list[tuple[str, str]] = []
    for field in _FIELD.finditer(told):
        name, value = field.groups()
        if name:
            parts += [(f" {name}", MUTED), (value, style)]
        else:
            parts.append((field[0], style or "$accent"))
    return Content.assemble(*parts)
