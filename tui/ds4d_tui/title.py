"""The line on top, which says what is watched and how it is, and the lines below it while
something needs attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from ds4d_tui.colours import STATES
from ds4d_tui.draw import MUTED, Share, bar, count, ends, fit, percent, plural, span, text
from ds4d_tui.pane import Lines

if TYPE_CHECKING:
    from ds4d.wire import Status
    from ds4d_tui.feed import Link, View

BAR = 30
ALERTS_MAX = 6


class Title(Lines):
    """`source` says where the data comes from, `paused` that the picture stands still."""

    source = ""
    paused = False

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        right = self._link(view, now) + " "
        return [ends(self._what(view, width - right.cell_length - 2), right, width)]

    def _what(self, view: View, width: int) -> Content:
        status = view.status
        if status is None:
            return text(" ds4d ", "bold")
        stale = view.link.state != "live"
        badge = f"bold $background on {MUTED if stale else STATES[status.state]}"
        parts = [text(" ds4d ", "bold") + text(f" {status.state.upper()} ", badge)]
        if status.model:
            parts.append(text(status.model.name, "bold"))
        doors = [url.removeprefix("http://").removesuffix("/v1") for url in status.urls[:1]]
        facts = [*doors, f"up {span(status.uptime_s)}", status.version, status.profile]
        parts += [text(fact, MUTED) for fact in (*facts, view.link.place)]
        return fit(parts, width)

    def _link(self, view: View, now: float) -> Content:
        age_s = view.age_s(now)
        age = "" if age_s is None else f" {span(age_s)}"
        if self.paused:
            return text("❚❚ paused", "bold $warning")
        if view.link.state == "lost":
            return text(f"✖ lost{age}", "bold $error")
        if view.link.state == "connecting":
            return text("◌ connecting", MUTED)
        if view.is_stale(now):
            return text(f"◌ stale{age}", "bold $warning")
        live = text("● ", "$success") + text(self.source, MUTED)
        if n := view.n_missed_lately(now):
            live += text(f" ▲ {count(n)} missed", "$warning")
        return live


class Alerts(Lines):
    """What an operator must know now: nothing, on a good day."""

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        if view.link.state == "lost":
            lines = [_loss(view.link, now)]  # what was going on may have ended
        elif view.status is not None:
            lines = [*_going_on(view.status), *_wrong(view.status)]
        else:
            lines = []
        wrapped = [part for line in lines for part in _indent(line, width)]
        if (n := len(wrapped) - ALERTS_MAX) > 0:
            wrapped[ALERTS_MAX - 1 :] = [text(f"   and {plural(n + 1, 'line')} more", MUTED)]
        return wrapped


def _loss(link: Link, now: float) -> Content:
    again = ""
    if link.retry_at is not None:
        again = f"; trying again in {max(link.retry_at - now, 0):.0f} s"
    return text("✖ ", "$error") + f"{link.why}{again}"


def _going_on(status: Status) -> list[Content]:
    lines = []
    if loading := status.loading:
        done = bar([Share(loading.fraction, "$accent")], BAR)
        share, since = percent(loading.fraction), span(loading.since_s)
        lines.append(
            text("◆ ", "$accent") + f"loading {loading.what}  " + done + f"  {share}  {since}"
        )
    if drain := status.drain:
        left = f"{span(drain.left_s)} left"
        n = f"{plural(drain.n_running, 'request')} running, {drain.n_queued} queued"
        stops = status.state == "stopping"
        what, hint = ("shutting down", "") if stops else ("draining", "  u takes it back")
        lines.append(text("◆ ", "$secondary") + f"{what}: {n}, {left}" + text(hint, MUTED))
    return lines


def _wrong(status: Status) -> list[Content]:
    lines = []
    mark = text("✖ ", "$error") if status.state == "failed" else text("▲ ", "$warning")
    told = {  # above, and more of it
        "loading": status.loading,
        "draining": status.drain,
        "stopping": status.drain,
    }
    for reason in status.reasons:
        if told.get(reason.code):
            continue
        remedy = f" → {reason.remedy}" if reason.remedy else ""
        lines.append(mark + text(reason.text) + text(remedy, MUTED))
    if status.reload and not status.reload.ok:
        lines.append(mark + f"the last reload failed: {status.reload.text}")
    return lines


def _indent(line: Content, width: int) -> list[Content]:
    """Wrapped, below the text and not below the mark."""
    first, *more = line.wrap(max(width - 4, 1))
    return [Content(" ") + first, *(Content("   ") + part for part in more)]
