"""The control sockets for real, before a daemon that only writes down what it is asked."""

from __future__ import annotations

import json
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio

from ds4d import wire
from ds4d.config import Config, Control, Paths
from ds4d.control import server
from ds4d.control.limits import Limits
from ds4d.errors import Refused
from ds4d.sched.snapshot import Lanes, Pages, Queue, Rates, Session, Totals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from anyio.abc import TaskGroup

NOBODY: frozenset[int] = frozenset()  # as service users: then we are an admin, or a monitor


@dataclass
class FakeRunner:
    """What methods see of a runner."""

    n_ctx: int = 8192
    n_running: int = 0
    n_queued: int = 0

    def n_open(self) -> tuple[int, int]:
        return self.n_running, self.n_queued

    def submit(self, claim: Any) -> Any:
        raise Refused("the queue is full", status=429, code="queue_full", retry_after_s=1)


@dataclass
class FakeAsks:
    """Writes down each call; `errors` are raised by the call of that name."""

    boot: str = "0123456789ab"
    runner: Any = field(default_factory=FakeRunner)
    state_: wire.State = "ready"
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    errors: dict[str, Exception] = field(default_factory=dict)
    n_status: int = 0
    n_sessions: int = 20
    toml: str = "[api]\n"
    label: str = "chatcmpl-{:024x}"  # of a request
    drained: anyio.Event = field(default_factory=anyio.Event)
    reloads: anyio.Event = field(default_factory=anyio.Event)  # what a reload waits for
    how: str = "drained: none was cut"
    on_shutdown: Any = None

    def _called(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.errors:
            raise self.errors[name]

    def state(self) -> wire.State:
        return self.state_

    def uptime_s(self) -> float:
        return 12.5

    def n_vocab(self) -> int:
        return 512

    def status(self) -> wire.Status:
        self.n_status += 1
        if "status" in self.errors:
            raise self.errors["status"]
        return wire.Status(
            state=self.state_,
            version="1",
            pid=1,
            boot=self.boot,
            uptime_s=12.5,
            profile="cpu-tiny",
            config_files=["/etc/ds4d/ds4d.toml"],
            config_hash="abc",
            urls=["http://127.0.0.1:30007"],
            lanes=Lanes(n=4, n_max=4, n_busy=self.n_status % 5),
            queue=Queue(n=0, n_max=32, n_lane=0, n_memory=0, oldest_s=0.0, wait_s=0.0),
            pages=Pages(
                n=128, n_free=64, n_promised=10, tokens=256, frontiers=48, frontiers_free=40
            ),
            rates=Rates(prefill_tokens_per_s=812.5, decode_tokens_per_s=93.25),
            totals=Totals(requests=10, prompt=10_000, cached=8_000, generated=500),
            heartbeat_age_s=0.01,
        )

    def sessions(self) -> wire.Sessions:
        phases = ("decode", "prefill", "queued", "idle")
        some = [
            Session(
                id=None if i % 4 == 2 else i,
                request=self.label.format(i),
                phase=phases[i % 4],
                waits_for="lane" if i % 4 == 2 else None,
                lane=i % 4 if i % 4 < 2 else None,
                n_tokens=1000 + i,
                n_pages=4,
                n_prompt=900,
                n_cached=512,
                n_generated=100,
                n_answer_max=1000,
                age_s=1.5,
                remaining_s=0.25,
                tokens_per_s=31.5,
            )
            for i in range(min(self.n_sessions, 200))
        ]
        return wire.Sessions(sessions=some, n_sessions=self.n_sessions)

    def close_session(self, id: int, *, force: bool) -> None:
        self._called("close_session", id, force)

    def cancel(self, request: str) -> None:
        self._called("cancel", request)

    async def drain(self, within_s: float | None, *, stop: bool, report: Any) -> str:
        self._called("drain", within_s, stop)
        report("2 running", None)
        try:
            await self.drained.wait()
        except anyio.get_cancelled_exc_class():
            self.calls.append(("drain taken back",))
            raise
        if stop:
            self.shutdown(fast=False)
        return self.how

    def undrain(self) -> None:
        self._called("undrain")

    async def reload(
        self, *, dry_run: bool, allow_partial: bool, file: str | None
    ) -> wire.Reloaded:
        self._called("reload", dry_run, allow_partial, file)
        await self.reloads.wait()
        self.calls.append(("reloaded",))
        return wire.Reloaded(dry_run=dry_run, applied=[], restart_required=[])

    def config_text(self, *, defaults: bool) -> wire.ConfigText:
        self._called("config_text", defaults)
        return wire.ConfigText(toml=self.toml, hash="abc")

    async def check_config(self, file: str | None) -> wire.Checked:
        self._called("check_config", file)
        return wire.Checked(problems=[])

    def set_lanes(self, n_max: int) -> None:
        self._called("set_lanes", n_max)

    def set_log_level(self, logger: str, level: str, ttl_s: float | None) -> str:
        self._called("set_log_level", logger, level, ttl_s)
        return "info"

    async def exposition(self) -> bytes:
        return b"ds4d_up 1\n"

    def shutdown(self, *, fast: bool) -> None:
        self._called("shutdown", fast)
        if self.on_shutdown is not None:
            self.on_shutdown()


class RpcError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.code = error["code"]
        self.message = error["message"]
        self.data = error.get("data")


class Client:
    """Speaks the protocol without any of our records, as a foreign client would."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self.notes: deque[dict[str, Any]] = deque()  # notifications that came between replies
        self._buffer = b""
        self._n = 0

    async def send(self, line: bytes | dict[str, Any]) -> None:
        data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        await self.stream.send(data)

    async def ask(self, method: str, **params: Any) -> int:
        """Send a call without waiting for its reply."""
        self._n += 1
        body = {"jsonrpc": "2.0", "id": self._n, "method": method, "params": params}
        await self.send(body)
        return self._n

    async def read(self) -> dict[str, Any]:
        """The next line. Raises EndOfStream."""
        with anyio.fail_after(10):
            while b"\n" not in self._buffer:
                self._buffer += await self.stream.receive()
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        assert found["jsonrpc"] == "2.0"
        return found

    async def reply(self, id: int | str | None) -> dict[str, Any]:
        while "id" not in (found := await self.read()):
            self.notes.append(found)
        assert found["id"] == id
        return found

    async def result(self, id: int) -> Any:
        found = await self.reply(id)
        if "error" in found:
            raise RpcError(found["error"])
        return found["result"]

    async def call(self, method: str, **params: Any) -> Any:
        return await self.result(await self.ask(method, **params))

    async def error(self, method: str, **params: Any) -> RpcError:
        try:
            result = await self.call(method, **params)
        except RpcError as error:
            return error
        raise AssertionError(f"{method} answered {result}")

    async def note(self, method: str) -> dict[str, Any]:
        """The params of the next notification, which must be that one."""
        found = self.notes.popleft() if self.notes else await self.read()
        assert found.get("method") == method, found
        params: dict[str, Any] = found["params"]
        return params

    async def ends(self) -> bool:
        """Whether the daemon has closed the connection, and had said nothing more before."""
        try:
            found = await self.read()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return not self._buffer
        raise AssertionError(found)


@dataclass
class ControlHouse:
    asks: FakeAsks
    paths: Paths
    tasks: TaskGroup
    scope: anyio.CancelScope  # of the service

    @asynccontextmanager
    async def raw(self, name: str = "control") -> AsyncIterator[Client]:
        async with await anyio.connect_unix(self.paths.runtime / f"{name}.sock") as stream:
            yield Client(stream)

    @asynccontextmanager
    async def client(self, name: str = "control") -> AsyncIterator[Client]:
        """One that has heard the hello."""
        async with self.raw(name) as client:
            await client.note("hello")
            yield client


def settings(path: Path, **paths: Any) -> Config:
    """With the sockets in `path`/run."""
    folders = Paths(config=path, state=path, cache=path, runtime=path / "run")
    return Config(paths=replace(folders, **paths), control=Control())


@asynccontextmanager
async def control_house(
    path: Path,
    asks: FakeAsks | None = None,
    *,
    service_uids: frozenset[int] | None = None,
    config: Config | None = None,
    **limits: Any,
) -> AsyncIterator[ControlHouse]:
    asks = asks or FakeAsks()
    config = config or settings(path)
    control = server.Control(config, asks, service_uids=service_uids, limits=Limits(**limits))
    scope = anyio.CancelScope()

    async def run(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with scope:
            await control.run(task_status=task_status)

    async with anyio.create_task_group() as tasks:
        await tasks.start(run)
        yield ControlHouse(asks, config.paths, tasks, scope)
        scope.cancel()


async def until(condition: Any) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.002)
