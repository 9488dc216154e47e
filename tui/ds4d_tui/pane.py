"""What all panes share: lines of text that are painted again only where they have changed.

A pane shows a view and nothing else; it is given a whole new one each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from textual.content import Content
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from ds4d_tui.draw import MUTED, cell, join, text
from ds4d_tui.feed import View

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Pane(Widget):
    """A part of the screen that `app.PANES` can list."""

    NAME: ClassVar[str] = ""
    PLACE: ClassVar[Literal["top", "body"]] = "body"  # side by side if there is room, or stacked

    _title: Content | None = None

    def show(self, view: View, now: float) -> None:
        """`now` is of the clock that the view's times are of."""
        raise NotImplementedError

    def entitle(self, *told: str) -> None:
        """In the border: the name, and what there is to say; told only when it has changed, since
        the whole pane is painted again."""
        parts = [text(self.NAME, "bold"), *(text(part, MUTED) for part in told if part)]
        title = join(parts, " · ")
        if self._title is None or not title.is_same(self._title):
            self.border_title = self._title = title


class Lines(Pane):
    """A pane that is a few lines, drawn for its width."""

    DEFAULT_CSS = """
    Lines {
        height: auto;
        text-wrap: nowrap;
        text-overflow: ellipsis;
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[View, float] = (View(), 0.0)
        self._lines: list[Content] = []

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        """`height` is how many lines there is room for; 0: as many as are wanted."""
        raise NotImplementedError

    def show(self, view: View, now: float) -> None:
        self._shown = (view, now)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def render(self) -> Content:
        return Content("\n").join(self._lines)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.draw(*self._shown, width, 0))

    def _draw(self) -> None:
        if not (size := self.content_size).width:
            return
        is_auto = bool(self.styles.height and self.styles.height.is_auto)
        lines = self.draw(*self._shown, size.width, 0 if is_auto else size.height)
        if len(lines) != len(self._lines) and is_auto:
            self._lines = lines
            self.refresh(layout=True)
        elif changed := _differing(self._lines, lines):
            self._lines = lines
            self.refresh(*(Region(0, y, size.width, 1) for y in changed))


def _differing(old: Sequence[Content], new: Sequence[Content]) -> list[int]:
    """Where two lists of lines differ, styles included."""
    both = min(len(old), len(new))
    return [
        *(y for y in range(both) if not old[y].is_same(new[y])),
        *range(both, max(len(old), len(new))),
    ]


class Rows(ScrollView, can_focus=True):
    """Many lines that scroll: only those in sight are drawn, and painted again only when they have
    changed. `point_at` moves the cursor, if there is to be one."""

    DEFAULT_CSS = """
    Rows {
        height: 1fr;
        overflow-x: hidden;
        overflow-y: auto;
        scrollbar-size-vertical: 1;
        &> .rows--cursor { background: $foreground 10%; }
        &:focus > .rows--cursor { background: $primary 30%; }
        &:ansi > .rows--cursor { background: ansi_default; text-style: reverse; }
    }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"rows--cursor"}

    def __init__(self) -> None:
        super().__init__()
        self.n_rows = 0
        self.cursor: int | None = None
        self._draw_row: Callable[[int], Content] = lambda row: Content("")
        self._drawn: dict[int, Content] = {}  # those in sight

    def put(self, n_rows: int, draw: Callable[[int], Content], width: int = 0) -> None:
        """Show other rows: `draw` makes one when it comes into sight. `width`: of the widest, if
        they scroll sideways."""
        self.n_rows, self._draw_row = n_rows, draw
        if (size := Size(width, n_rows)) != self.virtual_size:
            self.virtual_size = size
        before, self._drawn = self._drawn, {}
        top = round(self.scroll_y)
        for row in range(top, top + self.size.height):
            was = before.get(row)
            if row >= n_rows:
                if was is not None:
                    self._repaint(row)
            elif was is None or not was.is_same(self._row(row)):
                self._repaint(row)

    def point_at(self, row: int | None) -> None:
        """Move the cursor, and scroll along if it was in sight."""
        if row == self.cursor:
            return
        was, self.cursor = self.cursor, row
        for y in (was, row):
            if y is not None:
                self._repaint(y)
        if row is not None and (was is None or self._is_seen(was)):
            self.reveal(row)

    def reveal(self, row: int) -> None:
        top, height = round(self.scroll_y), self.size.height
        if row < top:
            self.scroll_to(y=row, animate=False, force=True)
        elif row >= top + height:
            self.scroll_to(y=row - height + 1, animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        x, top = self.scroll_offset
        row, width = top + y, self.scrollable_content_region.width
        if row >= self.n_rows:
            return Strip.blank(width, self.visual_style.rich_style)
        style = self.get_visual_style("rows--cursor") if row == self.cursor else self.visual_style
        content = self._row(row)
        if x:
            content = content[x:]
        strips = Visual.to_strips(
            self, cell(content, width), width, 1, style, apply_selection=False
        )
        return strips[0]

    def _row(self, row: int) -> Content:
        if row not in self._drawn:
            self._drawn[row] = self._draw_row(row)
        return self._drawn[row]

    def _is_seen(self, row: int) -> bool:
        return 0 <= row - round(self.scroll_y) < self.size.height

    def _repaint(self, row: int) -> None:
        if self._is_seen(row):
            self.refresh_line(row)
