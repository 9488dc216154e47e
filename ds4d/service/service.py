"""The daemon's state and why it is that; drain, reload and stop; what systemd is told of it all.

Knows the runner and the HTTP server by their few verbs.
"""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from ds4d import __version__, events, metrics, wire
from ds4d.errors import ConfigError, Declined
from ds4d.events import emit
from ds4d.notify import Patience, watchdog
from ds4d.sched import host
from ds4d.sched.memory import MIB
from ds4d.service.levels import LogLevels
from ds4d.service.memory import MemoryWatch
from ds4d.service.reload import Reloader
from ds4d.service.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ds4d.api.server import Server
    from ds4d.config import Loaded
    from ds4d.control.asks import Report
    from ds4d.notify import Notifier
    from ds4d.sched.host import Sample
    from ds4d.sched.runner import Runner
    from ds4d.service.reload import Prepared
    from ds4d.waking import Wakes

log = logging.getLogger(__name__)

BEAT_S = 0.5  # between two looks at the loop's own lag and at the state
LAG_MAX_S = 5.0  # beyond it the loop hangs, and systemd hears nothing from us
PROGRESS_S = 1.0  # between two reports of a drain
LOADING_LOG_S = 2.0  # between two lines about loading
STOP_MARGIN_S = 60.0  # for what comes after the drain, before systemd kills


class Service:
    """`run` it in the root task group. Every method is called on the event loop."""

    def __init__(
        self,
        loaded: Loaded,
        runner: Runner,
        server: Server,
        waking: Wakes,
        notify: Notifier,
        *,
        stop: Callable[[bool], None],
        connections: Callable[[], Mapping[wire.Role, int]],
        memory: Callable[[int | None], Sample] = host.sample,
    ) -> None:
        """`stop(fast)` does what a signal does; `fast` what two of them do. `connections` counts
        those of the control socket; `memory` looks at that of the host."""
        self.boot = events.BOOT
        self.runner = runner
        self._settings = Settings(loaded)
        self._levels = LogLevels(self._settings)
        self._memory = MemoryWatch(self._settings, memory)
        self._reloader = Reloader(self._settings, runner, server, waking, self._levels)
        self._server = server
        self._waking = waking
        self._notify = notify
        self._stop = stop
        self._connections = connections
        self._began = time.monotonic()
        self._running = False
        self._stopping = False
        self._reloading = False
        self._reload_turn = anyio.Lock()  # a signal may come while somebody else reloads
        self._last_reload: wire.Reload | None = None
        self._model: wire.Model | None = None  # by its names of now
        self._deadlines: list[float] = []  # of the drains under way, on the loop's clock
        self._lag_s = 0.0
        self._told: tuple[wire.State, tuple[str, ...]] = "starting", ()  # to the log and systemd

    # Tasks

    async def run(self) -> None:
        """The service's own tasks, until cancelled."""
        self._running = True
        interval_us = self._settings.started.paths.watchdog_us
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._memory.run)
                tasks.start_soon(self._levels.run)
                tasks.start_soon(self._beat)
                tasks.start_soon(self._tell_loading)
                if interval_us:
                    tasks.start_soon(watchdog, self._notify, interval_us, self._ailment)
        finally:
            self._moved()  # a failure of the engine is what cancels us

    def ready(self) -> None:
        """The model is there and the doors serve it."""
        self._model = self._waking.woken.model
        self._moved()
        self._notify.send("READY=1", f"STATUS={self._status_line()}")

    def stopping(self) -> None:
        """The end has begun; what runs may still finish."""
        self._stopping = True
        self._deadlines.append(anyio.current_time() + self.stop_drain_s)
        patience_us = round(1e6 * (self.stop_drain_s + STOP_MARGIN_S))
        if self._model is None:  # an end before this is a failed start, which systemd repeats
            self._notify.send("READY=1")
        self._notify.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={patience_us}")
        self._moved()

    async def _beat(self) -> None:
        """Measure how late the loop wakes; notice what changes the state by itself."""
        while True:
            due = anyio.current_time() + BEAT_S
            await anyio.sleep(BEAT_S)
            self._lag_s = max(anyio.current_time() - due, 0.0)
            metrics.LOOP_LAG.observe(self._lag_s)
            self._moved()

    async def _tell_loading(self) -> None:
        """Say how far loading is, in the log and to systemd, which must not lose patience as long
        as it moves."""
        patience = Patience()
        while (loading := self.runner.loading) is not None:
            percent = math.floor(100 * loading.fraction)
            emit(log, "daemon.loading", what=loading.what, percent=percent)
            more = patience.ask(loading.what, loading.fraction, anyio.current_time())
            self._notify.send(f"STATUS=loading: {loading.what}, {percent} %", *more)
            await anyio.sleep(LOADING_LOG_S)

    def _ailment(self) -> str | None:
        """Why systemd should think that we hang; None: we don't. An engine that stands still is not
        among the reasons: the runner ends the daemon then."""
        if self._lag_s > LAG_MAX_S:
            return f"the event loop woke {self._lag_s:.1f} s late"
        return None

    # State

    def state(self) -> wire.State:
        if self.runner.state == "failed":
            return "failed"
        if self._stopping:
            return "stopping"
        if not self._running:
            return "starting"
        if self._model is None:
            return "loading"
        if self._reloading:
            return "reloading"
        if self.runner.state == "ready":
            return "degraded" if self._shortcomings() else "ready"
        return self.runner.state

    def uptime_s(self) -> float:
        return time.monotonic() - self._began

    def _moved(self) -> None:
        """Tell the log and systemd about a state that they have not heard of."""
        state = self.state()
        codes = tuple(reason.code for reason in self._shortcomings())
        if (state, codes) == self._told:
            return
        previous, self._told = self._told[0], (state, codes)
        emit(
            log,
            "daemon.state",
            level=logging.WARNING if codes or state == "failed" else logging.INFO,
            **{"from": previous, "to": state},
            reasons=",".join(codes) or None,
        )
        if state != "loading":
            self._notify.send(f"STATUS={self._status_line()}")

    def _status_line(self) -> str:
        """One line for `systemctl status`."""
        state = self.state()
        model = f", {self._model.name}" if self._model else ""
        texts = "; ".join(reason.text for reason in self._reasons(state))
        return f"{state}{model}{': ' if texts else ''}{texts}"

    def _shortcomings(self) -> list[wire.Reason]:
        """What makes a ready daemon a degraded one."""
        if self._model is None or self.runner.state == "failed":
            return []
        return [*self._waking.woken.reasons, *self._lane_reasons(), *self._memory.reasons()]

    def _lane_reasons(self) -> list[wire.Reason]:
        capacity, woken = self.runner.capacity, self._waking.woken
        wanted = self._settings.config.lanes.max
        if capacity is None or woken.next_lane_bytes is None or wanted <= capacity.lanes:
            return []
        text = (
            f"{capacity.lanes} of {wanted} lanes: one more needs "
            f"{woken.next_lane_bytes / MIB:.0f} MiB in all and {woken.budget_bytes / MIB:.0f} "
            "may be used"
        )
        remedy = "free memory, or lower model.context, then restart; or lower lanes.max"
        return [wire.Reason(code="fewer_lanes", text=text, remedy=remedy)]

    def _reasons(self, state: wire.State) -> list[wire.Reason]:
        match state:
            case "loading" | "starting":
                what, fraction = self.runner.loading or ("model", 0.0)
                text = f"{what}, {math.floor(100 * fraction)} % of all loading done"
                return [wire.Reason(code="loading", text=text)]
            case "draining":
                n_running, n_queued = self.runner.n_open()
                text = f"{n_running} running and {n_queued} queued may finish; new work gets 503"
                remedy = "`ds4ctl undrain` accepts work again"
                return [wire.Reason(code="draining", text=text, remedy=remedy)]
            case "drained":
                remedy = "`ds4ctl undrain` accepts work again, `ds4ctl shutdown` ends it"
                text = "nothing runs and new work gets 503"
                return [wire.Reason(code="drained", text=text, remedy=remedy)]
            case "stopping":
                n_running, n_queued = self.runner.n_open()
                text = f"it is shutting down; {n_running} running and {n_queued} queued may finish"
                return [wire.Reason(code="stopping", text=text)]
            case "failed":
                remedy = "see the log; the service manager starts it again"
                return [wire.Reason(code="failed", text="the engine has failed", remedy=remedy)]
            case _:
                return self._shortcomings()

    # Views

    def n_vocab(self) -> int:
        return self.runner.n_vocab

    def status(self) -> wire.Status:
        state, settings = self.state(), self._settings
        loading, snapshot = self.runner.loading, self.runner.snapshot(sessions_max=0)
        need = self.runner.engine_need
        return wire.Status(
            state=state,
            reasons=self._reasons(state),
            version=__version__,
            pid=os.getpid(),
            boot=self.boot,
            uptime_s=self.uptime_s(),
            profile=settings.config.profile,
            config_files=[str(path) for path in settings.loaded.files],
            config_hash=settings.hash,
            urls=self._server.urls,
            loading=None
            if loading is None
            else wire.Loading(
                what=loading.what, fraction=loading.fraction, since_s=self.uptime_s()
            ),
            drain=self._drain_view(),
            reload=self._last_reload,
            model=self._model,
            lanes=snapshot.lanes if snapshot else None,
            queue=snapshot.queue if snapshot else None,
            pages=snapshot.pages if snapshot else None,
            rates=snapshot.rates if snapshot else None,
            totals=snapshot.totals if snapshot else None,
            memory=None if need is None else self._memory.terms(self._waking.woken, need),
            heartbeat_age_s=self.runner.heartbeat_age_s(),
            loop_lag_s=self._lag_s,
        )

    def sessions(self) -> wire.Sessions:
        snapshot = self.runner.snapshot()
        if snapshot is None:
            return wire.Sessions(sessions=[], n_sessions=0)
        return wire.Sessions(sessions=list(snapshot.sessions), n_sessions=snapshot.n_sessions)

    def _drain_view(self) -> wire.Drain | None:
        if not self._deadlines:
            return None
        n_running, n_queued = self.runner.n_open()
        left_s = max(min(self._deadlines) - anyio.current_time(), 0.0)
        return wire.Drain(n_running=n_running, n_queued=n_queued, left_s=left_s)

    async def exposition(self) -> bytes:
        """What Prometheus reads."""
        expose = partial(metrics.exposition, connections=self._connections())
        return await to_thread.run_sync(expose, self.status(), self.sessions().sessions)

    # Sessions and lanes

    def close_session(self, id: int, *, force: bool) -> None:
        self.runner.close_session(id, force=force)

    def cancel(self, request: str) -> None:
        self.runner.cancel(request)

    def set_lanes(self, n_max: int) -> None:
        """Until a reload changes `lanes.max`, or the end."""
        self.runner.set_lanes(n_max)
        self._settings.overrule("lanes.max", n_max, "ds4ctl lanes set")

    # Drain and stop

    @property
    def stop_drain_s(self) -> float:
        return self._settings.config.runtime.stop_drain_s

    async def drain(self, within_s: float | None, *, stop: bool, report: Report) -> str:
        """See `control.asks`. A second drain joins the first; the earlier deadline ends both, and
        only the last one that is cancelled takes back what they have in common."""
        if self._stopping or self.runner.state in ("loading", "failed"):
            raise Declined(f"the daemon is {self.state()}: nothing to drain", wire.WRONG_STATE)
        within_s = self._settings.config.runtime.drain_s if within_s is None else within_s
        deadline = anyio.current_time() + within_s
        n_open = sum(self.runner.n_open())
        self._deadlines.append(deadline)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._report_drain, report)
            try:
                how = await self.runner.drain(within_s, hard=False)
            except anyio.get_cancelled_exc_class():
                others = len(self._deadlines) > 1 or self._stopping
                if not others and self.runner.state in ("draining", "drained"):
                    self.runner.undrain()
                raise
            finally:
                tasks.cancel_scope.cancel()
                self._deadlines.remove(deadline)
                self._moved()
        emit(log, "drain.done", how=how, requests=n_open)
        match how:
            case "undrained":
                raise Declined("taken back: the daemon accepts work again", wire.WRONG_STATE)
            case "failed":
                raise Declined("the engine has failed: what ran has ended with it", wire.INTERNAL)
            case "deadline":
                own = anyio.current_time() >= deadline
                whose = f"the deadline of {within_s:g} s" if own else "another drain's deadline"
                text = f"{whose} has passed: what still ran was ended"
                if not stop:
                    raise Declined(text, wire.DEADLINE)
            case "drained":
                text = f"drained: {n_open} requests have ended, none was cut"
        if stop:
            self.shutdown(fast=False)
            text = f"{text}; shutting down"
        return text

    async def _report_drain(self, report: Report) -> None:
        self._moved()
        told: tuple[int, int] | None = None
        while (view := self._drain_view()) is not None:
            n_open, left_s = (view.n_running, view.n_queued), view.left_s
            report(f"{n_open[0]} running, {n_open[1]} queued, {left_s:.0f} s left", None)
            if n_open != told:
                running, queued = told = n_open
                left = round(left_s, 1)
                emit(log, "drain.progress", running=running, queued=queued, left_s=left)
            await anyio.sleep(PROGRESS_S)

    def undrain(self) -> None:
        if self._stopping:
            raise Declined("the daemon is shutting down already", wire.WRONG_STATE)
        self.runner.undrain()
        self._moved()

    def shutdown(self, *, fast: bool) -> None:
        self._stop(fast)

    # Settings

    def config_text(self, *, defaults: bool) -> wire.ConfigText:
        return self._settings.text(defaults=defaults)

    async def check_config(self, file: str | None) -> wire.Checked:
        return await self._reloader.check(file)

    def set_log_level(self, logger: str, level: str, ttl_s: float | None) -> str:
        return self._levels.set(logger, level, ttl_s)

    async def reload(
        self, *, dry_run: bool, allow_partial: bool, file: str | None
    ) -> wire.Reloaded:
        """Read all sources anew and apply them: all or nothing, unless `allow_partial`.

        Raises:
            ConfigError: a value is wrong.  Declined: while loading or stopping, or something needs
                a restart and the rest was not allowed to go without it.
        """
        async with self._reload_turn:
            if (refusal := self._no_reload()) is not None:
                self._log_reload(False, str(refusal))
                raise refusal
            if dry_run:
                prepared = await self._reloader.prepare(file, allow_partial=True)
                return prepared.report(dry_run=True)
            return await self._reload(file, allow_partial=allow_partial)

    async def _reload(self, file: str | None, *, allow_partial: bool) -> wire.Reloaded:
        self._reloading = True
        self._moved()
        self._notify.reloading()
        ok, text = False, "given up: the daemon goes down"
        try:
            prepared = await self._prepare(file, allow_partial=allow_partial)
            self._reloader.commit(prepared)
            self._model = self._waking.woken.model_as(prepared.served)
            ok, text = True, prepared.summary
            return prepared.report(dry_run=False)
        except (ConfigError, Declined) as error:
            text = str(error)
            raise
        finally:
            self._reloading = False
            self._reloaded(ok, text)

    async def _prepare(self, file: str | None, *, allow_partial: bool) -> Prepared:
        """Nothing has changed when this raises, whatever it is."""
        try:
            prepared = await self._reloader.prepare(file, allow_partial=allow_partial)
        except (ConfigError, Declined):
            raise
        except Exception as error:
            log.debug("reload.error traceback", exc_info=error)
            raise Declined(f"nothing was applied: unexpected {error!r}", wire.INTERNAL) from error
        if (refusal := self._no_reload()) is not None:
            raise refusal  # a signal has come meanwhile, or the engine has failed
        return prepared

    def _no_reload(self) -> Declined | None:
        """Why it cannot be now."""
        if self._model is not None and not self._stopping and self.runner.state != "failed":
            return None
        return Declined(f"the daemon is {self.state()}: reload once it is ready", wire.WRONG_STATE)

    def _reloaded(self, ok: bool, text: str) -> None:
        self._last_reload = wire.Reload(at=time.time(), ok=ok, text=text)
        metrics.RELOADS.labels(result="ok" if ok else "refused").inc()
        self._log_reload(ok, text)
        self._moved()
        line = self._status_line() + ("" if ok else f"; reload refused: {text}")
        ready = () if self._stopping else ("READY=1",)  # which ends what `reloading` has begun
        self._notify.send(*ready, f"STATUS={line.splitlines()[0]}")

    def _log_reload(self, ok: bool, text: str) -> None:
        level = logging.INFO if ok else logging.WARNING
        emit(log, "reload.result", level=level, ok=ok, text=text, config=self._settings.hash)
