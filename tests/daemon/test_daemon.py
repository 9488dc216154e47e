"""The daemon put together, in this process: a fake engine, real sockets, real signals."""

from __future__ import annotations

import errno
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from ds4d import cli, daemon
from ds4d.errors import ConfigError, DeviceError, MemoryRefusedError
from tests.daemon.house import Waking, daemon_with, engine

if TYPE_CHECKING:
    from pathlib import Path


def signal_us(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def test_the_doors_are_open_while_the_engine_wakes(tmp_path: Path) -> None:
    waking = Waking(engine())
    waking.gate.clear()
    async with daemon_with(waking, tmp_path) as house:
        assert (await house.get("/version"))[0] == 200
        assert (await house.get("/ready"))[0] == 503
        await house.until_loading()
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
        await house.ends()
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
        await house.ends()
    assert waking.engine.closed


async def test_the_deadline_of_a_drain_ends_a_stream_with_an_error_that_says_retry(
    tmp_path: Path,
) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path, "runtime.stop_drain_s=0.05") as house:
        await house.until_ready()
        events: list[Any] = []

        async def ask() -> None:
            events.extend(await house.stream())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            while len(waking.engine.cohorts) < 5:
                await anyio.sleep(0.001)
            signal_us()
        assert events[-1]["error"]["code"] == "draining"
        await house.ends()


async def test_a_second_signal_cuts_the_drain_short(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path, "runtime.stop_drain_s=3600") as house:
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
            await house.ends()
        assert statuses == [503]


async def test_a_lost_device_ends_the_daemon_with_exit_70(tmp_path: Path) -> None:
    waking = Waking(engine())
    with pytest.raises(BaseExceptionGroup) as ended:
        async with daemon_with(waking, tmp_path) as house:
            await house.until_ready()
            waking.engine.fail_next = RuntimeError("the bus is gone")
            status, _, _ = await house.chat()
            assert status >= 500
            await house.ends()
    assert ended.group_contains(DeviceError, match="the bus is gone")


def test_what_ends_the_daemon_ends_the_process_with_its_sentence_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waking = Waking(engine(), error=MemoryRefusedError("one lane needs 9 MiB and 1 may be used"))
    monkeypatch.setattr(daemon, "Waking", lambda settings: waking)
    waking.under_way = False
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


def test_a_lock_that_the_file_system_refuses_is_not_blamed_on_another_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"ds4d\.lock: cannot be locked: No locks available"),
        daemon._sole_instance(tmp_path),
    ):
        pass


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
