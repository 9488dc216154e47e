"""What users say of themselves, and what is remembered of it.

Owns told.txt and the dialogues that say things early and ask for them later; what was said last
counts. Knows nothing of roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ops.tiny.dialogue import Dialogue, dialogue
from ops.tiny.tasks.about.slots import SLOTS, Slots
from ops.tiny.tasks.about.small import small_talk, unknown
from ops.tiny.tasks.about.stanzas import SIGNS, Phrasings, read_named
from ops.tiny.tasks.about.topics import ALL_TOLD, BY_NAME, CORRECTING, FOLDER
from ops.tiny.tasks.about.typed import told_by, worded

if TYPE_CHECKING:
    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

NOT_TOLD = "You have not told me that."


class Told(NamedTuple):
    """Something that users say of themselves: how, how it is asked back, and the answer."""

    key: str
    sentence: str  # the answer
    of_user: str  # the same in a system prompt
    said: Phrasings
    asks: Phrasings


_SIGNS = {
    **SIGNS,
    ">": "the system prompt's wording",
    "+": "statements for training",
    "+!": "statements held out",
}
TOLD = [
    Told(s.name, s.one(), s.one(">"), s.phrasings("+", "+!"), s.phrasings())
    for s in read_named(FOLDER / "told.txt", SLOTS, _SIGNS, needed=["name"]).values()
]
_NAME = next(t for t in TOLD if t.key == "name")
_OTHERS = [t for t in TOLD if t is not _NAME]


def _corrections(told: Told, side: int) -> list[str]:
    """Statements that take an earlier one back; inside a sentence they begin small."""
    plain = [s for s in told.said[side] if s.startswith(("I ", "My ", "The "))]
    out = []
    for form in CORRECTING[side]:
        for said in plain or ["The " + told.sentence.removeprefix("The ")]:
            within = not form.endswith(". {}") and said[:2] != "I "
            out.append(form.replace("{}", said[0].lower() + said[1:] if within else said))
    return out


_CORRECTED = {told.key: (_corrections(told, 0), _corrections(told, 1)) for told in TOLD}


def _keep(sentence: str) -> str:
    return f"{sentence} I will keep that in mind."


def statement(w: Words, told: Told, slots: Slots) -> tuple[Step, str]:
    """The user says it; the step and the answer to a later question."""
    said = told_by(w, w.rng.choice(told.said[w.unseen])).format_map(slots)
    sentence = told.sentence.format_map(slots)
    if told is _NAME:
        answer = f"Hello {slots['name']}! How can I help you?"
    else:
        answer = _keep(sentence)
    return (said, answer, f"The user says: {said}"), sentence


def easy(w: Words) -> Step:
    """A small step of any kind between others."""
    from ops.tiny.tasks.copying import copying  # these two import nothing of this package
    from ops.tiny.tasks.lists import sums

    return w.rng.choices((small_talk, copying, sums, unknown), cum_weights=(40, 65, 85, 100))[0](w)


def _some_told(w: Words) -> list[Told]:
    r = w.rng
    n = r.choices((1, 2, 3, 4), (45, 30, 18, 7))[0]
    first = [_NAME] if r.random() < 0.5 else []
    chosen = first + r.sample(_OTHERS, n - len(first))
    r.shuffle(chosen)
    return chosen


def _between(w: Words, weights: tuple[int, ...]) -> list[Step]:
    n = w.rng.choices(range(len(weights)), weights)[0]
    return [easy(w) for _ in range(n)]


class _Known(NamedTuple):
    """What is known of the user: how it was said, the answer, and its values."""

    said: str
    sentence: str
    told: Told
    slots: Slots


def _recall(w: Words, known: list[_Known], where: str) -> Step:
    """A question about one of what is known, about all of it, or about what was not said."""
    r = w.rng
    x = r.random()
    if x < 0.08:
        ask = worded(w, ALL_TOLD)
        return ask, " ".join(k.sentence for k in known), f"{where} said it before."
    if x < 0.16:
        keys = {k.told.key for k in known}
        other = r.choice([t for t in TOLD if t.key not in keys])
        ask = worded(w, other.asks).format_map(Slots(w))
        return ask, NOT_TOLD, f"{where} did not say that."
    k = r.choice(known)
    if k.told is _NAME and x < 0.3:
        return worded(w, BY_NAME), f"Hello {k.slots['name']}!", f"{where} said: {k.said}"
    return (
        worded(w, k.told.asks).format_map(k.slots),
        k.sentence,
        f"{where} said: {k.said}",
    )


def _corrected(w: Words, known: list[_Known]) -> Step:
    """The user takes one of what is known back and says another value; `known` changes."""
    r = w.rng
    i = r.randrange(len(known))
    told, old = known[i].told, known[i].slots
    slots = Slots(w)
    slots.update({key: old[key] for key in ("pet", "kin", "event", "thing") if key in old})
    said = r.choice(_CORRECTED[told.key][w.unseen]).format_map(slots)
    sentence = told.sentence.format_map(slots)
    known[i] = _Known(said, sentence, told, slots)
    return said, f"All right. {sentence}", f"The user says: {said}"


def remembering(w: Words) -> list[Step]:
    """Things said early and asked later; the last step asks."""
    r = w.rng
    steps: list[Step] = []
    known: list[_Known] = []
    chosen = _some_told(w)
    if len(chosen) > 1 and r.random() < 0.3:  # all in one message
        for told in chosen:
            slots = Slots(w)
            (said, _, _), sentence = statement(w, told, slots)
            known.append(_Known(said, sentence, told, slots))
        said = " ".join(k.said if k.said[-1] in ".!?" else k.said + "." for k in known)
        steps.append((said, _keep(" ".join(k.sentence for k in known)), f"The user says: {said}"))
    else:
        for told in chosen:
            slots = Slots(w)
            step, sentence = statement(w, told, slots)
            known.append(_Known(step[0], sentence, told, slots))
            steps += [step, *_between(w, (75, 20, 5))]
    if r.random() < 0.14:
        steps.append(_corrected(w, known))
    steps += _between(w, (45, 30, 15, 10))
    if r.random() < 0.2:
        steps += [_recall(w, known, "The user"), *_between(w, (60, 40))]
    return [*steps, _recall(w, known, "The user")]


def remember(w: Words) -> Dialogue:
    if w.rng.random() > 0.12:
        return dialogue(w, "remember", remembering(w))
    # What the system prompt says of the user.
    known: list[_Known] = []
    for told in _some_told(w):
        slots = Slots(w)
        sentence = told.sentence.format_map(slots)
        known.append(_Known(told.of_user.format_map(slots), sentence, told, slots))
    about = " ".join(k.said for k in known)
    steps = [*_between(w, (60, 30, 10)), _recall(w, known, "The system prompt")]
    return dialogue(w, "remember", steps, about, True)
