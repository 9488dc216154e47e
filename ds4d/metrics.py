"""Prometheus series, named once (spec/serving.md 6.1). Who counts imports the name and counts.

Counters and histograms live here; gauges are read from one `wire.Status` when somebody asks, by
`exposition`, so that nothing has to be kept up to date. Label values come from closed sets: never
ids, text or file names. `docs/metrics.md` is made from this file by `ops/prometheus/write-table`.

A later feature adds one line a series: a counter or histogram to its section below, with every
value that its labels can have; a gauge to `GAUGES`, with how it is read from a status. A new value
of a label goes into its set. Nothing else has to know.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ds4d import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ds4d.sched.snapshot import Phase, Session

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
NO_MODEL: Final = "none"  # the label `model` until one is there: an empty label is no label

Values = tuple[str, ...]
Labels = Mapping[str, Values]  # by label, every value that it can have

REGISTRY = CollectorRegistry(auto_describe=True)
LABELS: dict[str, Labels] = {}  # by series, of REGISTRY and of GAUGES

# A prefill of a million tokens takes more than 15 minutes: the library's buckets stop at 10 s.
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150),
    *(300, 600, 1500, 3600),
)
_TOKENS = (16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)

# The closed sets

_APIS = ("chat", "bench")
_OUTCOMES = ("stop", "length", "tool_calls", "cancelled", "failed")
_CAUSES = ("client", "operator", "shutdown", "slow_client", "timeout")
_CODES = ("400", "401", "403", "404", "405", "413", "429", "503")
_PHASES = ("queued", "prefill", "decode")  # of a turn that ends
_RUNNING: tuple[Phase, ...] = ("prefill", "decode", "paused")  # of a turn that has a lane
_COHORTS = ("1", "2", "3", "4", "8", "16", "32")  # label r: so many lanes in a pass, or fewer
_DEGRADED = ("fewer_lanes", "kernel_cache", "memory_pressure", "prompt_texts", "swap")
_LANES = tuple(str(lane) for lane in range(64))
_LANE_STATES = ("free", *_RUNNING)
_TERMS = (
    *("budget", "available", "cgroup_headroom", "simulated", "headroom", "uncommitted"),
    *("free_to_promise", "weights", "arena", "pages", "lanes", "frontiers"),
)
_ROLES: tuple[wire.Role, ...] = get_args(wire.Role)
_STATES: Values = get_args(wire.State)

M = TypeVar("M", Counter, Histogram)


def _open(name: str, metric: M, labels: Labels) -> M:
    """Let every series be there from the start, at 0: the rate of one that appears is unknown."""
    LABELS[name] = labels
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


def _counter(name: str, what: str, **labels: Values) -> Counter:
    name = f"ds4d_{name}"
    return _open(name, Counter(name, what, tuple(labels), registry=REGISTRY), labels)


def _histogram(
    name: str, what: str, /, *, buckets: tuple[float, ...], **labels: Values
) -> Histogram:
    name = f"ds4d_{name}"
    made = Histogram(name, what, tuple(labels), registry=REGISTRY, buckets=buckets)
    return _open(name, made, labels)


def _seconds(name: str, what: str, **labels: Values) -> Histogram:
    return _histogram(f"{name}_seconds", what, buckets=_SECONDS, **labels)


# Requests

REQUESTS = _counter("requests", "Requests that ended, by how", api=_APIS, outcome=_OUTCOMES)
CANCELLED = _counter(
    "requests_cancelled", "Requests ended before their end", cause=_CAUSES, phase=_PHASES
)
REJECTED = _counter(
    "requests_rejected", "Requests refused at the door, by HTTP status", code=_CODES
)
FIRST_TOKEN = _seconds(
    "time_to_first_token", "From submit to the first token", cache=("warm", "partial", "cold")
)
INTER_TOKEN = _seconds("inter_token_latency", "Between two steps of a lane, per token", r=_COHORTS)
QUEUED = _seconds("request_queue", "From submit to the first work")
PREFILL = _seconds("request_prefill", "From the first work until a token could be drawn")
DECODE = _seconds("request_decode", "From the first token to the end")
REQUEST = _seconds("request", "From submit to the end", api=_APIS)
REQUEST_PROMPT = _histogram("request_prompt_tokens", "Prompt tokens of a request", buckets=_TOKENS)
REQUEST_OUTPUT = _histogram("request_output_tokens", "Tokens of an answer", buckets=_TOKENS)
RELEASE = _seconds("disconnect_to_release", "From a client's leaving to a free lane", phase=_PHASES)
KEEPALIVES = _counter("keepalives", "Comments sent so that a client keeps waiting")

# Tokens and speed

PROMPT = _counter(
    "prompt_tokens",
    "Prompt tokens, by where their state came from",
    source=("computed", "memory"),
)
GENERATED = _counter("generation_tokens", "Tokens drawn and emitted")
PREFILL_TIME = _counter("prefill_seconds", "Time of the engine in prefill")
DECODE_TIME = _counter("decode_seconds", "Time of the engine in decode")
CHUNKS = _counter("prefill_chunks", "Prefill chunks computed", kind=("cold", "replay"))

# Reuse

PREFIX_QUERY = _counter("prefix_query_tokens", "Prompt tokens looked up")
PREFIX_HIT = _counter("prefix_hit_tokens", "Prompt tokens found", tier=("memory",))
LOOKUPS = _counter("prefix_lookups", "Prompts looked up", result=("full", "partial", "miss"))

# Scheduling

CYCLES = _counter(
    "cohort_cycles", "Passes over the decoding lanes", r=_COHORTS, executor=("target_only",)
)
EMITTED = _counter(
    "cohort_emitted_tokens", "Tokens emitted by passes", r=_COHORTS, executor=("target_only",)
)
CYCLE = _seconds(
    "cohort_cycle", "Time of a pass", r=_COHORTS, executor=("target_only",), stage=("verify",)
)
STALL = _seconds("decode_stall", "Decoding lanes waited for something else", cause=("prefill",))

# Process

RELOADS = _counter("reloads", "Reloads of the configuration, by result", result=("ok", "refused"))
LOOP_LAG = _seconds("event_loop_lag", "How late the event loop woke")
DROPPED = _counter("control_dropped", "Updates left out for slow subscribers", role=_ROLES)

REGISTRY.register(ProcessCollector(namespace="ds4d", registry=None))
LEFT_OUT = frozenset(  # of the process: ours are those that `ds4ctl status` shows
    {"ds4d_process_resident_memory_bytes", "ds4d_process_virtual_memory_bytes"}
)


# Gauges

Reading = Mapping[Values, float]  # by the values of the labels; empty while it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One moment of the daemon."""

    status: wire.Status
    sessions: Sequence[Session]
    connections: Mapping[wire.Role, int] | None  # to the control socket; None: not known

    @property
    def seated(self) -> Mapping[int, Session]:
        return {one.lane: one for one in self.sessions if one.lane is not None}


@dataclass(frozen=True, slots=True)
class Gauge:
    name: str
    what: str
    read: Callable[[Seen], Reading]
    labels: Labels = field(default_factory=dict)


def _one(value: float | None) -> Reading:
    return {} if value is None else {(): float(value)}


def _at(path: str) -> Callable[[Seen], Reading]:
    """What lies at `path` in a status; nothing while a part on the way is None."""

    def read(seen: Seen) -> Reading:
        value: Any = seen.status
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        return _one(value)

    return read


def _shares(values: Iterable[str], true: Iterable[str]) -> Reading:
    """1 for what is, 0 for the others."""
    true = frozenset(true)
    return {(value,): float(value in true) for value in values}


def _running(seen: Seen) -> Reading:
    if seen.status.lanes is None:
        return {}
    phases = Counts(one.phase for one in seen.seated.values())
    return {(phase,): phases[phase] for phase in _RUNNING}


def _waiting(seen: Seen) -> Reading:
    queue = seen.status.queue
    return {} if queue is None else {("lane",): queue.n_lane, ("memory",): queue.n_memory}


def _lane_states(seen: Seen) -> Reading:
    lanes = seen.status.lanes
    seated = seen.seated
    found: dict[Values, float] = {}
    for lane in range(lanes.n if lanes else 0):
        now = seated[lane].phase if lane in seated else "free"
        found |= {(str(lane), *which): x for which, x in _shares(_LANE_STATES, [now]).items()}
    return found


def _lane_tokens(seen: Seen) -> Reading:
    lanes, seated = seen.status.lanes, seen.seated
    return {
        (str(lane),): seated[lane].n_tokens if lane in seated else 0
        for lane in range(lanes.n if lanes else 0)
    }


def _lane_usage(seen: Seen) -> Reading:
    model = seen.status.model
    return {k: n / model.context for k, n in _lane_tokens(seen).items()} if model else {}


def _decode_speed(seen: Seen) -> Reading:
    rates = seen.status.rates
    if rates is None:
        return {}
    each = [one.tokens_per_s or 0.0 for one in seen.seated.values() if one.phase == "decode"]
    lane = sum(each) / len(each) if each else 0.0
    return {("aggregate",): rates.decode_tokens_per_s, ("lane",): lane}


def _memory(seen: Seen) -> Reading:
    if (memory := seen.status.memory) is None:
        return {}
    terms = {
        "budget": memory.budget,
        "available": memory.available,
        "cgroup_headroom": memory.cgroup_headroom,
        "simulated": memory.simulated,
        "headroom": memory.reserve,
        "uncommitted": memory.uncommitted,
        "free_to_promise": memory.free_to_promise,
        **memory.parts,
    }
    return {(term,): float(n) for term, n in terms.items() if n is not None}


def _psi(seen: Seen) -> Reading:
    memory = seen.status.memory
    return _one(None if memory is None or memory.psi_some is None else memory.psi_some / 100)


def _build(seen: Seen) -> Reading:
    model = seen.status.model
    return {(seen.status.version, model.system_fingerprint if model else ""): 1.0}


def _connections(seen: Seen) -> Reading:
    known = seen.connections
    return {} if known is None else {(role,): known.get(role, 0) for role in _ROLES}


_ANY: Values = ()  # one value at a time, which changes with a restart or a reload at most

GAUGES: tuple[Gauge, ...] = (
    # State
    Gauge(
        "state",
        "1 for the state that the daemon is in",
        lambda s: _shares(_STATES, [s.status.state]),
        {"state": _STATES},
    ),
    Gauge(
        "degraded",
        "1 for a reason why the daemon is less than it could be",
        lambda s: _shares(_DEGRADED, [reason.code for reason in s.status.reasons]),
        {"reason": _DEGRADED},
    ),
    Gauge(
        "loading_ratio",
        "How much of all loading is done",
        lambda s: _one(s.status.loading.fraction if s.status.loading else 1.0),
    ),
    Gauge("uptime_seconds", "Since the start", _at("uptime_s")),
    Gauge(
        "engine_heartbeat_age_seconds",
        "Since the engine last moved, while it is at work; else 0",
        lambda s: _one(s.status.heartbeat_age_s or 0.0),
    ),
    Gauge(
        "build_info",
        "Version, and a fingerprint of what determines the answers",
        _build,
        {"version": _ANY, "fingerprint": _ANY},
    ),
    Gauge(
        "config_hash_info",
        "A digest of all settings in force",
        lambda s: {(s.status.config_hash,): 1.0},
        {"hash": _ANY},
    ),
    Gauge(
        "control_connections",
        "Connections to the control and monitor sockets",
        _connections,
        {"role": _ROLES},
    ),
    # Requests and lanes
    Gauge("requests_running", "Requests that have a lane", _running, {"phase": _RUNNING}),
    Gauge(
        "requests_waiting",
        "Requests in the queue, by what they wait for",
        _waiting,
        {"reason": ("lane", "memory")},
    ),
    Gauge("queue_limit", "Requests that may wait; more are refused with 429", _at("queue.n_max")),
    Gauge(
        "queue_oldest_seconds", "How long the first of the queue has waited", _at("queue.oldest_s")
    ),
    Gauge(
        "queue_wait_predicted_seconds", "How long one more request would wait", _at("queue.wait_s")
    ),
    Gauge("lanes_resident", "Lanes that have memory", _at("lanes.n")),
    Gauge("lanes_max", "Lanes that may be used: lanes.max", _at("lanes.n_max")),
    Gauge("lanes_busy", "Lanes that a request has", _at("lanes.n_busy")),
    Gauge(
        "lane_state",
        "1 for the state that a lane is in",
        _lane_states,
        {"lane": _LANES, "state": _LANE_STATES},
    ),
    # Tokens and their state
    Gauge("kv_tokens", "Tokens in a lane", _lane_tokens, {"lane": _LANES}),
    Gauge(
        "kv_usage_ratio", "Tokens in a lane, of the longest context", _lane_usage, {"lane": _LANES}
    ),
    Gauge("kv_pages", "Pages that there are", _at("pages.n")),
    Gauge("kv_pages_free", "Pages that nobody holds", _at("pages.n_free")),
    Gauge(
        "kv_pages_promised",
        "Pages that running requests may come to need, those they hold included",
        _at("pages.n_promised"),
    ),
    Gauge("frontiers", "Places for states from which a session can go on", _at("pages.frontiers")),
    Gauge("frontiers_free", "Such places that are free", _at("pages.frontiers_free")),
    Gauge(
        "context_tokens_limit", "Longest context, prompt and answer together", _at("model.context")
    ),
    Gauge(
        "context_tokens_max",
        "Tokens of the longest session that is known",
        lambda s: _one(max((one.n_tokens for one in s.sessions), default=0)),
    ),
    Gauge(
        "prefill_tokens_per_second",
        "Prompt tokens computed, mean of 10 s",
        _at("rates.prefill_tokens_per_s"),
    ),
    Gauge(
        "decode_tokens_per_second",
        "Tokens drawn, mean of 10 s: of all lanes, and of a lane that decodes",
        _decode_speed,
        {"scope": ("aggregate", "lane")},
    ),
    # Memory
    Gauge(
        "memory_bytes",
        "Memory of the host and what of it is promised; parts of the engine by name",
        _memory,
        {"term": _TERMS},
    ),
    Gauge(
        "memory_psi_some_ratio", "Share of the last 10 s in which something waited for memory", _psi
    ),
    Gauge("process_rss_bytes", "Resident memory of the process", _at("memory.resident")),
    Gauge("process_swap_bytes", "Memory of the process that is swapped out", _at("memory.swap")),
)
LABELS.update({f"ds4d_{gauge.name}": gauge.labels for gauge in GAUGES})


# Exposition


def exposition(
    status: wire.Status | None,
    sessions: Sequence[Session] = (),
    *,
    connections: Mapping[wire.Role, int] | None = None,
) -> bytes:
    """All series in Prometheus text format 0.0.4 (`CONTENT_TYPE`); without a status no gauges.

    `connections` are those to the control socket, by role. Reads /proc: call it in a worker thread.
    """
    if status is None:
        return generate_latest(_Page(None))
    seen = Seen(status=status, sessions=sessions, connections=connections)
    return generate_latest(_Page(seen))


class _Page(Collector):
    """What is shown of one moment, each sample with the model's name."""

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen
        model = seen.status.model if seen else None
        self._model = model.name if model else NO_MODEL

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.name not in LEFT_OUT:
                yield self._named(metric)
        if self._seen is not None:
            for gauge in GAUGES:
                yield self._gauge(gauge, gauge.read(self._seen))

    def _named(self, metric: Metric) -> Metric:
        metric.samples = [
            sample._replace(labels={**sample.labels, "model": self._model})
            for sample in metric.samples
            if sample.name != f"{metric.name}_created"  # a gauge beside each series, in this format
        ]
        return metric

    def _gauge(self, gauge: Gauge, reading: Reading) -> Metric:
        made = GaugeMetricFamily(f"ds4d_{gauge.name}", gauge.what, labels=(*gauge.labels, "model"))
        for values, value in reading.items():
            made.add_metric((*values, self._model), value)
        return made
