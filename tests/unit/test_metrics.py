"""What Prometheus reads: names, closed labels, gauges from a status; promtool has no complaint."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import ds4d
from ds4d import metrics, wire
from ds4d.sched.snapshot import Lanes, Pages, Queue, Rates, Session

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MODEL = wire.Model(
    name="ds4-tiny",
    file="/models/ds4-tiny.gguf",
    embedded=True,
    bytes=16_026_336,
    context=8192,
    row_fingerprint="rows",
    system_fingerprint="fp_0123456789",
    prompt_texts="ds4-tiny",
    prompt_profile="0731",
)
MEMORY = wire.Memory(
    budget=900,
    parts={"weights": 1, "arena": 2, "pages": 3, "lanes": 4, "frontiers": 5},
    available=1000,
    cgroup_headroom=800,
    simulated=None,
    reserve=100,
    uncommitted=50,
    free_to_promise=750,
    resident=300,
    swap=0,
    psi_some=12.5,
)
SESSIONS = [
    Session(
        id=1, request="a", phase="decode", waits_for=None, lane=0, n_tokens=100, tokens_per_s=8
    ),
    Session(
        id=2, request="b", phase="decode", waits_for=None, lane=2, n_tokens=300, tokens_per_s=4
    ),
    Session(id=3, request="c", phase="prefill", waits_for=None, lane=3, n_tokens=4096),
    Session(id=4, request="d", phase="idle", waits_for=None, n_tokens=5000),
    Session(id=None, request="e", phase="queued", waits_for="memory"),
]


def status(n_lanes: int = 4, **changes: Any) -> wire.Status:
    ready: dict[str, Any] = {
        "state": "ready",
        "version": "1.2.3",
        "pid": 1,
        "boot": "0123456789ab",
        "uptime_s": 12.5,
        "profile": "cpu-tiny",
        "config_files": [],
        "config_hash": "0123456789ab",
        "urls": [],
        "model": MODEL,
        "lanes": Lanes(n=n_lanes, n_max=3, n_busy=3),
        "queue": Queue(n=3, n_max=32, n_lane=1, n_memory=2, oldest_s=4.5, wait_s=9.0),
        "pages": Pages(n=64, n_free=20, n_promised=30, tokens=256, frontiers=48, frontiers_free=40),
        "rates": Rates(prefill_tokens_per_s=250.0, decode_tokens_per_s=12.0),
        "memory": MEMORY,
        "heartbeat_age_s": 0.25,
    }
    return wire.Status(**(ready | changes))


LOADING = status(
    state="loading",
    reasons=[wire.Reason(code="loading", text="weights, 40 %")],
    loading=wire.Loading(what="weights", fraction=0.4, since_s=3.0),
    **dict.fromkeys(("model", "lanes", "queue", "pages", "rates", "memory", "heartbeat_age_s")),
)

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text.decode())
        for one in family.samples
    }


def value(found: Samples, name: str, model: str = "ds4-tiny", **labels: str) -> float | None:
    return found.get((f"ds4d_{name}", frozenset({**labels, "model": model}.items())))


@pytest.fixture(scope="module")
def shown() -> Samples:
    connections: dict[wire.Role, int] = {"admin": 1, "monitor": 2}
    return samples(metrics.exposition(status(), SESSIONS, connections=connections))


def names(found: Samples) -> set[str]:
    return {name for name, _ in found}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("state", {"state": "ready"}, 1),
        ("state", {"state": "failed"}, 0),
        ("degraded", {"reason": "swap"}, 0),
        ("loading_ratio", {}, 1),
        ("uptime_seconds", {}, 12.5),
        ("engine_heartbeat_age_seconds", {}, 0.25),
        ("build_info", {"version": "1.2.3", "fingerprint": "fp_0123456789"}, 1),
        ("config_hash_info", {"hash": "0123456789ab"}, 1),
        ("control_connections", {"role": "monitor"}, 2),
        ("control_connections", {"role": "service"}, 0),
        ("requests_running", {"phase": "decode"}, 2),
        ("requests_running", {"phase": "prefill"}, 1),
        ("requests_running", {"phase": "paused"}, 0),
        ("requests_waiting", {"reason": "lane"}, 1),
        ("requests_waiting", {"reason": "memory"}, 2),
        ("queue_limit", {}, 32),
        ("queue_oldest_seconds", {}, 4.5),
        ("queue_wait_predicted_seconds", {}, 9),
        ("lanes_resident", {}, 4),
        ("lanes_max", {}, 3),
        ("lanes_busy", {}, 3),
        ("lane_state", {"lane": "0", "state": "decode"}, 1),
        ("lane_state", {"lane": "0", "state": "free"}, 0),
        ("lane_state", {"lane": "1", "state": "free"}, 1),
        ("kv_tokens", {"lane": "3"}, 4096),
        ("kv_tokens", {"lane": "1"}, 0),
        ("kv_usage_ratio", {"lane": "3"}, 0.5),
        ("kv_pages", {}, 64),
        ("kv_pages_free", {}, 20),
        ("kv_pages_promised", {}, 30),
        ("frontiers", {}, 48),
        ("frontiers_free", {}, 40),
        ("context_tokens_limit", {}, 8192),
        ("context_tokens_max", {}, 5000),
        ("prefill_tokens_per_second", {}, 250),
        ("decode_tokens_per_second", {"scope": "aggregate"}, 12),
        ("decode_tokens_per_second", {"scope": "lane"}, 6),
        ("memory_bytes", {"term": "available"}, 1000),
        ("memory_bytes", {"term": "headroom"}, 100),
        ("memory_bytes", {"term": "weights"}, 1),
        ("memory_bytes", {"term": "simulated"}, None),
        ("memory_psi_some_ratio", {}, 0.125),
        ("process_rss_bytes", {}, 300),
        ("process_swap_bytes", {}, 0),
    ],
)
def test_gauges_say_what_the_status_says(
    shown: Samples, name: str, labels: dict[str, str], expected: float | None
) -> None:
    assert value(shown, name, **labels) == expected


def test_every_gauge_has_a_value_while_the_daemon_serves(shown: Samples) -> None:
    assert {f"ds4d_{gauge.name}" for gauge in metrics.GAUGES} <= names(shown)


def test_while_it_loads_there_is_a_state_and_no_lane() -> None:
    found = samples(metrics.exposition(LOADING))
    assert value(found, "state", "none", state="loading") == 1
    assert value(found, "loading_ratio", "none") == 0.4
    assert value(found, "build_info", "none", version="1.2.3", fingerprint="") == 1
    assert value(found, "engine_heartbeat_age_seconds", "none") == 0
    absent = {"ds4d_lanes_max", "ds4d_requests_running", "ds4d_kv_tokens", "ds4d_memory_bytes"}
    assert not absent & names(found)


def test_without_a_status_the_counters_are_still_there() -> None:
    found = samples(metrics.exposition(None))
    assert value(found, "requests_total", "none", api="chat", outcome="stop") is not None
    assert value(found, "process_open_fds", "none") is not None
    assert "ds4d_state" not in names(found)


def test_a_daemon_that_is_degraded_says_why() -> None:
    reason = wire.Reason(code="memory_pressure", text="processes wait for memory")
    found = samples(metrics.exposition(status(state="degraded", reasons=[reason])))
    assert value(found, "degraded", reason="memory_pressure") == 1
    assert value(found, "degraded", reason="swap") == 0
    assert value(found, "state", state="degraded") == 1


def test_every_sample_carries_the_model_and_our_prefix(shown: Samples) -> None:
    for name, labels in shown:
        assert name.startswith("ds4d_")
        assert ("model", "ds4-tiny") in labels


def test_what_was_counted_is_read_at_the_next_scrape() -> None:
    before = samples(metrics.exposition(status()))
    metrics.GENERATED.inc(7)
    metrics.QUEUED.observe(0.3)
    metrics.REJECTED.labels(code="429").inc()
    after = samples(metrics.exposition(status()))
    for name, labels, more in (
        ("generation_tokens_total", {}, 7),
        ("request_queue_seconds_count", {}, 1),
        ("request_queue_seconds_bucket", {"le": "0.25"}, 0),
        ("request_queue_seconds_bucket", {"le": "0.5"}, 1),
        ("requests_rejected_total", {"code": "429"}, 1),
    ):
        old, new = value(before, name, **labels), value(after, name, **labels)
        assert old is not None and new is not None
        assert new - old == more, name


def test_a_prefill_of_half_an_hour_still_has_a_bucket_of_its_own(shown: Samples) -> None:
    buckets = [
        float(dict(labels)["le"])
        for name, labels in shown
        if name == "ds4d_request_prefill_seconds_bucket"
    ]
    finite = sorted(buckets)[:-1]
    assert (finite[0], finite[-1]) == (0.001, 3600)
    assert all(b / a <= 2.5 for a, b in pairwise(finite))


def test_every_series_of_a_closed_set_is_there_from_the_start(shown: Samples) -> None:
    """The rate of a series that appears with its first event does not see that event."""
    for name, labels in metrics.LABELS.items():
        if name in {f"ds4d_{gauge.name}" for gauge in metrics.GAUGES}:
            continue
        there = [dict(found) for series, found in shown if series.startswith(name)]
        for label, closed in labels.items():
            assert {found[label] for found in there if label in found} == set(closed), name


def test_labels_come_from_closed_sets(shown: Samples) -> None:
    for series, labels in shown:
        known = next((sets for name, sets in metrics.LABELS.items() if _is_of(series, name)), None)
        if known is None:
            assert series.startswith("ds4d_process_")
            continue
        for label, one in labels:
            if label in ("le", "model"):
                continue
            closed = known[label]
            assert one in closed or not closed, f"{series}: {label}={one}"


def _is_of(series: str, name: str) -> bool:
    return series.removeprefix(name) in ("", "_total", "_bucket", "_sum", "_count")


def test_the_largest_daemon_shows_fewer_than_1500_series() -> None:
    n_lanes = 64
    sessions = [
        Session(id=i, request=str(i), phase="decode", waits_for=None, lane=i)
        for i in range(n_lanes)
    ]
    connections: dict[wire.Role, int] = {"service": 1, "admin": 1, "monitor": 1}
    text = metrics.exposition(status(n_lanes), sessions, connections=connections)
    assert len(samples(text)) < 1500


def calls(*functions: str) -> Iterator[ast.Call]:
    """Every call of one of `functions` in our sources."""
    for path in sorted(Path(ds4d.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in functions:
                    yield node


def argument(call: ast.Call, name: str) -> Any:
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def test_every_reason_why_a_daemon_is_degraded_is_a_label() -> None:
    codes = {argument(call, "code") for call in calls("Reason")} - {None}
    states = set(metrics.LABELS["ds4d_state"]["state"])
    assert codes - states == set(metrics.LABELS["ds4d_degraded"]["reason"])


def test_every_status_with_which_a_request_is_refused_is_a_label() -> None:
    statuses = {argument(call, "status") for call in calls("RequestError", "Refused")} - {None}
    statuses.add(400)  # of an error that says nothing else
    assert {str(one) for one in statuses} == set(metrics.LABELS["ds4d_requests_rejected"]["code"])


def test_a_series_is_counted_with_labels_that_it_has() -> None:
    """A misspelt label would raise in the middle of a request."""
    for call in calls("labels"):
        made = getattr(metrics, getattr(getattr(call.func, "value", None), "attr", ""), None)
        if made is None:
            continue
        (closed,) = [metrics.LABELS[family.name] for family in made.describe()]
        given = dict(zip(closed, call.args, strict=False)) | {
            keyword.arg: keyword.value for keyword in call.keywords
        }
        assert given.keys() == closed.keys(), ast.unparse(call)
        for label, one in given.items():
            if isinstance(one, ast.Constant):
                assert one.value in closed[label], ast.unparse(call)


def test_the_table_in_the_docs_is_up_to_date() -> None:
    script = ROOT / "ops/prometheus/write-table"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("moment", [None, LOADING, status()], ids=["none", "loading", "ready"])
def test_promtool_finds_nothing_to_mend_in_an_exposition(moment: wire.Status | None) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    text = metrics.exposition(moment, SESSIONS)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_content_type_names_the_version_of_the_format() -> None:
    assert metrics.CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
