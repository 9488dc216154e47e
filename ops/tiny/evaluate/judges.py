"""Whether an answer is well-formed and whether it is right, by the kind of its task.

Calls and JSON are compared as JSON values, words by letter; reasoning is not judged. What "well
formed" means: calls name a declared tool, use only its parameters, follow its schema and lack
nothing; JSON parses, and follows the schema where one was given; a paragraph is one. Answers in
plain words have no form to keep.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ds4d.prompt.arguments import parse_json
from ops.tiny.tasks import prose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ops.tiny.dialogue import Dialogue
    from ops.tiny.evaluate.served import Said

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`formed` is None where the answer is words."""

    formed: bool | None
    right: bool


def judge(kind: str, d: Dialogue, said: Said, known: Callable[[str], bool]) -> Verdict:
    """The answer `said` to the dialogue `d`, whose last turn is the right one. `known`: whether
    training uses a word; asked for paragraphs only."""
    if d.turns[-1].calls:
        return _calls(d, said)
    if said.calls or not said.whole:
        return Verdict(False if kind in ("json", "json schema", "paragraph") else None, False)
    match kind:
        case "json" | "json schema":
            return _json(d, said.content)
        case "paragraph":
            return _paragraph(d, said.content, known)
        case _:
            return Verdict(None, said.content == d.turns[-1].text)


# --- calls ---------------------------------------------------------------------------------------


def _calls(d: Dialogue, said: Said) -> Verdict:
    last = d.turns[-1]
    schemas = {f["name"]: f["parameters"] for f in d.tools}
    formed = said.whole and bool(said.calls) and all(
        name in schemas and set(arguments) <= set(schemas[name].get("properties", {}))
        and fault(arguments, schemas[name]) is None
        for name, arguments in said.calls
    )  # fmt: skip
    right = said.whole and said.content == last.text and same(
        [list(call) for call in said.calls], [list(call) for call in last.calls]
    )  # fmt: skip
    return Verdict(formed, right)


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 2 and 2.0 are, 1 and true are not; the order of keys says nothing."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# --- JSON ----------------------------------------------------------------------------------------


def _json(d: Dialogue, text: str) -> Verdict:
    try:
        value = parse_json(text)
    except ValueError:
        return Verdict(False, False)
    formed = d.schema is None or fault(value, d.schema) is None
    return Verdict(formed, formed and same(value, parse_json(d.turns[-1].text)))


_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: _is_number(v) and v == int(v),
    "number": lambda v: _is_number(v),
    "boolean": lambda v: isinstance(v, bool),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
}
# What a schema may say about a value of a type, by keyword.
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda v, x: v >= x), "maximum": ("number", lambda v, x: v <= x),
    "minLength": ("string", lambda v, x: len(v) >= x),
    "maxLength": ("string", lambda v, x: len(v) <= x),
    "minItems": ("array", lambda v, x: len(v) >= x),
    "maxItems": ("array", lambda v, x: len(v) <= x),
}  # fmt: skip
_SAYS_NOTHING = frozenset(("description", "title", "default", "examples", "format", "$schema"))


def _is_number(v: Any) -> bool:
    return isinstance(v, (int, float)) and not isinstance(v, bool)


def fault(value: Any, schema: Json) -> str | None:
    """What is wrong with `value`, or None if it follows the schema.

    Knows the part of JSON Schema that the tasks use. Raises ValueError for any other keyword, lest
    a value pass unchecked.
    """
    for key, said in schema.items():
        problem = _against(value, key, said, schema)
        if problem is not None:
            return problem
    return None


def _against(value: Any, key: str, said: Any, schema: Json) -> str | None:
    match key:
        case "type":
            names = [said] if isinstance(said, str) else said
            return None if any(_TYPES[n](value) for n in names) else f"{value!r} is no {said}"
        case "enum":
            return None if any(same(value, x) for x in said) else f"{value!r} is none of {said}"
        case "const":
            return None if same(value, said) else f"{value!r} is not {said!r}"
        case "required":
            missing = [k for k in said if k not in value] if isinstance(value, dict) else []
            return f"lacks {', '.join(missing)}" if missing else None
        case "properties" if isinstance(value, dict):
            return _first(fault(value[k], s) for k, s in said.items() if k in value)
        case "additionalProperties" if isinstance(value, dict):
            more = [k for k in value if k not in schema.get("properties", {})]
            if isinstance(said, dict):
                return _first(fault(value[k], said) for k in more)
            return f"has {', '.join(more)} beyond its schema" if more and not said else None
        case "items" if isinstance(value, list):
            return _first(fault(v, said) for v in value)
        case "properties" | "additionalProperties" | "items":
            return None
        case "uniqueItems":
            twice = said and isinstance(value, list) and any(
                same(a, b) for i, a in enumerate(value) for b in value[:i]
            )  # fmt: skip
            return "has an item twice" if twice else None
        case _ if key in _LIMITS:
            kind, holds = _LIMITS[key]
            fits = not _TYPES[kind](value) or holds(value, said)
            return None if fits else f"{value!r} breaks {key} {said}"
        case _ if key in _SAYS_NOTHING:
            return None
        case _:
            raise ValueError(f"the keyword {key!r} of JSON Schema is not checked here")


def _first(problems: Any) -> str | None:
    return next((p for p in problems if p is not None), None)


# --- paragraphs ----------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_SENTENCE = re.compile(r"[^.!?]+[.!?]+")
_SLOT = re.compile(r"\{\w+\}")
# Words that a paragraph and its request share without being about the same.
_COMMON = frozenset("a an the of in on at to for with and or it is was about that who one".split())


@cache
def _framing() -> frozenset[str]:
    """Words that requests for paragraphs are made of, whatever they ask about."""
    lists = [side for both in (*prose.ASKS.values(), prose.WITH_WORD) for side in both]
    forms = [text for side in lists for text in side] + [
        t for p in prose.PLANS for t, _ in p.topics
    ]
    return _COMMON.union(*(words_of(_SLOT.sub(" ", form)) for form in forms))


def words_of(text: str) -> set[str]:
    """The words of a text in small letters."""
    return {w.lower() for w in _WORD.findall(text)}


def sentences(text: str) -> list[str]:
    return [s.strip() for s in _SENTENCE.findall(text)]


def strange(d: Dialogue, text: str, known: Callable[[str], bool]) -> list[str]:
    """Words of a paragraph that neither training nor its prompt has; names may be invented."""
    given = set().union(*(words_of(t.text) for t in d.turns[:-1]), words_of(d.system))
    said = {w for w in _WORD.findall(text) if w.islower()}
    return sorted(w for w in said if w not in given and not known(w))


def _paragraph(d: Dialogue, text: str, known: Callable[[str], bool]) -> Verdict:
    """Well-formed: at least three whole sentences, none of them twice. Right: also names what was
    asked about, in words that training or the prompt has."""
    said = sentences(text)
    whole = text.strip().endswith((".", "!", "?"))
    formed = whole and len(said) >= 3 and len(set(said)) == len(said)
    asked = topic(d.turns[-2].text, d.turns[-1].text)
    return Verdict(formed, formed and asked <= words_of(text) and not strange(d, text, known))


def topic(ask: str, answer: str) -> set[str]:
    """What a request is about: words that the right answer has too, names and things where there
    are any."""
    shared = words_of(ask) & words_of(answer)
    return (shared - _framing()) or (shared - _COMMON)


def known_share(d: Dialogue, text: str, known: Callable[[str], bool]) -> float:
    """Share 0..1 of a paragraph's words that training or its prompt has."""
    words: Sequence[str] = sorted(words_of(text))
    return 1 - len(strange(d, text, known)) / len(words) if words else 0.0
