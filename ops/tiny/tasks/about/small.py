"""Small talk and the unknown: one question and its answer, whatever stands before it.

Owns how often each topic is drawn; knows no dialogue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tasks.about.slots import Slots
from ops.tiny.tasks.about.topics import TOPICS, UNKNOWN, UNKNOWN_ASKS, Topic
from ops.tiny.tasks.about.typed import asked, casual

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words


def _steps(t: Topic, side: int) -> list[Step]:
    return [(ask, t.answer, f"This is {t.what}.") for ask in t.asks[side]]


def _groups(wanted: Callable[[Topic], bool] = lambda t: True) -> tuple[list[list[Step]], ...]:
    """The wanted topics: for training one group a topic, so that each comes as often, however
    many its phrasings; held out all in one, each three times and once as it is often typed."""
    topics = [t for t in TOPICS if wanted(t)]
    kept = [
        (said, answer, why)
        for t in topics
        for ask, answer, why in _steps(t, 1)
        for said in (ask, ask, ask, ask if "{" in ask else casual(ask))
    ]
    return [_steps(t, 0) for t in topics], [kept]


_ALL = _groups()


def _brief(t: Topic) -> bool:
    return not t.of_me and len(t.answer) < 40 and "{" not in t.answer


# What a role does not change and what is short enough to be written in another way.
_BRIEF = _groups(_brief)


def _drawn(w: Words, groups: tuple[list[list[Step]], ...]) -> Step:
    ask, answer, reasoning = w.rng.choice(w.rng.choice(groups[w.unseen]))
    ask = asked(w, ask)
    if "{" in ask:
        slots = Slots(w)
        ask, answer = ask.format_map(slots), answer.format_map(slots)
    return ask, answer, reasoning


def brief(w: Words) -> Step:
    """Small talk that a role does not change and that is short enough to be put otherwise."""
    return _drawn(w, _BRIEF)


def small_talk(w: Words) -> Step:
    """A question about the model or a word of courtesy. It says nothing of the user, so that it
    may stand anywhere in a dialogue that has no role in its system prompt."""
    return _drawn(w, _ALL)


def unknown(w: Words) -> Step:
    """A question or request whose answer stands nowhere in the prompt."""
    ask = w.rng.choice(UNKNOWN_ASKS[w.unseen])
    if w.unseen and "{" not in ask and w.rng.random() < 0.15:
        ask = casual(ask)
    ask = asked(w, ask).format_map(Slots(w))
    return ask, UNKNOWN, "The answer does not stand in the prompt, so I do not know it."
