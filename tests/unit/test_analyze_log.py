"""ops/scripts/analyze-log: what it makes of a log in every form, and of lines that are none."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds4d import events

SCRIPT = Path(__file__).parents[2] / "ops/scripts/analyze-log"
BOOT, NEXT = "0123456789ab", "12e456789012"  # the second is a number, read carelessly


def done(seq: int, boot: str = BOOT, **changes: Any) -> str:
    fields = {
        "req": f"req_{seq:032x}",
        "outcome": "stop",
        "prompt_tokens": 1000,
        "cached_tokens": 999,
        "generated_tokens": 50,
        "wait_ms": 1.5,
        "first_token_ms": 20,
        "total_ms": 100 * seq,
        "decode_tokens_per_s": 30,
    } | changes
    return line(seq, "request.done " + " ".join(f"{k}={v}" for k, v in fields.items()), boot)


def line(seq: int, text: str, boot: str = BOOT) -> str:
    return f"{text} seq={seq} boot={boot}"


DAY = [
    (0, line(1, "api.open host=127.0.0.1 port=30007")),
    (0, line(2, "daemon.state to=loading")),
    (12, line(3, "daemon.state from=loading to=ready")),
    (20, done(4)),
    (30, done(5, outcome="length", cached_tokens=0, decode_tokens_per_s=10)),
    (40, done(6, outcome="cancelled", cause="client", total_ms=9000)),
    (50, line(7, 'request.rejected request=req_1 status=429 reason="33 requests are waiting"')),
    (51, line(8, 'request.rejected request=req_2 status=429 reason="34 requests are waiting"')),
    (60, line(9, 'reload.result ok=no text="ds4d.toml:3: lanes.max: \\"x\\""')),
    (61, line(10, "reload.result ok=yes text=applied")),
    (65, line(11, 'daemon.watchdog reason="the engine has not moved for 61 s"')),
    (70, line(12, "drain.done how=drained requests=8")),
    (80, line(13, "daemon.signal signal=SIGTERM count=1")),
    (80, line(14, "daemon.state from=ready to=stopping")),
]


def short_iso(lines: list[tuple[int, str]], who: str = "python3") -> str:
    return "".join(
        f"2026-03-01T12:{s // 60:02}:{s % 60:02}+0000 host {who}[42]: {text}\n" for s, text in lines
    )


def as_json(lines: list[tuple[int, str]]) -> str:
    return "".join(
        json.dumps(
            {
                "MESSAGE": text,
                "__REALTIME_TIMESTAMP": str((1_772_366_400 + s) * 1_000_000),
                "SYSLOG_IDENTIFIER": "ds4d",
                "PRIORITY": "6",
            }
        )
        + "\n"
        for s, text in lines
    )


def a_file(lines: list[tuple[int, str]]) -> str:
    return "".join(
        f"2026-03-01T12:{s // 60:02}:{s % 60:02}.000+00:00 INFO {text}\n" for s, text in lines
    )


def cat(lines: list[tuple[int, str]]) -> str:
    return "".join(f"{text}\n" for _, text in lines)


def terminal(lines: list[tuple[int, str]]) -> str:
    return "".join(f"\x1b[33m12:00:{s:02} WARNING {text}\x1b[0m\n" for s, text in lines)


def run(text: str | bytes, *arguments: str, code: int = 0) -> str:
    raw = text.encode() if isinstance(text, str) else text
    ended = subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        input=raw,
        capture_output=True,
        check=False,
        env=os.environ | {"TZ": "UTC"},
    )
    assert ended.returncode == code, ended.stderr.decode()
    return (ended.stdout if code in (0, 1) else ended.stderr).decode()


def analysed(text: str | bytes, *arguments: str) -> Any:
    return json.loads(run(text, "--json", *arguments))


def verdicts(report: Any) -> dict[str, str]:
    return {one["claim"]: one["verdict"] for one in report["claims"]}


@pytest.mark.parametrize("form", [short_iso, as_json, a_file, cat, terminal])
def test_a_log_says_the_same_in_every_form(form: Any) -> None:
    report = analysed(form(DAY))
    assert (report["lines"], report["events"], report["unreadable"]) == (14, 14, 0)
    total = report["total"]
    assert total["outcomes"] == {"stop": 1, "length": 1, "cancelled": 1}
    assert total["cancelled_by"] == {"client": 1}
    assert total["tokens"] == {"prompt": 3000, "cached": 1998, "generated": 150}
    assert total["reuse"] == 0.666
    assert total["quantiles"]["first_token_ms"] == {"p50": 20, "p95": 20, "p99": 20, "max": 20}
    assert total["quantiles"]["decode_tokens_per_s"] == {"p50": 30, "p5": 10, "p1": 10, "min": 10}
    assert [one["total_ms"] for one in total["slowest"]] == [9000, 500, 400]
    assert total["slowest"][0]["request"] == f"req_{6:032x}"
    assert total["refused"] == [{"status": "429", "reason": "N requests are waiting", "count": 2}]
    assert total["errors"] == {"daemon.watchdog: the engine has not moved for N s": 1}
    assert [one["applied"] for one in report["reloads"]] == [False, True]
    assert report["reloads"][0]["text"] == 'ds4d.toml:3: lanes.max: "x"'
    assert report["drains"][0]["requests"] == 8
    (boot,) = report["boots"]
    assert (boot["boot"], boot["first_seq"], boot["last_seq"], boot["gaps"]) == (BOOT, 1, 14, [])
    assert boot["end"] == "stopped by SIGTERM"
    timed = form in (short_iso, as_json, a_file)
    assert boot["states_s"] == ({"loading": 12, "ready": 68, "stopping": 0} if timed else {})
    assert boot["lasted_s"] == (80 if timed else None)
    assert report["without_time"] == (0 if timed else 14)


def test_it_reads_what_the_daemon_writes() -> None:
    """Escapes, levels, priorities and tracebacks are those of `ds4d.events`."""
    log = logging.getLogger("ds4d.test")
    for journal in (True, False):
        stream = io.StringIO()
        events.configure("debug", stream, journal=journal)
        reason = 'a "b"\n=\\ \x1b[2J é'
        events.emit(log, "request.rejected", status=400, reason=reason)
        try:
            raise ValueError("no")
        except ValueError as error:
            log.debug("request.error traceback", exc_info=error)
        report = analysed(stream.getvalue())
        assert (report["events"], report["unreadable"]) == (2, 0)
        assert report["total"]["refused"][0]["reason"] == reason.replace("2J", "NJ")
        assert report["boots"][0]["boot"] == events.BOOT
        assert "\x1b" not in run(stream.getvalue())


def test_a_gap_in_the_numbers_is_found_and_fails_the_claim() -> None:
    lines = [done(seq) for seq in (1, 2, 5, 6, 8)]
    report = analysed("\n".join(lines))
    (boot,) = report["boots"]
    assert (boot["missing"], boot["gaps"]) == (3, [[3, 4], [7, 7]])
    assert verdicts(report)["gaps"] == "FAIL"
    assert "3 missing: 3..4, 7" in run("\n".join(lines))


def test_lines_out_of_order_leave_no_gap_and_lines_read_twice_count_once() -> None:
    lines = [done(seq) for seq in (3, 1, 5, 2, 4, 4, 1)]
    report = analysed("\n".join(lines))
    assert report["total"]["requests"] == 5
    assert (report["boots"][0]["missing"], report["boots"][0]["read_twice"]) == (0, 2)
    assert verdicts(report)["gaps"] == "PASS"


def test_a_log_that_begins_in_the_middle_of_a_start_hides_nothing_but_a_later_start_must_be_whole():
    middle = [done(seq) for seq in (100, 101)]
    assert verdicts(analysed("\n".join(middle)))["gaps"] == "PASS"
    later = [done(seq, NEXT) for seq in (3, 4)]
    report = analysed("\n".join(middle + later))
    assert report["boots"][1]["gaps"] == [[1, 2]]
    assert verdicts(report)["gaps"] == "FAIL"


def test_lines_that_the_daemon_could_not_write_fail_the_claim_even_without_a_gap() -> None:
    report = analysed("\n".join([done(1), f"{done(2)} dropped=4"]))
    assert report["boots"][0]["dropped"] == 4
    assert verdicts(report)["gaps"] == "FAIL"


def test_each_start_has_its_end_as_the_service_manager_tells_it() -> None:
    crash = [
        (81, "ds4d.service: Main process exited, code=exited, status=70/n/a"),
        (81, "ds4d.service: Failed with result 'exit-code'."),
        (82, "ds4d.service: Scheduled restart job, restart counter is at 1."),
        (82, "Started ds4d.service - ds4d."),
    ]
    text = (
        short_iso(DAY[:-2])
        + short_iso(crash, "systemd")
        + short_iso([(90, line(1, "daemon.state to=ready", NEXT))])
        + short_iso([(99, "ds4d.service: Watchdog timeout (limit 1min)!")], "systemd")
        + short_iso([(105, line(1, "daemon.state to=ready", "ffffffffffff"))])
        + short_iso([(120, line(1, "daemon.state to=ready", "eeeeeeeeeeee"))])
    )
    report = analysed(text)
    assert [(one["boot"], one["end"]) for one in report["boots"]] == [
        (BOOT, "Main process exited, code=exited, status=70/n/a"),
        (NEXT, "Watchdog timeout (limit 1min)!"),
        ("ffffffffffff", "without a word"),
        ("eeeeeeeeeeee", "runs, or the log ends"),
    ]
    assert report["unreadable"] == 0
    assert verdicts(report)["uptime"] == "FAIL"


@pytest.mark.parametrize("form", [short_iso, as_json])
def test_the_last_words_of_a_start_are_its_end_also_if_it_had_no_others(form: Any) -> None:
    wrong = "conf.d/a.toml:1: lanes.max: too large (got 99, expected 1..64 lanes)"
    text = form(
        [
            *DAY,
            (80, "ds4d.service: Deactivated successfully."),
            (90, "Starting ds4d.service - DeepSeek-V4-Flash serving daemon..."),
            (91, f"ds4d: {wrong}"),
            (91, "ds4d.service: Main process exited, code=exited, status=78/CONFIG"),
            (91, "ds4d.service: Failed with result 'exit-code'."),
            (95, "Starting ds4d.service - DeepSeek-V4-Flash serving daemon..."),
            (96, line(1, "daemon.state to=loading", NEXT)),
            (97, "<3>ds4d: 127.0.0.1:30007 is in use"),
        ]
    )
    report = analysed(text)
    assert [one["end"] for one in report["boots"]] == [
        "stopped by SIGTERM",
        f"{wrong}; Main process exited, code=exited, status=78/CONFIG",
        "127.0.0.1:30007 is in use",
    ]
    assert (report["unreadable"], verdicts(report)["gaps"]) == (0, "PASS")
    assert "lines 0" not in run(text)


def test_an_answer_of_one_token_has_no_rate() -> None:
    report = analysed("\n".join([done(1), done(2, generated_tokens=1, decode_tokens_per_s=0)]))
    assert report["total"]["quantiles"]["decode_tokens_per_s"]["min"] == 30


def test_claims_about_reuse_leave_out_the_last_token_which_is_always_computed() -> None:
    warm = [done(1), done(2)]
    assert verdicts(analysed("\n".join(warm))) == {
        "gaps": "PASS",
        "cached": "PASS",
        "reuse": "PASS",
        "uptime": "PASS",
        "swap": "unknown",
        "failed": "PASS",
    }
    cold = [*warm, done(3, cached_tokens=0, outcome="failed")]
    found = verdicts(analysed("\n".join(cold)))
    assert (found["cached"], found["reuse"], found["failed"]) == ("FAIL", "FAIL", "FAIL")
    swapped = line(4, "memory.sample available_mib=100 swap_mib=0")
    assert verdicts(analysed("\n".join([*warm, swapped])))["swap"] == "PASS"
    swapped = line(4, "memory.sample available_mib=100 swap_mib=12")
    assert verdicts(analysed("\n".join([*warm, swapped])))["swap"] == "FAIL"


def test_of_nothing_nothing_is_claimed() -> None:
    report = analysed("")
    assert set(verdicts(report).values()) == {"unknown"}
    assert run("").startswith("0 lines, 0 events\n")


def test_a_claim_can_be_required_for_a_script() -> None:
    text = "\n".join([done(1), done(3)])
    run(text, "--require", "cached", "--require", "uptime")
    run(text, "--require", "cached", "--require", "gaps", code=1)
    run(text, "--require", "swap", code=1)


def test_windows_split_by_time_and_time_limits_leave_out_the_rest() -> None:
    windows = analysed(as_json(DAY), "--window", "1m")["windows"]
    assert [(one["from"], one["requests"]) for one in windows] == [
        ("2026-03-01T12:00:00.000+00:00", 3),
        ("2026-03-01T12:01:00.000+00:00", 0),
    ]
    limits = ("--since", "2026-03-01T12:00:25Z", "--until", "2026-03-01T12:00:51Z")
    report = analysed(as_json(DAY), *limits)
    assert (report["events"], report["outside"]) == (3, 11)
    assert report["total"]["requests"] == 2
    assert verdicts(report)["gaps"] == "PASS"
    assert analysed(as_json(DAY), "--since", "1d")["events"] in (0, 14)


GARBAGE = (
    b"\xff\xfe not text\n"
    b"Traceback (most recent call last):\n"
    b'{"MESSAGE": 5\n'
    b'{"MESSAGE": null, "__REALTIME_TIMESTAMP": "soon"}\n'
    b'{"MESSAGE": [104, 105, 999, "x"], "__REALTIME_TIMESTAMP": 1e99}\n'
    b"{" + b"[" * 100_000 + b"\n"
    b"2026-99-99T99:99:99+0000 host ds4d[1]: request.done prompt_tokens=many total_ms=nan\n"
    b'request.done outcome="unclosed prompt_tokens=5\n'
    b"request.done =5 ==== outcome= seq=inf boot=\n"
    b"request.done seq=-3 boot=x wait_ms=1e400\n"
    b"daemon.state\n"
    b"\n"
    b"-- Boot 1234 --\n"
    b"| a further line\n"
)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_garbage_is_counted_shown_and_harmless(more: tuple[str, ...]) -> None:
    out = run(GARBAGE + done(1).encode(), *more)
    assert "Traceback" in out or more
    report = analysed(GARBAGE + done(1).encode())
    assert report["unreadable"] == 6
    assert report["unreadable_examples"][1] == {
        "line": 2,
        "text": "Traceback (most recent call last):",
    }
    assert report["total"]["outcomes"]["stop"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no-such-file",), "analyze-log: no-such-file: No such file or directory"),
        (("--since", "yesterday"), "'yesterday' is no time; expected 2026-03-01T18:00"),
        (("--window", "0m"), "'0m' is no length of time; expected 90s"),
        (("--slowest", "-1"), "'-1' is no number"),
        (("--require", "luck"), "invalid choice: 'luck'"),
        (("--since", "1h"), "no line has a time: --since and --until need"),
        (("--window", "1h"), "no line has a time: --window needs"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: tuple[str, ...], says: str) -> None:
    err = run(cat(DAY), *arguments, code=2)
    assert says in err
    assert "Traceback" not in err


def test_files_are_read_one_after_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one.log", tmp_path / "two.log"
    one.write_text(cat(DAY[:5]))
    two.write_text(cat(DAY[5:]))
    report = json.loads(run("", "--json", str(one), str(two)))
    assert (report["events"], report["boots"][0]["missing"]) == (14, 0)


def test_the_journal_is_read_when_nothing_else_is_given(tmp_path: Path) -> None:
    """From a terminal; `journalctl` here is one that prints what it was asked for."""
    journal = tmp_path / "journalctl"
    entry = as_json([(0, done(1))]).strip()
    journal.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" '{entry}'\n")
    journal.chmod(0o755)
    leader, follower = os.openpty()
    try:
        ended = subprocess.run(
            [sys.executable, SCRIPT, "--json", "--unit", "ds4d-test"],
            stdin=follower,
            capture_output=True,
            check=False,
            env=os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"},
        )
        absent = subprocess.run(
            [sys.executable, SCRIPT],
            stdin=follower,
            capture_output=True,
            check=False,
            env=os.environ | {"PATH": str(tmp_path / "nowhere")},
        )
    finally:
        os.close(leader)
        os.close(follower)
    report = json.loads(ended.stdout)
    assert report["unreadable_examples"] == [
        {"line": 1, "text": "--namespace=+ds4d-test --unit ds4d-test --output json --all"}
    ]
    assert report["total"]["requests"] == 1
    assert absent.returncode == 2
    assert absent.stderr == (
        b"analyze-log: journalctl: No such file or directory; name a file, or pipe a log in\n"
    )


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPT, "--json", "--slowest", "100000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdout.close()
        process.stdin.write("\n".join(done(seq) for seq in range(1, 2000)).encode())
        process.stdin.close()
        assert process.stderr.read() == b""
