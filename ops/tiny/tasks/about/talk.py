"""Talks of some turns.

Owns how often a talk is of which kind, and the talk in front of tools that are not called for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.dialogue import Dialogue, dialogue
from ops.tiny.tasks.about.roles import role, ruled
from ops.tiny.tasks.about.slots import Slots
from ops.tiny.tasks.about.small import small_talk, unknown
from ops.tiny.tasks.about.told import TOLD, remember, statement
from ops.tiny.tasks.about.topics import COUNT_TOOLS
from ops.tiny.tasks.about.typed import worded

if TYPE_CHECKING:
    from ops.tiny.dialogue import Json, Step
    from ops.tiny.words import Words


def _counting(w: Words, declared: list[Json]) -> Step:
    n = len(declared)
    answer = f"I have {n or 'no'} tool{'s' if n != 1 else ''}."
    names = ", ".join(f["name"] for f in declared) or "none"
    return worded(w, COUNT_TOOLS), answer, f"My tools: {names}."


def _with_tools(w: Words) -> Dialogue:
    """Small talk in front of tools, which it does not call for."""
    from ops.tiny.tools import several

    r = w.rng
    n = r.choice((0, 0, 1, 2, 3, 4, 5))
    declared = [made.function for made in several(w, n)] if n else []
    steps = [small_talk(w) for _ in range(r.choice((0, 0, 1, 2)))]
    steps.append(_counting(w, declared) if r.random() < 0.6 else small_talk(w))
    return dialogue(w, "chat", steps, tools=declared)


def chat(w: Words) -> Dialogue:
    """A talk of some turns: "chat", "role" or "remember"."""
    r = w.rng
    x = r.random()
    if x < 0.2:
        return remember(w)
    if x < 0.33:
        return role(w)
    if x < 0.41:
        return ruled(w)
    if x < 0.46:
        return _with_tools(w)
    steps: list[Step] = []
    for _ in range(r.choice((1, 1, 1, 2, 2, 3, 4))):
        x = r.random()
        if x < 0.06:
            steps.append(statement(w, r.choice(TOLD), Slots(w))[0])
        else:
            steps.append(unknown(w) if x < 0.24 else small_talk(w))
    return dialogue(w, "chat", steps)
