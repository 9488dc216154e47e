"""Where values come from: files, drop-ins, environment and command line to one `Loaded`.

Built-in < preset of the profile < file < drop-ins (`conf.d/*.toml`, sorted) < environment
(`DS4D__SECTION__KEY`) < command line (`--set section.key=value`). All problems are found in one
pass, one line each: `ds4d.toml:12: lanes.max: too large (got 99, expected 1..64 lanes)`. Does not
know what is built from a `Config`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ds4d.config.paths import directories, forget_passed
from ds4d.config.tree import DEFAULT_PROFILE, KEYS, PRESETS, SECTIONS, build, built_in, conflicts
from ds4d.config.values import Bad, printable, shown, typed, value_of
from ds4d.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ds4d.config.tree import Config, Paths

FILE_NAME: Final = "ds4d.toml"
DROP_INS: Final = "conf.d"  # a directory beside the file
ENVIRONMENT_PREFIX: Final = "DS4D__"
COMMAND_LINE: Final = "command line"
FILE_MAX_BYTES: Final = 1 << 16  # with every key and comment there are some 12,000

Problem = tuple[str, str, str]  # where, key (or ""), message


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, where each of its values is from, and what is needed to read it again."""

    config: Config
    sources: Mapping[str, str]  # of every key
    files: tuple[Path, ...]  # that were read, in order
    file: Path | None  # the one that was asked for; None: the one of the directory, if any
    sets: tuple[str, ...]
    environ: Mapping[str, str]  # variables that set keys

    def again(self, file: Path | None = None) -> Loaded:
        """The same sources as they are now, or with another main file. Raises ConfigError."""
        main = file or self.file
        usual = (self.config.paths.config / FILE_NAME).absolute()
        if main is None and usual in self.files:
            main = usual  # to lose it must not bring the built-in values back
        return _read(self.config.paths, main, self.sets, self.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One value of one source. `text`: it came from a line of text and has no TOML type yet."""

    where: str
    key: str
    value: Any
    text: bool = False
    base: Path | None = None  # where a relative path begins; None: in the working directory


def load(
    file: Path | None = None, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """As `read`, for those who need no sources."""
    return read(file, sets, environ).config


def read(
    file: Path | None = None, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Loaded:
    """Read all sources once. `file`: None looks for `ds4d.toml` in the configuration directory,
    where it may be missing. `environ`: None is the process's own, out of which what systemd said
    to this process alone is removed.

    Raises ConfigError, whose text has one line per problem.
    """
    environ = os.environ if environ is None else environ
    paths = directories(environ)
    if environ is os.environ:
        forget_passed(paths)
    ours = {name: environ[name] for name in sorted(environ) if _OURS.match(name)}
    return _read(paths, file, sets, ours)


def check(file: Path | None, environ: Mapping[str, str] | None = None) -> ConfigError | None:
    """What is wrong with `file` (None: the usual one), its drop-ins and the environment."""
    try:
        read(file, (), environ)
    except ConfigError as error:
        return error
    return None


def error_of(problems: Sequence[Problem]) -> ConfigError:
    return ConfigError("\n".join(": ".join(filter(None, p)) for p in problems), problems)


def _read(
    paths: Paths, file: Path | None, sets: Sequence[str], environ: Mapping[str, str]
) -> Loaded:
    problems: list[Problem] = []
    files: list[Path] = []
    given = [
        *_from_files(file, paths.config, files, problems),
        *_from_environment(environ, problems),
        *_from_command_line(sets, problems),
    ]
    profile = next((s.value for s in reversed(given) if s.key == "profile"), DEFAULT_PROFILE)
    profile = profile if isinstance(profile, str) and profile in PRESETS else DEFAULT_PROFILE
    values = built_in(profile)
    sources = built_in_sources(profile)
    wrong: set[str] = set()
    for setting in given:
        try:
            values[setting.key] = _value(setting)
            sources[setting.key] = setting.where
        except Bad as bad:
            got = setting.value if bad.got is None else bad.got
            message = f"{bad} (got {shown(got)}, expected {bad.expected})"
            problems.append((setting.where, printable(setting.key), message))
            wrong.add(setting.key)
    config = build(paths, values)
    problems += (
        (sources[conflict.key], conflict.key, conflict.message)
        for conflict in conflicts(config)
        if wrong.isdisjoint((conflict.key, *conflict.others))
    )
    if problems:
        raise error_of(problems)
    return Loaded(
        config=config,
        sources=sources,
        files=tuple(files),
        file=file,
        sets=tuple(sets),
        environ=environ,
    )


def built_in_sources(profile: str) -> dict[str, str]:
    """Where the values of `built_in(profile)` are from."""
    preset = PRESETS[profile]
    return {name: f"preset {profile}" if name in preset else "built-in" for name in KEYS}


def _value(setting: _Setting) -> Any:
    """The value, checked. Raises Bad."""
    key = KEYS.get(setting.key)
    if key is None:
        raise _unknown(setting.key)
    given = typed(setting.value, key) if setting.text else setting.value
    return value_of(given, key, base=setting.base)


def _unknown(name: str) -> Bad:
    if name in SECTIONS:
        inside = next(key for key in KEYS if key.startswith(f"{name}."))
        return Bad("a section, not a setting", f"keys in it, such as {inside}")
    near = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.5)
    others = ", ".join(sorted({known.partition(".")[0] for known in KEYS}))
    return Bad("no such setting", near[0] if near else f"a key of {others}")


# Files


def _from_files(
    file: Path | None, directory: Path, files: list[Path], problems: list[Problem]
) -> Iterator[_Setting]:
    main = file or directory / FILE_NAME
    drop_ins = main.parent / DROP_INS
    names: list[str] = []

    def unreadable(path: Path, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) else str(error)
        problems.append((printable(str(path)), "", f"cannot be read: {why}"))

    try:
        names = sorted(os.listdir(drop_ins))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        unreadable(drop_ins, error)
    chosen = [n for n in names if n.endswith(".toml") and not n.startswith(".")]  # no editor's own
    for path, name in [(main, main.name), *((drop_ins / n, f"{DROP_INS}/{n}") for n in chosen)]:
        try:
            data = _bytes(path)
        except (OSError, ValueError) as error:  # ValueError: no name that a file can have
            # One that nobody asked for may be missing; a link to nowhere is not.
            missing = isinstance(error, FileNotFoundError) and not os.path.lexists(path)
            if not (missing and path is main and file is None):
                unreadable(path, error)
            continue
        files.append(path.absolute())
        try:
            yield from _from_toml(data, printable(name), path.parent)
        except _NoSettings as error:
            problems.append((error.where, "", str(error)))


def _bytes(path: Path) -> bytes:
    """At most one byte more than a file may have. Raises OSError, ValueError."""
    if path.is_fifo():
        raise ValueError("it is a pipe, which a reload could not read again")
    with path.open("rb") as opened:
        return opened.read(FILE_MAX_BYTES + 1)


class _NoSettings(Exception):
    def __init__(self, where: str, problem: str) -> None:
        super().__init__(problem)
        self.where = where


def _from_toml(data: bytes, name: str, base: Path) -> Iterator[_Setting]:
    """Raises _NoSettings, before it yields anything."""
    if len(data) > FILE_MAX_BYTES:
        raise _NoSettings(name, "no file of settings: larger than 64 KiB")
    try:
        text = data.decode("utf-8-sig")
        tree = tomllib.loads(text)
        lines = _lines(text)
    except UnicodeDecodeError:
        raise _NoSettings(name, "is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(error))
        number = int(at[1]) if at and at[1] else text.count("\n") + 1
        said = printable(str(error)[: at.start()] if at else str(error))
        line = text.split("\n")[number - 1].strip()
        got = f" (got {shown(line)})" if line else ""
        raise _NoSettings(f"{name}:{number}", f"not TOML: {said}{got}") from None
    except (ValueError, RecursionError):  # thousands of digits or brackets
        raise _NoSettings(
            name, "no file of settings: nested too deeply, or a number too long"
        ) from None
    for key, value in sorted(_flat(tree), key=lambda one: lines[one[0]]):
        yield _Setting(where=f"{name}:{lines[key]}", key=key, value=value, base=base)


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`section.key` and value; deeper tables are values, which no key takes. An empty section
    says nothing."""
    for name, value in tree.items():
        if isinstance(value, dict) and (value or name in SECTIONS):
            for leaf, inner in value.items():
                yield f"{_written(name)}.{_written(leaf)}", inner
        else:
            yield _written(name), value


def _written(name: str) -> str:
    """A part of a key as TOML has it: `"lanes.max"` in quotes is not our lanes.max."""
    return name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'


# What can hold or begin a bracket or a newline that means nothing, else a bracket or a newline.
_TOKEN: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[\]{}\n]",
    re.DOTALL,
)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of valid TOML with the number of the line where each begins."""
    start, depth, number = 0, 0, 1
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case "\n" if depth == 0:
                statement = text[start : token.end()]
                yield number, statement
                number += statement.count("\n")
                start = token.end()
    yield number, text[start:]


def _lines(text: str) -> dict[str, int]:
    """The number of the line where each key of `_flat` is set. `tomllib` keeps no positions, so
    every statement is parsed once more, by itself below the header that it belongs to."""
    found: dict[str, int] = {}
    header = ""
    for number, statement in _statements(text):
        if statement.lstrip().startswith("["):
            header, statement = statement, ""
        for name, _ in _flat(tomllib.loads(header + statement)):
            found.setdefault(name, number)
    return found


# Environment and command line


# One underscore too few would set nothing.
_OURS: Final = re.compile(f"{ENVIRONMENT_PREFIX}|DS4D_({'|'.join(SECTIONS)})_", re.IGNORECASE)


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[_Setting]:
    for name, value in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            expected = f"{ENVIRONMENT_PREFIX}SECTION__KEY"
            problems.append((printable(name), "", f"not of the form {expected}"))
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        yield _Setting(where=printable(name), key=key, value=value, text=True)


def _from_command_line(sets: Iterable[str], problems: list[Problem]) -> Iterator[_Setting]:
    for item in sets:
        key, equals, value = item.partition("=")
        if equals:
            yield _Setting(where=COMMAND_LINE, key=key.strip(), value=value, text=True)
        else:
            problems.append((f"--set {shown(item)}", "", "needs the form section.key=value"))
