"""What the table of sessions can show: a look, an order and a width for each column.

Adding a column is an entry in `COLUMNS`. Knows no widget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from textual.content import Content

from ds4d_tui.colours import PHASES
from ds4d_tui.draw import MUTED, Share, bar, cell, count, percent, plural, rate, span, spark, text
from ds4d_tui.feed import key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ds4d.wire import Session
    from ds4d_tui.feed import View

    Cell = Content | str

AT_WORK = ("prefill", "decode", "paused")
WAITS = {"lane": "a lane", "memory": "memory", None: "its turn"}
NOTE = 11  # cells for the words behind a progress bar: 1.23k/32.8k


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    width: int  # at least
    most: int = 0  # what it may grow to, when there is room
    rank: int  # those of high rank go when there is none
    draw: Callable[[Session, View, int], Cell]  # for a width
    order: Callable[[Session], Any]  # None comes last, in either direction
    falls: bool = True  # which direction is the first
    left: bool = False


@dataclass(frozen=True, slots=True)
class Sort:
    column: Column
    falls: bool

    @property
    def mark(self) -> str:
        return "▼" if self.falls else "▲"


def _at_work_first(session: Session) -> tuple[int, int, float]:
    """By lane, so that a row stays where it is from prefill to the end of its answer; then the
    queue, oldest first; then what rests, last used first."""
    if session.phase in AT_WORK:
        return 0, session.lane if session.lane is not None else 1 << 30, 0.0
    if session.phase == "queued":
        return 1, 0, -session.age_s
    return 2, 0, session.idle_s


def _progress(session: Session, view: View, width: int) -> Cell:
    """What it waits for, or how far it is."""
    note = ""
    shares: list[Share] = []
    match session.phase:
        case "prefill":
            whole = max(session.n_prompt, 1)
            done = max(session.n_tokens - session.n_cached, 0)
            shares = [
                Share(session.n_cached / whole, "$primary 45%"),
                Share(done / whole, "$primary"),
            ]
            left_s = session.remaining_s
            note = percent(session.n_tokens / whole) if left_s is None else span(left_s)
        case "decode":
            shares = [Share(session.n_generated / max(session.n_answer_max, 1), "$success")]
            note = f"{count(session.n_generated)}/{count(session.n_answer_max)}"
        case "queued":
            until = "" if session.remaining_s is None else f" ~{span(session.remaining_s)}"
            return text(f"for {WAITS[session.waits_for]}{until}", PHASES["queued"])
        case "paused":
            return text("its reader is slow", PHASES["paused"])
        case "idle":
            return f"for {span(session.idle_s)}"
    return bar(shares, max(width - NOTE - 1, 1)) + f" {note:<{NOTE}}"


def _id(session: Session, width: int) -> str:
    """Its end if it is long, as the hidden ids are that monitors get."""
    if session.id is None:
        return "–"
    told = str(session.id)
    return told if len(told) <= width else f"…{told[1 - width :]}"


def _rate(session: Session) -> str:
    return "" if session.tokens_per_s is None else rate(session.tokens_per_s)


COLUMNS = (
    Column(
        name="id",
        width=4,
        rank=0,
        draw=lambda s, view, width: _id(s, width),
        order=lambda s: s.id,
        falls=False,
    ),
    Column(
        name="lane",
        width=4,
        rank=0,
        draw=lambda s, view, width: "" if s.lane is None else str(s.lane),
        order=lambda s: s.lane,
        falls=False,
    ),
    Column(
        name="state",
        width=7,
        rank=0,
        draw=lambda s, view, width: text(s.phase, PHASES[s.phase]),
        order=_at_work_first,
        falls=False,
        left=True,
    ),
    Column(
        name="request",
        width=11,
        most=36,
        rank=1,
        draw=lambda s, view, width: s.request,
        order=lambda s: s.request,
        falls=False,
        left=True,
    ),
    Column(
        name="prompt",
        width=6,
        rank=1,
        draw=lambda s, view, width: count(s.n_prompt),
        order=lambda s: s.n_prompt,
    ),
    Column(
        name="cached",
        width=6,
        rank=1,
        draw=lambda s, view, width: count(s.n_cached),
        order=lambda s: s.n_cached,
    ),
    Column(
        name="progress",
        width=17,
        most=34,
        rank=0,
        draw=_progress,
        order=lambda s: s.n_tokens / s.n_prompt if s.n_prompt and s.phase == "prefill" else None,
        left=True,
    ),
    Column(
        name="answer",
        width=6,
        rank=3,
        draw=lambda s, view, width: count(s.n_generated) if s.n_generated else "",
        order=lambda s: s.n_generated,
    ),
    Column(
        name="tok/s",
        width=5,
        rank=1,
        draw=lambda s, view, width: _rate(s),
        order=lambda s: s.tokens_per_s,
    ),
    Column(
        name="trend",
        width=10,
        most=16,
        rank=2,
        draw=lambda s, view, width: (
            ""
            if s.tokens_per_s is None
            else spark(view.trends.get(key(s), ()), width, f"{PHASES[s.phase]} 70%")
        ),
        order=lambda s: s.tokens_per_s,
        left=True,
    ),
    Column(
        name="tokens",
        width=6,
        rank=3,
        draw=lambda s, view, width: count(s.n_tokens),
        order=lambda s: s.n_tokens,
    ),
    Column(
        name="pages",
        width=5,
        rank=4,
        draw=lambda s, view, width: count(s.n_pages),
        order=lambda s: s.n_pages,
    ),
    Column(
        name="age",
        width=7,
        rank=1,
        draw=lambda s, view, width: span(s.age_s),
        order=lambda s: s.age_s,
    ),
    Column(
        name="idle",
        width=7,
        rank=4,
        draw=lambda s, view, width: span(s.idle_s) if s.idle_s else "",
        order=lambda s: s.idle_s or None,
    ),
)


def _named(name: str) -> Column:
    return next(column for column in COLUMNS if column.name == name)


BY_STATE = Sort(_named("state"), falls=False)

Layout = tuple[tuple[Column, int], ...]


def layout(width: int) -> Layout:
    """The columns that fit, in their order, and how wide each is; a space before each."""
    left, taken = width, set[str]()
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if column.width + 1 > left and taken:
            break
        taken.add(column.name)
        left -= column.width + 1
    shown = [column for column in COLUMNS if column.name in taken]
    widths = {column.name: column.width for column in shown}
    for name in ("progress", "request", "trend"):
        if name in widths:
            more = min(max(left, 0), _named(name).most - widths[name])
            widths[name] += more
            left -= more
    return tuple((column, widths[column.name]) for column in shown)


def header(columns: Layout, sort: Sort) -> Content:
    """The names; that of the sorted column has a mark, in the gap beside it."""
    line = Content("")
    for column, width in columns:
        is_sorted = column.name == sort.column.name
        mark = sort.mark if is_sorted else ""
        style = "bold $foreground" if is_sorted else MUTED
        if column.left:
            line += " " + cell(text(column.name + (mark or " "), style), width)
        else:
            line += cell(text(mark + column.name, style), width + 1, right=True)
    return line


def column_at(columns: Layout, x: int) -> Column | None:
    """Which column is at a cell of the line."""
    for column, width in columns:
        x -= width + 1
        if x < 0:
            return column
    return None


def row(session: Session, view: View, columns: Layout) -> Content:
    style = MUTED if session.phase == "idle" else ""
    cells = []
    for column, width in columns:
        drawn = column.draw(session, view, width)
        shown = text(drawn, style) if isinstance(drawn, str) else drawn
        cells.append(cell(shown, width, right=not column.left))
    return Content(" ") + Content(" ").join(cells)


def ordered(sessions: Iterable[Session], sort: Sort) -> list[Session]:
    by_state = sorted(sessions, key=_at_work_first)  # what is equal stays in this order
    keyed = [(sort.column.order(session), session) for session in by_state]
    known = [pair for pair in keyed if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=sort.falls)
    return [session for _, session in known] + [s for order, s in keyed if order is None]


def matches(session: Session, words: Sequence[str]) -> bool:
    """Whether each word of a filter names the session or is in what it does. A label counts from
    its beginning, with its prefix or without: its digits are anybody's."""
    names = {"" if session.id is None else str(session.id)}
    if session.lane is not None:
        names.add(f"lane{session.lane}")
    label = session.request.casefold()
    labels = (label, label.rpartition("_")[2])
    does = f"{session.phase} {session.waits_for or ''}"
    return all(
        word in names or word in does or any(one.startswith(word) for one in labels)
        for word in words
    )


def story(session: Session) -> list[Content]:
    """All of one session in words, the most telling first."""
    name = "no session yet" if session.id is None else f"session {session.id}"
    parts = [text(name, "bold"), text(session.request, MUTED)]
    parts.append(Content(f"prompt {session.n_prompt:,}"))
    if session.n_cached and session.n_prompt:
        share = percent(session.n_cached / session.n_prompt)
        parts.append(Content(f"{session.n_cached:,} reused ({share})"))
    if session.phase == "prefill":
        parts.append(Content(f"{session.n_tokens:,} done"))
    if session.n_generated:
        parts.append(Content(f"answer {session.n_generated:,} of at most {session.n_answer_max:,}"))
    if session.n_tokens:
        parts.append(Content(f"{session.n_tokens:,} tokens in {plural(session.n_pages, 'page')}"))
    if session.tokens_per_s is not None:
        parts.append(Content(f"{session.tokens_per_s:,.1f} tok/s"))
    parts.append(Content(f"began {span(session.age_s)} ago"))
    return parts
