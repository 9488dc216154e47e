"""ds4top with hands and eyes: keys pressed, the screen read, a scripted daemon on a real socket."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import msgspec
import pytest
from textual.widgets import Input

from ds4d import wire
from ds4d_tui import columns
from ds4d_tui.app import PANES
from ds4d_tui.colours import THEMES
from ds4d_tui.log import Tail
from ds4d_tui.sessions import Header, Sessions, Table
from tests.daemon import ds4top_daemon as scripted
from tests.daemon.ds4top_daemon import busy, hello, log_line, notification, status
from tests.daemon.ds4top_screen import (
    LARGE,
    SMALL,
    ids,
    press,
    still,
    text,
    under_cursor,
    until,
    until_shown,
    watching,
)

if TYPE_CHECKING:
    from pathlib import Path

    from textual.pilot import Pilot


async def type_filter(pilot: Pilot[None], typed: str) -> None:
    await press(pilot, "slash")
    assert isinstance(pilot.app.focused, Input)
    await pilot.press(typed[0])  # with its character, which `press` leaves out
    pilot.app.focused.value = typed
    await pilot.pause(0)


def header(pilot: Pilot[None]) -> str:
    return pilot.app.query_one(Header).render().plain


# The picture


async def test_the_overview_tells_state_model_rates_lanes_queue_and_memory(tmp_path: Path) -> None:
    async with watching(tmp_path) as (_, pilot):
        await until_shown(
            pilot,
            *("READY", "ds4-tiny", "127.0.0.1:30007", "up 3d 04h", "0.1.0"),
            *("25 tok/s", "133 tok/s", "■■■■ 4/4", "queue 3/32", "oldest 50 s"),
            *("6.82 GiB of 8.00 GiB", "weights 4.1G", "promised 90", "available 5.20 GiB"),
            *("to promise 3.14 GiB", "swap 0", "psi 0.0 %", "4 at work · 3 waiting · 13 idle"),
        )


async def test_a_session_tells_how_far_it_is_and_what_it_waits_for() -> None:
    async with still() as pilot:
        rows = {line.split()[0]: line for line in text(pilot.app).splitlines() if line.strip()}
    assert "━" in rows["17"] and " 15 s " in rows["17"]  # of its prompt, and until it is read
    assert "1.62k/4.10k" in rows["4"]
    assert "for a lane ~8 s" in rows["9"]
    assert "for 1m 10s" in rows["40"]


async def test_a_wide_screen_has_more_columns_and_graphs() -> None:
    async with still(SMALL) as pilot:
        narrow = header(pilot)
    async with still(LARGE) as pilot:
        wide = header(pilot)
        assert "peak" in text(pilot.app)
    assert {"trend", "tokens", "pages", "idle"} <= set(wide.split())
    assert not {"trend", "tokens", "pages", "idle"} & set(narrow.split())


async def test_the_layout_follows_the_size_of_the_terminal() -> None:
    async with still(SMALL) as pilot:
        await pilot.resize_terminal(*LARGE)
        await until(pilot, lambda: "trend" in header(pilot) and "peak" in text(pilot.app))
        await pilot.resize_terminal(60, 20)
        await until(pilot, lambda: "cached" not in header(pilot))
        assert "state" in header(pilot)


async def test_reasons_come_with_their_remedies(tmp_path: Path) -> None:
    reason = wire.Reason(code="swap", text="12 MiB are in swap", remedy="lower lanes.max")
    update = wire.Update(
        sub=1, seq=1, at=0.0, status=status(state="degraded", reasons=[reason]), sessions=[]
    )
    async with watching(tmp_path, update) as (_, pilot):
        await until_shown(pilot, "DEGRADED", "▲ 12 MiB are in swap → lower lanes.max")


async def test_loading_and_draining_tell_how_far_they_are(tmp_path: Path) -> None:
    loading = wire.Loading(what="weights", fraction=0.43, since_s=12.0)
    update = wire.Update(
        sub=1,
        seq=1,
        at=0.0,
        status=status(
            state="loading", loading=loading, model=None, lanes=None, rates=None, memory=None
        ),
        sessions=[],
    )
    async with watching(tmp_path, update) as (daemon, pilot):
        await until_shown(pilot, "LOADING", "loading weights", "43 %  12 s")
        drain = wire.Drain(n_running=3, n_queued=2, left_s=87.0)
        daemon.tell(wire.Update(sub=1, seq=2, at=0.0, status=status(state="draining", drain=drain)))
        await until_shown(
            pilot, "DRAINING", "◆ draining: 3 requests running, 2 queued, 1m 27s left  u takes"
        )
        reason = wire.Reason(code="stopping", text="it is shutting down")
        stopping = status(state="stopping", drain=drain, reasons=[reason])
        daemon.tell(wire.Update(sub=1, seq=3, at=0.0, status=stopping))
        await until_shown(pilot, "STOPPING", "◆ shutting down: 3 requests running")
        assert "▲" not in text(pilot.app).splitlines()[2]  # the reason says no more than that
        await daemon.__aexit__()
        await until_shown(pilot, "✖ lost")
        assert "shutting down" not in text(pilot.app)  # which is over, or cannot be known


async def test_a_failed_reload_is_told(tmp_path: Path) -> None:
    reload = wire.Reload(at=0.0, ok=False, text="ds4d.toml:12: lanes.max is 99")
    update = wire.Update(sub=1, seq=1, at=0.0, status=status(reload=reload), sessions=[])
    async with watching(tmp_path, update) as (_, pilot):
        await until_shown(pilot, "the last reload failed: ds4d.toml:12: lanes.max is 99")


async def test_with_no_sessions_it_says_where_clients_find_it(tmp_path: Path) -> None:
    async with watching(tmp_path, scripted.quiet(1.0)) as (_, pilot):
        await until_shown(pilot, "no sessions: clients find it at http://127.0.0.1:30007")
        assert under_cursor(pilot) is None
        await press(pilot, "down", "pageup", "end", "c", "x", "y")
        await until_shown(pilot, "no session is under the cursor")


# The table


async def test_it_sorts_by_any_column_and_back() -> None:
    async with still(LARGE) as pilot:
        names = [column.name for column in columns.COLUMNS]
        for name in [*names[3:], *names[:3]]:  # it begins with the third, the state
            await press(pilot, "greater_than_sign")
            assert re.search(f"[▲▼]{name}|{name}[▲▼]", header(pilot)), name
        await press(pilot, "less_than_sign")
        assert "lane" in header(pilot).split("▲")[1]


async def test_the_order_is_that_of_the_column_and_can_be_inverted() -> None:
    async with still() as pilot:
        assert ids(pilot)[:4] == [4, 7, 12, 17]  # by lane
        await press(pilot, "i")
        assert ids(pilot)[-4:] == [17, 12, 7, 4]
        await press(pilot, "less_than_sign", "less_than_sign")  # lane, id
        assert ids(pilot)[:5] == [4, 7, 9, 12, 17]
        await press(pilot, "i")
        assert ids(pilot)[:3] == [52, 51, 50]


async def test_a_click_on_a_name_sorts_and_a_second_one_inverts() -> None:
    async with still() as pilot:
        at = header(pilot).index("prompt") + 2
        await pilot.click(Header, offset=(at, 0))
        assert "▼prompt" in header(pilot)
        assert ids(pilot)[:3] == [17, 12, 7]
        await pilot.click(Header, offset=(at, 0))
        assert "▲prompt" in header(pilot)
        assert ids(pilot)[0] == 40


async def test_what_a_column_does_not_know_comes_last_in_either_direction() -> None:
    sessions = scripted.working(0.0) + scripted.resting(0.0, 3)
    rate = next(column for column in columns.COLUMNS if column.name == "tok/s")
    for falls in (True, False):
        order = columns.ordered(sessions, columns.Sort(rate, falls))
        assert [s.phase for s in order[-3:]] == ["idle"] * 3
        assert (order[0].id == 17) is falls


async def test_the_cursor_stays_on_its_session_while_rows_move(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, "down", "down", "down")
        assert under_cursor(pilot) == 17
        assert "session 17 ·" in text(pilot.app)
        await press(pilot, "less_than_sign", "less_than_sign", "i")  # by id, falling
        assert under_cursor(pilot) == 17
        update = busy(31.0)
        assert update.sessions is not None
        fewer = [s for s in update.sessions if s.id not in (4, 7, 50)]
        daemon.tell(msgspec.structs.replace(update, sessions=fewer))
        await until(pilot, lambda: 50 not in ids(pilot))
        assert under_cursor(pilot) == 17


async def test_on_the_first_row_the_cursor_stays_on_the_first_row(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, "down", "up")
        assert under_cursor(pilot) == 4
        update = busy(31.0)
        assert update.sessions is not None
        daemon.tell(msgspec.structs.replace(update, sessions=update.sessions[1:]))
        await until(pilot, lambda: under_cursor(pilot) == 7)
        daemon.tell(update)
        await until(pilot, lambda: under_cursor(pilot) == 4)


async def test_the_cursor_follows_a_turn_into_its_session(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, *["down"] * 5)
        waiting = pilot.app.query_one(Sessions).target
        assert waiting is not None and waiting.id is None
        update = busy(31.0)
        assert update.sessions is not None
        seated = [
            msgspec.convert(msgspec.to_builtins(s) | {"id": 99, "phase": "prefill"}, type(s))
            if s.request == waiting.request
            else s
            for s in update.sessions
        ]
        daemon.tell(msgspec.structs.replace(update, sessions=seated))
        await until(pilot, lambda: under_cursor(pilot) == 99)


async def test_when_its_session_goes_the_cursor_stays_where_it_was(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, "down")
        update = busy(31.0)
        assert update.sessions is not None
        gone = [s for s in update.sessions if s.id != 7]
        daemon.tell(msgspec.structs.replace(update, sessions=gone))
        await until(pilot, lambda: under_cursor(pilot) == 12)
        daemon.tell(msgspec.structs.replace(update, sessions=gone[:1]))
        await until(pilot, lambda: under_cursor(pilot) == 4)


async def test_keys_and_mouse_move_the_cursor() -> None:
    async with still() as pilot:
        seen = []
        for key in ("j", "j", "k", "end", "up", "home", "pagedown", "pageup", "G", "g"):
            await press(pilot, key)
            seen.append(under_cursor(pilot))
        assert seen == [7, 12, 7, 52, 51, 4, 41, 4, 52, 4]
        await pilot.click(Table, offset=(5, 3))
        assert under_cursor(pilot) == 17
        await press(pilot, "end")
        assert "39m 10s" in text(pilot.app)  # it has scrolled


async def test_a_filter_narrows_as_it_is_typed_and_esc_takes_it_back() -> None:
    async with still() as pilot:
        await type_filter(pilot, "idle")
        assert "13 match /idle" in text(pilot.app)
        assert "queued" not in text(pilot.app).split("match")[1]
        await press(pilot, "enter")
        assert isinstance(pilot.app.focused, Table)
        await until_shown(pilot, "esc clear filter")
        await press(pilot, "down")
        assert under_cursor(pilot) == 41
        await press(pilot, "escape")
        assert "match" not in text(pilot.app)
        assert len(ids(pilot)) == 20
        await type_filter(pilot, "nothing-like-it")
        assert "nothing matches the filter" in text(pilot.app)
        await press(pilot, "escape")
        assert not pilot.app.query_one(Input).value


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("17", {17}),  # and not 4, whose label has it in the middle
        ("78DDE", {4}),
        ("req_78dde6", {4}),
        ("lane2", {12}),
        ("DECODE lane0", {4}),
        ("memory", {None}),
        ("[bold]", set()),
    ],
)
async def test_a_filter_knows_ids_lanes_states_and_labels(
    typed: str, found: set[int | None]
) -> None:
    sessions = [*scripted.working(0.0), *scripted.waiting(0.0)]
    words = typed.casefold().split()
    assert {s.id for s in sessions if columns.matches(s, words)} == found


# Pause, panes, themes, keys, log


async def test_a_pause_freezes_the_picture_and_data_goes_on(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        await press(pilot, "space")
        assert "❚❚ paused" in text(pilot.app)
        frozen = text(pilot.app)
        n = pilot.app._source.feed.n_updates
        daemon.tell(busy(60.0))
        await until(pilot, lambda: pilot.app._source.feed.n_updates > n)
        await pilot.pause(0.6)  # more than a tick
        assert text(pilot.app) == frozen
        await press(pilot, "greater_than_sign")  # what is there can be looked at
        assert "request▲" in text(pilot.app)
        await press(pilot, "space")
        await until_shown(pilot, "oldest 1m 20s", "live 10 Hz")


async def test_a_number_hides_a_pane_and_shows_it_again() -> None:
    async with still() as pilot:
        for i, pane in enumerate(PANES, 1):
            widget = pilot.app.query_one(pane)
            await press(pilot, str(i))
            assert not widget.display
        await press(pilot, "4")
        assert pilot.app.query_one(PANES[3]).region.height > 15  # it has all the room
        await press(pilot, "1", "2", "3")
        assert "oldest 50 s" in text(pilot.app)
        assert ids(pilot)[0] == 4


async def test_t_goes_round_the_themes() -> None:
    async with still() as pilot:
        seen = [pilot.app.theme]
        for _ in THEMES:
            await press(pilot, "t")
            await pilot.pause()
            seen.append(pilot.app.theme)
            assert "READY" in text(pilot.app)
        assert seen == [*THEMES, THEMES[0]]


async def test_the_keys_are_listed() -> None:
    async with still(LARGE) as pilot:
        await press(pilot, "question_mark")
        seen = text(pilot.app)
        for told in ("pause", "drain", "Refuse".lower(), "filter", "theme", "sort"):
            assert told in seen
        assert "prefill" in seen and "reused, computed" in seen
        await press(pilot, "escape")
        assert "reused, computed" not in text(pilot.app)


async def test_q_and_ctrl_c_quit_from_anywhere() -> None:
    for keys in (["q"], ["d", "ctrl+c"]):
        async with still() as pilot:
            await press(pilot, *keys)
            await until(pilot, lambda pilot=pilot: not pilot.app._running or pilot.app._exit)


async def test_a_signal_ends_it_with_the_terminal_as_it_was() -> None:
    async with still() as pilot:
        os.kill(os.getpid(), signal.SIGTERM)
        await until(pilot, lambda: not pilot.app._running or pilot.app._exit)
    assert pilot.app.return_code == 143


async def test_the_log_follows_until_it_is_held(tmp_path: Path) -> None:
    first = msgspec.structs.replace(busy(30.0), log=[log_line(n) for n in range(1, 30)])
    async with watching(tmp_path, first) as (daemon, pilot):
        await until_shown(pilot, "11:00:29")

        def tell(*lines: wire.LogLine) -> None:
            daemon.tell(wire.Update(sub=1, seq=2, at=0.0, log=list(lines)))

        tell(log_line(30, "error", "engine.stalled s=61"))
        await until_shown(pilot, "✖ engine.stalled s=61")
        await press(pilot, "f")
        tell(log_line(31, text="later.line"), log_line(32, text="later.line"))
        await until_shown(pilot, "log · held, 2 new")
        assert "later.line" not in text(pilot.app)
        await press(pilot, "f")
        await until_shown(pilot, "later.line")
        assert "held" not in text(pilot.app)
        pilot.app.query_one(Tail).focus()
        await press(pilot, "up", "up")
        tell(log_line(33, text="even.later"))
        await until_shown(pilot, "log · held, 1 new")
        await press(pilot, "down", "down")
        tell(log_line(34, text="even.later"))
        await until_shown(pilot, "11:00:34")


async def test_lower_levels_can_be_left_out_of_the_log(tmp_path: Path) -> None:
    lines = [log_line(1, "debug", "a.b"), log_line(2, "info", "c.d"), log_line(3, "error", "e.f")]
    first = msgspec.structs.replace(busy(30.0), log=lines)
    async with watching(tmp_path, first) as (_, pilot):
        await until_shown(pilot, "a.b", "c.d", "e.f")
        await press(pilot, "v", "v")
        assert "log · warning and above" in text(pilot.app)
        assert "a.b" not in text(pilot.app) and "c.d" not in text(pilot.app)
        await press(pilot, "v", "v")
        assert "a.b" in text(pilot.app)


async def test_a_held_log_stays_where_it_is(tmp_path: Path) -> None:
    first = msgspec.structs.replace(busy(30.0), log=[log_line(n) for n in range(1, 30)])
    async with watching(tmp_path, first) as (daemon, pilot):
        await until_shown(pilot, "11:00:29")
        await press(pilot, "f", "v")
        late = wire.LogLine(seq=1, at=1e300, level="info", text="of.another.world")
        daemon.tell(notification(hello(boot="new")), wire.Update(sub=1, seq=2, at=0.0, log=[late]))
        await until_shown(pilot, "log · info and above · held, 2 new")
        assert "11:00:29" in text(pilot.app)
        await press(pilot, "f")
        await until_shown(pilot, "--:--:--   of.another.world")


async def test_any_size_of_terminal_will_do() -> None:
    async with still((1, 1)) as pilot:
        for size in ((10, 3), (200, 60), (30, 8), (2, 2)):
            await press(pilot, "down", "slash", "escape", "question_mark", "escape")
            await pilot.resize_terminal(*size)
        assert under_cursor(pilot) == 9


async def test_long_lines_of_the_log_scroll_sideways(tmp_path: Path) -> None:
    line = log_line(1, text=f"a.b text={'x' * 90} end=here")
    async with watching(tmp_path, msgspec.structs.replace(busy(30.0), log=[line])) as (_, pilot):
        await until_shown(pilot, "a.b")
        assert "end=here" not in text(pilot.app)
        pilot.app.query_one(Tail).focus()
        await press(pilot, "right", "right", "right", "right")
        assert "end=here" in text(pilot.app)
        await press(pilot, *["left"] * 4)
        assert "a.b" in text(pilot.app)


async def test_lines_that_did_not_arrive_are_told_and_none_comes_twice(tmp_path: Path) -> None:
    first = msgspec.structs.replace(busy(30.0), log=[log_line(1, text="one")])
    async with watching(tmp_path, first) as (daemon, pilot):
        lines = [log_line(1, text="one"), log_line(5, text="five")]
        daemon.tell(wire.Update(sub=1, seq=2, at=0.0, log=lines))
        await until_shown(pilot, "five", "3 lines are missing here")
        assert text(pilot.app).count(" one") == 1


async def test_a_label_is_copied_for_the_terminal() -> None:
    async with still() as pilot:
        await press(pilot, "y")
        await until_shown(pilot, "copied")
        assert pilot.app.clipboard == "req_78dde6e5fd29f057ce73018173b720d4"


# What it costs


async def test_a_burst_of_updates_is_one_repaint(tmp_path: Path) -> None:
    async with watching(tmp_path) as (daemon, pilot):
        shown = []
        sessions = pilot.app.query_one(Sessions)
        show = sessions.show
        sessions.show = lambda view, now: (shown.append(view), show(view, now))
        daemon.tell(*(busy(31.0 + n) for n in range(100)))
        await until_shown(pilot, "oldest 2m 30s")
        assert len(shown) < 20


async def test_only_lines_that_changed_are_painted() -> None:
    async with still() as pilot:
        table = pilot.app.query_one(Table)
        painted: list[int] = []
        render = table.render_line
        table.render_line = lambda y: (painted.append(y), render(y))[1]
        source = pilot.app._source
        update = busy(30.0)
        assert update.sessions is not None
        moved = update.sessions[2]
        other = msgspec.convert(
            msgspec.to_builtins(moved) | {"n_generated": moved.n_generated + 400}, type(moved)
        )
        sessions = [other if s is moved else s for s in update.sessions]
        source.feed.line(
            notification(msgspec.structs.replace(update, sessions=sessions, log=[])), 30.0
        )
        pilot.app.on_frame()
        await pilot.pause()
        assert set(painted) == {2}
