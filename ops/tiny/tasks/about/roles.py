"""Roles and rules: what the system prompt makes of the model.

Owns roles.txt, rules.txt and the dialogues under such a system prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ops.tiny.dialogue import Dialogue, turns_of, with_thinking
from ops.tiny.tasks.about.slots import SLOTS, Slots
from ops.tiny.tasks.about.small import brief
from ops.tiny.tasks.about.stanzas import SIGNS, Phrasings, read_named
from ops.tiny.tasks.about.topics import CONDITIONS, FOLDER, WHO, WHO_AND_JOB
from ops.tiny.tasks.about.typed import worded

if TYPE_CHECKING:
    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

_GIVEN = {">": "system prompts for training", ">!": "system prompts held out"}


class Trait(NamedTuple):
    key: str
    answer: str
    given: Phrasings  # in the system prompt
    asks: Phrasings


TRAITS = {
    s.name: Trait(s.name, s.one(), s.phrasings(">", ">!"), s.phrasings())
    for s in read_named(
        FOLDER / "roles.txt", SLOTS, SIGNS | _GIVEN, needed=["name", "job"]
    ).values()
}
_MORE = [t for t in TRAITS.values() if t.key not in ("name", "job")]


class Rule(NamedTuple):
    """A way to answer: how the system prompt asks for it, and what it makes of an answer."""

    reasoning: str
    pattern: str  # {a} the answer, {A} and {l} it in capitals and small letters, {v} own words
    given: Phrasings


_RULE_SLOTS = {"a", "A", "l", "v", "user"}
_RULE_SIGNS = {"=": "what becomes of the answer", **_GIVEN}
RULES = [
    Rule(s.name, s.one(), s.phrasings(">", ">!"))
    for s in read_named(FOLDER / "rules.txt", _RULE_SLOTS, _RULE_SIGNS).values()
]
_ADDED = ["Ahoy!", "Over.", "Sir.", "Meow.", "Have a nice day.", "Peace.", "Beep!", "So be it.",
          "The end.", "Yes, captain.", "Well!", "Listen:", "Dear user,", "Hurrah!"]  # fmt: skip


def _apply_rule(w: Words, steps: list[Step]) -> tuple[str, list[Step]]:
    """What the system prompt asks for, and the steps with their answers as it wants them."""
    r = w.rng
    rule = r.choice(RULES)
    own = r.choice(_ADDED) if r.random() < 0.4 else w.phrase(1, 3)
    slots = {"v": own, "user": w.name()}
    why = rule.reasoning.format_map(slots)
    done = [
        (ask, rule.pattern.format_map({"a": a, "A": a.upper(), "l": a.lower(), **slots}), why)
        for ask, a, _ in steps
    ]
    return r.choice(rule.given[w.unseen]).format_map(slots), done


def ruled(w: Words) -> Dialogue:
    """A rule in the system prompt that changes every answer, or the answer to one word."""
    r = w.rng
    steps = [brief(w) for _ in range(r.choices((1, 2, 3), (60, 28, 12))[0])]
    if r.random() > 0.2:
        return _under(w, *_apply_rule(w, steps))
    slots = Slots(w)
    given = r.choice(CONDITIONS[w.unseen]).format_map(slots)
    if r.random() < 0.75:
        steps[-1] = (slots["any"], slots["phrase"], f"The system prompt says: {given}")
    return _under(w, given, steps)


def _under(w: Words, given: str, steps: list[Step]) -> Dialogue:
    """A dialogue whose system prompt is a role or a rule, sometimes with more around it."""
    r = w.rng
    if r.random() < 0.3:
        more = " ".join(w.sentence() for _ in range(r.randint(1, 3)))
        given = f"{given}\n{more}" if r.random() < 0.5 else f"{more}\n{given}"
    return with_thinking(w, Dialogue("role", turns_of(steps), given))


def role(w: Words) -> Dialogue:
    """Somebody whom the system prompt describes."""
    r = w.rng
    slots = Slots(w)
    traits = [TRAITS["name"]]
    if r.random() < 0.55:
        given = [r.choice(WHO_AND_JOB[w.unseen])]
        traits.append(TRAITS["job"])
        who = "I am {name}, {a_job}."
    else:
        given = [r.choice(traits[0].given[w.unseen])]
        who = "I am {name}."
    more = r.sample(_MORE, r.choices((0, 1, 2, 3), (35, 30, 22, 13))[0])
    given += [r.choice(t.given[w.unseen]) for t in more]
    traits += more
    said = " ".join(given).format_map(slots)
    steps: list[Step] = []
    for _ in range(r.choices((1, 2, 3), (55, 30, 15))[0]):
        x = r.random()
        if steps and x < 0.25:
            steps.append(brief(w))
        elif x < 0.45:
            ask = worded(w, WHO)
            steps.append((ask, who.format_map(slots), "The system prompt says who I am."))
        else:
            trait = r.choice(traits)
            ask = worded(w, trait.asks).format_map(slots)
            answer = trait.answer.format_map(slots)
            steps.append((ask, answer, f"The system prompt gives my {trait.key}."))
    if r.random() < 0.12:
        rule, steps = _apply_rule(w, steps)
        said = f"{said} {rule}"
    return _under(w, said, steps)
