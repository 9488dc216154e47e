"""Values of the slots in phrasings.

Owns what `{name}`, `{name2}` and `{a_job}` stand for; knows no phrasing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ops.tiny.words import Words

_A = frozenset(
    "ewe one once ones use used useful user uses usual usury unit unite united union".split()
)
_AN = frozenset(
    "heir heirs honest honestly honor honorable honour honourable honoured hour".split()
)


def an(words: str) -> str:
    """The words behind their article, a or an."""
    first = words.split(" ", 1)[0].lower()
    vowel = first in _AN or (first[0] in "aeiou8" and first not in _A)
    return f"an {words}" if vowel else f"a {words}"


class Slots(dict[str, str]):
    """Values of slots, drawn when first asked for. `{name2}` is another `{name}`, `{a_job}` is the
    job with its article, `{A_job}` the same at the start of a sentence."""

    makers: ClassVar[dict[str, Callable[[Slots], str]]] = {
        "name": lambda s: s.w.name(),
        "place": lambda s: s.w.place(),
        "any": lambda s: s.w.any_word(),
        "phrase": lambda s: s.w.phrase(1, 3),
        "work": lambda s: " ".join(x.capitalize() for x in s.w.phrase(1, 4).split()),
        "thing": lambda s: s.w.draw("thing"),
        "animal": lambda s: s.w.draw("animal"),
        "food": lambda s: s.w.draw("food"),
        "color": lambda s: s.w.draw("color"),
        "job": lambda s: s.w.draw("job"),
        "noun": lambda s: s.w.draw("noun"),
        "language": lambda s: s.w.draw("language"),
        "month": lambda s: s.w.draw("month"),
        "date": lambda s: s.w.date(),
        "clock": lambda s: s.w.clock(),
        "code": lambda s: s.w.code(),
        "email": lambda s: s.w.email(),
        "number": lambda s: str(s.w.number()),
        "age": lambda s: str(s.w.rng.randint(5, 99)),
        "n": lambda s: str(s.w.rng.randint(2, 99)),
        "year": lambda s: str(s.w.rng.randint(1000, 2030)),
        "company": lambda s: s.w.any_word().capitalize(),
        "pet": lambda s: s.w.rng.choice(("cat", "dog", "horse", "bird", "rabbit", "parrot")),
        "kin": lambda s: s.w.rng.choice(_KIN),
        "event": lambda s: s.w.novel() if s.w.rng.random() < 0.3 else s.w.rng.choice(_EVENTS),
        "task": lambda s: s.w.rng.choice(_TASKS).format_map(s),
        "odd": lambda s: s.w.rng.choice((s.w.novel, s.w.scrambled, s.w.pseudo))(),
    }

    def __init__(self, w: Words) -> None:
        super().__init__()
        self.w = w

    def __missing__(self, key: str) -> str:
        if key[:2] == "a_":
            made = an(self[key[2:]])
        elif key[:2] == "A_":
            made = "A" + an(self[key[2:]])[1:]
        elif key in self.makers:
            made = self.makers[key](self)
        else:
            base = key.rstrip("234")
            make = self.makers[base]
            while (made := make(self)) == self[base]:
                pass
        self[key] = made
        return made


_KIN = ("brother", "sister", "friend", "boss", "neighbour", "son", "daughter", "teacher", "aunt")
_EVENTS = (
    "meeting", "lesson", "exam", "appointment", "dinner", "party", "interview", "call", "trip",
    "match", "concert", "course", "class", "visit", "train", "bus", "flight", "test", "lunch",
    "game", "wedding", "walk", "show", "speech", "breakfast", "swim", "race", "dance", "workshop",
)  # fmt: skip
_TASKS = (
    "help {name3}", "count every {thing}", "guard the {thing}", "sell {food} in {place2}",
    "watch the {animal}", "find the {thing} of {name3}", "talk about {any}",
    "answer questions about {any}", "keep the {thing} clean", "teach {language}", "test {any}",
    "write to {name3}",
)  # fmt: skip
_NUMBERS = ("", "2", "3", "4")


def slot_names(makers: Iterable[str]) -> frozenset[str]:
    """All names that slots made by these makers may have in a table."""
    return frozenset(f"{a}{key}{n}" for key in makers for a in ("", "a_", "A_") for n in _NUMBERS)


SLOTS = slot_names(Slots.makers)
