"""What `ds4ctl` shows a person: complete, aligned, within 80 columns."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ds4d import __version__, wire
from ds4d.ctl import show
from ds4d.ctl.words import brief, many, plain, size, span
from ds4d.sched.snapshot import Lanes, Pages, Queue, Rates, Session, Totals

GIB, MIB = 1 << 30, 1 << 20

MODEL = wire.Model(
    name="DeepSeek-V4-Flash-0731",
    file="/var/lib/ds4d/models/current/DeepSeek-V4-Flash-0731.gguf",
    embedded=False,
    bytes=86_720_111_488,
    context=262_144,
    row_fingerprint="a1b2c3d4e5f6",
    system_fingerprint="fp_0123456789",
    prompt_texts="deepseek 0731",
    prompt_profile="0731",
)
MEMORY = wire.Memory(
    budget=110 * GIB,
    parts={"weights": 81 * GIB, "lanes": 2 * GIB, "pages": 12 * GIB},
    available=14 * GIB,
    cgroup_headroom=20 * GIB,
    simulated=None,
    reserve=4 * GIB,
    uncommitted=900 * MIB,
    free_to_promise=13 * GIB,
    resident=90 * GIB,
    swap=3 * MIB,
    psi_some=13.0,
)
STATUS = wire.Status(
    state="degraded",
    reasons=[
        wire.Reason(
            code="memory_pressure",
            text="processes wait for memory 13 % of the time (memory.psi_some_max is 10)",
            remedy="end other programs, or lower lanes.max or model.context and restart",
        ),
        wire.Reason(code="lanes", text="3 of 4 lanes: the fourth needs 512 MiB more"),
    ],
    version=__version__,
    pid=4242,
    boot="8f3e21c07d55",
    uptime_s=11_532.0,
    profile="balanced",
    config_files=["/etc/ds4d/ds4d.toml", "/etc/ds4d/conf.d/10-lanes.toml"],
    config_hash="1a2b3c4d5e6f",
    urls=["http://127.0.0.1:30007/v1"],
    reload=wire.Reload(at=0.0, ok=False, text="ds4d.toml:3: lanes.max: too large\nand more"),
    model=MODEL,
    lanes=Lanes(n=8, n_max=4, n_busy=3),
    queue=Queue(n=2, n_max=32, n_lane=1, n_memory=1, oldest_s=12.0, wait_s=20.0),
    pages=Pages(n=4096, n_free=1200, n_promised=800, tokens=256, frontiers=96, frontiers_free=40),
    rates=Rates(prefill_tokens_per_s=1234.0, decode_tokens_per_s=45.3),
    totals=Totals(requests=1234, prompt=5_600_000, cached=4_100_000, generated=300_000),
    memory=MEMORY,
    heartbeat_age_s=12.0,
    loop_lag_s=0.4,
)


def shown(status: wire.Status = STATUS, **changes: Any) -> str:
    """Without colours, each run of spaces and line ends as one space."""
    text = re.sub(r"\033\[[\d;]*m", "", show.status(msgspec.structs.replace(status, **changes)))
    return " ".join(text.split())


def test_a_status_says_what_why_and_what_to_do() -> None:
    text = shown()
    for part in (
        "● ds4d is degraded, up 3 h 12 min",
        "Why: processes wait for memory 13 % of the time",
        "To do: end other programs, or lower lanes.max",
        "Why: 3 of 4 lanes: the fourth needs 512 MiB more Model:",
        "Model: DeepSeek-V4-Flash-0731, 80.8 GiB, context 262,144 tokens /var/lib/ds4d/models/",
        "prompt profile 0731, prompt texts of deepseek 0731",
        "fingerprints: fp_0123456789 in answers, a1b2c3d4e5f6 of KV rows",
        "Lanes: 3 of 4 busy; 4 more stay idle (lanes.max or `ds4ctl lanes set`)",
        "Queue: 2 of 32 wait (1 for a lane, 1 for memory), the oldest for 12 s; "
        "one more would wait about 20 s",
        "Rates: prefill 1,234, decode 45.3 tokens/s",
        "Pages: 1,200 of 4,096 free (256 tokens each), 800 promised to running requests; "
        "40 of 96 frontiers free",
        "Totals: 1,234 requests; 5.60 M prompt tokens, 73 % of them cached; 300,000 generated",
        "Memory: ds4d: 95.0 GiB of a budget of 110 GiB: weights 81.0 GiB, pages 12.0 GiB, "
        "lanes 2.0 GiB host: 14.0 GiB available, 900 MiB of it promised to ds4d but untouched",
        "free to promise: 13.0 GiB, of which 4.0 GiB stay for others",
        "cgroup: 20.0 GiB below its limit",
        "process: 90.0 GiB resident, 3.0 MiB swapped",
        "pressure: something waited for memory 13.0 % of the last 10 s",
        "Slow: the engine has not moved for 12 s the event loop woke 0.4 s late",
        "API: http://127.0.0.1:30007/v1",
        "Config: /etc/ds4d/ds4d.toml /etc/ds4d/conf.d/10-lanes.toml hash 1a2b3c4d5e6f, "
        "profile balanced",
        "refused: ds4d.toml:3: lanes.max: too large and more",
        "Process: 4242, ds4d",
    ):
        assert part in text, part


def test_a_status_is_aligned_and_fits_80_columns() -> None:
    lines = re.sub(r"\033\[[\d;]*m", "", show.status(STATUS)).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(re.match(r" {0,8}\w[\w ]*: |\s{10}\S", text) for text in lines[1:])
    assert {text.index(": ") for text in lines[1:] if not text.startswith(" " * 10)} == {8}
    assert "\N{NO-BREAK SPACE}" not in "".join(lines)
    assert not re.search(r"\d\n +(?:[KMG]iB|s|min|%)\b", "\n".join(lines)), "a torn quantity"


def test_a_path_is_never_broken() -> None:
    long = "/srv/" + "very-long-name-of-a-folder/" * 4 + "model.gguf"
    text = show.status(
        msgspec.structs.replace(STATUS, model=msgspec.structs.replace(MODEL, file=long))
    )
    assert long in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {
                "state": "loading",
                "loading": wire.Loading(what="kernels", fraction=0.409, since_s=12.0),
                "reasons": [wire.Reason(code="loading", text="kernels, 40 %")],
            },
            "ds4d is loading: kernels, 40 % of all loading, for 12 s Model",
        ),
        (
            {
                "state": "draining",
                "drain": wire.Drain(n_running=3, n_queued=1, left_s=87.0),
                "reasons": [],
            },
            "ds4d is draining, at most 1 min 27 s more Why: 3 running, 1 queued may finish",
        ),
        (
            {"lanes": Lanes(n=4, n_max=2, n_busy=3)},
            "3 busy, 2 may be used once requests have ended",
        ),
        (
            {"queue": Queue(n=0, n_max=32, n_lane=0, n_memory=0, oldest_s=0, wait_s=0)},
            "Queue: empty, room for 32",
        ),
        ({"totals": Totals(requests=1)}, "Totals: 1 request; 0 prompt tokens; 0 generated"),
        ({"config_files": []}, "Config: no file, built-in values (`ds4d config init` writes one)"),
        ({"version": "0.0.9"}, f"ds4d {__version__} is installed: restart the daemon to run it"),
        (
            {"memory": msgspec.structs.replace(MEMORY, simulated=GIB, psi_some=None, swap=0)},
            "simulated: 1.0 GiB left of memory.simulate_total_gib free to promise: 13.0 GiB, of "
            "which 4.0 GiB stay for others (memory.reserve_mib) process: 90.0 GiB resident, "
            "nothing swapped Slow",
        ),
        (
            {"reload": wire.Reload(at=0.0, ok=True, text="1 applied: log.level")},
            "00 1 applied: log.level Process",
        ),
    ],
)
def test_a_status_tells_what_is_particular(changes: dict[str, Any], says: str) -> None:
    assert says in shown(**changes)


def test_a_daemon_that_has_nothing_yet_is_shown_without_holes() -> None:
    bare = wire.Status(
        state="starting",
        version=__version__,
        pid=1,
        boot="b",
        uptime_s=0.2,
        profile="cpu-tiny",
        config_files=[],
        config_hash="0",
        urls=[],
    )
    assert re.sub(r" +", " ", shown(bare)) == (
        "● ds4d is starting, up 0.2 s Config: no file, built-in values (`ds4d config init` writes "
        f"one) hash 0, profile cpu-tiny Process: 1, ds4d {__version__}, boot b"
    )


PREFILLING = Session(
    id=17,
    request="chatcmpl-5f2a0b",
    phase="prefill",
    lane=0,
    n_tokens=81_920,
    n_prompt=131_072,
    n_cached=40_960,
    age_s=33.0,
    remaining_s=22.0,
    tokens_per_s=2231.4,
)


def test_sessions_are_a_table_whose_numbers_stand_under_each_other() -> None:
    idle = replace(PREFILLING, id=3, phase="idle", lane=None, idle_s=7300.0, remaining_s=None)
    queued = Session(
        id=None, request="r", phase="queued", waits_for="memory", n_prompt=1 << 20, age_s=3.2
    )
    text = show.sessions(wire.Sessions(sessions=[PREFILLING, idle, queued], n_sessions=9))
    head, *rows = text.splitlines()
    assert rows.pop() == "3 of 9, those at work first"
    assert [row.split() for row in rows] == [
        "17 prefill 0 81.9k 131k 41.0k 0 2231 33s 22s chatcmpl-5f2".split(),
        "3 idle - 81.9k 131k 41.0k 0 2231 2h - chatcmpl-5f2".split(),
        "- for memory - 0 1.05M 0 0 - 3.2s - r".split(),
    ]
    for name in ("LANE", "TOKENS", "PROMPT", "CACHED", "ANSWER", "TOK/S", "SINCE", "LEFT"):
        assert {row[head.index(name) + len(name)] for row in rows} == {" "}
    assert max(map(len, rows)) <= 80
    assert show.sessions(wire.Sessions(sessions=[], n_sessions=0)) == "no sessions"


def test_requests_are_named_by_as_much_as_tells_them_apart() -> None:
    ids = ["req_72798e3e48b0", "req_31834bc1b486", "mine, number 1", "mine, number 2"]
    text = show.sessions(
        wire.Sessions(sessions=[replace(PREFILLING, request=id) for id in ids], n_sessions=4)
    )
    assert [row[-14:] for row in text.splitlines()[1:]] == [id[:14] for id in ids]


def change(key: str, when: Any) -> wire.Change:
    return wire.Change(key=key, old="1", new="2", when=when)


def test_a_reload_tells_what_holds_from_when_on() -> None:
    changes = [change("log.level", "now"), change("api.keepalive_s", "next request")]
    later = [change("api.listen", "restart")]
    answer = wire.Reloaded(dry_run=False, applied=changes, restart_required=later)
    assert show.reloaded(answer).splitlines() == [
        "applied:",
        "  log.level: 1 -> 2",
        "applies from the next request on:",
        "  api.keepalive_s: 1 -> 2",
        "waits for a restart:",
        "  api.listen: 1 -> 2",
    ]
    answer = msgspec.structs.replace(answer, dry_run=True)
    assert show.reloaded(answer).splitlines()[::2] == [
        "would apply at once:",
        "would apply from the next request on:",
        "needs a restart:",
        "a reload applies all or nothing: --allow-partial leaves out the last ones",
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (size(0), "0 B"),
        (size(1023), "1.0 KiB"),
        (size(999), "999 B"),
        (size(16_026_336), "15.3 MiB"),
        (size(86_720_111_488), "80.8 GiB"),
        (size(-3 * GIB), "-3.0 GiB"),
        (size(5 << 50), "5120 TiB"),
        (span(-1), "0.0 s"),
        (span(9.94), "9.9 s"),
        (span(9.96), "10 s"),
        (span(59.6), "1 min"),
        (span(61), "1 min 1 s"),
        (span(3600), "1 h"),
        (span(3659), "1 h"),
        (span(11_532), "3 h 12 min"),
        (span(200_000), "2 d 7 h"),
        (many(999_999), "999,999"),
        (many(1_250_000), "1.25 M"),
        (brief(999), "999"),
        (brief(8345), "8.35k"),
        (brief(9999), "10.0k"),
        (brief(131_072), "131k"),
        (brief(999_600), "1.00M"),
        (brief(1 << 20), "1.05M"),
        (plain("a\tb\033[31m\r\nc\u202e"), "a       b?[31m?\nc?"),
    ],
)
def test_numbers_and_texts_are_as_a_person_reads_them(said: str, expected: str) -> None:
    assert said == expected
