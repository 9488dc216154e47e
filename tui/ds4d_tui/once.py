"""One picture as plain text, for scripts and bad lines: the lines of the panes, without an app."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ds4d_tui import columns
from ds4d_tui.client import FAILED, OK, Broken, Client
from ds4d_tui.draw import text
from ds4d_tui.title import Alerts, Title

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.message import Message

    from ds4d_tui.feed import View
    from ds4d_tui.pane import Lines
    from ds4d_tui.tape import Replay

WAIT_S = 10.0  # for the first whole picture
WIDTH_MIN = 40
ASCII = str.maketrans("━─█▒░●■□·✖▲▼◆◌→–…×▁▂▃▄▅▆▇", "=-#:.*#o.x^v*o>-.x_..::||")


class _Enough(Exception):
    """The feed has a whole picture."""


def main(source: Client | Replay, panes: Sequence[type[Lines]]) -> int:
    """Print what `source` and `panes` show now; returns the exit code."""
    if sys.stdout is None:  # the caller has closed it
        return _fail("there is no stdout to print to")
    if isinstance(source, Client):
        try:
            asyncio.run(_first(source))
        except Broken as error:
            return _fail(str(error), error.exit_code)
        except TimeoutError:
            return _fail(f"the daemon sent no picture within {WAIT_S:g} s")
    else:
        source.catch_up()
    width = max(shutil.get_terminal_size((120, 0)).columns, WIDTH_MIN)
    told = picture(source.feed.view(), source.clock(), width, source.label(), panes)
    encoding = sys.stdout.encoding or "ascii"
    if not draws_lines(encoding):
        told = told.translate(ASCII).encode("ascii", "replace").decode("ascii")
    try:
        sys.stdout.write(told)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes
        if isinstance(error, BrokenPipeError):  # `ds4top --once | head`
            return OK
        return _fail(f"the picture cannot be printed: {error.strerror}")
    return OK


def _fail(why: str, exit_code: int = FAILED) -> int:
    sys.stderr.write(f"ds4top: {why}\n")
    return exit_code


def draws_lines(encoding: str) -> bool:
    """Whether it has the characters of bars and graphs."""
    try:
        "━█▁".encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


async def _first(client: Client) -> None:
    def tell(message: Message) -> None:
        if client.feed.view().status is not None:
            raise _Enough

    try:
        async with asyncio.timeout(WAIT_S):
            await client.attend(tell)
    except _Enough:
        return


def picture(view: View, now: float, width: int, source: str, panes: Sequence[type[Lines]]) -> str:
    """The panes one below the other, without what has been; the sessions, all of them, last."""
    view = replace(view, prefill=(), decode=(), trends={})
    title = Title()
    title.source = source
    layout = columns.layout(width - 1)
    sessions = columns.ordered(view.sessions, columns.BY_STATE)
    lines = [
        *title.draw(view, now, width, 0),
        *Alerts().draw(view, now, width, 0),
        *(line for pane in panes for line in pane().draw(view, now, width, 0)),
        columns.header(layout, columns.BY_STATE),
        *(columns.row(session, view, layout) for session in sessions),
    ]
    if hidden := view.n_sessions - len(sessions):
        lines.append(text(f" and {hidden} more"))
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)
