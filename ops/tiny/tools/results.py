"""What a tool gave back, and the sentence that reports it: one wording for every kind of value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ops.tiny.tools.values import Json, join, value

if TYPE_CHECKING:
    from ops.tiny.catalog import Kind
    from ops.tiny.tools.made import Made
    from ops.tiny.words import Words

_REASONS = ["not found", "no access", "timeout", "bad value", "permission denied", "no such file",
            "connection refused", "quota exceeded", "internal error", "invalid argument",
            "already exists", "not available", "no results", "rate limit reached"]  # fmt: skip
_REASONS_UNSEEN = ["service unavailable", "wrong format", "unknown user", "out of memory"]
STATUSES = [
    "ok",
    "done",
    "sent",
    "saved",
    "pending",
    "booked",
    "closed",
    "ready",
    "started",
    "failed",
]


def result(w: Words, made: Made) -> tuple[str, list[tuple[str, str]], str]:
    """Text of a result; (key, sentence) of each of its values, in order; the whole answer."""
    r = w.rng
    x = r.random()
    if x < 0.07:
        reason = (
            r.choice(w.either(_REASONS, _REASONS_UNSEEN)) if r.random() < 0.7 else w.phrase(2, 3)
        )
        text = r.choice([f"Error: {reason}", json.dumps({"error": reason}), f"error: {reason}"])
        return text, [], f"The tool failed: {reason}."
    if x < 0.17 or not made.results:
        text = r.choice([w.phrase(3, 7), w.sentence()]) if r.random() < 0.7 else r.choice(STATUSES)
        return text, [], f"The tool says: {text}"
    values = {key: _drawn(w, key, kind) for key, kind in made.results}
    if len(values) > 1 and r.random() < 0.15:
        values = dict(r.sample(list(values.items()), r.randint(1, len(values))))
    said = [(key, sentence(key, v)) for key, v in values.items()]
    return _written(w, values), said, " ".join(s for _, s in said)


def _drawn(w: Words, key: str, kind: Kind) -> Any:
    if kind.sort == "list" and kind.items is not None and kind.items.sort == "enum":
        return w.rng.choice(kind.items.choices)
    if key == "status" and kind.sort == "word":
        return w.rng.choice(STATUSES)
    return value(w, kind)[0]


def _written(w: Words, values: Json) -> str:
    """As JSON mostly; else a line for each value."""
    r = w.rng
    x = r.random()
    flat = not any(isinstance(v, (list, dict)) for v in values.values())
    if x < 0.75 or not flat:
        return json.dumps(values, ensure_ascii=False, indent=2 if x > 0.68 else None)
    if x < 0.8:
        return json.dumps({r.choice(["result", "data", "output"]): values}, ensure_ascii=False)
    form, gap = r.choice([("{}: {}", "\n"), ("{}={}", "\n"), ("{}: {}", ", "), ("{} = {}", "; ")])
    return gap.join(form.format(k, _plain(v)) for k, v in values.items())


def _plain(v: Any) -> str:
    return json.dumps(v) if isinstance(v, bool) else str(v)


def _member(x: Any) -> str:
    if isinstance(x, dict):
        return ", ".join(f"{k} {_plain(i)}" for k, i in x.items())
    return _plain(x)


def sentence(key: str, v: Any) -> str:
    """`The price is 3.5.`; lists joined, members of an object named."""
    name = key.replace("_", " ")
    if isinstance(v, dict):
        return " ".join(sentence(f"{key} {k}", inner) for k, inner in v.items())
    if isinstance(v, list):
        shown = [_member(x) for x in v]
        if v and isinstance(v[0], dict):
            return f"The {name}: {'; '.join(shown)}."
        return f"The {name} is {join(shown)}." if shown else f"The {name} is empty."
    return f"The {name} is {_plain(v)}."
