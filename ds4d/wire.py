"""What goes over the control socket: JSON-RPC 2.0, one object a line (spec/serving.md 4.2).

Owns every record, the methods with their parameters and results, and the error codes. The daemon
(`control/`), `ds4ctl` and `ds4top` share this module, so a new method is one class here. Unknown
parameters are refused, so that a typing error never acts; unknown fields of results are ignored,
so that an older client can read a newer daemon. Knows neither sockets nor who fills a record.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 (msgspec reads the annotations)
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

# "as": ds4top knows these records through this module alone.
from ds4d.sched.snapshot import Lanes as Lanes
from ds4d.sched.snapshot import Pages as Pages
from ds4d.sched.snapshot import Queue as Queue
from ds4d.sched.snapshot import Rates as Rates
from ds4d.sched.snapshot import Session as Session
from ds4d.sched.snapshot import Totals as Totals

MAJOR, MINOR = 1, 0  # a client of another major must stop
LINE_MAX = 1 << 20  # bytes, the LF included
REQUEST_MIN = 12  # characters of a request's id that stand for it where no other begins so

Role = Literal["service", "admin", "monitor"]
State = Literal[
    "starting",
    "loading",
    "ready",
    "degraded",
    "reloading",
    "draining",
    "drained",
    "stopping",
    "failed",
]
Topic = Literal["status", "sessions", "log"]

# Error codes: JSON-RPC's own, then ours.
PARSE, INVALID, NO_METHOD, BAD_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
BUSY, WRONG_STATE, NOT_FOUND, DENIED, DEADLINE, IO, CONFIG_INVALID, UNSUPPORTED = range(1, 9)
CANCELLED = 9  # an operation, by op.cancel or because the daemon goes down

R = TypeVar("R")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by the daemon."""


class Params(msgspec.Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call: its class names the method, its fields are the parameters, `R` is the result."""

    METHOD: ClassVar[str]
    RESULT: ClassVar[Any]


# The envelope


class Request(msgspec.Struct, frozen=True, kw_only=True):
    jsonrpc: Literal["2.0"]
    method: str
    id: int | str | None = None  # None: no answer is wanted
    params: msgspec.Raw = msgspec.Raw(b"{}")


class Error(Record, frozen=True, kw_only=True):
    code: int
    message: str
    data: Any = None


class Reply(Record, frozen=True, kw_only=True):
    """Anything that the daemon sends: a result, an error, or a notification (`method`)."""

    jsonrpc: Literal["2.0"] = "2.0"
    id: int | str | UnsetType | None = UNSET  # None: the call could not be read
    result: msgspec.Raw | UnsetType = UNSET
    error: Error | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: msgspec.Raw | UnsetType = UNSET


# Notifications


class Protocol(Record, frozen=True, kw_only=True):
    major: int
    minor: int


class Hello(Record, frozen=True, kw_only=True):
    """The first line on every connection."""

    METHOD: ClassVar[str] = "hello"

    protocol: Protocol
    server: Literal["ds4d"] = "ds4d"
    version: str
    pid: int
    boot: str  # changes with every start of the daemon
    state: State
    role: Role
    features: list[str]  # optional parts that this daemon has


class LogLine(Record, frozen=True, kw_only=True):
    seq: int  # of the daemon's events since its start, without a gap
    at: float  # seconds since 1970
    level: Literal["debug", "info", "warning", "error"]
    text: str  # the event and its fields, logfmt


class Update(Record, frozen=True, kw_only=True):
    """What a subscription sends: whole snapshots of its topics, only log lines add up."""

    METHOD: ClassVar[str] = "update"

    sub: int
    seq: int  # of this subscription, without a gap
    at: float
    dropped: int = 0  # updates that were left out before this one, for a slow reader
    status: Status | None = None
    sessions: list[Session] | None = None
    n_sessions: int | None = None  # all there are, when `sessions` holds only some
    log: list[LogLine] | None = None


class OpProgress(Record, frozen=True, kw_only=True):
    """How far an operation is; the last one is `ended` and has the result or the error."""

    METHOD: ClassVar[str] = "op.progress"

    op: str
    kind: str  # the method that began it
    text: str
    fraction: float | None = None
    ended: bool = False
    result: Any = None
    error: Error | None = None


# Results


class Done(Record, frozen=True, kw_only=True):
    """There is nothing more to say than that it is done; `text` is for a person."""

    text: str = ""


class Op(Record, frozen=True, kw_only=True):
    op: str
    kind: str


class Pong(Record, frozen=True, kw_only=True):
    at: float
    uptime_s: float


class Reason(Record, frozen=True, kw_only=True):
    """Why the state is what it is: `text` says what and why, `remedy` what to do, if anything."""

    code: str  # of a closed set: a label of ds4d_degraded
    text: str
    remedy: str = ""


class Loading(Record, frozen=True, kw_only=True):
    what: str
    fraction: float  # of all loading
    since_s: float


class Model(Record, frozen=True, kw_only=True):
    name: str
    file: str
    embedded: bool
    bytes: int
    context: int
    row_fingerprint: str  # which KV state it can exchange with others
    system_fingerprint: str
    prompt_texts: str  # whose constants its prompts carry
    prompt_profile: str


class Memory(Record, frozen=True, kw_only=True):
    """Bytes. Terms as in spec/serving.md 2.5."""

    budget: int  # what lanes, pages and weights could have at start
    parts: Mapping[str, int]  # what they were given, by part
    available: int  # of the host, now
    cgroup_headroom: int | None
    simulated: int | None  # what is left of memory.simulate_total_gib
    reserve: int  # H: what stays free for the rest of the host
    uncommitted: int  # U: promised to us, not yet touched
    free_to_promise: int  # F = A - U
    resident: int
    swap: int  # of this process
    psi_some: float | None  # percent of the last 10 s in which something waited for memory


class Drain(Record, frozen=True, kw_only=True):
    n_running: int
    n_queued: int
    left_s: float


class Reload(Record, frozen=True, kw_only=True):
    """The last one: when, and how it went."""

    at: float
    ok: bool
    text: str


class Status(Record, frozen=True, kw_only=True):
    state: State
    reasons: list[Reason] = []
    version: str
    pid: int
    boot: str
    uptime_s: float
    profile: str
    config_files: list[str]
    config_hash: str
    urls: list[str]  # where the API answers
    loading: Loading | None = None
    drain: Drain | None = None
    reload: Reload | None = None
    model: Model | None = None
    lanes: Lanes | None = None
    queue: Queue | None = None
    pages: Pages | None = None
    rates: Rates | None = None
    totals: Totals | None = None
    memory: Memory | None = None
    heartbeat_age_s: float | None = None
    loop_lag_s: float = 0.0


class Sessions(Record, frozen=True, kw_only=True):
    sessions: list[Session]
    n_sessions: int


class Change(Record, frozen=True, kw_only=True):
    key: str
    old: str  # as TOML
    new: str
    when: Literal["now", "next request", "restart"]


class Reloaded(Record, frozen=True, kw_only=True):
    dry_run: bool
    applied: list[Change]
    restart_required: list[Change]  # left as they were


class ConfigText(Record, frozen=True, kw_only=True):
    toml: str
    hash: str


class Problem(Record, frozen=True, kw_only=True):
    where: str  # ds4d.toml:12, a variable, the command line
    key: str
    message: str


class Checked(Record, frozen=True, kw_only=True):
    problems: list[Problem]


class LogLevel(Record, frozen=True, kw_only=True):
    logger: str
    previous: str
    level: str


class MetricsText(Record, frozen=True, kw_only=True):
    text: str  # Prometheus text format 0.0.4


class Subscribed(Record, frozen=True, kw_only=True):
    sub: int


# Methods


class Ping(Params[Pong], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "ping"
    RESULT = Pong


class GetStatus(Params[Status], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "status"
    RESULT = Status


class GetSessions(Params[Sessions], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "sessions"
    RESULT = Sessions

    phase: Literal["queued", "prefill", "decode", "paused", "idle"] | None = None
    limit: int = 200


class CloseSession(Params[Done], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "session.close"
    RESULT = Done

    id: int
    force: bool = False  # also while a request works on it, which fails then


class CancelRequest(Params[Done], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "request.cancel"
    RESULT = Done

    request: str  # its id, or the first characters of it, at least REQUEST_MIN


class StartDrain(Params[Op], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "drain"
    RESULT = Op

    deadline_s: float | None = None  # None: runtime.drain_s
    stop: bool = False  # shut down when it has ended


class Undrain(Params[Done], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "undrain"
    RESULT = Done


class DoReload(Params[Reloaded], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "reload"
    RESULT = Reloaded

    dry_run: bool = False
    allow_partial: bool = False  # apply what needs no restart, leave the rest
    file: str | None = None  # role service only


class ShowConfig(Params[ConfigText], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "config.show"
    RESULT = ConfigText

    defaults: bool = False  # the built-in values instead of the effective ones


class CheckConfig(Params[Checked], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "config.check"
    RESULT = Checked

    file: str | None = None  # role service only; None: the daemon's own, as it is on disk now


class SetLanes(Params[Lanes], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "lanes.set"
    RESULT = Lanes

    max: int


class Bench(Params[Op], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A load on the live daemon; the operation's result is a list of `BenchRow`."""

    METHOD = "bench"
    RESULT = Op

    prompt_tokens: int = 512
    answer_tokens: int = 64
    depth: int = 0  # tokens of context before the prompt, not measured
    concurrency: int = 1
    runs: int = 3
    exclusive: bool = True  # refuse unless nothing else runs


class BenchRow(Record, frozen=True, kw_only=True):
    """Of one run; a step of n lanes counts n tokens."""

    run: int
    concurrency: int
    depth: int
    prompt_tokens: int
    answer_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float  # of all lanes together
    first_token_ms: float  # mean
    total_s: float


class SetLogLevel(Params[LogLevel], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "log.level"
    RESULT = LogLevel

    level: Literal["debug", "info", "warning", "error"]
    logger: str = "ds4d"
    ttl_s: float | None = None  # then the previous level comes back


class GetMetrics(Params[MetricsText], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "metrics"
    RESULT = MetricsText


class Subscribe(Params[Subscribed], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "subscribe"
    RESULT = Subscribed

    topics: list[Topic]
    hz: float = 1.0  # 0.2..20


class Unsubscribe(Params[Done], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "unsubscribe"
    RESULT = Done

    sub: int


class WaitOp(Params[OpProgress], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "op.wait"
    RESULT = OpProgress

    op: str


class CancelOp(Params[Done], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "op.cancel"
    RESULT = Done

    op: str


class Shutdown(Params[Done], frozen=True, kw_only=True, forbid_unknown_fields=True):
    METHOD = "shutdown"
    RESULT = Done

    mode: Literal["graceful", "fast"] = "graceful"
