"""Where the bytes are: what was given to each part, pages used and promised, what the host has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from ds4d_tui.colours import PARTS
from ds4d_tui.columns import AT_WORK
from ds4d_tui.draw import MUTED, Share, block, cell, fit, flow, join, size, text
from ds4d_tui.pane import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ds4d.wire import Memory, Pages, Session
    from ds4d_tui.feed import View

LABEL = 8
ROOMY = 10  # lines
PSI_HIGH = 10.0  # percent: beyond it the host is short of memory (spec/serving.md 2.5)


class MemoryPane(Lines):
    NAME = "memory"
    PLACE = "top"

    def draw(self, view: View, now: float, width: int, height: int) -> list[Content]:
        status = view.status
        if status is None or status.memory is None:
            return []
        roomy = height >= ROOMY
        groups = [_budget(status.memory, width, roomy), _host(status.memory, width, roomy)]
        if status.pages:
            groups.insert(1, _pages(status.pages, view.sessions, width, roomy))
        if not roomy:
            return [line for group in groups for line in group]
        return [line for group in groups for line in (*group, Content(""))][:-1]


def _labelled(label: str, lines: list[Content], width: int) -> list[Content]:
    labels = [label, *[""] * (len(lines) - 1)]
    return [
        cell(text(f"{name:<{LABEL}}", MUTED) + line, width)
        for name, line in zip(labels, lines, strict=True)
    ]


def _budget(memory: Memory, width: int, roomy: bool) -> list[Content]:
    """The bar is the budget; what is not given to a part stays empty."""
    given = sum(memory.parts.values())
    whole = max(memory.budget, given, 1)
    told = text(size(given), "bold") + text(f" of {size(memory.budget)}", MUTED)
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    styles = [PARTS[i % len(PARTS)] for i in range(len(parts))]
    shares = [Share(n / whole, style) for (_, n), style in zip(parts, styles, strict=True)]
    legend = [
        text("■ ", style) + text(f"{name} ", MUTED) + size(n, short=not roomy)
        for (name, n), style in zip(parts, styles, strict=True)
    ]
    room = max(width - LABEL - told.cell_length - 1, 4)
    lines = flow(legend, width - LABEL, 2 if roomy else 1, "  " if roomy else " ")
    return _labelled("budget", [block(shares, room) + " " + told, *lines], width)


def _pages(pages: Pages, sessions: Sequence[Session], width: int, roomy: bool) -> list[Content]:
    """A promise counts the pages that a turn has already; what idle sessions keep can be taken
    from them for it, so it is drawn before them."""
    used = max(pages.n - pages.n_free, 0)
    at_work = min(sum(s.n_pages for s in sessions if s.phase in AT_WORK), used)
    promised = max(pages.n_promised - at_work, 0)
    idle = used - at_work
    whole = max(pages.n, 1)
    shares = [
        Share(at_work / whole, "$primary"),
        Share(promised / whole, "$warning", "▒"),
        Share(idle / whole, "$primary 45%"),
    ]
    told = [
        text("at work ", MUTED) + text(at_work, "bold $primary" if at_work else "bold"),
        text("promised ", MUTED) + text(promised, "bold $warning" if promised else "bold"),
        text("idle ", MUTED) + text(idle, "bold"),
        text("free ", MUTED) + text(max(pages.n_free - promised, 0), "bold"),
    ]
    if not roomy:
        facts = join(told)
        room = max(width - LABEL - facts.cell_length - 1, 4)
        return _labelled("pages", [block(shares, room) + " " + facts], width)
    frontiers = pages.frontiers - pages.frontiers_free
    told += [
        text("of ", MUTED) + f"{pages.n}",
        text("each ", MUTED) + f"{pages.tokens} tokens",
        text("frontiers ", MUTED) + f"{frontiers} of {pages.frontiers}",
    ]
    bar = block(shares, width - LABEL)
    return _labelled("pages", [bar, *flow(told, width - LABEL, 2)], width)


def _host(memory: Memory, width: int, roomy: bool) -> list[Content]:
    tight = memory.free_to_promise < memory.reserve
    parts = [
        text("available ", MUTED) + text(size(memory.available), "bold"),
        text("to promise ", MUTED)
        + text(size(memory.free_to_promise), "bold $warning" if tight else "bold"),
        text("swap ", MUTED) + text(size(memory.swap), "bold $error" if memory.swap else ""),
    ]
    if memory.psi_some is not None:
        high = memory.psi_some >= PSI_HIGH
        told = f"{memory.psi_some:.1f} %"
        parts.append(text("psi ", MUTED) + text(told, "bold $warning" if high else ""))
    parts += [
        text("reserve ", MUTED) + size(memory.reserve),
        text("resident ", MUTED) + size(memory.resident),
        text("uncommitted ", MUTED) + size(memory.uncommitted),
    ]
    if memory.cgroup_headroom is not None:
        parts.append(text("cgroup ", MUTED) + size(memory.cgroup_headroom))
    if memory.simulated is not None:
        parts.append(text("simulated ", MUTED) + size(memory.simulated))
    room = width - LABEL
    return _labelled("host", flow(parts, room, 2) if roomy else [fit(parts, room)], width)
