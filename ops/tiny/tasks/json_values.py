"""Values of JSON: which words pass for text, and how a value is said and written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.tiny.words import Words

_TAKEN = frozenset(("true", "false", "null", "none", "yes", "no", "and", "on", "off"))


def is_text(value: str) -> bool:
    """Whether a reader would take `value` for text, not for a number or a truth value."""
    if value.lower() in _TAKEN:
        return False
    try:
        float(value)  # also 59E9
    except ValueError:
        return True
    return False


def text_word(w: Words) -> str:
    """Any word that passes for text."""
    while not is_text(value := w.any_word()):
        pass
    return value


def bare(value: Any) -> str:
    """A value as an answer: strings without quotes, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def dumps(value: Any) -> str:
    """A value as the answers write JSON."""
    return json.dumps(value, ensure_ascii=False)
