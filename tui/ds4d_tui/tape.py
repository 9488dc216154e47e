"""A recording of what the daemon sent: written while ds4top watches, shown again without a daemon.

    {"t":1764500000.1,"ds4top":1,"hz":2.0}             the first line
    {"t":1764500000.2,"line":{"jsonrpc":"2.0",…}}      a line as it came, t in seconds since 1970
    {"t":1764500060.0,"lost":"the daemon closed …"}    the connection broke

Owns that format, and the clock of a replay. Knows neither sockets nor widgets.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import UNSET, UnsetType

from ds4d import wire
from ds4d_tui.client import CallError
from ds4d_tui.draw import span
from ds4d_tui.feed import Feed, Garbled
from ds4d_tui.messages import Frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TextIO

    from textual.message import Message

    from ds4d_tui.client import R

FORMAT: Final = 1
END: Final = float("inf")
READ_ONLY = "this is a recording: there is no daemon to ask"


class TapeError(Exception):
    """A recording that cannot be written or read: one sentence."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file."""

    t: float
    ds4top: int | None = None
    hz: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # how often updates were asked for
    line: msgspec.Raw | UnsetType = UNSET
    text: str | None = None  # a line that was not even JSON
    lost: str | None = None


class Tape:
    """Writes a recording. Each line is on its way to the disk when a call returns; the calls block,
    and raise `OSError`."""

    def __init__(self, path: Path, hz: float) -> None:
        """Begins a new file. Raises `TapeError`."""
        try:
            self._file: TextIO = path.open("x", encoding="utf-8")
            self._write(Entry(t=time.time(), ds4top=FORMAT, hz=hz))
        except FileExistsError:
            raise TapeError(f"{path} exists already; choose another name") from None
        except OSError as error:
            raise TapeError(f"cannot write {path}: {error.strerror}") from error

    def line(self, raw: bytes) -> None:
        try:
            msgspec.json.decode(raw)
        except msgspec.MsgspecError:
            self._write(Entry(t=time.time(), text=raw.decode("utf-8", "replace")))
        else:
            self._write(Entry(t=time.time(), line=msgspec.Raw(raw.strip())))

    def lost(self, why: str) -> None:
        self._write(Entry(t=time.time(), lost=why))

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry).decode("utf-8") + "\n")
        self._file.flush()


def read(path: Path) -> list[Entry]:
    """The whole recording, times from 0. Raises `TapeError`."""
    entries: list[Entry] = []
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break  # its writer was killed in the middle
                entries.append(_entry(path, number, raw))
    except OSError as error:
        raise TapeError(f"cannot read {path}: {error.strerror}") from error
    if not entries:
        raise TapeError(f"{path} is not a recording of ds4top: it is empty")
    start = entries[0].t
    times = itertools.accumulate((entry.t - start for entry in entries), max)  # clocks can jump
    return [msgspec.structs.replace(e, t=t) for e, t in zip(entries, times, strict=True)]


def _entry(path: Path, number: int, raw: bytes) -> Entry:
    try:
        entry = msgspec.json.decode(raw, type=Entry)
    except msgspec.MsgspecError as error:
        raise TapeError(
            f"{path}:{number} is not a line of a recording of ds4top: {error}"
        ) from None
    if number == 1 and entry.ds4top is None:
        raise TapeError(f"{path} is not a recording of ds4top: --record makes one")
    if number == 1 and entry.ds4top != FORMAT:
        raise TapeError(
            f"{path} is a recording of format {entry.ds4top}; this ds4top reads {FORMAT}"
        )
    return entry


class Replay:
    """Plays a recording; it is a `Source`. `speed` 2 is twice as fast; what lies before `start_s`
    is taken in at once (`END`: all of it). Its clock stands still while it is held, and at the end.
    """

    def __init__(self, path: Path, *, speed: float = 1.0, start_s: float = 0.0) -> None:
        """Raises `TapeError`."""
        self._entries = deque(read(path))
        self.length_s = self._entries[-1].t
        self.feed = Feed(self._entries[0].hz, place=str(path), read_only=READ_ONLY)
        self._speed = speed
        self._base_s = min(start_s, self.length_s)  # of the recording, when the clock last began
        self._began: float | None = None  # on our clock; None: it stands still
        self._going = asyncio.Event()
        self._going.set()

    def clock(self) -> float:
        if self._began is None:
            return self._base_s
        return min(self._base_s + (time.monotonic() - self._began) * self._speed, self.length_s)

    def label(self) -> str:
        speed = "" if self._speed == 1 else f" ×{self._speed:g}"
        return f"replay {span(self.clock())} of {span(self.length_s)}{speed}"

    def hold(self, on: bool) -> None:
        self._base_s = self.clock()
        self._began = None if on else time.monotonic()
        if on:
            self._going.clear()
        else:
            self._going.set()

    def catch_up(self) -> None:
        """Take in all that lies before now."""
        while self._entries and self._entries[0].t <= self.clock():
            self._play(self._entries.popleft())

    async def run(self, tell: Callable[[Message], object]) -> None:
        self.hold(False)
        while True:
            self.catch_up()
            tell(Frame())
            if not self._entries:
                return
            await self._going.wait()
            await asyncio.sleep(max(self._entries[0].t - self.clock(), 0.0) / self._speed)

    async def call(self, params: wire.Params[R]) -> R:
        raise CallError(READ_ONLY, wire.WRONG_STATE)

    def _play(self, entry: Entry) -> None:
        if entry.lost is not None:
            self.feed.lost(entry.lost)
        elif isinstance(entry.line, msgspec.Raw):
            try:
                self.feed.line(bytes(entry.line), entry.t)
            except Garbled as error:
                self.feed.lost(str(error))
        elif entry.text is not None:
            self.feed.lost("a line that is not JSON came")
