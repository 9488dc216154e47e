"""The table of sessions: sorted, filtered, with a cursor that stays on its session, and a line that
tells all about the one under it. On the first row the cursor stays on the first row: what is on top
is what most want to see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Input

from ds4d_tui import columns
from ds4d_tui.columns import AT_WORK, BY_STATE, Column, Sort
from ds4d_tui.draw import MUTED, fit, flow, text
from ds4d_tui.feed import View, key
from ds4d_tui.pane import Lines, Pane, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events
    from textual.app import ComposeResult

    from ds4d.wire import Session


class Header(Lines):
    """The names of the columns; a click on one sorts by it."""

    class Picked(Message):
        def __init__(self, column: Column) -> None:
            super().__init__()
            self.column = column

    sort = BY_STATE

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        return [columns.header(columns.layout(width - 1), self.sort)]

    def on_click(self, event: events.Click) -> None:
        columns_shown = columns.layout(self.content_size.width - 1)
        if column := columns.column_at(columns_shown, event.x):
            self.post_message(self.Picked(column))


class Detail(Lines):
    session: Session | None = None

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        if self.session is None:
            return [Content("")]
        story = columns.story(self.session)
        if height <= 1:
            return [fit(story, width, " · ")]
        return flow(story, width, height, " · ")


class Table(Rows):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "to(0)", "First", show=False),
        Binding("end,G", "to(-1)", "Last", show=False),
    ]

    class Moved(Message):
        def __init__(self, row: int) -> None:
            super().__init__()
            self.row = row

    can_point = False  # its rows are sessions, and not a sentence

    def action_move(self, n: int) -> None:
        self._go(0 if self.cursor is None else self.cursor + n)

    def action_page(self, n: int) -> None:
        self._go((self.cursor or 0) + n * max(self.size.height - 1, 1))

    def action_to(self, row: int) -> None:
        self._go(row if row >= 0 else self.n_rows - 1)

    def on_click(self, event: events.Click) -> None:
        row = round(self.scroll_y) + event.y
        if row < self.n_rows:  # and not on the ground below
            self._go(row)

    def _go(self, row: int) -> None:
        if self.can_point:
            row = min(max(row, 0), self.n_rows - 1)
            self.point_at(row)  # at once: the next key may be here before the message
            self.reveal(row)
            self.post_message(self.Moved(row))


class Sessions(Pane):
    NAME = "sessions"

    DEFAULT_CSS = """
    Sessions {
        layout: vertical;
        Header { height: 1; }
        Detail { height: 1; padding: 0 1; }
        Input { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
        &.-filtering Input { display: block; }
        &.-filtering Detail { display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "clear", "clear filter"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._view = View()
        self._now = 0.0
        self._sort = BY_STATE
        self._words: list[str] = []
        self._shown: list[Session] = []
        self._target: Session | None = None  # under the cursor, as it was last shown
        self._follows = False  # the cursor stays on its session

    def compose(self) -> ComposeResult:
        yield Header()
        yield Table()
        yield Detail()
        yield Input(placeholder="words: an id, a request, a state, lane0", compact=True)

    @property
    def shown(self) -> Sequence[Session]:
        """The rows of the table."""
        return self._shown

    @property
    def target(self) -> Session | None:
        """The session under the cursor."""
        return self._target

    def show(self, view: View, now: float) -> None:
        was, self._view, self._now = self._view, view, now
        if view.sessions is not was.sessions or view.status is not was.status:
            self._draw()

    def on_resize(self) -> None:
        self._draw()

    # Sorting and filtering

    def sort_by(self, column: Column) -> None:
        """Again: the other way round."""
        again = column.name == self._sort.column.name
        self._sort = Sort(column, not self._sort.falls if again else column.falls)
        self._draw()

    def sort_beside(self, step: int) -> None:
        """By the next column to the right (1) or left (-1) of those that are seen."""
        seen = [column for column, _ in columns.layout(self._width())]
        names = [column.name for column in seen]
        at = names.index(self._sort.column.name) if self._sort.column.name in names else 0
        self.sort_by(seen[(at + step) % len(seen)])

    def invert(self) -> None:
        self.sort_by(self._sort.column)

    def ask_filter(self) -> None:
        self.add_class("-filtering")
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        event.stop()
        self._words = event.value.casefold().split()
        self._draw()

    @on(Input.Submitted)
    def _keep_filter(self, event: Input.Submitted) -> None:
        event.stop()
        self._end_filter()

    def action_clear(self) -> None:
        self.query_one(Input).value = ""
        self._end_filter()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "clear" or bool(self._words) or self.has_class("-filtering")

    def _end_filter(self) -> None:
        self.remove_class("-filtering")
        self.query_one(Table).focus()
        self.refresh_bindings()

    @on(Header.Picked)
    def _picked(self, event: Header.Picked) -> None:
        event.stop()
        self.sort_by(event.column)

    @on(Table.Moved)
    def _moved(self, event: Table.Moved) -> None:
        event.stop()
        if event.row < len(self._shown):
            self._target = self._shown[event.row]
            self._follows = event.row > 0
            self._point()

    # Drawing

    def _width(self) -> int:
        """Of the columns: one cell is left for the scrollbar, so that they do not jump with it."""
        return max(self.query_one(Table).container_size.width - 1, 1)

    def _draw(self) -> None:
        if not self.content_size:
            return
        sessions = (s for s in self._view.sessions if columns.matches(s, self._words))
        self._shown = columns.ordered(sessions, self._sort)
        view, shown, layout = self._view, self._shown, columns.layout(self._width())
        table = self.query_one(Table)
        table.can_point = bool(shown)
        if shown:
            table.put(len(shown), lambda row: columns.row(shown[row], view, layout))
        else:
            table.put(1, lambda row: text(f" {self._why_empty()}", MUTED))
        head = self.query_one(Header)
        head.sort = self._sort
        head.show(self._view, self._now)
        self._point()
        self._entitle()

    def _why_empty(self) -> str:
        status = self._view.status
        if self._words:
            return "nothing matches the filter; Esc clears it"
        if status is None or status.loading:
            return ""
        return f"no sessions: clients find it at {' '.join(status.urls) or 'no address'}"

    def _point(self) -> None:
        """Put the cursor on the row of its session, wherever that is now."""
        table = self.query_one(Table)
        at = self._row_of_target(table.cursor)
        self._target = None if at is None else self._shown[at]
        table.point_at(at)
        detail = self.query_one(Detail)
        detail.session = self._target
        detail.show(self._view, self._now)

    def _row_of_target(self, cursor: int | None) -> int | None:
        if not self._shown:
            return None
        if not self._follows:
            return 0
        if self._target is not None:
            wanted = key(self._target)
            for row, session in enumerate(self._shown):
                if key(session) == wanted:
                    return row
            for row, session in enumerate(self._shown):  # its turn has got a session
                if self._target.id is None and session.request == self._target.request:
                    return row
        return min(cursor or 0, len(self._shown) - 1)

    def _entitle(self) -> None:
        sessions, n = self._view.sessions, self._view.n_sessions
        counts = {
            "at work": sum(s.phase in AT_WORK for s in sessions),
            "waiting": sum(s.phase == "queued" for s in sessions),
            "idle": sum(s.phase == "idle" for s in sessions),
            "not listed": n - len(sessions),
        }
        told = [f"{number} {word}" for word, number in counts.items() if number > 0]
        if self._words:
            told.append(f"{len(self._shown)} match /{' '.join(self._words)}")
        self.entitle(*told)
