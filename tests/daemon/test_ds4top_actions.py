"""ds4top acts: a question first, then exactly one call; and it outlives the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from ds4d import wire
from ds4d_tui.app import Ds4Top
from ds4d_tui.client import Client
from ds4d_tui.feed import MISSED_S
from tests.daemon.ds4top_daemon import Daemon, busy, hello, log_line, notification, status
from tests.daemon.ds4top_screen import SMALL, ids, press, text, until, until_shown, watching

if TYPE_CHECKING:
    from pathlib import Path

MONITOR = notification(hello(role="monitor"))


# Actions: a question first, then exactly one call


@pytest.mark.parametrize(
    ("keys", "question", "call"),
    [
        (["d"], "drain the daemon?", ("drain", {"deadline_s": None, "stop": False})),
        (
            ["c"],
            "cancel this request?",
            ("request.cancel", {"request": "req_78dde6e5fd29f057ce73018173b720d4"}),
        ),
        (["x"], "close session 4?", ("session.close", {"id": 4, "force": True})),
        (["end", "x"], "close session 52?", ("session.close", {"id": 52, "force": False})),
    ],
)
async def test_an_action_is_asked_about_and_sent_once(
    tmp_path: Path, keys: list[str], question: str, call: tuple[str, dict[str, Any]]
) -> None:
    answers = {"drain": wire.Op(op="drain-1", kind="drain")}
    async with watching(tmp_path, **answers) as (daemon, pilot):
        await press(pilot, *keys)
        await until_shown(pilot, question)
        await press(pilot, "enter")  # which alone changes nothing
        await until(pilot, lambda: question not in text(pilot.app))
        await press(pilot, *keys)
        await until_shown(pilot, question)
        assert daemon.calls == []
        await press(pilot, "y")
        await until(pilot, lambda: daemon.calls)
        assert daemon.calls == [call]


async def test_the_buttons_of_a_question_work(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, "c")
        await until_shown(pilot, "cancel this request?")
        await pilot.click("#no")
        for refuse in ("n", "escape", "q"):
            await until(pilot, lambda: "cancel this request?" not in text(pilot.app))
            await press(pilot, "c")
            await until_shown(pilot, "cancel this request?")
            await press(pilot, refuse)
        await until(pilot, lambda: "cancel this request?" not in text(pilot.app))
        assert daemon.calls == []
        await press(pilot, "c")
        await until_shown(pilot, "cancel this request?")
        await press(pilot, "left", "enter")
        await until(pilot, lambda: daemon.calls)
        await until_shown(pilot, "cancelled")


async def test_undrain_is_there_while_it_drains(tmp_path: Path) -> None:
    draining = wire.Update(sub=1, seq=1, at=0.0, status=status(state="draining"), sessions=[])
    async with watching(tmp_path, draining) as (daemon, pilot):
        await until_shown(pilot, "u undrain")
        assert "d drain" not in text(pilot.app)
        await press(pilot, "d")
        await until_shown(pilot, "it drains already")
        await press(pilot, "u")
        await until_shown(pilot, "take the drain back?")
        await press(pilot, "y")
        await until(pilot, lambda: daemon.calls == [("undrain", {})])
        await until_shown(pilot, "new requests are accepted again")
        daemon.tell(busy(31.0))
        await until_shown(pilot, "d drain")
        await press(pilot, "u")
        await until_shown(pilot, "it does not drain")


async def test_the_end_of_a_drain_is_told(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        news = {"op": "drain-1", "kind": "drain", "text": "2 running"}
        daemon.tell(wire.OpProgress(**news))
        done = wire.Done(text="drained: none was cut")
        daemon.tell(wire.OpProgress(**news, ended=True, result=done))
        await until_shown(pilot, "drained: none was cut")
        error = wire.Error(code=wire.DEADLINE, message="2 were cut at the deadline")
        daemon.tell(wire.OpProgress(**news, ended=True, error=error))
        await until_shown(pilot, "2 were cut at the deadline")


def change(key: str, old: str, new: str, when: Any = "now") -> wire.Change:
    return wire.Change(key=key, old=old, new=new, when=when)


async def test_a_reload_shows_what_would_change_before_it_asks(tmp_path: Path) -> None:
    applied = [change("sched.prefill_share", "0.8", "0.7")]
    plan = wire.Reloaded(dry_run=True, applied=applied, restart_required=[])
    async with watching(tmp_path, reload=plan) as (daemon, pilot):
        await press(pilot, "r")
        await until_shown(pilot, "reload the configuration?", "sched.prefill_share  0.8 → 0.7")
        assert [params["dry_run"] for _, params in daemon.calls] == [True]
        await press(pilot, "y")
        await until_shown(pilot, "changed: sched.prefill_share")
    assert [params for _, params in daemon.calls] == [
        {"dry_run": True, "allow_partial": False, "file": None},
        {"dry_run": False, "allow_partial": False, "file": None},
    ]


async def test_what_needs_a_restart_is_left_out_of_a_reload_and_said(tmp_path: Path) -> None:
    plan = wire.Reloaded(
        dry_run=True,
        applied=[change("api.send_stall_s", "60", "30", "next request")],
        restart_required=[change("model.path", '"a"', '"b"', "restart")],
    )
    async with watching(tmp_path, reload=plan) as (daemon, pilot):
        await press(pilot, "r")
        await until_shown(
            pilot,
            "60 → 30 (next request)",
            "needs a restart, and stays as it is:",
            'model.path  "a" → "b"',
        )
        await press(pilot, "y")
        await until(pilot, lambda: len(daemon.calls) == 2)
        assert daemon.calls[1][1]["allow_partial"] is True


async def test_a_reload_that_only_a_restart_could_do_is_not_asked_about(tmp_path: Path) -> None:
    restart = [change("model.path", '"a"', '"b"', "restart")]
    plan = wire.Reloaded(dry_run=True, applied=[], restart_required=restart)
    async with watching(tmp_path, reload=plan) as (daemon, pilot):
        await press(pilot, "r")
        await until_shown(pilot, "reload: needs a restart", "model.path")
        await press(pilot, "escape")
        daemon.answers["reload"] = wire.Reloaded(dry_run=True, applied=[], restart_required=[])
        await press(pilot, "r")
        await until_shown(pilot, "nothing would change")
    assert all(params["dry_run"] for _, params in daemon.calls)


async def test_what_is_wrong_in_the_files_is_listed(tmp_path: Path) -> None:
    problems = [{"where": "ds4d.toml:12", "key": "lanes.max", "message": "expected 1 to 64"}]
    wrong = (wire.CONFIG_INVALID, "ds4d.toml:12: lanes.max: expected 1 to 64", problems)
    async with watching(tmp_path, reload=wrong) as (_, pilot):
        await press(pilot, "r")
        await until_shown(pilot, "reload: not done", "ds4d.toml:12  lanes.max  expected 1 to 64")
        assert text(pilot.app).count("lanes.max") == 1
        await press(pilot, "enter")
        await until(pilot, lambda: "not done" not in text(pilot.app))


async def test_an_action_that_fails_tells_why(tmp_path: Path) -> None:
    busy_with = (wire.BUSY, "session 52 answers a request: use [/force]")
    async with watching(tmp_path, **{"session.close": busy_with}) as (_, pilot):
        await press(pilot, "end", "x")
        await until_shown(pilot, "close session 52?")
        await press(pilot, "y")
        await until_shown(pilot, "close: not done", "session 52 answers a request: use [/force]")


async def test_what_cannot_be_acted_on_is_explained(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, "end", "c")
        await until_shown(pilot, "no request works under the cursor")
        await press(pilot, "home", *["down"] * 5, "x")
        await until_shown(pilot, "no session is there yet")
    assert daemon.calls == []


async def test_notifications_do_not_lie_over_a_question(tmp_path: Path) -> None:
    async with watching(tmp_path) as (_, pilot):
        pilot.app.notify("something that has happened", timeout=60)
        await until_shown(pilot, "something that has happened")
        await press(pilot, "d")
        await until_shown(pilot, "drain the daemon?")
        await until(pilot, lambda: "something that has happened" not in text(pilot.app))


async def test_a_daemon_that_goes_before_it_answers_leaves_an_error(tmp_path: Path) -> None:
    answers: dict[str, Any] = {"request.cancel": None}
    async with watching(tmp_path, **answers) as (daemon, pilot):
        await press(pilot, "c")
        await until_shown(pilot, "cancel this request?")
        await press(pilot, "y")
        await until(pilot, lambda: daemon.calls)
        daemon.hang_up()
        await until_shown(pilot, "the connection was lost before the answer")


async def test_on_the_monitor_socket_nothing_can_be_changed_and_it_says_why(
    tmp_path: Path,
) -> None:
    no_log = {"log": (wire.DENIED, "the topic log needs the role admin")}
    async with watching(tmp_path, greeting=MONITOR, subscribe=no_log) as (daemon, pilot):
        await until_shown(pilot, "● read-only 10 Hz", "log · the topic log needs the role admin")
        for key, name in (("d", "drain"), ("r", "reload"), ("c", "cancel"), ("x", "close")):
            await press(pilot, key)
            await until_shown(pilot, f"cannot {name}:", "read-only monitor socket")
            pilot.app.clear_notifications()
            assert len(pilot.app.screen_stack) == 1
    assert daemon.calls == []


# The connection


async def test_a_restart_of_the_daemon_is_outlived(tmp_path: Path) -> None:
    first = msgspec.structs.replace(busy(30.0), log=[log_line(7, text="before.it")])
    async with watching(tmp_path, first) as (daemon, pilot):
        await daemon.__aexit__()
        await until_shown(pilot, "✖ lost", "✖ no daemon listens at", "trying")
        assert pilot.app.screen.has_class("-stale")
        assert ids(pilot)[0] == 4  # what was known is still there
        await press(pilot, "d")
        await until_shown(pilot, "there is no connection to the daemon now")
        pilot.app.clear_notifications()
        again = Daemon(daemon.path, notification(hello(boot="1b2c", pid=4800)))
        again.tell(
            wire.Update(
                sub=1,
                seq=1,
                at=0.0,
                status=status(uptime_s=2.0),
                sessions=[],
                log=[log_line(1, text="after.it")],
            )
        )
        async with again:
            await until_shown(pilot, "live 10 Hz", "up 2 s", "after.it")
            assert "the daemon was started anew: pid 4800" in text(pilot.app)
            assert "trying again" not in text(pilot.app)


async def test_data_that_stops_coming_goes_stale_and_comes_back(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        source = pilot.app._source
        now = source.clock()
        source.clock = lambda: now + 7.0
        await until_shown(pilot, "◌ stale 7 s")
        assert pilot.app.screen.has_class("-stale")
        daemon.tell(busy(31.0))
        await until_shown(pilot, "● live 10 Hz")
        assert not pilot.app.screen.has_class("-stale")


async def test_updates_that_the_daemon_left_out_are_counted_for_a_while(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        for n_dropped in (3, 9):
            daemon.tell(msgspec.structs.replace(busy(31.0), dropped=n_dropped))
        await until_shown(pilot, "● live 10 Hz ▲ 12 missed")
        source = pilot.app._source
        now = source.clock() + MISSED_S
        source.clock = lambda: now
        await until(pilot, lambda: "missed" not in text(pilot.app))


async def test_another_major_version_ends_it_with_a_sentence(tmp_path: Path) -> None:
    foreign = notification(hello(protocol=wire.Protocol(major=2, minor=0)))
    async with Daemon(tmp_path / "control.sock", foreign) as daemon:
        app = Ds4Top(Client([daemon.path], 10.0))
        async with app.run_test(size=SMALL, notifications=True) as pilot:
            await until(pilot, lambda: app.last_words)
    assert "speaks version 2.0 of the protocol and this ds4top 1.0" in app.last_words
    assert app.return_code == 1
    assert daemon.n_connections == 1


async def test_it_waits_for_a_daemon_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    app = Ds4Top(Client([path], 10.0))
    async with app.run_test(size=SMALL, notifications=True) as pilot:
        await until_shown(pilot, "no daemon listens at")
        daemon = Daemon(path)
        daemon.tell(busy(30.0))
        async with daemon:
            await until_shown(pilot, "READY", "live 10 Hz")
