"""Which state the daemon says it is in, to whom, and what holds when several things come at once:
drains, reloads, signals, a failing engine.

The whole daemon with a fake engine, and a service manager that writes down what it hears.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from ds4d import daemon, wire
from ds4d.errors import DeviceError
from tests.daemon.house import Refusal, Waking, daemon_with, engine, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.daemon.house import House, Operator


class Manager:
    """Hears what systemd would."""

    def __init__(self, path: Path) -> None:
        self.address = str(path / "notify")
        self.heard: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.setblocking(False)

    def states(self) -> list[str]:
        """First words of STATUS, without repetition."""
        words = [one["STATUS"].split(",")[0].split(":")[0] for one in self.heard if "STATUS" in one]
        return [word for i, word in enumerate(words) if i == 0 or word != words[i - 1]]

    def names(self) -> list[str]:
        """What was said apart from STATUS and requests for time."""
        said = ("READY", "RELOADING", "STOPPING")
        return [name for one in self.heard for name in said if name in one]

    async def listen(self) -> None:
        while True:
            await anyio.wait_readable(self._socket)
            lines = self._socket.recv(4096).decode().split("\n")
            self.heard.append(dict(line.split("=", 1) for line in lines))

    def close(self) -> None:
        self._socket.close()


@asynccontextmanager
async def managed(
    waking: Waking, path: Path, *sets: str, ready: bool = True
) -> AsyncIterator[tuple[House, Operator, Manager]]:
    """A daemon, its operator and its manager."""
    (path / "run" / "ds4d").mkdir(parents=True)  # systemd makes it
    manager = Manager(path)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.listen)
            async with (
                daemon_with(waking, path, *sets, NOTIFY_SOCKET=manager.address) as house,
                house.operator() as operator,
            ):
                if ready:
                    await house.until_ready()
                yield house, operator, manager
            await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
    finally:
        manager.close()


@asynccontextmanager
async def streaming(house: House, n: int = 1, **more: Any) -> AsyncIterator[list[list[Any]]]:
    """`n` clients at work; what each has heard once all have ended."""
    heard: list[list[Any]] = []

    async def ask() -> None:
        heard.append(await house.stream(**more))

    async with anyio.create_task_group() as tasks:
        for _ in range(n):
            tasks.start_soon(ask)
        yield heard


def end_of(events: list[Any]) -> str:
    """How a stream ended, which it may do once."""
    errors = [event["error"]["code"] for event in events if "error" in event]
    finishes = [
        choice["finish_reason"]
        for event in events
        for choice in event.get("choices", ())
        if choice["finish_reason"]
    ]
    (end,) = errors + finishes
    return str(end)


# One state, told everywhere


async def test_every_move_is_told_to_the_log_and_to_systemd(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ds4d")
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, manager):
        async with streaming(house, max_tokens=40):
            await until(lambda: bool(waking.engine.cohorts))
            op = await operator.ask("drain", deadline_s=30)
            await operator.ask("reload")  # in between, and no end of the drain
            assert (await operator.ask("status"))["state"] == "draining"
        await operator.ask("op.wait", op=op["op"])
        assert (await operator.ask("status"))["state"] == "drained"
        assert (await house.get("/health"))[0] == 200
        assert (await house.get("/ready"))[1]["status"] == "drained"
        await operator.ask("undrain")
        assert (await house.get("/ready"))[0] == 200
        await operator.ask("shutdown")
        await house.ends()
    moves = [r.getMessage() for r in caplog.records if r.getMessage().startswith("daemon.state")]
    told = [move.rpartition("to=")[2] for move in moves]
    moved = ["ready", "draining", "reloading", "draining", "drained", "ready", "stopping"]
    assert told[-7:] == moved
    assert manager.states()[-7:] == moved
    assert manager.names() == ["READY", "RELOADING", "READY", "STOPPING"]


async def test_before_the_doors_are_open_it_is_starting(tmp_path: Path) -> None:
    """The control socket is the first of them."""
    waking = Waking(engine())
    states: list[str] = []
    serve = daemon.Server.run

    class Slow(daemon.Server):
        async def run(self, **started: Any) -> None:
            async with await anyio.connect_unix(str(tmp_path / "run/ds4d/control.sock")) as stream:
                states.append((await stream.receive()).decode())
            await serve(self, **started)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon, "Server", Slow)
        async with daemon_with(waking, tmp_path) as house:
            await house.until_ready()
    assert '"state":"starting"' in states[0]


async def test_a_daemon_that_shuts_down_says_what_it_waits_for(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, manager):
        async with streaming(house, 2, max_tokens=100) as heard:
            await until(lambda: bool(waking.engine.cohorts))
            os.kill(os.getpid(), signal.SIGTERM)
            with anyio.fail_after(5):
                while (status := await operator.ask("status"))["state"] != "stopping":
                    await anyio.sleep(0.002)
            assert "2 running and 0 queued may finish" in status["reasons"][0]["text"]
            assert 20 < status["drain"]["left_s"] <= 30
            with pytest.raises(Refusal, match="shutting down already") as refusal:
                await operator.ask("undrain")
            assert refusal.value.code == wire.WRONG_STATE
        assert [end_of(events) for events in heard] == ["length"] * 2
        await house.ends()
    (stopping,) = (one for one in manager.heard if "STOPPING" in one)
    assert stopping["EXTEND_TIMEOUT_USEC"] == "90000000"  # 30 s for the drain, and a minute


@pytest.mark.parametrize("how", ["signal", "socket"])
async def test_an_end_while_it_loads_is_no_failed_start(tmp_path: Path, how: str) -> None:
    """systemd would start it again."""
    waking = Waking(engine())
    waking.gate.clear()
    async with managed(waking, tmp_path, ready=False) as (house, operator, manager):
        await until(lambda: manager.states() == ["loading"])
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            await operator.ask("shutdown")
        await house.ends()
    waking.gate.set()
    assert manager.names() == ["READY", "STOPPING"]
    assert manager.states() == ["loading", "stopping"]


# Several things at once


async def test_of_two_drains_the_one_that_is_cancelled_leaves_the_other(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, _):
        async with streaming(house, max_tokens=60) as heard:
            await until(lambda: bool(waking.engine.cohorts))
            one, other = [await operator.ask("drain", deadline_s=s) for s in (20, 30)]
            await operator.ask("op.cancel", op=one["op"])
            assert (await operator.ask("op.wait", op=one["op"]))["error"]["code"] == wire.CANCELLED
            status = await operator.ask("status")
            assert status["state"] == "draining"
            assert 20 < status["drain"]["left_s"] <= 30
            end = await operator.ask("op.wait", op=other["op"])
            assert "none was cut" in end["result"]["text"]
        assert [end_of(events) for events in heard] == ["length"]
        await operator.ask("undrain")
        async with streaming(house, max_tokens=60):
            await until(lambda: len(waking.engine.cohorts) > 61)
            alone = await operator.ask("drain", deadline_s=30)
            await operator.ask("op.cancel", op=alone["op"])
            await operator.ask("op.wait", op=alone["op"])
            assert (await operator.ask("status"))["state"] == "ready"


async def test_a_drain_that_another_ones_deadline_ends_says_so(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, _):
        async with streaming(house) as heard:
            await until(lambda: bool(waking.engine.cohorts))
            long, short = [await operator.ask("drain", deadline_s=s) for s in (600, 0.05)]
            ends = [await operator.ask("op.wait", op=op["op"]) for op in (long, short)]
        said = [end["error"]["message"] for end in ends]
        assert said[0].startswith("another drain's deadline has passed")
        assert said[1].startswith("the deadline of 0.05 s has passed")
        assert [end_of(events) for events in heard] == ["draining"]


async def test_a_signal_during_a_drain_takes_it_over(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, manager):
        async with streaming(house, 2, max_tokens=60) as heard:
            await until(lambda: bool(waking.engine.cohorts))
            await operator.ask("drain", deadline_s=600, stop=True)
            os.kill(os.getpid(), signal.SIGTERM)
        await house.ends()
        assert [end_of(events) for events in heard] == ["length"] * 2
    assert manager.names()[-1] == "STOPPING"
    assert waking.engine.closed


async def test_shut_down_fast_everybody_still_gets_one_end(tmp_path: Path) -> None:
    """Whether they run, wait for a lane, or are being told the first token."""
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, _):
        async with streaming(house, 8) as heard:
            await until(lambda: len(waking.engine.cohorts) > 3)
            await operator.ask("shutdown", mode="fast")
            await house.ends()
        assert [end_of(events) for events in heard] == ["draining"] * 8


async def test_to_ask_again_for_the_end_changes_nothing_and_a_signal_does() -> None:
    stop = daemon._Stop()
    stop.ask(False)
    stop.ask(False)
    assert stop.asked.is_set()
    assert not stop.drain.cancel_called
    stop.ask(True)
    assert stop.drain.cancel_called


async def test_a_reload_that_a_signal_overtakes_changes_nothing(tmp_path: Path) -> None:
    """And systemd, which has heard STOPPING=1, does not hear READY=1 behind it."""
    waking = Waking(engine(delay_step_s=0.005))
    reading, go_on = threading.Event(), threading.Event()

    def slowly() -> None:
        reading.set()
        go_on.wait(10)

    async with managed(waking, tmp_path) as (house, operator, manager):
        async with streaming(house, max_tokens=100), house.operator() as second:
            await until(lambda: bool(waking.engine.cohorts))
            waking.on_text_side = slowly
            house.configure("[api]\nlist_aliases = true\naliases = ['other']")
            async with anyio.create_task_group() as tasks:
                refused: list[Refusal] = []

                async def reload() -> None:
                    with pytest.raises(Refusal) as refusal:
                        await second.ask("reload")
                    refused.append(refusal.value)

                tasks.start_soon(reload)
                await until(reading.is_set)
                assert (await operator.ask("status"))["state"] == "reloading"
                await operator.ask("shutdown")
                assert (await operator.ask("status"))["state"] == "stopping"
                go_on.set()
            assert refused[0].code == wire.WRONG_STATE
            assert len((await house.get("/v1/models"))[1]["data"]) == 1
        await house.ends()
    assert manager.names() == ["READY", "RELOADING", "STOPPING"]


async def test_reloads_come_one_after_the_other_and_the_last_file_holds(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with managed(waking, tmp_path) as (house, operator, manager):
        for i in range(5):
            house.configure(f"[api]\ndefault_max_tokens = {i + 1}")
            os.kill(os.getpid(), signal.SIGHUP)
            await operator.ask("reload")
        assert "default_max_tokens = 5" in (await operator.ask("config.show"))["toml"]
        names = manager.names()
        assert names[1:] == ["RELOADING", "READY"] * (len(names) // 2)


async def test_what_nobody_foresaw_in_a_reload_is_told_and_breaks_nothing(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))

    def broken() -> None:
        raise RuntimeError("of all things")

    async with managed(waking, tmp_path) as (house, operator, manager):
        waking.on_text_side = broken
        house.configure("[api]\nstrict_model = true")
        async with streaming(house, max_tokens=60) as heard:
            await until(lambda: bool(waking.engine.cohorts))
            with pytest.raises(Refusal, match="nothing was applied: unexpected") as refusal:
                await operator.ask("reload")
            assert refusal.value.code == wire.INTERNAL
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: manager.names().count("RELOADING") == 2)
        assert [end_of(events) for events in heard] == ["length"]
        assert "of all things" in (await operator.ask("status"))["reload"]["text"]
        assert (await house.chat(model="nobody"))[0] == 200


async def test_a_reload_while_it_drains_is_no_end_of_the_drain(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with managed(waking, tmp_path) as (house, operator, _):
        async with streaming(house, max_tokens=60) as heard:
            await until(lambda: bool(waking.engine.cohorts))
            op = await operator.ask("drain", deadline_s=30)
            house.configure("[runtime]\ndrain_s = 0.01")  # for the next drain
            await operator.ask("reload")
            assert (await operator.ask("status"))["state"] == "draining"
            end = await operator.ask("op.wait", op=op["op"])
        assert end["error"] is None
        assert [end_of(events) for events in heard] == ["length"]


# An engine that fails


async def test_a_lost_device_gives_every_client_one_end_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waking = Waking(engine(delay_step_s=0.002))
    whole: list[int] = []
    with pytest.raises(BaseExceptionGroup) as ended:
        async with managed(waking, tmp_path) as (house, operator, manager):

            async def ask() -> None:
                whole.append((await house.chat(max_tokens=4000))[0])

            async with streaming(house, 5) as heard, anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await until(lambda: len(waking.engine.cohorts) > 3)
                await operator.ask("drain", deadline_s=60)
                waking.engine.fail_next = RuntimeError("the bus is gone")
                await house.ends()
            assert [end_of(events) for events in heard] == ["internal_error"] * 5
            assert whole == [500]
    assert ended.group_contains(DeviceError, match="the bus is gone")
    moves = [r.getMessage() for r in caplog.records if r.getMessage().startswith("daemon.state")]
    assert moves[-1].startswith("daemon.state from=draining to=failed")
    assert not any("none was cut" in record.getMessage() for record in caplog.records)
    assert manager.states()[-1] == "failed"
