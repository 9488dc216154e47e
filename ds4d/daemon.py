"""The daemon, put together: build, open the doors, wake the engine, drain, stop.

The only composition root. Knows every part and no algorithm.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import anyio

from ds4d.api.server import Server
from ds4d.control.server import Control
from ds4d.errors import ConfigError, Declined, TemporaryError, cause
from ds4d.events import emit
from ds4d.notify import Notifier
from ds4d.sched.runner import Runner
from ds4d.service import Service, rules
from ds4d.waking import Waking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4d.config import Loaded
    from ds4d.waking import Wakes

log = logging.getLogger(__name__)

_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main(loaded: Loaded) -> int:
    """Run until a signal ends it; the exit code. Raises what `cli` turns into a sentence."""
    config = loaded.config
    waking = Waking(config)
    with _sole_instance(config.paths.state):
        _prefer_us_as_victim(config.runtime.oom_score_adj)
        uvloop = importlib.util.find_spec("uvloop") is not None
        try:
            anyio.run(serve, loaded, waking, backend_options={"use_uvloop": uvloop})
        except Exception as error:
            Notifier(config.paths.notify).send(f"STATUS=failed: {cause(error)}")
            raise
    if waking.under_way:
        _leave(0)  # its thread is deep in a compiler, which a finalising interpreter would upset
    return 0


async def serve(loaded: Loaded, waking: Wakes) -> None:
    """Everything between the lock and the exit code."""
    config = loaded.config
    stop = _Stop()
    notify = Notifier(config.paths.notify)
    runner = Runner(waking.build, rules=rules(config), engine_stall_s=config.runtime.engine_stall_s)
    server = Server(
        config.api,
        runner,
        passed=config.paths.passed.get("api", ()),
        metrics_listen=config.metrics.listen,
        exposition=lambda: service.exposition(),
    )
    service = Service(
        loaded,
        runner,
        server,
        waking,
        notify,
        stop=stop.ask,
        connections=lambda: control.connections(),
    )
    control = Control(config, service)
    _check_passed(loaded)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop.listen, service)
        with stop.loading:
            await tasks.start(control.run)  # doors first: they answer "loading, 40 %" meanwhile
            await tasks.start(server.run)
            tasks.start_soon(service.run)
            await tasks.start(runner.run)
            server.serve_model(waking.woken.served)
            service.ready()
        await stop.asked.wait()
        service.stopping()
        with stop.drain:  # left early by the second signal, and nobody stays without an end
            # The running settings, not those of the start: a reload may have changed them.
            await runner.drain(service.stop_drain_s)  # the door answers 503 until the end
        tasks.cancel_scope.cancel()


class _Stop:
    """SIGTERM or SIGINT: the first asks for a drain, the second cuts it short, the third exits.
    SIGHUP asks for a reload. `ask` is the first, or the first two, without a signal; to ask again
    for what was asked for changes nothing."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.loading = anyio.CancelScope()  # given up by the first: there is nothing to drain yet
        self.drain = anyio.CancelScope()  # by the second
        self._n = 0

    def ask(self, fast: bool) -> None:
        self._heard(2 if fast else 1)

    def _heard(self, n: int) -> None:
        self._n = max(self._n, n)
        self.asked.set()
        self.loading.cancel()
        if self._n >= 2:
            self.drain.cancel()

    async def listen(self, service: Service) -> None:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        async with anyio.create_task_group() as tasks:
            with anyio.open_signal_receiver(*numbers) as signals:
                async for number in signals:
                    if number == signal.SIGHUP:
                        tasks.start_soon(_reload, service)
                        continue
                    emit(log, "daemon.signal", signal=number.name, count=self._n + 1)
                    if self._n >= 2:
                        _leave(128 + number)
                    self._heard(self._n + 1)


async def _reload(service: Service) -> None:
    """For SIGHUP, which nobody waits for: the service tells the log and systemd how it went."""
    with suppress(ConfigError, Declined):
        await service.reload(dry_run=False, allow_partial=False, file=None)


# What the process must have or be


def _check_passed(loaded: Loaded) -> None:
    """Sockets from systemd whose names nobody here knows would never be answered."""
    passed, known = loaded.config.paths.passed, {"api", "control", "monitor"}
    if strange := sorted(passed.keys() - known):
        raise ConfigError(
            f"systemd passed sockets named {', '.join(strange)}; expected FileDescriptorName= one "
            f"of {', '.join(sorted(known))}"
        )
    if "api" in passed and loaded.sources["api.listen"] != "built-in":
        emit(
            log,
            "config.ignored",
            level=logging.WARNING,
            key="api.listen",
            where=loaded.sources["api.listen"],
            reason="systemd has opened the door: ListenStream= of ds4d-api.socket says where",
        )


def _prefer_us_as_victim(score: int) -> None:
    """When memory runs out the kernel should end this and not the operator's shell."""
    try:
        if int(_OOM_SCORE.read_text()) < score:
            _OOM_SCORE.write_text(f"{score}\n")
    except (OSError, ValueError) as error:
        emit(log, "daemon.oom_score", level=logging.DEBUG, reason=str(error))


@contextmanager
def _sole_instance(state: Path) -> Iterator[None]:
    """Hold the lock of a state directory. Raises TemporaryError when another daemon does."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state / "ds4d.lock").open("a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"{state}: the state directory cannot be written: {error.strerror}; "
            "let XDG_STATE_HOME (under systemd: StateDirectory=) name one that can"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise TemporaryError(
                f"another ds4d (process {holder}) runs with {state}: stop that one, or give this "
                "one a state directory of its own (XDG_STATE_HOME)"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{lock.name}: cannot be locked: {error.strerror}; let XDG_STATE_HOME (under "
                "systemd: StateDirectory=) name a directory whose files can"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield  # the kernel drops the lock with the file, however we end


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)
