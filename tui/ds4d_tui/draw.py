"""Numbers as people read them, and bars, sparklines and graphs of characters.

Owns how a value looks. Knows neither widgets nor records; styles are names of theme colours, which
Textual resolves when it paints, so that a change of theme needs no new drawing.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from textual.content import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MUTED = "$foreground 65%"
FAINT = "$foreground 45%"
LINE = "$foreground 20%"  # what is not filled
BODY = "40%"  # of the colour, below the top of a graph

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HEADROOM = 1.25  # a steady value is not a wall


def text(value: object, style: str = "") -> Content:
    return Content.styled(str(value), style) if style else Content(str(value))


# Numbers


def count(n: float) -> str:
    """Tokens and the like, in five characters: 999, 1.23k, 12.3k, 123k, 1.23M."""
    return _scaled(n, 1000, ("", "k", "M", "G", "T"))


def rate(per_s: float) -> str:
    """Of a second: one decimal below 10, where it matters."""
    return f"{per_s:.1f}" if 0 < per_s < 9.95 else count(per_s)


def size(n_bytes: float, *, short: bool = False) -> str:
    """Bytes in powers of 1024: 0, 512 B, 1.20 GiB; short: 1.2G."""
    if n_bytes == 0:
        return "0"
    if n_bytes < 0:
        return f"-{size(-n_bytes, short=short)}"
    if short:
        return _scaled(n_bytes, 1024, ("B", "K", "M", "G", "T"), digits=2)
    return _scaled(n_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(n: float, base: int, units: tuple[str, ...], digits: int = 3) -> str:
    """So many digits, at least those before the point, and a unit; whole numbers of the first."""
    step = 0
    while n >= 999.5 and step < len(units) - 1:
        n /= base
        step += 1
    before = 1 if n < 9.995 else 2 if n < 99.95 else 3
    return f"{n:.{max(digits - before, 0) if step else 0}f}{units[step]}"


def span(seconds: float) -> str:
    """A duration in its two largest units: 12 s, 1m 20s, 2h 05m, 3d 04h."""
    s = max(int(seconds), 0)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60}m {s % 60:02d}s"
    if s < 86_400:
        return f"{s // 3600}h {s % 3600 // 60:02d}m"
    return f"{s // 86_400}d {s % 86_400 // 3600:02d}h"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# Lines of several parts


def join(parts: Iterable[Content], gap: str = "  ") -> Content:
    return Content(gap).join(parts)


def fit(parts: Sequence[Content], width: int, gap: str = "  ") -> Content:
    """As many of `parts`, in their order, as `width` has room for."""
    taken: list[Content] = []
    left = width
    for part in parts:
        need = part.cell_length + (len(gap) if taken else 0)
        if need > left:
            break
        taken.append(part)
        left -= need
    return join(taken, gap)


def flow(parts: Sequence[Content], width: int, n_lines: int, gap: str = "  ") -> list[Content]:
    """`parts` on up to `n_lines` lines, none broken; what had no room is counted: +2."""
    lines: list[list[Content]] = [[]]
    for i, part in enumerate(parts):
        if join([*lines[-1], part], gap).cell_length <= width:
            lines[-1].append(part)
        elif len(lines) < n_lines and lines[-1]:
            lines.append([part])
        else:
            more = text(f"+{len(parts) - i}", MUTED)
            while lines[-1] and join([*lines[-1], more], gap).cell_length > width:
                more = text(f"+{len(parts) - i + 1}", MUTED)
                lines[-1].pop()
            lines[-1].append(more)
            break
    return [join(line, gap) for line in lines]


def ends(left: Content, right: Content, width: int) -> Content:
    """`left` and `right` at the two ends of a line; `left` gives way."""
    room = max(width - right.cell_length - 1, 0)
    return cell(left, room) + " " * (width - room - right.cell_length) + right


def cell(content: Content, width: int, *, right: bool = False) -> Content:
    """Exactly `width` wide; what is too long ends in an ellipsis."""
    if content.cell_length > width:
        return content.truncate(width, ellipsis=True) if width > 0 else Content("")
    pad = width - content.cell_length
    return content.pad_left(pad) if right else content.pad_right(pad)


# Bars


class Share(NamedTuple):
    """A part of a bar, 0..1 of its length."""

    share: float
    style: str
    full: str = ""  # the character, if not that of the bar


def bar(shares: Sequence[Share], width: int) -> Content:
    """A thin bar: the shares one after the other; the rest is a hairline."""
    return _cells(shares, width, "━", "─")


def block(shares: Sequence[Share], width: int) -> Content:
    """The same as a thick bar: `block` is for what is held, `bar` for what moves on."""
    return _cells(shares, width, "█", "░")


def _cells(shares: Sequence[Share], width: int, full: str, rest: str) -> Content:
    parts: list[tuple[str, str]] = []
    taken, total = 0, 0.0
    for share, style, special in shares:
        total = min(total + max(share, 0.0), 1.0)
        end = round(total * width)
        if share > 0 and end <= taken:
            end = min(taken + 1, width)  # what is there is seen, however little
        parts.append(((special or full) * max(end - taken, 0), style))
        taken = max(taken, end)
    parts.append((rest * (width - taken), LINE))
    return Content.assemble(*(part for part in parts if part[0]))


# Values over time; None is a time without data


def spark(values: Sequence[float | None], width: int, style: str) -> Content:
    """The last `width` values on one line."""
    return graph(values, width, 1, style)[0]


def graph(values: Sequence[float | None], width: int, height: int, style: str) -> list[Content]:
    """The last `width` values, the newest at the right, on a scale that begins at 0. What lies
    below the top of a column is paler."""
    shown = list(values)[-width:] if width > 0 else []
    top = max((v for v in shown if v is not None), default=0.0) * _HEADROOM
    levels = [None if v is None else _level(v, top, height) for v in shown]
    pad = " " * (width - len(shown))
    return [Content.assemble(pad, *_row(levels, 8 * row, style)) for row in reversed(range(height))]


def _row(levels: list[int | None], floor: int, style: str) -> list[tuple[str, str]]:
    """The columns of one line, whose lower edge is at `floor` eighths."""
    cells = [0 if level is None else min(max(level - floor, 0), 9) for level in levels]
    return [
        ("".join(_EIGHTHS[min(n, 8)] for n in run), f"{style} {BODY}" if is_body else style)
        for is_body, run in itertools.groupby(cells, lambda n: n == 9)
    ]


def _level(value: float, top: float, height: int) -> int:
    """In eighths of a line; a value above 0 is always seen, and 0 is a line on the ground."""
    if value <= 0 or top <= 0:
        return 1
    return max(math.ceil(8 * height * min(value / top, 1.0)), 1)
