"""The parameters of a call: decoded, or a sentence that says which one is wrong.

Knows the records of `wire` only by what they declare.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import inspect

from ds4d import wire
from ds4d.errors import Declined

if TYPE_CHECKING:
    from collections.abc import Iterable

P = TypeVar("P", bound=wire.Params[Any])

_SHOWN = 60  # characters of a value that a message repeats


def decode(kind: type[P], raw: bytes | msgspec.Raw) -> P:
    """Raises Declined (BAD_PARAMS) that names the parameter and what was expected."""
    method, known = kind.METHOD, _fields(kind)
    try:
        given = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad(f"{method}: params cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise _bad(f"{method}: params: expected an object with parameters by name, {_got(given)}")
    for name in given:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise _bad(f"{method}: no parameter {shown(name)}; {nearest(name, known) or has}")
    try:
        decoded: P = msgspec.convert(given, kind)
        return decoded
    except msgspec.ValidationError as error:
        at = re.search(r"`\$\.(\w+)|required field `(\w+)`", str(error))
        name = "" if at is None else at[1] or at[2]
        if name not in known:
            raise _bad(f"{method}: {error}") from None
        problem = _got(given[name]) if name in given else "but it is missing"
        raise _bad(f"{method}: {name}: expected {known[name]}, {problem}") from None


def check(kind: type[wire.Params[Any]], name: str, value: float, low: float, high: float) -> None:
    """Raises Declined (BAD_PARAMS) unless `value` lies in low..high."""
    if not low <= value <= high:
        raise _bad(f"{kind.METHOD}: {name}: expected {low:g} to {high:g}, got {value}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What somebody may have meant."""
    near = difflib.get_close_matches(name[:_SHOWN], list(known), n=3)
    return f"did you mean {' or '.join(near)}?" if near else None


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _got(value: object) -> str:
    return f"got {shown(value)}"


def _bad(message: str) -> Declined:
    return Declined(message, wire.BAD_PARAMS)


@cache
def _fields(kind: type[wire.Params[Any]]) -> dict[str, str]:
    """Each parameter, and what it takes in words."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return {field.encode_name: _words(field.type) for field in described.fields}


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a text"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.ListType(item_type=item):
            return f"a list, each {_words(item)}"
        case inspect.UnionType(types=types):
            return " or ".join(map(_words, types))
        case _:
            raise TypeError(f"{kind}: a parameter of a type that has no words yet")
