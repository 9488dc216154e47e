"""The daemon, put together: build, open the doors, wake the engine, drain, stop.

The only composition root. Knows every part and no algorithm.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import anyio

from ds4d import __version__
from ds4d.api import models
from ds4d.api.chat import Served
from ds4d.api.models import ModelInfo
from ds4d.api.server import Server
from ds4d.errors import ConfigError, TemporaryError
from ds4d.events import emit
from ds4d.model import embedded, gguf
from ds4d.model.quants import Quant
from ds4d.notify import Notifier
from ds4d.prompt import constants
from ds4d.prompt.tokenizer import Tokenizer
from ds4d.sched import host
from ds4d.sched.memory import MIB, Wish, plan_capacity
from ds4d.sched.runner import Runner
from ds4d.sched.scheduler import Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4d.config import Config
    from ds4d.engine import Engine, Need
    from ds4d.model.geometry import Geometry
    from ds4d.model.gguf import ModelFile
    from ds4d.prompt.constants import Constants, Profile
    from ds4d.sched.memory import Capacity, NeedFor
    from ds4d.sched.runner import Report

log = logging.getLogger(__name__)

IDLE_CONTEXTS_A_LANE = 2  # room for sessions between their turns, where memory allows
FRONTIERS_A_LANE = 12
MAX_EFFORT_CTX = 393_216  # below it the release's card advises against effort `max`
TELL_S = 2.0  # between two reports while loading


def main(config: Config) -> int:
    """Run until a signal ends it; the exit code. Raises what `cli` turns into a sentence."""
    waking = Waking(config)
    with _sole_instance(config.paths.state):
        uvloop = importlib.util.find_spec("uvloop") is not None
        anyio.run(serve, config, waking, backend_options={"use_uvloop": uvloop})
    if waking.under_way:
        _leave(0)  # its thread is deep in a compiler, which a finalising interpreter would upset
    return 0


async def serve(config: Config, waking: Wakes) -> None:
    """Everything between the lock and the exit code."""
    runner = Runner(
        waking.build,
        rules=Rules(queue_total=config.sched.queue_total, send_stall_s=config.api.send_stall_s),
    )
    server = Server(config.api, runner)
    notify = Notifier(config.paths.notify)
    async with anyio.create_task_group() as tasks:
        stop = _Stop(tasks.cancel_scope)
        tasks.start_soon(stop.listen)
        await tasks.start(server.run)  # doors first: they answer "loading, 40 %" meanwhile
        tasks.start_soon(_tell_loading, runner, notify)
        await tasks.start(runner.run)
        server.serve_model(waking.served)
        notify.send("READY=1", "STATUS=serving")
        with anyio.CancelScope() as stop.scope:
            stop.drains = True
            await stop.asked.wait()
            emit(log, "daemon.state", state="draining")
            notify.send("STOPPING=1", "STATUS=draining")
            await runner.drain(config.runtime.stop_drain_s)  # the door answers 503 until the end
        emit(log, "daemon.state", state="stopping")
        tasks.cancel_scope.cancel()


async def _tell_loading(runner: Runner, notify: Notifier) -> None:
    """Say how far loading is, in the log and to systemd, which must not lose patience."""
    while (loading := runner.loading) is not None:
        percent = round(100 * loading.fraction)
        emit(log, "daemon.loading", what=loading.what, percent=percent)
        patience_us = round(10e6 * TELL_S)
        notify.send(
            f"STATUS=loading {loading.what}, {percent} %", f"EXTEND_TIMEOUT_USEC={patience_us}"
        )
        await anyio.sleep(TELL_S)


class _Stop:
    """SIGTERM or SIGINT: the first asks for a drain, the second cuts it short, the third exits."""

    def __init__(self, loading: anyio.CancelScope) -> None:
        self.asked = anyio.Event()
        self.scope = loading  # what a signal cuts short: loading, later the drain
        self.drains = False  # whether there is something to drain, which the first signal spares

    async def listen(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            n = 0
            async for number in signals:
                n += 1
                emit(log, "daemon.signal", signal=signal.Signals(number).name, count=n)
                self.asked.set()
                if n >= 3:
                    _leave(128 + number)
                if n == 2 or not self.drains:
                    self.scope.cancel()


class Wakes(Protocol):
    """What makes an engine, in its own thread, and the text side of its model with it."""

    @property
    def served(self) -> Served: ...

    def build(self, report: Report) -> tuple[Engine, Capacity]: ...


class Waking:
    """What happens in the engine thread before there is an engine: file, tokenizer, kernels."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._served: Served | None = None
        self.under_way = False

    @property
    def served(self) -> Served:
        """The text side of the model. Raises RuntimeError before `build` has returned."""
        if self._served is None:
            raise RuntimeError("there is no model yet")
        return self._served

    def build(self, report: Report) -> tuple[Engine, Capacity]:
        """Open the model, promise memory, compile what the file needs. Raises ModelFileError,
        ConfigError, MemoryRefusedError."""
        self.under_way = True
        try:
            return self._build(report)
        finally:
            self.under_way = False

    def _build(self, report: Report) -> tuple[Engine, Capacity]:
        from ds4d.cpu import engine as cpu  # takes a second: the doors are open by now

        config = self._config
        path = config.model.path or embedded.path()
        report("model file", 0.0)
        with gguf.open_model(path) as model:
            geometry = model.geometry
            context = config.model.context or geometry.context
            if context > geometry.context:
                raise ConfigError(
                    f"model.context: {path.name} was made for {geometry.context} tokens "
                    f"(got {context}, expected at most that)"
                )
            report("tokenizer", 0.01)
            v = model.vocabulary()
            tokenizer = Tokenizer(v.tokens, v.types.tolist(), v.merges)
            tensors = {name: model.tensor(name) for name in model.tensors}
            texts = _constants(config, path, _profile(config, f"{path.name} {geometry.name}"))
            threads = config.runtime.engine_threads or cpu.default_threads(host.processors())

            def need(*, lanes: int, pages: int, frontiers: int, chunk: int) -> Need:
                return cpu.need(
                    geometry,
                    tensors,
                    lanes=lanes,
                    pages=pages,
                    frontiers=frontiers,
                    threads=threads,
                )

            capacity = self._promise(need, geometry, context)

            def progress(what: str, share: float) -> None:
                if what == "weights":
                    report(what, 0.05 + 0.15 * share)
                else:
                    report(f"kernel {what}" if share < 1 else what, 0.2 + 0.75 * share)

            engine = cpu.CpuEngine(
                geometry,
                tensors,
                lanes=capacity.lanes,
                pages=capacity.pages,
                frontiers=capacity.frontiers,
                threads=threads,
                cache_dir=_writable(config.paths.cache),
                progress=progress,
            )
            self._served = _text_side(config, model, tokenizer, texts, capacity, engine)
        return engine, capacity

    def _promise(self, need: NeedFor, geometry: Geometry, context: int) -> Capacity:
        """Lanes, pages and frontiers that fit into the memory there is."""
        config = self._config
        wish = Wish(
            context=context,
            page_tokens=geometry.page_tokens,
            lanes=config.lanes.max,
            chunk=config.prefill.chunk,
            idle_contexts=IDLE_CONTEXTS_A_LANE * config.lanes.max,
            frontiers=FRONTIERS_A_LANE * config.lanes.max,
        )
        capacity, parts = plan_capacity(need, wish, self._budget_bytes())
        emit(
            log,
            "admission.decision",
            action="start",
            lanes=capacity.lanes,
            pages=capacity.pages,
            frontiers=capacity.frontiers,
            total_mib=parts.total // MIB,
            **{f"{name}_mib": n_bytes // MIB for name, n_bytes in parts.parts.items()},
        )
        return capacity

    def _budget_bytes(self) -> int:
        memory = self._config.memory
        total = memory.simulate_total_gib
        simulated = None if total is None else int(total * (1 << 30))
        return max(host.sample(simulated).free - memory.reserve_mib * MIB, 0)


def _text_side(
    config: Config,
    model: ModelFile,
    tokenizer: Tokenizer,
    texts: Constants,
    capacity: Capacity,
    engine: Engine,
) -> Served:
    """What the API must know of the model: its texts, its names, what it recommends."""
    g = model.geometry
    two_bit = {Quant.IQ2_XXS, Quant.Q2_K}
    facts = (engine.row_fingerprint, texts.name, texts.profile, __version__)
    name = config.model.name or g.name or Path(model.path).stem
    info = ModelInfo(
        name=name,
        root=f"deepseek-ai/{g.name}" if g.name.startswith("DeepSeek") else f"ds4d/{name}",
        n_ctx=capacity.context,
        n_vocab=tokenizer.n_vocab,
        defaults=models.defaults(
            config.api,
            texts.profile,
            two_bit_experts=any(
                t.quant in two_bit for t in model.tensors.values() if "_exps" in t.name
            ),
            temperature=model.defaults.temperature,
            thinking=model.defaults.thinking,
        ),
        fingerprint="fp_" + hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest(),
        max_effort_ctx=MAX_EFFORT_CTX if texts.name == "release" else 0,
    )
    return Served(info=info, tokenizer=tokenizer, constants=texts)


def _profile(config: Config, names: str) -> Profile:
    """The two releases have the same configuration and tokenizer: only a name tells them apart."""
    wanted = config.api.prompt_profile
    if wanted != "auto":
        return wanted
    return "0731" if "0731" in names else "preview"


def _constants(config: Config, model: Path, profile: Profile) -> Constants:
    """The release's prompt texts from beside the model; without them the embedded model's own,
    which a release was not trained with."""
    if config.model.path is None:
        return constants.load()
    path = config.model.constants or model.with_name("prompt.json")
    if config.model.constants is None and not path.is_file():
        emit(
            log,
            "model.constants",
            level=logging.WARNING,
            file=str(path),
            reason="missing: prompts carry ds4-tiny's texts instead of the release's",
        )
        return constants.load()
    return constants.load(path, profile)


# Directories


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
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise TemporaryError(
                f"another ds4d (process {holder}) runs with {state}: stop that one, or give this "
                "one a state directory of its own (XDG_STATE_HOME)"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield  # the kernel drops the lock with the file, however we end


def _writable(cache: Path) -> Path | None:
    """The cache directory, or None when kernels have to be compiled anew at each start."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror
    else:
        if os.access(cache, os.W_OK | os.X_OK):
            return cache
        reason = "not writable"
    emit(
        log,
        "cache.off",
        level=logging.WARNING,
        directory=str(cache),
        reason=f"{reason}: kernels are compiled at each start; let XDG_CACHE_HOME name another",
    )
    return None


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)
