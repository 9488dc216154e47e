"""Arguments of a tool call: JSON on the client's side, DSML parameters on the model's (api.md 1.7).

A DSML parameter says whether its value is raw text (`string="true"`) or JSON (`string="false"`).
The model may contradict the tool's schema; then the schema decides. Knows no tokens and no tags but
the one that ends a value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ds4d.prompt.tokenizer import DSML

CLOSE_VALUE = f"</{DSML}parameter>"
ESCAPED_CLOSE_VALUE = f"&lt;/{DSML}parameter>"

Kinds = frozenset[str]
"""JSON Schema type names that a value may have."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MAX_KEY = 128  # characters
_MAX_DEPTH = 16  # of schemas within schemas; below, anything goes


def valid_name(name: str) -> bool:
    """Whether a tool may be called so."""
    return _NAME.fullmatch(name) is not None


def valid_key(key: str) -> bool:
    """Whether a parameter's name can stand in a tag, which knows no escapes. Schemas of real tools
    have keys such as `$filter` and `first name`; only what would break the tag is out."""
    return 1 <= len(key) <= _MAX_KEY and key.isprintable() and not any(c in '"<>' for c in key)


def dumps(value: object) -> str:
    """JSON as the model was trained on it: `, ` and `: ` between things, nothing escaped that need
    not be. Other JSON libraries write no blanks."""
    return json.dumps(value, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no infinity in any spelling. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_not_json, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _not_json(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if abs(number) < float("inf") else _not_json(digits)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`text` as it stands in the prompt; it never holds the closing tag."""

    key: str
    text: str
    is_string: bool


def as_parameters(arguments: str) -> list[Parameter]:
    """The parameters for a call's JSON object, in its order. What is no object becomes one
    parameter, `arguments`, with the text as it came."""
    try:
        values = parse_json(arguments)
        if isinstance(values, dict):
            return [_as_parameter(key, value) for key, value in values.items()]
    except (ValueError, RecursionError):
        pass
    return [_as_parameter("arguments", arguments)]


def _as_parameter(key: str, value: object) -> Parameter:
    if isinstance(value, str):
        return Parameter(key, value.replace(CLOSE_VALUE, ESCAPED_CLOSE_VALUE), is_string=True)
    # Only a string inside can hold the tag, and JSON has its own escape for it.
    text = dumps(value).replace(CLOSE_VALUE, "\\u003c" + CLOSE_VALUE[1:])
    return Parameter(key, text, is_string=False)


def as_json(text: str, *, is_string: bool, kinds: Kinds | None) -> str:
    """The JSON for a parameter's text, when its flag says `is_string` and its schema `kinds`.

    JSON that the model wrote is kept as it wrote it.
    """
    try:
        value = parse_json(text)
    except ValueError:
        return dumps(text)
    if kinds is None:
        return dumps(text) if is_string else text
    if not is_string:
        return dumps(text) if "string" in kinds and not _fits(value, kinds) else text
    return text if "string" not in kinds and _fits(value, kinds) else dumps(text)


def _fits(value: object, kinds: Kinds) -> bool:
    match value:
        case float():
            return "number" in kinds or (value.is_integer() and "integer" in kinds)
        case int() if not isinstance(value, bool):
            return "number" in kinds or "integer" in kinds
        case _:
            return _kind(value) in kinds


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def parameter_kinds(parameters: object, key: str) -> Kinds | None:
    """What the tool's `parameters` schema lets the value of `key` be; None: anything."""
    if not isinstance(parameters, dict):
        return None
    properties = parameters.get("properties")
    if isinstance(properties, dict) and key in properties:
        return _kinds(properties[key], parameters, {})
    return _kinds(parameters.get("additionalProperties"), parameters, {})


def _kinds(
    schema: object, root: dict[str, Any], seen: dict[int, Kinds | None], depth: int = 0
) -> Kinds | None:
    """`seen`: what is known of the schemas visited, by `id`. References make a graph of them, whose
    paths may be without number; a schema within itself is anything."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    if id(schema) not in seen:
        seen[id(schema)] = None
        seen[id(schema)] = _kinds_said(schema, root, seen, depth)
    return seen[id(schema)]


def _kinds_said(
    schema: dict[str, Any], root: dict[str, Any], seen: dict[int, Kinds | None], depth: int
) -> Kinds | None:
    said: list[Kinds] = []
    match schema.get("type"):
        case str(name):
            said.append(frozenset((name,)))
        case list(names):
            said.append(frozenset(name for name in names if isinstance(name, str)))
    if isinstance(schema.get("enum"), list):
        said.append(frozenset(map(_kind, schema["enum"])))
    if "const" in schema:
        said.append(frozenset((_kind(schema["const"]),)))
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        if isinstance(choices, list):
            each = [_kinds(choice, root, seen, depth + 1) for choice in choices]
            known = [kinds for kinds in each if kinds is not None]
            if len(known) == len(each):
                said.append(frozenset().union(*known))
    together = schema.get("allOf")
    also = [_resolve(schema.get("$ref"), root), *(together if isinstance(together, list) else ())]
    said += [kinds for part in also if (kinds := _kinds(part, root, seen, depth + 1)) is not None]
    if not said:
        return None
    kinds = frozenset.intersection(*map(_widen, said))
    return (kinds | {"null"} if schema.get("nullable") is True else kinds) or None


def _widen(kinds: Kinds) -> Kinds:
    return kinds | {"integer"} if "number" in kinds else kinds


def _resolve(ref: object, root: dict[str, Any]) -> object:
    """What a reference within the same schema points at; None for any other."""
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    node: object = root
    for part in ref[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return node
