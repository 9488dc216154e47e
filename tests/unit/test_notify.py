"""What systemd hears: datagrams, the watchdog's beat, more time for what moves."""

from __future__ import annotations

import logging
import re
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from ds4d.notify import Notifier, Patience, watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MORE = ("EXTEND_TIMEOUT_USEC=60000000",)


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    """Listens as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(address)
        heard.settimeout(10)
        yield heard


# Datagrams


def test_the_lines_of_one_call_arrive_in_one_datagram(tmp_path: Path) -> None:
    with manager(f"{tmp_path}/notify") as heard:
        Notifier(f"{tmp_path}/notify").send("READY=1", "STATUS=serving")
        assert heard.recv(200) == b"READY=1\nSTATUS=serving"


def test_an_abstract_socket_is_reached_by_its_at_sign() -> None:
    with manager("") as heard:  # the kernel picks an abstract name
        name = heard.getsockname()
        assert name.startswith(b"\0")
        Notifier("@" + name[1:].decode()).send("WATCHDOG=1")
        assert heard.recv(200) == b"WATCHDOG=1"


def test_an_at_sign_within_a_path_is_a_letter_like_others(tmp_path: Path) -> None:
    with manager(f"{tmp_path}/a@b") as heard:
        Notifier(f"{tmp_path}/a@b").send("WATCHDOG=1")
        assert heard.recv(200) == b"WATCHDOG=1"


def test_a_reload_tells_its_time_in_the_same_datagram(tmp_path: Path) -> None:
    with manager(f"{tmp_path}/notify") as heard:
        Notifier(f"{tmp_path}/notify").reloading()
        assert re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=\d+", heard.recv(200))


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("loading\nREADY=1", "loading READY=1"),
        ("a\r\nb", "a b"),
        ("file \udcff.gguf", "file ?.gguf"),
        ("größer", "größer"),
    ],
)
def test_a_status_stays_one_line_of_utf_8(tmp_path: Path, status: str, told: str) -> None:
    with manager(f"{tmp_path}/notify") as heard:
        Notifier(f"{tmp_path}/notify").send(f"STATUS={status}")
        assert heard.recv(200).decode() == f"STATUS={told}"


@pytest.mark.parametrize("address", [None, ""])
def test_without_a_socket_nothing_happens(address: str | None) -> None:
    Notifier(address).send("READY=1")
    Notifier(address).reloading()


def test_a_manager_that_does_not_listen_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notify = Notifier(f"{tmp_path}/nobody")
    with caplog.at_level(logging.INFO, "ds4d"):
        notify.send("READY=1")
        notify.send("WATCHDOG=1")
    (line,) = caplog.messages
    assert line.startswith("daemon.notify ") and "No such file" in line


def test_a_manager_that_is_full_does_not_block_us(tmp_path: Path) -> None:
    with manager(f"{tmp_path}/notify"):
        notify = Notifier(f"{tmp_path}/notify")
        for _ in range(10_000):  # far beyond net.unix.max_dgram_qlen
            notify.send("WATCHDOG=1")


# The watchdog


class Listening(Notifier):
    def __init__(self) -> None:
        super().__init__(None)
        self.heard: list[str] = []

    def send(self, *lines: str) -> None:
        self.heard += lines


class Patient:
    """Its ailment is what the test says, and how often it was asked."""

    def __init__(self) -> None:
        self.ailment: str | None = None
        self.asked = 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.ailment

    async def until_asked(self, more: int) -> None:
        with anyio.fail_after(10):
            wanted = self.asked + more
            while self.asked < wanted:
                await anyio.sleep(0.001)


async def test_the_watchdog_is_silent_while_something_ails_and_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notify, patient = Listening(), Patient()
    caplog.set_level(logging.INFO, "ds4d")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watchdog, notify, 3000, patient)
        await patient.until_asked(3)
        assert notify.heard == ["WATCHDOG=1"] * patient.asked
        assert caplog.messages == []

        patient.ailment = "the engine has not moved for 60 s"
        n_beats = len(notify.heard)
        await patient.until_asked(3)
        patient.ailment = "the engine has not moved for 61 s"  # the same thing, older
        await patient.until_asked(3)
        assert len(notify.heard) == n_beats
        (line,) = caplog.messages
        assert line == 'daemon.watchdog reason="the engine has not moved for 60 s"'

        patient.ailment = None
        await patient.until_asked(3)
        assert len(notify.heard) > n_beats
        assert caplog.messages[1:] == ['daemon.watchdog reason="it moves again"']
        tasks.cancel_scope.cancel()


async def test_the_watchdog_beats_three_times_in_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(delay: float) -> None:
        slept.append(delay)
        if len(slept) == 3:
            raise TimeoutError

    monkeypatch.setattr(anyio, "sleep", sleep)
    notify = Listening()
    with pytest.raises(TimeoutError):
        await watchdog(notify, 60_000_000, lambda: None)
    assert slept == [20.0] * 3
    assert notify.heard == ["WATCHDOG=1"] * 3


# Patience


def test_the_first_progress_asks_at_once() -> None:
    assert Patience().ask("model file", 0.0, now=5.0) == MORE


def test_more_time_is_asked_for_every_ten_seconds_while_it_moves() -> None:
    patience = Patience()
    asked = [now for now in range(31) if patience.ask("weights", now / 100, now=float(now))]
    assert asked == [0, 10, 20, 30]


def test_what_stands_still_gets_no_more_time() -> None:
    patience = Patience()
    assert patience.ask("weights", 0.5, now=0.0) == MORE
    assert not any(patience.ask("weights", 0.5, now=float(now)) for now in range(1, 1000))
    assert patience.ask("weights", 0.51, now=1000.0) == MORE


def test_progress_shortly_after_asking_counts_at_the_next_look() -> None:
    """It moved at second 3 and stands since: that is worth one more extension, not two."""
    patience = Patience()
    patience.ask("weights", 0.5, now=0.0)
    asked = [now for now in range(3, 100) if patience.ask("weights", 0.6, now=float(now))]
    assert asked == [10]


def test_another_step_at_the_same_fraction_is_progress() -> None:
    patience = Patience()
    patience.ask("kernel norm", 0.5, now=0.0)
    assert patience.ask("kernel rope", 0.5, now=10.0) == MORE
