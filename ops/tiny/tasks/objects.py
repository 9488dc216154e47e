"""JSON objects made of words, read and changed.

Owns what is said of an object and what its JSON is. Answers are written as `json.dumps` writes
them, keys in the order of the words. `schema_json`, JSON to a given schema, is found here too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ops.tiny.tasks.json_values import bare, dumps, is_text, text_word
from ops.tiny.tasks.phrasing import ABSENT, TABLES, Asked, chosen, different, joined, picks, posed
from ops.tiny.tasks.schema_json import schema_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Json, Step
    from ops.tiny.words import Words

__all__ = ["pairs", "schema_json"]

OBJECT = TABLES["objects"]
_ORDINALS = ["first", "second", "third"]


def _key(w: Words) -> str:
    r = w.rng
    x = r.random()
    if x < 0.45:
        return w.draw("field")
    if x < 0.85:
        return w.any_word()
    return f"{w.any_word()}_{w.draw('field')}"


def _string(w: Words, key: str) -> str:
    while not is_text(value := w.string(key)):
        pass
    return value


def _plain_value(w: Words, key: str) -> Any:
    x = w.rng.random()
    if x < 0.24:
        return w.integer()
    if x < 0.3:
        return w.decimal()
    if x < 0.4:
        return w.rng.random() < 0.5
    return _string(w, key)


def _object(w: Words, low: int = 1, high: int = 5, nested: float = 0.12) -> Json:
    """An object of plain values, some lists of words or numbers, and small objects."""
    r = w.rng
    out: Json = {}
    for key in different(lambda: _key(w), r.randint(low, high)):
        x = r.random()
        if x < nested:
            inner = different(lambda: _key(w), r.randint(1, 3))
            out[key] = {k: w.integer() if r.random() < 0.3 else text_word(w) for k in inner}
        elif x < nested + 0.12:
            out[key] = [text_word(w) for _ in range(r.randint(1, 4))]
        elif x < nested + 0.15:
            out[key] = [w.integer() for _ in range(r.randint(1, 4))]
        else:
            out[key] = _plain_value(w, key)
    return out


def _pretty(w: Words, made: Json) -> str:
    return json.dumps(made, indent=2) if w.rng.random() < 0.2 else json.dumps(made)


def _in_words(w: Words, made: Json) -> str:
    """`a is 1, list b: x and y`: each value with its key, in order."""
    r = w.rng
    form = r.choice(("{} {}", "{} is {}", "{}: {}", "{} = {}", "{} is {}", "{}: {}"))
    gap = r.choice((", ", ", ", "; ", "\n", "\n"))
    spoken = form != "{} {}" and r.random() < 0.4  # `due date` for `due_date`
    said = []
    for key, value in made.items():
        name = key.replace("_", " ") if spoken else key
        if isinstance(value, list):
            said.append(f"list {form.format(name, ' and '.join(map(str, value)))}")
        elif isinstance(value, dict):
            members = " and ".join([f"{k} {v}" for k, v in value.items()])
            said.append(f"object {form.format(name, members)}")
        else:
            said.append(form.format(name, bare(value)))
    return gap.join(said)


def _make(w: Words) -> Asked:
    made = _object(w)
    head = chosen(w, OBJECT["make"])
    why = f"The keys are {joined(list(made))}."
    return Asked(head, _in_words(w, made), dumps(made), why)


def _value(w: Words) -> Asked:
    made = _object(w, 2, 6, 0.2)
    key = w.rng.choice(list(made))
    value = made[key]
    why = f"The key {key} has this value."
    if w.rng.random() < 0.08:
        key, value = different(w.any_word, 1, made)[0], ABSENT
        why = f"There is no key {key}."
    elif isinstance(value, dict):
        inner = w.rng.choice(list(value))
        value = value[inner]
        key = f"{key}.{inner}" if w.rng.random() < 0.5 else f"{inner} of {key}"
    head = chosen(w, OBJECT["value"]).format(k=key)
    return Asked(head, _pretty(w, made), bare(value), why)


def _keys_of(w: Words) -> Asked:
    made = _object(w, 1, 6)
    if w.rng.random() < 0.65:
        return Asked(chosen(w, OBJECT["keys"]), _pretty(w, made), ", ".join(made), "In this order.")
    why = ", ".join([f"{i + 1} {key}" for i, key in enumerate(made)])
    return Asked(chosen(w, OBJECT["count"]), _pretty(w, made), str(len(made)), f"{why}.")


def _item(w: Words) -> Asked:
    r = w.rng
    made = _object(w, 1, 4)
    key = different(lambda: _key(w), 1, made)[0]
    items = [text_word(w) if r.random() < 0.7 else w.integer() for _ in range(r.randint(1, 5))]
    made[key] = items
    keys = list(made)
    r.shuffle(keys)
    i = r.randrange(min(3, len(items)))
    n = "last" if r.random() < 0.2 else _ORDINALS[i]
    value = items[-1] if n == "last" else items[i]
    head = chosen(w, OBJECT["item"]).format(n=n, k=key)
    text = _pretty(w, {k: made[k] for k in keys})
    return Asked(head, text, bare(value), f"The list is {', '.join(map(str, items))}.")


def _has(w: Words) -> Asked:
    made = _object(w, 1, 6)
    there = w.rng.random() < 0.5
    key = w.rng.choice(list(made)) if there else different(lambda: _key(w), 1, made)[0]
    head = chosen(w, OBJECT["has"]).format(k=key)
    why = f"The key {key} is {'' if there else 'not '}there."
    return Asked(head, _pretty(w, made), "Yes." if there else "No.", why)


def _changed(w: Words) -> Asked:
    """The object again, with one member changed, added, removed or renamed."""
    r = w.rng
    made = _object(w, 1, 5)
    keys = list(made)
    form = r.choice(("change", "change", "add", "remove", "rename"))
    key = r.choice(keys) if form != "add" else different(lambda: _key(w), 1, made)[0]
    if form == "remove":
        done = {k: v for k, v in made.items() if k != key}
        head, why = chosen(w, OBJECT[form]).format(k=key), f"I skip {key}."
    elif form == "rename":
        name = different(lambda: _key(w), 1, made)[0]
        done = {name if k == key else k: v for k, v in made.items()}
        head, why = chosen(w, OBJECT[form]).format(k=key, v=name), f"{key} becomes {name}."
    else:
        value = _plain_value(w, key)
        done = {**made, key: value}
        head = chosen(w, OBJECT[form]).format(k=key, v=bare(value))
        why = f"{key} is {bare(value)}."
    return Asked(head, _pretty(w, made), dumps(done), why)


PAIRS: dict[str, tuple[int, Callable[[Words], Asked]]] = {
    "make": (40, _make), "value": (20, _value), "keys": (8, _keys_of), "item": (5, _item),
    "has": (5, _has), "changed": (22, _changed),
}  # fmt: skip
_PAIRS = picks(PAIRS)


def pairs(w: Words) -> Step:
    """An object made of words, read or changed."""
    return posed(w, w.rng.choice(_PAIRS)(w))
