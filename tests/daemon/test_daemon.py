"""The daemon put together, in this process: a fake engine, real sockets, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import pytest

from ds4d import cli, config, daemon
from ds4d.api.chat import Served
from ds4d.api.models import Defaults, ModelInfo
from ds4d.errors import DeviceError, MemoryRefusedError
from tests.daemon.script_runner import CONSTANTS, TOKENIZER
from tests.fakes import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

CONTEXT = 8192


class Waking:
    """A fake engine behind a gate, and the byte tokenizer."""

    def __init__(self, engine: FakeEngine, *, error: Exception | None = None) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()
        self._error = error
        info = ModelInfo(
            name="fake",
            root="ds4d/fake",
            n_ctx=CONTEXT,
            n_vocab=TOKENIZER.n_vocab,
            defaults=Defaults(thinking=False, temperature=0.0),
        )
        self.served = Served(info=info, tokenizer=TOKENIZER, constants=CONSTANTS)

    def build(self, report: Callable[[str, float], None]) -> Any:
        report("kernels", 0.4)
        self.gate.wait(20)
        if self._error is not None:
            raise self._error
        return self.engine, self.engine.capacity


def engine(**more: Any) -> FakeEngine:
    return FakeEngine(n_vocab=TOKENIZER.n_vocab, **{"eos_every": 0, "delay_step_s": 0.002} | more)


class House:
    def __init__(self, url: str, client: aiohttp.ClientSession, ended: anyio.Event) -> None:
        self.url = url
        self.client = client
        self.ended = ended

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def chat(self, **more: Any) -> tuple[int, dict[str, str], Any]:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40} | more
        url = self.url + "/v1/chat/completions"
        async with self.client.post(url, json=body) as response:
            return response.status, dict(response.headers), await response.json()

    async def until_ready(self) -> None:
        with anyio.fail_after(10):
            while (await self.get("/ready"))[0] != 200:
                await anyio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@asynccontextmanager
async def daemon_with(waking: Waking, path: Path, **runtime: Any) -> AsyncIterator[House]:
    port = free_port()
    settings = await anyio.to_thread.run_sync(
        lambda: config.load(sets=[f"api.listen=127.0.0.1:{port}"], environ={"HOME": str(path)})
    )
    settings = replace(settings, runtime=replace(settings.runtime, **runtime))
    ended = anyio.Event()

    async def run() -> None:
        try:
            await daemon.serve(settings, waking)
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as client:
        tasks.start_soon(run)
        house = House(f"http://127.0.0.1:{port}", client, ended)
        with anyio.fail_after(10):
            while not ended.is_set():
                try:
                    await house.get("/version")
                    break
                except aiohttp.ClientConnectionError:
                    await anyio.sleep(0.005)
        yield house
        tasks.cancel_scope.cancel()


def signal_us(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def ends(house: House) -> None:
    with anyio.fail_after(10):
        await house.ended.wait()


async def test_the_doors_are_open_while_the_engine_wakes(tmp_path: Path) -> None:
    waking = Waking(engine())
    waking.gate.clear()
    async with daemon_with(waking, tmp_path) as house:
        assert (await house.get("/version"))[0] == 200
        assert (await house.get("/ready"))[0] == 503
        status, headers, body = await house.chat()
        assert (status, body["error"]["code"]) == (503, "model_loading")
        assert "40 %" in body["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        waking.gate.set()
        await house.until_ready()
        status, _, body = await house.chat()
        assert (status, body["usage"]["completion_tokens"]) == (200, 40)


async def test_a_signal_while_loading_ends_the_daemon_at_once(tmp_path: Path) -> None:
    waking = Waking(engine())
    waking.gate.clear()
    async with daemon_with(waking, tmp_path) as house:
        signal_us()
        await ends(house)
    waking.gate.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_work_finish_and_refuses_new_work(tmp_path: Path, number: int) -> None:
    waking = Waking(engine(delay_step_s=0.01))
    async with daemon_with(waking, tmp_path) as house:
        await house.until_ready()
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await house.chat(max_tokens=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while not waking.engine.cohorts:
                await anyio.sleep(0.001)
            signal_us(number)
            with anyio.fail_after(5):
                while (await house.get("/ready"))[0] != 503:
                    await anyio.sleep(0.001)
            status, _, body = await house.chat()
            assert (status, body["error"]["code"]) == (503, "draining")
            assert (await house.get("/health"))[0] == 200
        ((status, _, body),) = answers
        assert (status, body["usage"]["completion_tokens"]) == (200, 60)
        await ends(house)
    assert waking.engine.closed


async def test_the_deadline_of_a_drain_ends_a_stream_with_an_error_that_says_retry(
    tmp_path: Path,
) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path, stop_drain_s=0.05) as house:
        await house.until_ready()
        events = []
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with house.client.post(house.url + "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                if len(events) == 5:
                    signal_us()
        assert events[-1]["error"]["code"] == "draining"
        await ends(house)


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path, stop_drain_s=3600.0) as house:
        await house.until_ready()
        async with anyio.create_task_group() as tasks:
            statuses: list[int] = []

            async def ask() -> None:
                statuses.append((await house.chat(max_tokens=8000))[0])

            tasks.start_soon(ask)
            while not waking.engine.cohorts:
                await anyio.sleep(0.001)
            signal_us()
            while (await house.get("/ready"))[0] != 503:
                await anyio.sleep(0.001)
            assert not house.ended.is_set()
            signal_us()
            await ends(house)
        assert statuses == [503]


async def test_a_lost_device_ends_the_daemon_with_exit_70(tmp_path: Path) -> None:
    waking = Waking(engine())
    with pytest.raises(BaseExceptionGroup) as ended:
        async with daemon_with(waking, tmp_path) as house:
            await house.until_ready()
            waking.engine.fail_next = RuntimeError("the bus is gone")
            status, _, _ = await house.chat()
            assert status >= 500
            await ends(house)
    assert ended.group_contains(DeviceError, match="the bus is gone")


def test_what_ends_the_daemon_ends_the_process_with_its_sentence_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waking = Waking(engine(), error=MemoryRefusedError("one lane needs 9 MiB and 1 may be used"))
    monkeypatch.setattr(daemon, "Waking", lambda settings: waking)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["serve", "--listen", "127.0.0.1:0"]) == 71
    assert capsys.readouterr().err.splitlines()[-1] == (
        "ds4d: one lane needs 9 MiB and 1 may be used"
    )


def test_a_second_instance_is_told_who_holds_the_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with daemon._sole_instance(tmp_path / "ds4d"):
        assert cli.main(["serve", "--listen", "127.0.0.1:0"]) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert f"another ds4d (process {os.getpid()}) runs with {tmp_path}/ds4d" in line
    with daemon._sole_instance(tmp_path / "ds4d"):
        pass  # free again


def test_a_state_directory_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert cli.main(["serve", "--listen", "127.0.0.1:0"]) == 78
    assert f"{tmp_path}/file/ds4d: the state directory" in capsys.readouterr().err


def test_readiness_is_told_to_the_service_manager(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        daemon.Notifier(str(tmp_path / "notify")).send("READY=1", "STATUS=serving")
        assert manager.recv(100) == b"READY=1\nSTATUS=serving"
    daemon.Notifier(str(tmp_path / "notify")).send("nobody listens: no harm")
    daemon.Notifier(None).send("nor here")
