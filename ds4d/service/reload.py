"""How other settings take the place of those that hold: all or nothing.

`prepare` reads, compares and readies, which may fail and take its time; `commit` neither waits nor
fails. Knows which part obeys which key, and not who asked or what is said about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from anyio import to_thread

from ds4d import config, wire
from ds4d.errors import ConfigError, Declined
from ds4d.service import levels
from ds4d.service.settings import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from ds4d.api.chat import Served
    from ds4d.api.server import Server
    from ds4d.config import Changed, Config, Loaded
    from ds4d.sched.runner import Runner
    from ds4d.service.levels import LogLevels
    from ds4d.service.settings import Settings
    from ds4d.waking import Wakes


@dataclass(frozen=True, slots=True)
class Prepared:
    """A reload that can no longer fail."""

    loaded: Loaded
    served: Served
    apply: Callable[[], None]  # of the HTTP server
    now: list[Changed]
    later: list[Changed]  # wait for a restart

    @property
    def summary(self) -> str:
        if not self.now and not self.later:
            return "nothing has changed"
        later = ", ".join(c.key for c in self.later)
        text = f"{len(self.now)} applied: {', '.join(c.key for c in self.now)}" if self.now else ""
        wait = "waits" if len(self.later) == 1 else "wait"
        waits = f"{later} {wait} for a restart" if later else ""
        return "; ".join(part for part in (text, waits) if part)

    def report(self, *, dry_run: bool) -> wire.Reloaded:
        return wire.Reloaded(
            dry_run=dry_run,
            applied=[_change(c, c.when) for c in self.now],
            restart_required=[_change(c, "restart") for c in self.later],
        )


class Reloader:
    """Call it on the event loop, one reload at a time and once there is a model."""

    def __init__(
        self,
        settings: Settings,
        runner: Runner,
        server: Server,
        waking: Wakes,
        log_levels: LogLevels,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._server = server
        self._waking = waking
        self._levels = log_levels

    async def check(self, file: str | None) -> wire.Checked:
        """What is wrong with the sources as they are now."""
        try:
            await self._read(file)
        except ConfigError as error:
            return wire.Checked(problems=_problems(error))
        return wire.Checked(problems=[])

    async def prepare(self, file: str | None, *, allow_partial: bool) -> Prepared:
        """Read all sources anew. Changes nothing. Raises ConfigError, and Declined when something
        needs a restart and the rest may not go without it."""
        loaded = await self._read(file)
        changed = config.diff(self._settings.config, loaded.config)
        now = [c for c in changed if c.when != "restart" and not self._beyond(c, loaded.config)]
        later = [c for c in changed if c not in now]
        if later and not allow_partial:
            names = ", ".join(f"{c.key} ({c.old} to {c.new})" for c in later)
            need = "needs" if len(later) == 1 else "need"
            raise Declined(
                f"nothing was applied: {names} {need} a restart"
                + (f"; --allow-partial applies the other {len(now)}" if now else ""),
                wire.CONFIG_INVALID,
            )
        adopted = config.adopt(self._settings.loaded, loaded, [c.key for c in later])
        served, apply = await to_thread.run_sync(self._ready_door, adopted.config)
        return Prepared(adopted, served, apply, now, later)

    def commit(self, prepared: Prepared) -> None:
        """Neither waits nor fails, as long as the engine has not failed."""
        runner, now = self._runner, prepared.loaded.config
        changed = self._settings.adopt(prepared.loaded)
        prepared.apply()
        runner.rules = rules(now)
        runner.engine_stall_s = now.runtime.engine_stall_s
        if runner.capacity is not None:
            if "lanes.max" in changed:  # else `ds4ctl lanes set` still holds
                runner.set_lanes(min(now.lanes.max, runner.capacity.lanes))
            if "prefill.chunk" in changed:
                runner.set_chunk(now.prefill.chunk)
        if levels.KEY in changed:
            self._levels.obey(now.log.level)

    async def _read(self, file: str | None) -> Loaded:
        again = self._settings.loaded.again
        return await to_thread.run_sync(again, None if file is None else Path(file))

    def _ready_door(self, new: Config) -> tuple[Served, Callable[[], None]]:
        """In a worker thread: key files and prompt texts are read anew."""
        served = self._waking.woken.text_side(new)
        return served, self._server.prepare(new.api, served)

    def _beyond(self, changed: Changed, new: Config) -> bool:
        """More than the start asked for: that was allocated, as far as there was memory for it."""
        started = self._settings.started
        match changed.key:
            case "lanes.max":
                return new.lanes.max > started.lanes.max
            case "prefill.chunk":
                return new.prefill.chunk > started.prefill.chunk
        return False


def _change(changed: Changed, when: Literal["now", "next request", "restart"]) -> wire.Change:
    return wire.Change(key=changed.key, old=changed.old, new=changed.new, when=when)


def _problems(error: ConfigError) -> list[wire.Problem]:
    if not error.problems:
        return [wire.Problem(where="", key="", message=str(error))]
    return [wire.Problem(where=w, key=k, message=m) for w, k, m in error.problems]
