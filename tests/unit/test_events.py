"""Log lines: their form in the journal, on a terminal and in a file; numbers without a gap."""

from __future__ import annotations

import io
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ds4d import events
from ds4d.events import emit

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("ds4d.test")


class Failing(io.StringIO):
    """A stream that refuses its lines while `full`."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def out() -> Failing:
    stream = Failing()
    events.configure("debug", stream, journal=True)
    return stream


@pytest.fixture(autouse=True)
def levels_as_they_were() -> Iterator[None]:
    last_resort = logging.lastResort
    yield
    log.setLevel(logging.NOTSET)
    logging.lastResort = last_resort


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r" seq=(\d+)", text)]


def test_a_line_in_the_journal_has_its_priority_its_number_and_no_clock(out: Failing) -> None:
    last = numbers(_one(out))[0]
    emit(log, "kv.store", session=17, ms=41.25, reason="park", shared=True, note=None)
    emit(log, "daemon.state", level=logging.ERROR, state="failed")
    emit(log, "lane.state", level=logging.WARNING, lane=0)
    emit(log, "prefill.chunk", level=logging.DEBUG, to=0)
    boot = f"boot={events.BOOT}"
    assert out.getvalue().splitlines()[1:] == [
        f"<6>kv.store session=17 ms=41.25 reason=park shared=yes seq={last + 1} {boot}",
        f"<3>daemon.state state=failed seq={last + 2} {boot}",
        f"<4>lane.state lane=0 seq={last + 3} {boot}",
        f"<7>prefill.chunk to=0 seq={last + 4} {boot}",
    ]


def _one(out: Failing) -> str:
    emit(log, "test.first")
    return out.getvalue()


def test_a_line_in_a_file_has_the_time_with_its_zone_and_the_level() -> None:
    stream = io.StringIO()
    events.configure(stream=stream)
    emit(log, "lane.state", lane=1)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d INFO lane\.state lane=1"
        rf" seq=\d+ boot={events.BOOT}\n",
        stream.getvalue(),
    )


def test_a_terminal_gets_colour_and_is_spared_the_numbers() -> None:
    stream = Terminal()
    events.configure(stream=stream)
    emit(log, "lane.state", lane=1)
    emit(log, "lane.state", level=logging.ERROR, lane=2)
    events.tell("Try this:")
    plain, red, told = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO lane\.state lane=1", plain)
    assert re.fullmatch(r"\x1b\[31m\d\d:\d\d:\d\d ERROR lane\.state lane=2\x1b\[0m", red)
    assert told == "Try this:"


def test_nobody_is_told_anything_where_the_log_is_no_terminal(out: Failing) -> None:
    events.tell("Try this:")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("two\nlines", r'"two\nlines"'),
        ("back\\slash", r'"back\\slash"'),
        ("", '""'),
        ("Zürich", "Zürich"),
        ("\x1b[31m", r'"\x1b[31m"'),
        ("\udc80", r'"\udc80"'),
        (1e-7, "1e-07"),
        (0, "0"),
        (False, "no"),
    ],
)
def test_a_value_can_neither_break_the_line_nor_pass_for_another_field(
    out: Failing, value: str | float | bool, written: str
) -> None:
    emit(log, "x", v=value)
    assert out.getvalue().startswith(f"<6>x v={written} seq=")
    assert out.getvalue().count("\n") == 1


def test_a_value_of_any_length_leaves_a_line_that_journald_does_not_split(out: Failing) -> None:
    emit(log, "request.error", reason="é\n" * 1_000_000)
    assert len(out.getvalue().encode()) < 48 * 1024
    assert re.search(r'\\u2026" seq=\d+ boot=\w+\n$', out.getvalue())


def test_lines_of_many_threads_are_numbered_in_the_order_in_which_they_are_written(
    out: Failing,
) -> None:
    start = threading.Barrier(8)

    def talk(who: int) -> None:
        start.wait()
        for n in range(200):
            emit(log, "test.talk", who=who, n=n)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(talk, range(8)))
    seen = numbers(out.getvalue())
    assert seen == list(range(seen[0], seen[0] + 1600))


def test_a_level_that_is_off_uses_up_no_number(out: Failing) -> None:
    events.configure("info", out, journal=True)
    for level in (logging.INFO, logging.DEBUG, logging.INFO):
        emit(log, "x", level=level)
    first, second = numbers(out.getvalue())
    assert second == first + 1


def test_lines_that_could_not_be_written_leave_a_gap_and_the_next_says_how_many(
    out: Failing,
) -> None:
    emit(log, "before")
    out.full = True
    emit(log, "lost", n=1)
    emit(log, "lost", n=2)
    out.full = False
    emit(log, "after")
    emit(log, "later")
    before, after, later = out.getvalue().splitlines()
    assert numbers(after)[0] - numbers(before)[0] == 3
    assert after.endswith(" dropped=2")
    assert "dropped" not in later


def test_a_line_that_could_not_be_written_is_still_known_to_who_subscribed(out: Failing) -> None:
    emit(log, "before")
    last = events.recent()[-1].seq
    out.full = True
    emit(log, "lost", n=1)
    assert [line.text for line in events.since(last)] == ["lost n=1"]


def test_a_stream_that_was_closed_stops_nobody(out: Failing) -> None:
    out.close()
    emit(log, "into.the.void")
    assert events.recent()[-1].text == "into.the.void"


def test_the_last_lines_are_kept_and_no_more_than_those(out: Failing) -> None:
    for n in range(events.KEPT + 7):
        emit(log, "x", level=logging.WARNING, n=n)
    kept = events.recent()
    assert len(kept) == events.KEPT
    assert (kept[0].text, kept[-1].text, kept[-1].level) == ("x n=7", "x n=506", "warning")
    assert events.since(kept[-3].seq) == kept[-2:]
    assert events.since(kept[-1].seq) == events.since(kept[-1].seq + 10) == []
    assert events.since(kept[0].seq - 100) == kept
    assert abs(kept[-1].at - kept[0].at) < 60


@pytest.mark.parametrize("field", sorted(events.RESERVED))
def test_a_field_that_only_the_log_may_add_is_our_own_mistake(field: str) -> None:
    with pytest.raises(AssertionError, match="not the caller's"):
        emit(log, "x", **{field: 1})


def test_a_traceback_follows_line_by_line_and_cannot_pass_for_an_event(out: Failing) -> None:
    try:
        raise ValueError("one\ntwo \x1b[2J")
    except ValueError as error:
        log.debug("request.error", exc_info=error)
    first, *rest = out.getvalue().splitlines()
    assert re.fullmatch(rf"<7>request\.error seq=\d+ boot={events.BOOT}", first)
    assert all(line.startswith("<7>| ") for line in rest)
    assert rest[0] == "<7>| Traceback (most recent call last):"
    assert rest[-2:] == ["<7>| ValueError: one", r"<7>| two \x1b[2J"]


def test_what_other_libraries_warn_of_is_an_event_too(
    out: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = logging.getLogger("asyncio.test")
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    foreign.warning("Task %s\nwas lost", "t=1")
    foreign.info("not asked for")
    foreign.error("%d", "not a number")
    first, more, broken = out.getvalue().splitlines()
    assert first.startswith('<4>log.foreign logger=asyncio.test text="Task t=1" seq=')
    assert more == "<4>| was lost"
    assert broken.startswith('<3>log.foreign logger=asyncio.test text="cannot be formatted: ')


def test_a_logger_can_be_made_to_say_more_while_it_runs_and_put_back(out: Failing) -> None:
    events.configure("info", out, journal=True)
    assert events.set_level("ds4d.test", "debug") == "inherit"
    emit(log, "heard", level=logging.DEBUG)
    assert events.set_level("ds4d.test", "inherit") == "debug"
    emit(log, "unheard", level=logging.DEBUG)
    assert events.set_level("ds4d", "error") == "info"
    emit(log, "unheard", level=logging.WARNING)
    assert events.set_level("ds4d", "info") == "error"
    logging.getLogger("ds4d").setLevel(logging.NOTSET)  # as before `configure`
    assert events.set_level("ds4d", events.set_level("ds4d", "debug")) == "debug"
    assert re.findall(r"\w*heard", out.getvalue()) == ["heard"]


@pytest.mark.parametrize(
    ("logger", "level", "says"),
    [
        ("ds4d", "loud", "loud: no such log level; expected one of debug, info, warning, error"),
        ("ds4d.test", "INFO", "INFO: no such log level"),
        ("ds4d.tset", "info", r"ds4d.tset: no such logger; there are ds4d, .*ds4d\.test"),
        ("asyncio", "info", "asyncio: no such logger"),
        ("root", "info", "root: no such logger"),
        ("", "info", ": no such logger"),
    ],
)
def test_a_level_or_logger_that_does_not_exist_is_refused(
    logger: str, level: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        events.set_level(logger, level)
