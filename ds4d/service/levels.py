"""Log levels that an operator sets by a command: for good, or for a while.

Owns when the level before comes back. `log.level` of the settings is the level of all of `ds4d`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from ds4d import events, wire
from ds4d.errors import Declined

if TYPE_CHECKING:
    from ds4d.service.settings import Settings

KEY: Final = "log.level"
_ALL: Final = "ds4d"  # the logger that has it


@dataclass(frozen=True, slots=True)
class _Before:
    level: str
    until: float  # when it comes back, on the loop's clock


class LogLevels:
    """`run` it. `set` and `obey` are called on the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._before: dict[str, _Before] = {}  # by logger
        self._changed = anyio.Event()

    def set(self, logger: str, level: str, ttl_s: float | None) -> str:
        """Returns the level until now. Raises Declined."""
        try:
            previous = self._put(logger, level)
        except ValueError as error:
            raise Declined(str(error), wire.BAD_PARAMS) from None
        before = self._before.pop(logger, None)
        if ttl_s is not None:
            # Two in a row: the level before the first one comes back.
            level = before.level if before else previous
            self._before[logger] = _Before(level, anyio.current_time() + ttl_s)
        self._changed.set()
        return previous

    def obey(self, level: str) -> None:
        """`log.level` of the settings is another now: it ends what was set over it."""
        self._before.pop(_ALL, None)
        events.set_level(_ALL, level)

    async def run(self) -> None:
        """Bring levels back when their time has come, until cancelled."""
        while True:
            self._changed = anyio.Event()
            now = anyio.current_time()
            for logger, before in list(self._before.items()):
                if before.until <= now:
                    del self._before[logger]
                    self._put(logger, before.level)
            due = min((before.until for before in self._before.values()), default=math.inf)
            with anyio.move_on_after(due - now):
                await self._changed.wait()

    def _put(self, logger: str, level: str) -> str:
        previous = events.set_level(logger, level)
        if logger == _ALL:
            self._settings.overrule(KEY, level, "ds4ctl log level")
        return previous
