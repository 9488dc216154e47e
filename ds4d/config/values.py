"""What a key may hold: types, bounds and forms; a value checked; a value as TOML text.

Owns the declaration of a key (`key`, `In`, `Like`), the record `Key` that everything which speaks
of settings is made from (help, template, manual page), and the checks of one value. Does not know
which keys there are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import tomli_w

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
When = Literal["now", "next request", "restart"]
NOW: Final = "now"  # a reload applies it at once
NEXT: Final = "next request"  # a reload applies it to requests that come after
RESTART: Final = "restart"  # it is fixed when the daemon starts

_DECLARED: Final = "ds4d"  # under which a dataclass field keeps what `key` said of it
_IPV6: Final = re.compile(r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]")  # begins no list of texts
_SHOWN_MAX: Final = 60  # characters of a wrong value in a message
# Control characters, and the halves of characters that stand for bytes which are no UTF-8.
_UNSPEAKABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


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
        return f"{span} {self.unit}".rstrip() + step

    def check(self, value: Any) -> None:
        """Raises Bad."""
        if not value >= self.low:  # so written that NaN fails too
            raise Bad("too small", str(self))
        if value > self.high:
            raise Bad("too large", str(self))
        if self.step > 1 and value % self.step:
            raise Bad("not allowed", str(self))


class Like:
    """The form of a text, or of each text of a list: `what` it is, a function that tells whether
    it is that, and the `problem` with it if not."""

    unit = ""

    def __init__(self, what: str, fits: Callable[[str], bool], *, problem: str) -> None:
        self._what = what
        self._fits = fits
        self._problem = problem

    def __str__(self) -> str:
        return self._what

    def check(self, value: Any) -> None:
        """Raises Bad."""
        for text in (value,) if isinstance(value, str) else value:
            if not self._fits(text):
                raise Bad(self._problem, self._what, got=text)


@dataclass(frozen=True, slots=True)
class _Declared:
    when: When
    help: str
    unset: str
    example: Any


def key(default: T, when: When, help: str, *, unset: str = "", example: object = None) -> T:
    """Declare a setting: the default of a field of a section.

    `help` is one or two sentences without the default, range and reload class, which are added.
    Where the default is None, `unset` says what that means and `example` is a value.
    """
    assert (default is None) == bool(unset) == (example is not None), help
    declared = _Declared(when, help, unset, example)
    return dataclasses.field(default=default, metadata={_DECLARED: declared})


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A setting: what it takes and what it is for."""

    name: str  # section.key
    kind: type  # int, float, bool, str, Path or tuple (of texts)
    default: Any  # None: not set, see `unset`
    defaults: Mapping[str, Any]  # by profile
    when: When  # from when on a reload applies a new value
    help: str
    unset: str  # what not setting it means, where the default is None
    example: Any  # a value, where the default is None
    choices: tuple[str, ...]
    rule: In | Like | None

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def expected(self) -> str:
        """What it takes, for a person: `1..64 lanes`, `one of …`, `a path`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is tuple and self.rule is not None:
            return f"a list, each {self.rule}"
        return str(self.rule or _WORDS[self.kind])

    @property
    def unit(self) -> str:
        return self.rule.unit if self.rule is not None else ""

    @property
    def default_text(self) -> str:
        """What holds where nothing is set, for a person."""
        profiles: dict[str, list[str]] = {}
        for profile, value in self.defaults.items():
            text = f"not set ({self.unset})" if value is None else as_toml(value)
            profiles.setdefault(text, []).append(profile)
        if len(profiles) == 1:
            return next(iter(profiles))
        return "; ".join(f"{text} in {', '.join(names)}" for text, names in profiles.items())

    @property
    def effect(self) -> str:
        """What a reload does with a new value, for a person."""
        return _EFFECTS[self.when]


_EFFECTS: Final[Mapping[When, str]] = {
    NOW: "a reload applies it at once",
    NEXT: "a reload applies it to requests that come after",
    RESTART: "fixed when the daemon starts",
}
_WORDS: Final[Mapping[type, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    tuple: "a list of texts",
}


def key_of(
    name: str, hint: Any, field: dataclasses.Field[Any], presets: Mapping[str, Mapping[str, Any]]
) -> Key:
    """The key that a field of a section declares; `hint` is its type with what was annotated."""
    rule: In | Like | None = None
    choices: tuple[str, ...] = ()
    if get_origin(hint) in (Union, UnionType):  # `int | None`: None is said by leaving it out
        (hint,) = (arm for arm in get_args(hint) if arm is not NoneType)
    if get_origin(hint) is Annotated:
        hint, rule = get_args(hint)
    if get_origin(hint) is Literal:
        choices, hint = get_args(hint), str
    declared: _Declared = field.metadata[_DECLARED]
    return Key(
        name=name,
        kind=get_origin(hint) or hint,
        default=field.default,
        defaults={p: values.get(name, field.default) for p, values in presets.items()},
        when=declared.when,
        help=declared.help,
        unset=declared.unset,
        example=declared.example,
        choices=choices,
        rule=rule,
    )


class Bad(Exception):
    """A value that a key cannot take; `got` is the part of it that is wrong, if not all."""

    def __init__(self, problem: str, expected: str, *, got: Any = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.expected = expected
        self.got = got


def value_of(given: Any, of: Key, *, base: Path | None = None) -> Any:
    """`given`, as TOML has it, as the key's own type. A relative path begins at `base`.
    Raises Bad."""
    wrong = Bad("wrong type", of.expected)
    if of.kind is tuple:
        if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
            raise wrong
        for text in given:
            _check_text(text, of.expected)
        value: Any = tuple(given)
    else:
        value = given
        takes = {Path: (str,), float: (float, int)}.get(of.kind, (of.kind,))
        if type(value) not in takes:  # not isinstance: True is no number here
            raise wrong
        if isinstance(value, str):
            _check_text(value, of.expected)
    if of.choices and value not in of.choices:
        raise Bad("not known", of.expected)
    if of.rule is not None:
        of.rule.check(value)
    if of.kind is Path:
        return _path(value, of.expected, base)
    return float(value) if of.kind is float else value


def _check_text(text: str, expected: str) -> None:
    if not text.strip():
        raise Bad("empty", expected, got=text)
    if _UNSPEAKABLE.search(text):
        raise Bad("not plain text", expected, got=text)


def _path(text: str, expected: str, base: Path | None) -> Path:
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise Bad("nobody's home directory", expected)
    try:
        return (base or Path()).absolute() / path
    except OSError:  # the working directory has been deleted
        raise Bad("relative to a directory that is gone", "an absolute path") from None


def typed(text: str, of: Key) -> Any:
    """A value from the environment or the command line: bare text, or a TOML value where the key
    is no text; a list also as `a,b`."""
    if of.kind in (str, Path):
        return text
    if of.kind is tuple and (not text.lstrip().startswith("[") or _IPV6.match(text.lstrip())):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"] if "\n" not in text else text
    except (ValueError, RecursionError):
        return text  # fails the type check, which names what was expected


def shown(value: Any) -> str:
    """A value from outside, for a message: one short printable line."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = printable(value if isinstance(value, str) else str(value))
    except (ValueError, RecursionError):
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."


def printable(text: str) -> str:
    """`text` without what would end a line or move a cursor."""
    return text if text.isprintable() and text.strip() else repr(text)


def as_toml(value: Any) -> str:
    """A value of a key as TOML in one line; None, which TOML does not have, as `unset`."""
    if value is None:
        return "unset"
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    written = str(value) if isinstance(value, Path) else value
    return tomli_w.dumps({"v": written}).removeprefix("v = ").rstrip("\n")
