"""A tool in a prompt, one request for it, and whether two tools can be told apart."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.catalog import Kind
    from ops.tiny.tools.values import Json
    from ops.tiny.words import Words


@dataclass
class Made:
    """`topics` are the words that tell its requests from those for another tool; `again` asks the
    same tool for something else."""

    function: Json
    request: str
    arguments: Json
    results: list[tuple[str, Kind]] = field(default_factory=list)
    topics: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()  # verb and noun of an invented tool
    origin: object = None  # the catalogue's entry
    fixed: bool = False  # the request may begin with a value, whose letters stay as they are
    again: Callable[[Words], Made] | None = None
    several: Callable[[Words], tuple[str, list[Json]] | None] | None = None

    @property
    def name(self) -> str:
        return str(self.function["name"])

    def inside(self) -> str:
        """The request as it stands behind other words."""
        ask = self.request
        return ask if self.fixed or ask[:2].isupper() else ask[0].lower() + ask[1:]

    @cached_property
    def text(self) -> str:
        """Its schema as the prompt shows it, in small letters."""
        return json.dumps(self.function, ensure_ascii=False).lower()

    @cached_property
    def asked(self) -> list[str]:
        """Beginnings of the request's longer words."""
        return [x[:5] for x in re.findall("[a-z]{4,}", self.request.lower())]


def fits(request: Made, tool: Made) -> int:
    """How many words of a request stand in a tool's schema."""
    return sum(x in tool.text for x in request.asked)


def apart(a: Made, b: Made) -> bool:
    """Whether a reader of both schemas knows which of the two each request is for."""
    if a.name == b.name or (a.origin is not None and a.origin is b.origin):
        return False
    if a.words and b.words:
        return a.words != b.words
    if not a.topics & b.topics:
        return True
    return fits(a, a) > fits(a, b) and fits(b, b) > fits(b, a)
