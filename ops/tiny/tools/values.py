"""Values of every kind, how people write them, and their JSON schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ops.tiny.words import Words

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.catalog import Kind

Json = dict[str, Any]


def join(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _sum(w: Words) -> str:
    r = w.rng
    text = f"{w.integer()} {r.choice('+-*/')} {w.integer()}"
    return text if r.random() < 0.8 else f"({text}) {r.choice('+-*/')} {w.integer()}"


_TEXT: dict[str, Callable[[Words], str]] = {
    "word": Words.any_word, "phrase": lambda w: w.phrase(1, 5), "name": Words.name,
    "place": Words.place, "date": Words.date, "clock": Words.clock,
    "day": lambda w: w.draw("day"), "month": lambda w: w.draw("month"), "email": Words.email,
    "path": Words.path, "folder": Words.folder, "url": Words.url, "code": Words.code,
    "language": lambda w: w.draw("language"), "color": lambda w: w.draw("color"),
    "animal": lambda w: w.draw("animal"), "food": lambda w: w.draw("food"),
    "thing": lambda w: w.draw("thing"), "job": lambda w: w.draw("job"), "sum": _sum,
}  # fmt: skip
_NUMBER: dict[str, Callable[[Words], int | float]] = {
    "int": Words.number, "small": lambda w: w.rng.randint(1, 12),
    "percent": lambda w: w.rng.choice((5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 100))
    if w.rng.random() < 0.5 else w.rng.randint(0, 100),
    "year": lambda w: w.rng.randint(1950, 2035), "decimal": Words.decimal,
}  # fmt: skip
_TYPES = {"int": "integer", "small": "integer", "percent": "integer", "year": "integer",
          "decimal": "number", "bool": "boolean"}  # fmt: skip


def value(w: Words, kind: Kind) -> tuple[Any, str]:
    """A value and how a person writes it. An object is only said by its members."""
    r, sort = w.rng, kind.sort
    text = _TEXT.get(sort)
    if text is not None:
        v = text(w)
        if sort == "phrase" and r.random() < 0.3:
            return v, f"'{v}'" if r.random() < 0.6 else f'"{v}"'
        return v, v
    if sort == "enum":
        v = r.choice(kind.choices)
        return v, v.replace("_", " ")
    if sort == "bool":
        on = r.random() < 0.5
        return on, r.choice(("yes", "true", "on") if on else ("no", "false", "off"))
    if sort == "list":
        return _list(w, kind)
    if sort == "object":
        made = {key: value(w, member)[0] for key, member in kind.members}
        return made, str(made)
    n = _NUMBER[sort](w)
    return n, str(n)


def _list(w: Words, kind: Kind) -> tuple[list[Any], str]:
    r, items = w.rng, kind.items
    if items is None:
        raise ValueError("a list has items")
    n = r.choice((1, 2, 2, 3, 3, 4))
    if items.sort == "enum":
        chosen = r.sample(items.choices, min(n, len(items.choices)))
        return chosen, join([c.replace("_", " ") for c in chosen])
    made, said = [], []
    for _ in range(n):
        if items.sort == "object":
            member = {key: value(w, k) for key, k in items.members}
            v: Any = {key: pair[0] for key, pair in member.items()}
            # Odd parts of the pattern are keys.
            s = "".join(member[p][1] if i % 2 else p for i, p in enumerate(kind.pattern))
        else:
            v, s = value(w, items)
        if v not in made:
            made.append(v)
            said.append(s)
    if r.random() < 0.15:
        return made, ", ".join(said)
    return made, join(said)


def schema(kind: Kind, describe: str = "", w: Words | None = None) -> Json:
    """The JSON schema of one parameter; with `w`, now and then with what clients add to it."""
    out: Json
    if kind.sort == "enum":
        out = {"type": "string", "enum": list(kind.choices)}
    elif kind.sort == "list" and kind.items is not None:
        out = {"type": "array", "items": schema(kind.items)}
    elif kind.sort == "object":
        out = {
            "type": "object",
            "properties": {key: schema(k) for key, k in kind.members},
            "required": [key for key, _ in kind.members],
        }
    else:
        out = {"type": _TYPES.get(kind.sort, "string")}
    if w is not None and w.rng.random() < 0.12:
        _adorn(w, kind, out)
    if describe:
        out["description"] = describe
    return out


def _adorn(w: Words, kind: Kind, out: Json) -> None:
    """Keys that change nothing about the right value."""
    if kind.sort in ("int", "small"):
        out["minimum"] = w.rng.choice((0, 1))
    elif kind.sort == "percent":
        out |= {"minimum": 0, "maximum": 100}
    elif kind.sort == "date":
        out["format"] = "date"
    elif kind.sort in ("email", "url"):
        out["format"] = {"email": "email", "url": "uri"}[kind.sort]
    elif kind.sort == "bool":
        out["default"] = False
    elif kind.sort == "enum":
        out["default"] = kind.choices[0]
    elif kind.sort == "list":
        out["minItems"] = 1
    elif kind.sort in ("word", "phrase"):
        out["minLength"] = 1
