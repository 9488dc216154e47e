"""Tools that stand in prompts: schemas, requests for them, right calls, results.

Three sources: the catalogue's tools (`known`) under many names, so that the schema has to be read;
`composed` and `implied` ones of random words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tools.invented import composed, implied
from ops.tiny.tools.known import known
from ops.tiny.tools.made import Made, apart
from ops.tiny.tools.results import result

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.words import Words

__all__ = ["Made", "composed", "implied", "known", "make", "result", "several", "stranger"]

# A tool whose name has one of these could do nearly anything: no request is declined beside it.
_ANYTHING = ("web", "search", "shell", "bash", "command", "exec", "run", "ask", "browse", "fetch",
             "http", "agent", "message", "note", "todo", "query")  # fmt: skip


def make(w: Words) -> Made:
    x = w.rng.random()
    share = 0.7 if w.unseen else 0.64
    return known(w) if x < share else composed(w) if x < (1 + share) / 2 else implied(w)


def several(w: Words, n: int, make: Callable[[Words], Made] = make) -> list[Made]:
    """`n` tools of which a request fits one only; now and then all share a verb or a noun."""
    r = w.rng
    if n > 1 and r.random() < 0.12:
        return _alike(w, n)
    made: list[Made] = []
    while len(made) < n:
        new = make(w)
        if all(apart(new, m) for m in made):
            made.append(new)
    return made


def _alike(w: Words, n: int) -> list[Made]:
    """Invented tools that share their verb or their noun."""
    r = w.rng
    first = composed(w)
    verb, noun = first.words
    shares_verb = r.random() < 0.5
    made = [first]
    while len(made) < n:
        one = implied if r.random() < 0.4 else composed
        new = one(w, verb=verb) if shares_verb else one(w, noun=noun)
        if all(apart(new, m) for m in made):
            made.append(new)
    r.shuffle(made)
    return made


def stranger(w: Words, made: list[Made]) -> Made | None:
    """A tool that could do what none of `made` can; None if the draw came too close to one."""
    if any(word in m.name.lower() for m in made for word in _ANYTHING):
        return None
    other = make(w)
    said = " ".join(m.text for m in made)
    if any(other.origin is not None and other.origin is m.origin for m in made):
        return None
    return None if any(word.lower() in said for word in other.topics) else other
