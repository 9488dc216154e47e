"""Every setting there is: sections, keys, defaults, ranges and what they are for.

A new setting is one line here. Help, `config init`, `config show`, the manual page and the classes
of a reload are made from these lines. Does not know where values come from.
"""

# ruff: noqa: RUF009 (`key` makes a dataclass field, like `dataclasses.field`)

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

from ds4d.config.forms import (
    ADDRESS,
    CONTROL_MODE,
    HOST,
    MONITOR_MODE,
    ORIGIN,
    host_and_port,
    is_loopback,
)
from ds4d.config.values import NEXT, NOW, RESTART, In, Key, key, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Profile = Literal["cpu-tiny", "balanced", "lean", "prefill-fast", "long-1m"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model is served, and under which name."""

    path: Path | None = key(
        None,
        RESTART,
        "A GGUF file, or the directory of a target as `ds4d model install` makes it.",
        unset="the embedded ds4-tiny",
        example=Path("/var/lib/ds4d/models/current"),
    )
    name: str | None = key(
        None,
        NOW,
        "The name that clients see.",
        unset="as the file calls itself",
        example="deepseek-v4-flash",
    )
    context: Annotated[int, In(256, 1 << 20, "tokens", step=256)] | None = key(
        None,
        RESTART,
        "What a session may hold, prompt and answer together; lanes and pages are made for it.",
        unset="what the file was made for",
        example=262_144,
    )
    constants: Path | None = key(
        None,
        RESTART,
        "The prompt texts of the model's release.",
        unset="prompt.json beside the model",
        example=Path("/var/lib/ds4d/models/current/prompt.json"),
    )
    verify_digest: Literal["none", "size", "full"] = key(
        "size",
        RESTART,
        "What is compared at start with the record that `ds4d model install` left beside the "
        "file: nothing, the size, or the SHA-256 too, which reads the whole file.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """The HTTP door: where it is, who may come in, and what holds where a client says nothing."""

    listen: Annotated[tuple[str, ...], ADDRESS] = key(
        ("127.0.0.1:30007",),
        RESTART,
        "Addresses of the API; port 0 takes a free one. Sockets that systemd passes under the "
        "name api go before them.",
    )
    api_keys_file: Path | None = key(
        None,
        NOW,
        "One key a line, mode 0600, read at start and at a reload.",
        unset="no key is needed",
        example=Path("/etc/ds4d/api.keys"),
    )
    insecure_no_auth: bool = key(
        False, RESTART, "Allow listening beyond this machine without keys."
    )
    allowed_hosts: Annotated[tuple[str, ...], HOST] = key(
        (),
        NOW,
        "Host names besides localhost that a loopback door answers to; others are refused, "
        "against DNS rebinding.",
    )
    cors_origins: Annotated[tuple[str, ...], ORIGIN] = key(
        (), NOW, "Web pages that may call the API from a browser; * is any."
    )
    max_body_mib: Annotated[int, In(1, 512, "MiB")] = key(
        64, NOW, "The largest request body; a conversation of 1M tokens is 5 MiB."
    )
    keepalive_s: Annotated[float, In(0.05, 60, "s")] = key(
        5.0,
        NEXT,
        "A stream with nothing to say sends a comment this often; some clients give up after "
        "300 s of silence.",
    )
    default_max_tokens: Annotated[int, In(1, 1 << 20, "tokens")] = key(
        32_768,
        NOW,
        "The longest answer where the client names no limit; clamped to the room there is.",
    )
    min_headroom: Annotated[int, In(1, 1 << 20, "tokens")] = key(
        512,
        NOW,
        "A prompt that leaves less room than this (and less than its max_tokens) is refused: a "
        "shorter answer helps nobody.",
    )
    default_effort: Literal["low", "high", "max"] = key(
        "low", NOW, "How hard the model thinks where the client does not say."
    )
    default_min_p: Annotated[float, In(0, 0.999, "")] | None = key(
        None,
        NOW,
        "min_p of sampling where the client does not say.",
        unset="0.05 for models with 2-bit experts, else 0",
        example=0.05,
    )
    prompt_profile: Literal["auto", "preview", "0731"] = key(
        "auto", NOW, "The prompt format of which release; auto goes by the file's name."
    )
    aliases: tuple[str, ...] = key((), NOW, "Further names that the model answers to.")
    list_aliases: bool = key(
        False,
        NOW,
        "Also list the aliases at /v1/models; clients that detect the model want to see one.",
    )
    strict_model: bool = key(
        False, NOW, "Answer 404 to names that are not the model's, instead of serving it anyway."
    )
    allow_ignore_eos: bool | None = key(
        None,
        NOW,
        "Admit ignore_eos, with which benchmarks ask for answers of a fixed length.",
        unset="on loopback only",
        example=True,
    )
    codex_catalog: bool = key(
        False, NOW, "Add an empty models array beside data at /v1/models, for Codex."
    )
    stream_granularity: Literal["token", "step"] = key(
        "token",
        NOW,
        "One chunk for each token, which benchmarks count, or for what a step has produced.",
    )
    send_stall_s: Annotated[float, In(1, 600, "s")] = key(
        60.0, NEXT, "A client that reads nothing for this long counts as gone."
    )
    request_max_s: Annotated[float, In(10, 86_400, "s")] = key(
        7200.0, NEXT, "A request that runs longer is ended."
    )
    queue_deadline_s: Annotated[float, In(10, 86_400, "s")] = key(
        1800.0, NEXT, "A request that waits longer for its turn is ended."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """How many sessions compute at the same time, and what is kept of those that wait."""

    max: Annotated[int, In(1, 64, "lanes")] = key(
        1, NOW, "Sessions that run at once; a reload can go up to what was allocated at start."
    )
    idle_contexts: Annotated[int, In(0, 64, "contexts a lane")] = key(
        2,
        RESTART,
        "Room for idle sessions, in whole contexts for each lane, as far as memory allows.",
    )
    frontiers: Annotated[int, In(2, 256, "frontiers a lane")] = key(
        12, RESTART, "Points at which sessions can be continued or forked, for each lane."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sched:
    """Who waits for whom."""

    queue_total: Annotated[int, In(1, 256, "requests")] = key(
        32, NOW, "Requests that may wait; beyond that a client gets 429 with Retry-After."
    )
    decode_stall_target_ms: Annotated[int, In(0, 60_000, "ms")] = key(
        2000, NOW, "How long a prefill may hold up the answers of other sessions at a time."
    )
    prefill_share: Annotated[float, In(0.1, 1, "")] = key(
        0.8, NOW, "The share of time that prefills may take while other sessions answer."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """How prompts are read."""

    chunk: Annotated[int, In(128, 8192, "tokens", step=128)] = key(
        2048,
        NEXT,
        "Prompt tokens in one pass: what a cancelled prompt may still cost, and how long other "
        "sessions wait. A reload can go up to what was allocated at start.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the daemon may take of the machine's memory, and when it says that there is too
    little."""

    reserve_mib: Annotated[int, In(0, 1 << 20, "MiB")] = key(
        512, RESTART, "Memory that is left to the rest of the machine."
    )
    simulate_total_gib: Annotated[float, In(0.001, 4096, "GiB")] | None = key(
        None,
        RESTART,
        "For tests: behave as if the machine had this much memory.",
        unset="what the machine has",
        example=16.0,
    )
    psi_some_max: Annotated[float, In(0, 100, "percent")] = key(
        10.0,
        NOW,
        "Memory pressure (the share of the last 10 s in which something waited for memory) "
        "beyond which the state is degraded.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The sockets of ds4ctl and ds4top, where the daemon makes them itself. Those that systemd
    passes have their mode from the socket unit."""

    socket_mode: Annotated[str, CONTROL_MODE] = key(
        "0600", RESTART, "Who may command the daemon through control.sock."
    )
    monitor_mode: Annotated[str, MONITOR_MODE] = key(
        "0600", RESTART, "Who may watch the daemon through monitor.sock, which only tells."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures for Prometheus, at /metrics of the API as long as that is on loopback."""

    listen: Annotated[str, ADDRESS] = key(
        "127.0.0.1:9464",
        RESTART,
        "Where /metrics is served instead when the API can be reached from other machines.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The process: threads, stopping, watchdog."""

    engine_threads: Annotated[int, In(1, 1024, "threads")] | None = key(
        None,
        RESTART,
        "Threads that compute.",
        unset="one for each processor but one",
        example=8,
    )
    drain_s: Annotated[float, In(0, 86_400, "s")] = key(
        120.0, NOW, "What `ds4ctl drain` gives running and waiting requests to end."
    )
    stop_drain_s: Annotated[float, In(0, 86_400, "s")] = key(
        30.0, NOW, "What SIGTERM and `systemctl stop` give running and waiting requests to end."
    )
    engine_stall_s: Annotated[float, In(1, 3600, "s")] = key(
        60.0,
        NOW,
        "An engine that makes no progress for this long counts as hung: the daemon ends with exit "
        "code 70, and systemd starts it again. What cannot even end is left to WatchdogSec.",
    )
    oom_score_adj: Annotated[int, In(0, 1000, "")] = key(
        1000,
        RESTART,
        "How gladly the kernel ends this process when memory runs out; 1000 is before all others.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What is written to the journal or the terminal."""

    level: Literal["debug", "info", "warning", "error"] = key(
        "info", NOW, "Events below this level are left out."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where things lie: systemd's directories, else the user's (XDG). Nothing is created here.
    And what else the service manager says to a process that it starts."""

    config: Path
    state: Path  # logs, journals, models
    cache: Path  # compiled kernels, KV tier
    runtime: Path  # sockets; mode 0700
    notify: str | None = None  # systemd's socket for READY=1 and the like
    passed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # sockets by their name
    watchdog_us: int | None = None  # systemd wants a sign of life this often
    under_systemd: bool = False
    journal: bool = False  # stderr goes to the journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    paths: Paths
    profile: Profile = key(
        "cpu-tiny",
        RESTART,
        "A preset for keys that depend on model and machine; each of them can still be set. "
        "cpu-tiny is for the embedded model on a laptop; balanced has 256k tokens of context, lean "
        "and prefill-fast the same with shorter passes over prompts, long-1m a million tokens.",
    )
    model: Model = Model()
    api: Api = Api()
    lanes: Lanes = Lanes()
    sched: Sched = Sched()
    prefill: Prefill = Prefill()
    memory: Memory = Memory()
    control: Control = Control()
    metrics: Metrics = Metrics()
    runtime: Runtime = Runtime()
    log: Log = Log()


# A bare laptop (design.md): the model's own context, lanes that two cores can feed. The others are
# those of one GB10 (spec/serving.md 1.8).
DEFAULT_PROFILE: Final = "cpu-tiny"
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cpu-tiny": {"lanes.max": 4, "prefill.chunk": 256},
    "balanced": {"model.context": 262_144, "lanes.max": 3, "prefill.chunk": 8192},
    "lean": {"model.context": 262_144, "lanes.max": 3, "prefill.chunk": 4096},
    "prefill-fast": {"model.context": 262_144, "lanes.max": 3, "prefill.chunk": 4096},
    "long-1m": {"model.context": 1 << 20, "lanes.max": 3, "prefill.chunk": 4096},
}


def _keys(owner: type, prefix: str) -> Iterator[Key]:
    hints = get_type_hints(owner, include_extras=True)
    for declared in dataclasses.fields(owner):
        if declared.metadata:
            name = prefix + declared.name
            yield key_of(name, hints[declared.name], declared, PRESETS)


_CLASSES: Final[Mapping[str, type]] = {
    name: section
    for name, section in get_type_hints(Config).items()
    if isinstance(section, type) and dataclasses.is_dataclass(section) and section is not Paths
}
SECTIONS: Final[Mapping[str, str]] = {
    name: " ".join((section.__doc__ or "").split()) for name, section in _CLASSES.items()
}
KEYS: Final[Mapping[str, Key]] = {
    found.name: found
    for found in (
        *_keys(Config, ""),
        *(found for name, section in _CLASSES.items() for found in _keys(section, f"{name}.")),
    )
}


def built_in(profile: str) -> dict[str, Any]:
    """The value of each key where no source gives one."""
    return {n: key.defaults[profile] for n, key in KEYS.items()} | {"profile": profile}


def build(paths: Paths, values: Mapping[str, Any]) -> Config:
    """The tree out of values by key; a key that is missing has its built-in value."""
    top = {name: value for name, value in values.items() if "." not in name}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, dot, leaf = name.partition(".")
        if dot:
            parts.setdefault(section, {})[leaf] = value
    return Config(paths=paths, **top, **{n: _CLASSES[n](**part) for n, part in parts.items()})


def value_at(config: Config, name: str) -> Any:
    """The value of key `name`."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


@dataclass(frozen=True, slots=True)
class Conflict:
    """Values that are fine one by one and not together. It is told at `key`."""

    key: str
    others: tuple[str, ...]
    message: str


def conflicts(config: Config) -> Iterator[Conflict]:
    """What the sections' own checks cannot see."""
    api, listen = config.api, config.api.listen
    if not listen:
        message = "no address (got [], expected at least one host:port)"
        yield Conflict("api.listen", (), message)
    for address in sorted({a for a in listen if listen.count(a) > 1 and not a.endswith(":0")}):
        message = f"twice the same address (got {address}, expected it once)"
        yield Conflict("api.listen", (), message)
    beyond = [address for address in listen if not is_loopback(host_and_port(address)[0])]
    if not (api.api_keys_file or api.insecure_no_auth):
        for address in beyond:
            message = (
                f"reachable from other machines without a key (got {address}, expected "
                "api.api_keys_file or api.insecure_no_auth = true)"
            )
            yield Conflict("api.listen", ("api.api_keys_file", "api.insecure_no_auth"), message)
    if beyond and config.metrics.listen in listen:
        message = f"taken by api.listen (got {config.metrics.listen}, expected another port)"
        yield Conflict("metrics.listen", ("api.listen",), message)
    context, chunk = config.model.context, config.prefill.chunk
    if context is not None and chunk > context:
        message = f"longer than a session (got {chunk}, expected at most model.context, {context})"
        yield Conflict("prefill.chunk", ("model.context", "profile"), message)
