"""ds4top without its screen: sockets, recordings, the plain picture, the command line."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from textual.worker import WorkerFailed

import ds4d_tui
from ds4d import wire
from ds4d_tui import draw, once, tape
from ds4d_tui.app import Ds4Top, main, parser
from ds4d_tui.client import CallError, Client, Foreign, places
from ds4d_tui.columns import BY_STATE, COLUMNS, header, layout, ordered, row, story
from ds4d_tui.draw import Share
from ds4d_tui.feed import Feed, Garbled, History, View
from ds4d_tui.messages import Told
from ds4d_tui.tape import Replay, Tape, TapeError
from tests.daemon import ds4top_daemon as scripted
from tests.daemon.ds4top_daemon import Daemon, answer, busy, hello, log_line, notification, refusal
from tests.daemon.ds4top_screen import press, text, until, until_shown

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = notification(hello())


async def ran(client: Client, *, until_: Any = None) -> list[Any]:
    """All that the client tells until it ends or `until_` holds."""
    told: list[Any] = []

    async def stop() -> None:
        async with asyncio.timeout(10):
            while until_ is None or not until_():
                await asyncio.sleep(0.005)

    tasks = {asyncio.create_task(client.run(told.append)), asyncio.create_task(stop())}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()
    return told


# Where the daemon is


def test_the_users_daemon_comes_before_the_systems_and_control_before_monitor(
    tmp_path: Path,
) -> None:
    found = [str(path) for path in places(None, {"XDG_RUNTIME_DIR": "/run/user/7"})]
    assert found == [
        "/run/user/7/ds4d/control.sock",
        "/run/ds4d/control.sock",
        "/run/user/7/ds4d/monitor.sock",
        "/run/ds4d/monitor.sock",
    ]
    without = places(None, {"HOME": "/home/me"})
    assert str(without[0]) == "/home/me/.local/state/ds4d/run/control.sock"
    assert str(places(None, {"XDG_STATE_HOME": "/s"})[0]) == "/s/ds4d/run/control.sock"
    relative = {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "HOME": "/h"}
    assert str(places(None, relative)[0]) == "/h/.local/state/ds4d/run/control.sock"


def test_a_socket_that_is_named_is_the_only_one_with_its_monitor(tmp_path: Path) -> None:
    control = tmp_path / "control.sock"
    assert places(control, {}) == (control, tmp_path / "monitor.sock")
    assert places(tmp_path / "monitor.sock", {}) == (tmp_path / "monitor.sock",)


async def test_where_control_is_denied_the_monitor_is_watched(tmp_path: Path) -> None:
    control = Daemon(tmp_path / "control.sock", refusal(None, wire.DENIED, "not for you"))
    monitor = Daemon(tmp_path / "monitor.sock", notification(hello(role="monitor")))
    monitor.tell(busy(1.0))
    async with control, monitor:
        client = Client([control.path, monitor.path], 10.0)
        await ran(client, until_=lambda: client.feed.n_updates)
    link = client.feed.link
    assert link.place == str(monitor.path)
    assert "read-only monitor socket" in link.read_only


async def test_a_denied_subscription_is_a_denied_socket(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "control.sock")
    daemon.answers["subscribe"] = (wire.DENIED, "no status for you")
    async with daemon:
        client = Client([daemon.path], 10.0)
        await ran(client, until_=lambda: client.feed.link.state == "lost")
    assert "no status for you" in client.feed.link.why


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
async def test_a_socket_without_permission_is_told(tmp_path: Path) -> None:
    async with Daemon(tmp_path / "control.sock") as daemon:
        daemon.path.chmod(stat.S_IRUSR)
        client = Client([daemon.path], 10.0)
        await ran(client, until_=lambda: client.feed.link.state == "lost")
    assert "permission denied" in client.feed.link.why


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"SSH-2.0-OpenSSH\n", "not of the protocol"),
        (answer(1, wire.Done()), "its first line is no hello"),
        (refusal(None, wire.BUSY, "user 0 has 8 connections"), "user 0 has 8 connections"),
        (HELLO + b'{"jsonrpc":"2.0","method":"update","params":{}}\n', "not of the protocol"),
        (HELLO + b"\xff\xfe\n", "not of the protocol"),
        (HELLO + refusal(None, wire.INTERNAL, "an update failed"), "an update failed"),
        (HELLO + b"x" * (wire.LINE_MAX + 10) + b"\n", "a line of more than"),
    ],
)
async def test_what_is_not_a_daemon_is_told(tmp_path: Path, greeting: bytes, why: str) -> None:
    async with Daemon(tmp_path / "control.sock", greeting) as daemon:
        client = Client([daemon.path], 10.0)
        await ran(client, until_=lambda: client.feed.link.state == "lost")
    assert why in client.feed.link.why


async def test_a_listener_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    async with Daemon(tmp_path / "control.sock", b"") as daemon:
        client = Client([daemon.path], 10.0, hello_s=0.02)
        await ran(client, until_=lambda: client.feed.link.state == "lost")
    assert "nothing came from" in client.feed.link.why


async def test_fields_that_a_newer_daemon_adds_are_ignored(tmp_path: Path) -> None:
    newer = json.loads(HELLO)
    newer["params"] |= {"more": 1, "protocol": {"major": 1, "minor": 9, "patch": 3}}
    daemon = Daemon(tmp_path / "control.sock", json.dumps(newer).encode() + b"\n")
    daemon.tell(busy(1.0), b'{"jsonrpc":"2.0","method":"weather","params":{"rain":true}}\n')
    async with daemon:
        client = Client([daemon.path], 10.0)
        await ran(client, until_=lambda: client.feed.n_updates)


async def test_another_major_is_not_tried_again(tmp_path: Path) -> None:
    bare = {"jsonrpc": "2.0", "method": "hello", "params": {"protocol": {"major": 3, "minor": 1}}}
    async with Daemon(tmp_path / "control.sock", json.dumps(bare).encode() + b"\n") as daemon:
        with pytest.raises(Foreign, match=r"version 3\.1 .* use the ds4top that came with"):
            await Client([daemon.path], 10.0).attend(lambda message: None)


async def test_the_backoff_grows_and_begins_anew_after_a_connection(tmp_path: Path) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await asyncio.sleep(0)

    client = Client([tmp_path / "control.sock"], 10.0, sleep=sleep)
    await ran(client, until_=lambda: len(slept) >= 8)
    assert slept[:8] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    slept.clear()
    daemon = Daemon(tmp_path / "control.sock")
    daemon.tell(busy(1.0))
    async with daemon:
        seen = asyncio.create_task(ran(client, until_=lambda: len(slept) >= 2))
        while not client.feed.n_updates:
            await asyncio.sleep(0)
    await seen
    assert slept[:2] == [0.2, 0.4]


async def test_calls_are_answered_by_number_and_time_out(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "control.sock")
    daemon.answers |= {"ping": wire.Pong(at=1.0, uptime_s=2.0), "undrain": None, "metrics": 5}
    daemon.tell(busy(1.0))
    client = Client([daemon.path], 10.0, call_s=0.2)
    with pytest.raises(CallError, match="no connection"):
        await client.call(wire.Ping())
    async with daemon:
        task = asyncio.create_task(client.run(lambda message: None))
        while not client.feed.n_updates:
            await asyncio.sleep(0.005)
        assert (await client.call(wire.Ping())).uptime_s == 2.0
        with pytest.raises(CallError, match="could not be read"):
            await client.call(wire.GetMetrics())
        with pytest.raises(CallError, match="no answer came"):
            await client.call(wire.Undrain())
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_status_and_sessions_are_asked_for_at_the_rate_that_was_wished(
    tmp_path: Path,
) -> None:
    daemon = Daemon(tmp_path / "control.sock")
    daemon.tell(busy(1.0))
    async with daemon:
        client = Client([daemon.path], 4.0)
        await ran(client, until_=lambda: len(daemon.subscriptions) == 2)
    assert daemon.subscriptions == [
        {"topics": ["status", "sessions"], "hz": 4.0},
        {"topics": ["log"], "hz": 4.0},
    ]


# What arrives


def test_a_history_has_a_value_for_each_step_and_holes_where_none_came() -> None:
    history = History(6, 2.0)
    for now, value in ((0.0, 1.0), (1.0, 2.0), (2.1, 3.0), (6.5, 4.0), (14.0, 5.0)):
        history.add(value, now)
    # 3 holds for the one step that a late update skipped; from 6.5 to 14 nothing came
    assert history.values() == (3.0, 4.0, None, None, None, 5.0)


def test_histories_of_sessions_that_are_gone_are_forgotten() -> None:
    feed = Feed(2.0)
    feed.line(notification(busy(1.0)), 1.0)
    assert len(feed.view().trends) == 20
    feed.line(notification(busy(2.0, 7)), 2.0)
    assert set(feed.view().trends) == {
        *(f"session {n}" for n in (4, 7, 9, 12, 17)),
        *(f"turn {s.request}" for s in scripted.waiting(0.0)[1:]),
    }


def test_a_view_does_not_change_after_it_was_taken() -> None:
    feed = Feed(2.0)
    feed.line(notification(busy(0.0)), 0.0)
    view = feed.view()
    before = (view.sessions, view.log, view.decode, dict(view.trends))
    for n in range(1, 20):
        feed.line(notification(busy(3.0 * n)), 3.0 * n)
    assert (view.sessions, view.log, view.decode, dict(view.trends)) == before


def test_log_lines_alone_do_not_make_the_picture_newer() -> None:
    feed = Feed(2.0)
    feed.line(notification(busy(0.0)), 1.0)
    feed.line(notification(wire.Update(sub=2, seq=1, at=0.0, log=[log_line(1)])), 50.0)
    assert feed.view().age_s(51.0) == 50.0
    assert feed.view().is_stale(51.0)


def test_the_log_is_bounded_and_begins_anew_with_a_new_daemon() -> None:
    feed = Feed(2.0)
    feed.line(HELLO, 0.0)
    lines = [log_line(n) for n in range(1, 700)]
    feed.line(notification(wire.Update(sub=2, seq=1, at=0.0, log=lines)), 0.0)
    assert len(feed.view().log) == 500
    feed.line(notification(hello(boot="other", pid=5)), 0.0)
    feed.line(notification(wire.Update(sub=2, seq=1, at=0.0, log=[log_line(1)])), 0.0)
    assert [line.text for line in feed.view().log[-2:]] == [
        "the daemon was started anew: pid 5",
        log_line(1).text,
    ]


# How it looks, in characters


def test_numbers_are_short_and_keep_their_width() -> None:
    assert [draw.count(n) for n in (0, 999, 1000, 12_345, 999_600, 1_234_567)] == [
        *("0", "999", "1.00k", "12.3k", "1.00M", "1.23M")
    ]
    assert [draw.rate(n) for n in (0, 0.04, 7.25, 9.96, 182.4)] == ["0", "0.0", "7.2", "10", "182"]
    assert [draw.size(n) for n in (0, 512, 16_026_336, 86_720_111_488)] == [
        *("0", "512 B", "15.3 MiB", "80.8 GiB")
    ]
    assert draw.size(4200 << 20, short=True) == "4.1G"
    assert draw.size(-(3 << 30)) == "-3.00 GiB"
    assert [draw.span(s) for s in (-1, 59.9, 80, 7500, 273_840)] == [
        *("0 s", "59 s", "1m 20s", "2h 05m", "3d 04h")
    ]


def test_a_bar_has_its_length_and_shows_what_is_small() -> None:
    for shares in ([0.0], [0.001, 0.5], [0.4, 0.4, 0.4], [0.001] * 30, [2.0]):
        told = draw.bar([Share(share, "$primary") for share in shares], 20)
        assert told.cell_length == 20
    assert draw.bar([Share(0.001, "$primary")], 20).plain == "━" + "─" * 19
    assert draw.bar([Share(0.0, "$primary")], 4).plain == "────"


def test_a_graph_fills_from_the_right_and_leaves_holes_open() -> None:
    values = [None, 0.0, 4.0, None, 8.0]
    top, low = draw.graph(values, 7, 2, "$primary")
    assert (top.plain, low.plain) == ("      ▅", "   ▁▇ █")
    assert draw.spark([], 4, "$primary").plain == "    "
    assert draw.spark([0.0, 0.0], 2, "$primary").plain == "▁▁"
    assert draw.graph(values, 0, 1, "$primary")[0].plain == ""


def test_parts_that_have_no_room_are_counted() -> None:
    parts = [draw.text(word) for word in ("one", "two", "three", "four")]
    assert [line.plain for line in draw.flow(parts, 9, 2)] == ["one  two", "three  +1"]
    assert [line.plain for line in draw.flow(parts, 40, 2)] == ["one  two  three  four"]
    assert draw.fit(parts, 9).plain == "one  two"
    assert draw.ends(draw.text("left and long"), draw.text("right"), 12).plain == "left … right"


@pytest.mark.parametrize("width", [1, 5, 20, 40, 60, 79, 100, 119, 158, 300])
def test_rows_and_header_have_the_width_of_their_columns(width: int) -> None:
    columns = layout(width)
    total = sum(wide + 1 for _, wide in columns)
    assert total <= width or len(columns) == 1
    assert header(columns, BY_STATE).cell_length == total
    for session in busy(30.0).sessions or ():
        assert row(session, View(), columns).cell_length == total


def test_all_columns_are_there_when_there_is_room() -> None:
    assert [column for column, _ in layout(158)] == list(COLUMNS)


def test_an_id_that_is_too_long_shows_its_end() -> None:
    hidden = scripted.resting(0.0, 1)[0]
    fields = {name: getattr(hidden, name) for name in hidden.__slots__}
    long = type(hidden)(**fields | {"id": 281_474_976_710_655})
    assert row(long, View(), layout(79)).plain.startswith(" …655 ")


def test_the_story_of_a_session_tells_all_of_it() -> None:
    sessions = ordered(busy(30.0).sessions or (), BY_STATE)
    told = [" · ".join(part.plain for part in story(session)) for session in sessions[:5]]
    assert told[3] == (
        "session 17 · req_81af155173f23d752d68c6662bca4b85 · prompt 60,416 · "
        "8,192 reused (14 %) · 42,692 done · 42,692 tokens in 166 pages · 1,202.0 tok/s · "
        "began 33 s ago"
    )


# Recordings


def recording(path: Path, *items: Any, hz: float = 2.0) -> Path:
    """`items`: (seconds, a record or bytes, or a str for a loss)."""
    entries = [{"t": 100.0, "ds4top": 1, "hz": hz}]
    for seconds, item in items:
        entry: dict[str, Any] = {"t": 100.0 + seconds}
        if isinstance(item, str):
            entry["lost"] = item
        else:
            entry["line"] = json.loads(item if isinstance(item, bytes) else notification(item))
        entries.append(entry)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
    return path


def short(path: Path) -> Path:
    return recording(
        path,
        (0.0, HELLO),
        (0.1, busy(0.0)),
        (10.0, busy(10.0)),
        (20.0, "the daemon closed the connection"),
        (21.0, HELLO),
        (21.1, busy(30.0)),
    )


async def test_what_was_recorded_is_shown_again(tmp_path: Path) -> None:
    file = tmp_path / "tape"
    kept = Tape(file, 10.0)
    daemon = Daemon(tmp_path / "control.sock")
    daemon.tell(busy(12.0))
    client = Client([daemon.path], 10.0, kept, sleep=lambda delay_s: asyncio.sleep(60))
    async with daemon:
        task = asyncio.create_task(client.run(lambda message: None))
        while not client.feed.n_updates:
            await asyncio.sleep(0.005)
        daemon.tell(b"no json\n")
        while client.feed.link.state != "lost":
            await asyncio.sleep(0.005)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    kept.close()
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert (lines[0]["ds4top"], lines[0]["hz"]) == (1, 10.0)
    assert all(line["t"] > 1.7e9 for line in lines)
    assert {"text": "no json\n"}.items() <= lines[-2].items()
    assert "not of the protocol" in lines[-1]["lost"]

    again = Replay(file, start_s=tape.END)
    again.catch_up()
    before, after = client.feed.view(), again.feed.view()
    assert (after.status, after.sessions, after.log) == (before.status, before.sessions, before.log)
    assert after.link.state == "lost"


async def test_a_replay_at_the_end_stands_still_with_the_last_picture(tmp_path: Path) -> None:
    replay = Replay(short(tmp_path / "tape"), start_s=tape.END)
    app = Ds4Top(replay)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until_shown(pilot, "replay 21 s of 21 s", "oldest 50 s")
        await press(pilot, "d")
        await until_shown(pilot, "cannot drain: this is a recording")
        assert "✖" not in text(app) and "stale" not in text(app)


async def test_a_replay_begins_where_it_is_told_and_goes_on(tmp_path: Path) -> None:
    replay = Replay(short(tmp_path / "tape"), speed=100.0, start_s=5.0)
    seen: list[str] = []
    app = Ds4Top(replay)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: seen.append(text(app)) or "oldest 50 s" in seen[-1])
        await until_shown(pilot, "replay 21 s of 21 s ×100")
    assert "oldest 20 s" in "".join(seen)


async def test_a_pause_holds_a_replay(tmp_path: Path) -> None:
    replay = Replay(short(tmp_path / "tape"), speed=30.0)
    app = Ds4Top(replay)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_shown(pilot, "oldest 20 s")
        await press(pilot, "space")
        at = replay.clock()
        await pilot.pause(0.2)
        assert replay.clock() == at < 21.0
        assert "oldest 50 s" not in text(app)
        await press(pilot, "space")
        await until_shown(pilot, "oldest 50 s")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is not a recording of ds4top: it is empty"),
        ("{}\n", "tape:1 is not a line of a recording"),
        ('{"t": 1}\n', "is not a recording of ds4top: --record makes one"),
        ('{"t": 1, "ds4top": 7}\n', "of format 7; this ds4top reads 1"),
        ('{"t": 1, "ds4top": 1}\nnonsense\n', "tape:2 is not a line of a recording"),
        ('{"t": 1, "ds4top": 1, "hz": 0}\n', "tape:1"),
    ],
)
def test_a_file_that_is_no_recording_is_told(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "tape"
    file.write_text(content, "utf-8")
    with pytest.raises(TapeError) as caught:
        Replay(file)
    assert why in str(caught.value)


def test_a_recording_that_was_cut_off_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    file = short(tmp_path / "tape")
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rindex(b'"line"')])
    replay = Replay(file, start_s=tape.END)
    assert replay.length_s == 21.0


def test_a_recording_never_overwrites_a_file(tmp_path: Path) -> None:
    file = short(tmp_path / "tape")
    with pytest.raises(TapeError, match="exists already"):
        Tape(file, 2.0)
    with pytest.raises(TapeError, match="cannot write"):
        Tape(tmp_path / "absent" / "tape", 2.0)
    with pytest.raises(TapeError, match="cannot read"):
        Replay(tmp_path / "none")


async def test_a_recording_that_cannot_go_on_is_told_and_the_picture_goes_on(
    tmp_path: Path,
) -> None:
    class Full(Tape):
        def line(self, raw: bytes) -> None:
            raise OSError(28, "No space left on device")

    daemon = Daemon(tmp_path / "control.sock")
    daemon.tell(busy(1.0))
    async with daemon:
        with closing(Full(tmp_path / "tape", 10.0)) as full:
            client = Client([daemon.path], 10.0, full)
            told = await ran(client, until_=lambda: client.feed.n_updates)
    said = [message.text for message in told if isinstance(message, Told)]
    assert said == ["the recording has ended: No space left on device"]


# The plain picture and the command line


@contextmanager
def in_a_thread(daemon: Daemon) -> Iterator[None]:
    """A daemon for `main`, which has a loop of its own."""
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with daemon:
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def test_once_prints_a_picture_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = Daemon(tmp_path / "control.sock")
    daemon.tell(busy(30.0))
    with in_a_thread(daemon):
        assert main(["--once", "--socket", str(daemon.path)]) == 0
    out = capsys.readouterr().out
    assert "READY" in out and "6.82 GiB" in out and out.count("\n") == 28
    assert "\x1b" not in out
    assert ["17", "3", "prefill", "req_81af15…"] in [line.split()[:4] for line in out.splitlines()]


def test_once_tells_why_there_is_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "control.sock"
    assert main(["--once", "--socket", str(path)]) == 3
    assert f"no daemon listens at {path}" in capsys.readouterr().err
    with in_a_thread(Daemon(path, refusal(None, wire.DENIED, "not for you"))):
        assert main(["--once", "--socket", str(path)]) == 4
    foreign = notification(hello(protocol=wire.Protocol(major=2, minor=0)))
    with in_a_thread(Daemon(path, foreign)):
        assert main(["--once", "--socket", str(path)]) == 1
    assert "version 2.0" in capsys.readouterr().err


def test_once_shows_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(short(tmp_path / "tape"))
    assert main(["--once", "--replay", file, "--at", "end"]) == 0
    assert "oldest 50 s" in capsys.readouterr().out
    assert main(["--once", "--replay", file, "--at", "12"]) == 0
    assert "oldest 30 s" in capsys.readouterr().out


def test_a_terminal_without_unicode_gets_ascii(tmp_path: Path) -> None:
    file = short(tmp_path / "tape")
    run = subprocess.run(
        [
            *(sys.executable, "-c", "import sys; from ds4d_tui.app import main; sys.exit(main())"),
            *("--once", "--replay", str(file), "--at", "end"),
        ],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        check=True,
    )
    told = run.stdout.decode("ascii")
    assert "READY" in told and "####" in told and "?" not in told


def test_once_tells_when_its_output_goes_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(short(tmp_path / "tape"))
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--once", "--replay", file]) == 1
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--once", "--replay", file]) == 1
    assert capsys.readouterr().err == (
        "ds4top: the picture cannot be printed: No space left on device\n"
        "ds4top: there is no stdout to print to\n"
    )


class Broken(Replay):
    """A source with a fault in it."""

    async def run(self, tell: Any) -> None:
        raise KeyError("sub")


async def test_a_fault_ends_the_app(tmp_path: Path) -> None:
    app = Ds4Top(Broken(short(tmp_path / "tape")))
    with pytest.raises(WorkerFailed):
        async with app.run_test():
            pass
    assert isinstance(app.fault, KeyError)
    assert app.return_code == 1


def test_a_fault_is_a_sentence_that_says_where_its_traceback_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object) -> int:
        raise KeyError("sub")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(once, "main", fault)
    assert main(["--once"]) == 1
    (kept,) = tmp_path.glob("ds4top-crash-*.txt")
    assert "in fault" in kept.read_text("utf-8")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert capsys.readouterr().err == (
        f"ds4top: a fault in ds4top ended it: KeyError: 'sub'; its traceback is in {kept}\n"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert main(["--once"]) == 1
    assert "could not be kept: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--hz", "11"], "argument --hz: expected 0.2 to 10, got '11'"),
        (["--hz", "nan"], "argument --hz: expected 0.2 to 10, got 'nan'"),
        (["--at", "soon", "--replay", "f"], "argument --at: expected seconds or `end`, got 'soon'"),
        (["--at", "end"], "--at and --speed are for --replay"),
        (["--speed", "2"], "--at and --speed are for --replay"),
        (["--replay", "f", "--record", "g"], "--replay needs no daemon"),
        (["--once", "--record", "g"], "there is nothing to --record"),
        (["--theme", "pink"], "argument --theme: invalid choice: 'pink'"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        ([], "it needs a terminal (stdin, stderr): --once prints a picture"),
    ],
)
def test_wrong_arguments_get_one_sentence(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert why in error and error.startswith("ds4top: ") and error.count("\n") == 1


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for action in parser()._actions:
        assert action.option_strings[-1] in out
        assert action.help


def test_an_unreadable_recording_ends_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--once", "--replay", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == (
        f"ds4top: cannot read {tmp_path / 'none'}: No such file or directory\n"
    )


def test_a_line_that_cannot_be_read_is_garbled() -> None:
    for raw in (b"", b"[]", b'{"jsonrpc":"2.0","method":"hello","params":3}', b'{"id":{}}'):
        with pytest.raises(Garbled):
            Feed(2.0).line(raw, 0.0)


def test_the_plain_picture_names_what_it_leaves_out() -> None:
    update = busy(1.0)
    feed = Feed(2.0)
    feed.line(
        notification(
            wire.Update(
                sub=1, seq=1, at=0.0, status=update.status, sessions=update.sessions, n_sessions=500
            )
        ),
        0.0,
    )
    assert once.picture(feed.view(), 0.0, 120, "live", []).endswith(" and 480 more\n")


def test_of_the_project_it_knows_only_the_wire() -> None:
    """And of others only Textual and msgspec."""
    named = {
        name
        for path in Path(ds4d_tui.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in _imports(node)
    }
    outside = {name for name in named if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in outside} == {"ds4d", "ds4d_tui", "msgspec", "textual"}
    assert {name for name in outside if name.split(".")[0] == "ds4d"} == {"ds4d.wire"}


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        return inner if node.module == "ds4d" else [node.module or ""]
    return []
