"""What stands on the screen of ds4top: as text, and as a small SVG that shows the same anywhere."""

from __future__ import annotations

import html
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import textual
from rich.cells import cell_len

from ds4d import wire
from ds4d_tui.app import Ds4Top
from ds4d_tui.client import CallError, Client
from ds4d_tui.feed import Feed
from ds4d_tui.messages import Frame
from ds4d_tui.sessions import Sessions
from tests.daemon import ds4top_daemon as daemon
from tests.daemon.ds4top_daemon import Daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from rich.segment import Segment
    from rich.style import Style
    from textual.app import App
    from textual.message import Message
    from textual.pilot import Pilot

CELL_W, CELL_H, FONT = 12, 23, 20  # DejaVu Sans Mono of 20 px is 12 by 23
VERSION = f"<!-- textual {textual.__version__} -->"


SMALL, LARGE = (80, 24), (160, 50)


class Still:
    """A source whose time stands at `t`, all that a scene has told before taken in."""

    def __init__(self, scene: Callable[[float], wire.Update], t: float) -> None:
        self.feed = Feed(2.0, place="/run/ds4d/control.sock")
        self.feed.line(daemon.notification(daemon.hello()), 0.0)
        for step in range(int(2 * t) + 1):
            self.feed.line(daemon.notification(scene(step / 2)), step / 2)
        self.t = t

    def clock(self) -> float:
        return self.t

    def label(self) -> str:
        return "live 2 Hz"

    def hold(self, on: bool) -> None:
        pass

    async def run(self, tell: Callable[[Message], object]) -> None:
        tell(Frame())

    async def call(self, params: object) -> object:
        raise CallError("nobody is there", wire.IO)


class Run(NamedTuple):
    """Cells of one look."""

    text: str
    fg: str
    bg: str
    bold: bool


def _segments(app: App[None]) -> list[list[Segment]]:
    """As `App.export_screenshot` gets them."""
    screen = app.screen
    update = screen._compositor.render_update(full=True, screen_stack=app._background_screens)
    return [[segment for strip in row for segment in strip] for row in update.strips]


def _run(text: str, style: Style | None) -> Run:
    assert style is not None
    fg, bg = (_hex(color) for color in (style.color, style.bgcolor))
    if style.reverse:
        fg, bg = bg, fg
    return Run(text, fg, bg, bool(style.bold))


def _hex(color: object) -> str:
    triplet = getattr(color, "triplet", None)
    return triplet.hex if triplet else "#000000"


def text(app: App[None]) -> str:
    return "\n".join("".join(s.text for s in row).rstrip() for row in _segments(app))


def svg(app: App[None]) -> str:
    """The screen as it is, a line of the file for each of its own."""
    width, height = app.size
    looks: dict[tuple[str, bool], str] = {}
    ground = [[_run(s.text, s.style) for s in row if s.text] for row in _segments(app)]
    body = [f'<rect width="100%" height="100%" fill="{ground[-2][0].bg}"/>']
    for y, row in enumerate(ground):
        body.append("".join(_rects(row, y, ground[-2][0].bg)) + _line(row, y, looks))
    style = "".join(
        f".{name}{{fill:{fg}{';font-weight:bold' if bold else ''}}}"
        for (fg, bold), name in looks.items()
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" font-size="{FONT}" '
            f'viewBox="0 0 {width * CELL_W} {height * CELL_H}" '
            "font-family=\"'DejaVu Sans Mono','Menlo','Consolas',monospace\">",
            VERSION,
            f"<style>{style}</style>",
            *body,
            "</svg>\n",
        )
    )


def _rects(row: list[Run], y: int, ground: str) -> Iterator[str]:
    x = 0
    for run in row:
        n = cell_len(run.text)
        if run.bg != ground:
            yield (
                f'<rect x="{x * CELL_W}" y="{y * CELL_H}" width="{n * CELL_W}" '
                f'height="{CELL_H}" fill="{run.bg}"/>'
            )
        x += n


def _line(row: list[Run], y: int, looks: dict[tuple[str, bool], str]) -> str:
    x, spans = 0, []
    for run in row:
        for word in re.finditer(r"\S+", run.text):
            name = looks.setdefault((run.fg, run.bold), f"s{len(looks)}")
            at = x + cell_len(run.text[: word.start()])
            told = html.escape(word[0], quote=False)
            spans.append(f'<tspan x="{at * CELL_W}" class="{name}">{told}</tspan>')
        x += cell_len(run.text)
    return f'<text y="{y * CELL_H + 18}">{"".join(spans)}</text>' if spans else ""


def words(picture: str) -> list[list[tuple[str, str]]]:
    """The words of an `svg` and where they are: what must be alike under any Textual."""
    return [
        re.findall(r'<tspan x="(\d+)" class="\w+">([^<]*)<', line) for line in picture.split("\n")
    ]


async def press(pilot: Pilot[None], *keys: str) -> None:
    """As `Pilot.press`, which waits for a twenty-fifth of a second after each key."""
    for key in keys:
        pilot.app.simulate_key(key)
        for _ in range(3):  # to the app, the focused widget, and up to who has bound it
            await pilot.pause(0)


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Let the app run until `condition` holds."""
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, f"it did not come true:\n{text(pilot.app)}"
        await pilot.pause(0.01)


async def until_shown(pilot: Pilot[None], *told: str) -> None:
    await until(pilot, lambda: all(word in text(pilot.app) for word in told))


@asynccontextmanager
async def watching(
    path: Path,
    first: wire.Update | None = None,
    *,
    size: tuple[int, int] = SMALL,
    greeting: bytes | None = None,
    **answers: Any,
) -> AsyncIterator[tuple[Daemon, Pilot[None]]]:
    """A daemon, and ds4top that shows its first picture."""
    server = Daemon(path / "control.sock", greeting)
    server.answers |= answers
    server.tell(first or daemon.busy(30.0))
    async with server:
        app = Ds4Top(Client([server.path], 10.0))
        async with app.run_test(size=size, notifications=True) as pilot:
            await until_shown(pilot, "● ", " 10 Hz")
            yield server, pilot


@asynccontextmanager
async def still(size: tuple[int, int] = SMALL, t: float = 30.0) -> AsyncIterator[Pilot[None]]:
    """The load at a moment that stands still, for what needs no daemon."""
    app = Ds4Top(Still(daemon.busy, t))
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        yield pilot


def ids(pilot: Pilot[None]) -> list[int | None]:
    return [session.id for session in pilot.app.query_one(Sessions).shown]


def under_cursor(pilot: Pilot[None]) -> int | None:
    target = pilot.app.query_one(Sessions).target
    return target.id if target else None
