"""Settings: TOML files, drop-ins, environment and command line to one frozen `Config`.

Built-in < preset of the profile < file < drop-ins (`conf.d/*.toml`, sorted) < environment
(`DS4D__SECTION__KEY`) < command line (`--set section.key=value`). All problems are found in one
pass, one line each: `ds4d.toml:12: lanes.max: too large (got 99, expected 1..64)`.

Owns every key, its default, unit and range, and the directories of the daemon; alone in the
package it reads the environment. Does not know what is built from a `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ds4d.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FILE_NAME = "ds4d.toml"
ENVIRONMENT_PREFIX = "DS4D__"


class In:
    """Bounds of a number, both inclusive; `step` is what it must be a multiple of."""

    def __init__(self, low: float, high: float, unit: str, *, step: int = 1) -> None:
        self.low = low
        self.high = high
        self.unit = unit
        self.step = step

    def __str__(self) -> str:
        span = "..".join(str(int(n)) if n == int(n) else str(n) for n in (self.low, self.high))
        step = f", a multiple of {self.step}" if self.step > 1 else ""
        return f"{span} {self.unit}{step}".replace(" ,", ",").rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    path: Path | None = None  # None: the embedded ds4-tiny
    name: str | None = None  # None: as the file calls itself
    context: Annotated[int, In(256, 1 << 20, "tokens", step=256)] | None = None  # None: the file's
    constants: Path | None = None  # prompt texts of the release; None: prompt.json beside `path`


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    listen: tuple[str, ...] = ("127.0.0.1:30007",)  # host:port; port 0 takes a free one
    api_keys_file: Path | None = None  # one key a line, mode 0600; None: any key will do
    insecure_no_auth: bool = False  # needed to listen beyond loopback without keys
    allowed_hosts: tuple[str, ...] = ()  # besides localhost, against DNS rebinding
    cors_origins: tuple[str, ...] = ()  # "*": any
    max_body_mib: Annotated[int, In(1, 512, "MiB")] = 64  # a conversation of 1M tokens is 5
    keepalive_s: Annotated[float, In(0.05, 60, "s")] = 5.0  # some clients give up after 300
    default_max_tokens: Annotated[int, In(1, 1 << 20, "tokens")] = 32_768  # then clamped
    min_headroom: Annotated[int, In(1, 1 << 20, "tokens")] = 512  # a shorter answer helps nobody
    default_effort: Literal["low", "high", "max"] = "low"  # the release's own default
    default_min_p: Annotated[float, In(0, 0.999, "")] | None = None  # None: 0.05 for 2-bit experts
    prompt_profile: Literal["auto", "preview", "0731"] = "auto"
    aliases: tuple[str, ...] = ()  # further names of the model
    list_aliases: bool = False  # clients that detect the model want to see exactly one
    strict_model: bool = False  # 404 for names that are not ours
    allow_ignore_eos: bool | None = None  # None: on loopback only; benchmarks need it
    codex_catalog: bool = False  # an empty `models` array beside `data`
    stream_granularity: Literal["token", "step"] = "token"  # benchmarks count chunks
    send_stall_s: Annotated[float, In(1, 600, "s")] = 60.0  # then a reader counts as gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    max: Annotated[int, In(1, 64, "lanes")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sched:
    queue_total: Annotated[int, In(1, 256, "requests")] = 32  # waiting ones; beyond: 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    # A chunk is what a cancelled prompt may still cost, and how long other lanes wait.
    chunk: Annotated[int, In(128, 8192, "tokens", step=128)] = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    reserve_mib: Annotated[int, In(0, 1 << 20, "MiB")] = 512  # left to the rest of the host
    simulate_total_gib: Annotated[float, In(0.001, 4096, "GiB")] | None = None  # for tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    engine_threads: Annotated[int, In(1, 1024, "threads")] | None = None  # None: cores - 1
    stop_drain_s: Annotated[float, In(0, 86_400, "s")] = 30.0  # after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where things lie: systemd's directories, else the user's (XDG). Nothing is created here."""

    config: Path
    state: Path  # logs, journals, models
    cache: Path  # compiled kernels, KV tier
    runtime: Path  # sockets; mode 0700
    notify: str | None = None  # systemd's socket for READY=1 and the like


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    paths: Paths
    profile: Literal["cpu-tiny"] = "cpu-tiny"
    model: Model = Model()
    api: Api = Api()
    lanes: Lanes = Lanes()
    sched: Sched = Sched()
    prefill: Prefill = Prefill()
    memory: Memory = Memory()
    runtime: Runtime = Runtime()
    log: Log = Log()


# A bare laptop (design.md): the model's own context, lanes that two cores can feed.
DEFAULT_PROFILE = "cpu-tiny"
PRESETS: dict[str, dict[str, Any]] = {
    "cpu-tiny": {"lanes.max": 4, "prefill.chunk": 256},
}


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value of one source. `text`: it came from a line of text and has no TOML type yet."""

    where: str
    key: str
    value: Any
    text: bool = False


def load(
    *,
    file: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read all sources once. `file`: None looks for `ds4d.toml` in the configuration directory,
    where it may be missing. Raises ConfigError whose text is one line per problem."""
    environ = os.environ if environ is None else environ
    paths = directories(environ)
    problems: list[str] = []
    given = [
        *_from_files(file, paths.config, problems),
        *_from_environment(environ),
        *_from_command_line(sets, problems),
    ]
    profile = next((s.value for s in reversed(given) if s.key == "profile"), DEFAULT_PROFILE)
    preset = PRESETS.get(profile, {}) if isinstance(profile, str) else {}
    values: dict[str, Any] = {"profile": DEFAULT_PROFILE, **preset}
    sources: dict[str, str] = {}
    for setting in given:
        known = _KEYS.get(setting.key)
        if known is None:
            problems.append(_unknown(setting))
            continue
        try:
            values[setting.key] = _value(setting, known)
        except _Bad as bad:
            problems.append(
                f"{setting.where}: {setting.key}: {bad.problem} "
                f"(got {_shown(setting.value)}, expected {bad.expected})"
            )
        sources[setting.key] = setting.where
    config = _build(paths, values)
    if not problems:
        problems += _contradictions(config, sources)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def directories(environ: Mapping[str, str]) -> Paths:
    """systemd's `*_DIRECTORY` (the first of several), else `XDG_*` with `ds4d/` below."""
    home = Path(environ.get("HOME") or "/")

    def base(variable: str, default: str) -> Path:
        path = Path(environ.get(variable) or "")
        return path if path.is_absolute() else home / default  # relative ones are to be ignored

    def pick(systemd: str, otherwise: Path) -> Path:
        first = environ.get(systemd, "").split(":")[0]
        return Path(first) if first else otherwise

    state = pick("STATE_DIRECTORY", base("XDG_STATE_HOME", ".local/state") / "ds4d")
    run = environ.get("XDG_RUNTIME_DIR")
    return Paths(
        config=pick("CONFIGURATION_DIRECTORY", base("XDG_CONFIG_HOME", ".config") / "ds4d"),
        state=state,
        cache=pick("CACHE_DIRECTORY", base("XDG_CACHE_HOME", ".cache") / "ds4d"),
        runtime=pick("RUNTIME_DIRECTORY", Path(run) / "ds4d" if run else state / "run"),
        notify=environ.get("NOTIFY_SOCKET"),
    )


def host_and_port(listen: str) -> tuple[str, int]:
    """`"127.0.0.1:30007"` or `"[::1]:30007"` taken apart. Raises ValueError."""
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", listen, re.ASCII)
    if parts is None or int(parts[3]) > 65_535:
        raise ValueError(listen)
    return parts[1] or parts[2], int(parts[3])


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


# Sources


def _from_files(file: Path | None, directory: Path, problems: list[str]) -> Iterator[_Setting]:
    main = file or directory / FILE_NAME
    if file is not None or main.exists():
        yield from _from_toml(main, problems)
    for drop_in in sorted((main.parent / "conf.d").glob("*.toml")):
        yield from _from_toml(drop_in, problems)


def _from_toml(path: Path, problems: list[str]) -> Iterator[_Setting]:
    try:
        text = path.read_text("utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    except UnicodeDecodeError:
        problems.append(f"{path}: is not UTF-8 text")
        return
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        line = (at and at[1]) or str(text.count("\n") + 1)
        problems.append(f"{path.name}:{line}: {str(error)[: at.start()] if at else error}")
        return
    lines = _lines(text)
    for name, value in _flatten(tree, ""):
        line = next(lines[p] for p in _prefixes(name) if p in lines)
        yield _Setting(f"{path.name}:{line}", name, value)


def _flatten(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _prefixes(name: str) -> Iterator[str]:
    """`a.b.c`, `a.b`, `a`, then "": where to look for a key that the scanner did not see."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_SECTION = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]")
_ASSIGNMENT = re.compile(rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


def _lines(text: str) -> dict[str, int]:
    """Dotted key to line number. `tomllib` keeps no positions, so this reads heads of lines."""
    found = {"": 1}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := _SECTION.match(line):
            section = _dotted(head[1])
            found.setdefault(section, number)
        elif assignment := _ASSIGNMENT.match(line):
            name = _dotted(assignment[1])
            found.setdefault(f"{section}.{name}" if section else name, number)
    return found


def _dotted(written: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in written.split("."))


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Setting]:
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            dotted = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield _Setting(name, dotted, environ[name], text=True)


def _from_command_line(sets: Sequence[str], problems: list[str]) -> Iterator[_Setting]:
    for item in sets:
        name, equals, value = item.partition("=")
        if not equals:
            problems.append(f"--set {item}: needs the form section.key=value")
        else:
            yield _Setting("command line", name.strip(), value, text=True)


def listing() -> str:
    """Every key with what it takes, one a line: for `ds4d serve --help`."""
    width = max(map(len, _KEYS))
    return "\n".join(f"{name:<{width}}  {key.expected}" for name, key in _KEYS.items())


# Values


class _Bad(Exception):
    def __init__(self, problem: str, expected: str) -> None:
        self.problem = problem
        self.expected = expected


@dataclass(frozen=True, slots=True)
class _Key:
    kind: Any  # int, float, bool, str, Path or tuple
    choices: tuple[str, ...] = ()
    bounds: In | None = None

    @property
    def expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        return str(self.bounds or _WORDS[self.kind])


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    tuple: "a list of texts",
}


def _keys() -> dict[str, _Key]:
    found: dict[str, _Key] = {}
    for top, section in get_type_hints(Config).items():
        if dataclasses.is_dataclass(section) and top != "paths":
            hints = get_type_hints(section, include_extras=True)
            found |= {f"{top}.{name}": _key_of(hint) for name, hint in hints.items()}
    return found | {"profile": _key_of(get_type_hints(Config)["profile"])}


def _key_of(hint: Any) -> _Key:
    if get_origin(hint) in (Union, UnionType):  # `int | None`: None is said by leaving it out
        hint = next(a for a in get_args(hint) if a is not type(None))
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return _Key(kind, bounds=bounds)
    if get_origin(hint) is Literal:
        return _Key(str, choices=get_args(hint))
    return _Key(get_origin(hint) or hint)


_KEYS = _keys()


def _value(setting: _Setting, key: _Key) -> Any:
    value = _typed(setting.value, key) if setting.text else setting.value
    wrong = _Bad("wrong type", key.expected)
    if key.kind is tuple:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise wrong
        return tuple(value)
    if key.kind is float and type(value) is int:
        value = float(value)
    written = str if key.kind is Path else key.kind
    if type(value) is not written:  # not isinstance: True is no number here
        raise wrong
    if key.kind is Path and not value:
        raise _Bad("empty", key.expected)
    if key.choices and value not in key.choices:
        raise _Bad("not known", key.expected)
    if key.bounds is not None and isinstance(value, int | float):
        if not value >= key.bounds.low:  # so written that NaN fails too
            raise _Bad("too small", key.expected)
        if value > key.bounds.high:
            raise _Bad("too large", key.expected)
        if key.bounds.step > 1 and value % key.bounds.step:
            raise _Bad("not allowed", key.expected)
    return Path(value).expanduser() if key.kind is Path else value


def _typed(text: str, key: _Key) -> Any:
    """A value from the environment or the command line: bare text, or a TOML value where the key
    is no text; a list also as `a,b`."""
    if key.kind in (str, Path):
        return text
    if key.kind is tuple and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text  # fails the type check, which names what was expected


def _unknown(setting: _Setting) -> str:
    near = difflib.get_close_matches(setting.key, _KEYS, n=1, cutoff=0.5)
    sections = ", ".join(sorted({name.partition(".")[0] for name in _KEYS}))
    return (
        f"{setting.where}: {setting.key}: no such setting "
        f"(got {_shown(setting.value)}, expected {near[0] if near else f'a key of {sections}'})"
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, str) else str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 60 else text[:57] + "..."


def _build(paths: Paths, values: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, leaf = name.partition(".")
        if dot:
            tree.setdefault(section, {})[leaf] = value
        else:
            tree[name] = value
    hints = get_type_hints(Config)
    return Config(
        paths=paths,
        **{n: hints[n](**v) if isinstance(v, dict) else v for n, v in tree.items()},
    )


def _contradictions(config: Config, sources: dict[str, str]) -> Iterator[str]:
    where = sources.get("api.listen", "built-in")
    if not config.api.listen:
        yield f"{where}: api.listen: no address (got [], expected at least one host:port)"
    for listen in config.api.listen:
        try:
            host, _ = host_and_port(listen)
        except ValueError:
            yield f"{where}: api.listen: not an address (got {_shown(listen)}, expected host:port)"
            continue
        open_door = not (config.api.api_keys_file or config.api.insecure_no_auth)
        if open_door and not is_loopback(host):
            yield (
                f"{where}: api.listen: reachable from other machines without a key "
                f"(got {listen}, expected api.api_keys_file or api.insecure_no_auth = true)"
            )
