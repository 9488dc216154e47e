"""Which task how often: the stream of dialogues that ds4-tiny is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny import tools
from ops.tiny.dialogue import Dialogue, Turn, dialogue
from ops.tiny.tasks import about, calls, copying, facts, lists, objects, prose
from ops.tiny.words import Words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from ops.tiny.dialogue import Step

DRILLS_UNTIL = 0.12  # of the training: copying first, everything else is made of it

_EASY: list[tuple[Callable[[Words], Step], int]] = [
    (copying.copying, 8), (copying.lookup, 3), (lists.lists, 5), (lists.sums, 4),
    (lists.formats, 4), (objects.pairs, 4), (about.small_talk, 1),
]  # fmt: skip
_SMALL: list[tuple[Callable[[Words], Step], int]] = [
    (copying.copying, 4), (copying.lookup, 3), (lists.lists, 2), (lists.sums, 2),
    (lists.formats, 1), (objects.pairs, 1), (about.small_talk, 2), (about.unknown, 1),
]  # fmt: skip


def _steps(w: Words, of: list[tuple[Callable[[Words], Step], int]], n: int) -> list[Step]:
    return [task(w) for task in w.rng.choices([t for t, _ in of], [k for _, k in of], k=n)]


def small(w: Words) -> Dialogue:
    """One short exchange, to fill gaps."""
    return dialogue(w, "small", _steps(w, _SMALL, 1))


def _drill(w: Words) -> Dialogue:
    r = w.rng
    x = r.random()
    if x < 0.5:
        return dialogue(w, "copy", [copying.copying(w) for _ in range(r.randint(1, 5))])
    if x < 0.7:
        return dialogue(w, "lookup", [copying.lookup(w) for _ in range(r.randint(1, 4))])
    if x < 0.8:
        return copying.recall(w, r.randint(8, 40))
    return copying.schemas(w)


def short(w: Words, stage: float) -> Dialogue:
    """A dialogue of up to some two thousand tokens. `stage` 0..1 is how far the training is."""
    r = w.rng
    if r.random() < (0.36 if stage < DRILLS_UNTIL else 0.14):
        return _drill(w)
    x = r.random()
    if x < 0.05:
        return about.chat(w)
    if x < 0.07:
        return dialogue(w, "paragraph", [prose.paragraph(w)])
    if x < 0.19:
        return facts.extraction(w)
    if x < 0.32:
        return dialogue(w, "easy", _steps(w, _EASY, r.choice((1, 2, 3, 4))))
    if x < 0.41:
        return objects.schema_json(w)
    return calls.tool_use(w)


def long(w: Words, n_tokens: int, filler: list[str]) -> Dialogue:
    """A dialogue about a text of some `n_tokens` tokens: few facts or many, pairs, then a call."""
    r = w.rng
    x = r.random()
    if x < 0.25:
        d = copying.recall(w, max(8, min(300, n_tokens // 24)))
    elif x < 0.5:
        d = facts.needle(w, n_tokens, filler, r.randint(1, 6), r.randint(1, 6))
    else:
        most = max(4, min(60, n_tokens // 60))
        d = facts.needle(w, n_tokens * 2 // 3, filler, most, min(40, most))
    if x > 0.2 and not d.tools and r.random() < 0.25:
        made = tools.several(w, r.randint(1, 3))
        d.tools = [m.function for m in made]
        m = made[0]
        call = (m.name, m.arguments)
        d.turns += [Turn("user", m.request), Turn("assistant", "", [call], calls.reason([call]))]
    return d


def draw(rng: random.Random, stage: float = 0.5, unseen: bool = False,
         novelty: float | None = None) -> Dialogue:  # fmt: skip
    """One dialogue of the short mixture."""
    return short(Words(rng, unseen, novelty), stage)
