"""Tables of tools as people write them: reads `*.txt` beside this file.

Owns the text format and its checks; knows no words and makes no prompts. A stanza per tool:

    rent_car car_rental hire_car
      Rent a car in a city / Car hire
      city|location: place -- The city / Where to pick it up
      ?size|category: small,medium,large
      ?driver|renter: {name: name, age: int}
      ?items|things: [{count: small, item: thing}] as {count} {item}
      > I need a {size} car in {city}.
      > An insured car in {city}, please. & insured=true
      = status: [done,pending], code: code

First its names, then descriptions, parameters (`?` optional; names, kind, descriptions), requests,
and the keys of a result. `heldout.txt` is for evaluation only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HELD_OUT = "heldout"
SCALARS = frozenset(
    """word phrase name place date clock day month int small percent year decimal email path folder
    url code language color animal food thing job sum bool""".split()
)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w-]*)(?:\.([A-Za-z_][\w-]*))?\}")


class CatalogError(Exception):
    """A stanza that does not follow the format; says where and what would be right."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be: `sort` is a scalar's name, "enum", "list" or "object"."""

    sort: str
    choices: tuple[str, ...] = ()
    items: Kind | None = None
    members: tuple[tuple[str, Kind], ...] = ()
    pattern: tuple[str, ...] = ()  # how an object of a list is said: literal, key, literal, ...


@dataclass(frozen=True, slots=True)
class Param:
    names: tuple[str, ...]
    kind: Kind
    optional: bool
    descriptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """`pieces`: literal, (parameter, member or ""), literal, ...; `implied` is what the words say
    without naming it."""

    pieces: tuple[str | tuple[int, str], ...]
    implied: tuple[tuple[int, Any], ...]
    used: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    params: tuple[Param, ...]
    requests: tuple[Request, ...]
    results: tuple[tuple[str, Kind], ...]


def _split(text: str, at: str) -> list[str]:
    """Cut at a separator that stands in no bracket."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{") - (c in "]}")
        if c == at and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [p.strip() for p in [*parts, text[start:]]]


def _members(text: str) -> tuple[tuple[str, Kind], ...]:
    """`key: kind, key: kind`; a part without a colon goes on with the choices before it."""
    parts: list[str] = []
    for part in _split(text, ","):
        if ":" in part or not parts:
            parts.append(part)
        else:
            parts[-1] += "," + part
    out = []
    for part in parts:
        key, colon, kind = part.partition(":")
        if not colon or not kind.strip():
            raise CatalogError(f"{part!r}: expected `key: kind`")
        out.append((key.strip(), parse_kind(kind)))
    return tuple(out)


def parse_kind(text: str) -> Kind:
    """A kind from its text. Raises CatalogError."""
    body, _, pattern = text.strip().partition(" as ")
    body = body.strip()
    if body.startswith("{") and body.endswith("}"):
        return Kind("object", members=_members(body[1:-1]))
    if body.startswith("[") and body.endswith("]"):
        items = parse_kind(body[1:-1])
        said: tuple[str, ...] = ()
        if items.sort == "object":
            said = tuple(_PLACEHOLDER.sub(r"\0\1\0", pattern.strip()).split("\0"))
            keys = {k for k, _ in items.members}
            if set(said[1::2]) != keys:
                raise CatalogError(f"{text!r}: behind ` as ` stands a pattern with all of {keys}")
        return Kind("list", items=items, pattern=said)
    if body in SCALARS:
        return Kind(body)
    choices = tuple(c.strip() for c in body.split(","))
    if len(choices) >= 2 and all(re.fullmatch(r"[\w.+/#-]+", c) for c in choices):
        return Kind("enum", choices=choices)
    raise CatalogError(f"{body!r} is no kind: a scalar, `a,b`, `[kind]` or `{{key: kind}}`")


def _param(line: str) -> Param:
    head, _, descriptions = line.partition(" -- ")
    names, colon, kind = head.partition(":")
    if not colon:
        raise CatalogError(f"{line!r}: expected `name|alias: kind`")
    said = tuple(d.strip() for d in descriptions.split(" / ")) if descriptions else ()
    aliases = tuple(n.strip() for n in names.lstrip("?").split("|"))
    return Param(aliases, parse_kind(kind), names.startswith("?"), said)


def _implied(text: str, params: tuple[Param, ...]) -> list[tuple[int, Any]]:
    at = {p.names[0]: i for i, p in enumerate(params)}
    out = []
    for part in _split(text, ","):
        name, _, value = part.partition("=")
        if name.strip() not in at:
            raise CatalogError(f"`& {part}`: no parameter {name.strip()!r}; first names count")
        try:
            out.append((at[name.strip()], json.loads(value)))
        except ValueError:
            raise CatalogError(f"`& {part}`: {value!r} is no JSON; text needs quotes") from None
    return out


def _request(line: str, params: tuple[Param, ...]) -> Request:
    text, _, extra = line.partition(" & ") if " & " in line and "=" in line else (line, "", "")
    implied = _implied(extra, params) if extra else []
    at = {p.names[0]: i for i, p in enumerate(params)}
    pieces: list[str | tuple[int, str]] = []
    end, used, members = 0, {i for i, _ in implied}, dict[int, set[str]]()
    for m in _PLACEHOLDER.finditer(text):
        if m[1] not in at:
            raise CatalogError(f"{line!r}: no parameter {m[1]!r}; first names count")
        i, key = at[m[1]], m[2] or ""
        kind = params[i].kind
        if (kind.sort == "object") != bool(key):
            raise CatalogError(f"{line!r}: {m[0]}: an object is said by {{name.key}}, others whole")
        if key:
            members.setdefault(i, set()).add(key)
        pieces += [text[end : m.start()], (i, key)]
        end = m.end()
        used.add(i)
    pieces.append(text[end:])
    for i, keys in members.items():
        wanted = {k for k, _ in params[i].kind.members}
        if keys != wanted:
            raise CatalogError(f"{line!r}: {params[i].names[0]} needs all of {sorted(wanted)}")
    missing = [p.names[0] for i, p in enumerate(params) if not p.optional and i not in used]
    if missing:
        raise CatalogError(f"{line!r}: lacks the required {', '.join(missing)}")
    for i, value in implied:
        _check_implied(line, params[i], value)
    return Request(tuple(pieces), tuple(implied), frozenset(used))


def _check_implied(line: str, param: Param, value: Any) -> None:
    kind = param.kind
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = {
        "bool": isinstance(value, bool), "enum": value in kind.choices,
        "int": whole, "small": whole, "percent": whole, "year": whole,
        "decimal": isinstance(value, float) or whole, "day": isinstance(value, str),
        "list": isinstance(value, list),
    }.get(kind.sort, isinstance(value, str))  # fmt: skip
    if not good:
        raise CatalogError(f"{line!r}: {value!r} is no {kind.sort} for {param.names[0]}")


def parse(text: str, source: str = "") -> list[Entry]:
    """All tools of a table. Raises CatalogError with the tool's name."""
    out = []
    for stanza in re.split(r"\n\s*\n", text):
        lines = [x for x in stanza.splitlines() if x.strip() and not x.lstrip().startswith("#")]
        if not lines:
            continue
        try:
            out.append(_entry(lines))
        except CatalogError as error:
            raise CatalogError(f"{source}: {lines[0].strip()}: {error}") from None
    return out


def _entry(lines: list[str]) -> Entry:
    if lines[0][0].isspace() or len(lines) < 3:
        raise CatalogError("a stanza begins with its names at the left, then indented lines")
    body = [x.strip() for x in lines[1:]]
    plain = [x for x in body[1:] if x[0] not in ">="]
    params = tuple(_param(x) for x in plain)
    if len({p.names[0] for p in params}) != len(params):
        raise CatalogError("two parameters have one first name")
    requests = tuple(_request(x[1:].strip(), params) for x in body[1:] if x[0] == ">")
    if not requests:
        raise CatalogError("no request (`> ...`)")
    results = [x[1:] for x in body[1:] if x[0] == "="]
    return Entry(
        tuple(lines[0].split()), tuple(d.strip() for d in body[0].split(" / ")), params, requests,
        _members(results[0]) if results else (),
    )  # fmt: skip


@cache
def training() -> list[Entry]:
    """The tools that training draws from."""
    files = sorted(p for p in FOLDER.glob("*.txt") if p.stem != HELD_OUT)
    return [e for p in files for e in parse(p.read_text("utf-8"), p.name)]


@cache
def held_out() -> list[Entry]:
    """The tools that only evaluation draws from."""
    path = FOLDER / f"{HELD_OUT}.txt"
    return parse(path.read_text("utf-8"), path.name)
