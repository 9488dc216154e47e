"""How fast it is, and how much of it is in use: rates with their history, lanes, queue, totals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from ds4d_tui.colours import PHASES
from ds4d_tui.draw import (
    FAINT,
    MUTED,
    cell,
    count,
    ends,
    fit,
    graph,
    percent,
    rate,
    span,
    spark,
    text,
)
from ds4d_tui.pane import Lines

if TYPE_CHECKING:
    from ds4d.wire import Status
    from ds4d_tui.feed import Trend, View

LANES_MAX = 16  # that are drawn one by one
GRAPHS_HEIGHT = 6  # room that makes graphs worth while


class Overview(Lines):
    NAME = "overview"
    PLACE = "top"

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        if height >= GRAPHS_HEIGHT:
            return self._graphs(view, width, height)
        return self._narrow(view, width)

    def _narrow(self, view: View, width: int) -> list[Content]:
        is_past = view.prefill or view.decode
        left = max(min(width // 2 - 2, 60), 22) if is_past else 22
        return [
            _sparkline(*rate_row, left) + "   " + fit(facts, width - left - 3)
            for rate_row, facts in zip(_rates(view), _facts(view), strict=True)
        ]

    def _graphs(self, view: View, width: int, height: int) -> list[Content]:
        """Two graphs side by side, the capacity in the last two lines."""
        room = height - 4
        columns = (width - 3) // 2
        pictures = [_graph(*row, columns, room) for row in _rates(view)]
        lines = [left + "   " + right for left, right in zip(*pictures, strict=True)]
        return [*lines, Content(""), *(fit(facts, width) for facts in _facts(view))]


def _rates(view: View) -> list[tuple[str, str, float | None, Trend]]:
    rates = view.status.rates if view.status else None
    return [
        ("prefill", PHASES["prefill"], rates.prefill_tokens_per_s if rates else None, view.prefill),
        ("decode", PHASES["decode"], rates.decode_tokens_per_s if rates else None, view.decode),
    ]


def _now(value: float | None) -> Content:
    shown = "–" if value is None else rate(value)
    return text(f"{shown:>5}", "bold") + text(" tok/s", MUTED)


def _sparkline(name: str, style: str, value: float | None, trend: Trend, width: int) -> Content:
    head = text(f"{name:<8}", MUTED) + _now(value) + "  "
    return head + spark(trend, max(width - head.cell_length, 0), style)


def _graph(
    name: str, style: str, value: float | None, trend: Trend, width: int, height: int
) -> list[Content]:
    peak = max((v for v in trend[-width:] if v is not None), default=0.0)
    head = text(f"{name} ", MUTED) + _now(value)
    told = text(f"peak {rate(peak)}", FAINT)
    if head.cell_length + 2 + told.cell_length <= width:
        head = ends(head, told, width)
    return [cell(head, width), *graph(trend, width, height, style)]


def _facts(view: View) -> list[list[Content]]:
    """Two lines of them, the most telling first."""
    status = view.status
    if status is None or status.lanes is None or status.queue is None:
        return [[text("lanes –", MUTED)], [text("queue –", MUTED)]]
    lanes, queue = status.lanes, status.queue
    totals = _totals(status)
    busy = text(f" {lanes.n_busy}/{lanes.n_max}", "bold")
    first = [text("lanes ", MUTED) + _lanes(view) + busy, *totals[::2]]
    style = f"bold {PHASES['queued']}" if queue.n else "bold"
    second = [text("queue ", MUTED) + text(f"{queue.n}/{queue.n_max}", style)]
    if queue.n:
        second.append(text("oldest ", MUTED) + span(queue.oldest_s))
        second.append(text("wait ", MUTED) + f"~{span(queue.wait_s)}")
    engine, lag = _pulse(status)
    return [[*first, engine], [*second, *totals[1::2], lag]]


def _lanes(view: View) -> Content:
    """A square a lane, in the colour of what runs in it; a dot: not to be used."""
    lanes = view.status.lanes if view.status else None
    if lanes is None or lanes.n > LANES_MAX:
        return Content("")
    phases = {session.lane: session.phase for session in view.sessions if session.lane is not None}
    squares = [
        ("■", PHASES[phases[lane]])
        if lane in phases
        else ("□", MUTED)
        if lane < lanes.n_max
        else ("·", FAINT)
        for lane in range(lanes.n)
    ]
    return Content.assemble(*squares)


def _totals(status: Status) -> list[Content]:
    totals = status.totals
    if totals is None:
        return []
    reused = percent(totals.cached / totals.prompt) if totals.prompt else "–"
    return [
        text("requests ", MUTED) + count(totals.requests),
        text("reused ", MUTED) + reused,
        text("prompts ", MUTED) + count(totals.prompt),
        text("answers ", MUTED) + count(totals.generated),
    ]


def _pulse(status: Status) -> tuple[Content, Content]:
    """Whether the engine and the loop move."""
    call_s = status.heartbeat_age_s
    engine = "rests" if call_s is None else f"moved {call_s:.1f} s ago"
    return (
        text("engine ", MUTED) + engine,
        text("loop lag ", MUTED) + f"{1000 * status.loop_lag_s:.0f} ms",
    )
