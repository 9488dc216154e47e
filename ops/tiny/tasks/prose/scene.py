"""Who, where and what a paragraph is about.

Owns the values of a paragraph's slots, drawn once and fitting together; knows no sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ops.tiny.tasks.about.slots import Slots
from ops.tiny.words import held_out

if TYPE_CHECKING:
    from collections.abc import Callable

_SHE = frozenset(
    """Karen Grace Iris Zoe Quinn Wendy Alice Daisy Hannah Jane Nancy Rachel Mrs. Linda Susan Helen
    Mary Ingrid Kim Esther Grete""".split()
)
_HE = frozenset("Noah Joshua Luca Andrea Kofi Ezra".split())


def _she(name: str) -> bool:
    """Names that end in a are women's, all others men's, but for those listed."""
    first = name.split(" ", 1)[0]
    return first in _SHE or (first[-1] in "aA" and first not in _HE)


# Things that one can carry, buy and lose, and that a stranger's word may replace.
_CARRIED = """
    apple bag ball bell book bottle bowl box brush bucket button cake camera candle clock
    coat coin cup drum fan flag flower fork glove guitar hammer hat helmet horn jacket jar
    kettle key kite knife ladder lamp lantern letter lock map mirror mug needle notebook pan
    parcel pen pencil phone picture pillow plate radio ring rope ruler sack scarf shirt
    shovel spoon stamp stool ticket toy umbrella vase violin wallet watch whistle basket
    blanket telescope trumpet magnet
""".split()
# Food of which one has some, not one.
_EATEN = """
    rice bread cheese fish chicken salad pizza pasta cake honey pumpkin spinach corn cabbage
    ham toast jam pudding pie bacon beef lamb melon porridge fruit
""".split()
_FOODS = [x for x in _EATEN if not held_out(x)], [x for x in _EATEN if held_out(x)]
_THINGS = [x for x in _CARRIED if not held_out(x)], [x for x in _CARRIED if held_out(x)]


_CHOICES = """
weather: warm, cold, windy, rainy, sunny, grey, cloudy, bright, foggy, hot, mild
daytime: morning, afternoon, evening
season: spring, summer, autumn, winter
room: kitchen, hall, cellar, attic, bedroom, garage, workshop, office, shed
spot: market, river, station, school, bridge, park, harbour, library, mill, bakery, square,
 lake, fountain, tower
hidden: under the table, behind the door, on the shelf, next to the stove, in a corner, near the
 window, below the stairs, in an old box, behind a chair, under the bed, on top of a cupboard,
 in a drawer
mood: happy, proud, glad, content, thankful, cheerful, merry, pleased
size: small, big, little, large, tiny, huge
look: old, new, shiny, strange, plain, pretty, heavy, light, round, simple, fine
matter: wood, metal, glass, paper, stone, leather, clay, iron, cloth
kin: brother, sister, mother, father, uncle, aunt, cousin, neighbour, grandmother
many: two, three, four, five, six, seven, eight, nine, ten, twelve
drink: tea, coffee, milk, water, juice, hot chocolate
plant: roses, beans, tulips, carrots, herbs, tomatoes, apples, cherries, onions, peas
noise: a soft click, a loud bang, a low hum, a high whistle, a short beep, a long creak
vehicle: train, bus, boat, car, bicycle, ferry, tram
skill: swim, paint, bake bread, ride a bicycle, play the piano, sing, draw maps, count in
 another language, dance, fish, sew, tie knots
"""
_LISTS = [line.split(": ") for line in _CHOICES.strip().replace("\n ", " ").splitlines()]


def _thing(s: Slots) -> str:
    w = s.w
    if w.rng.random() < 0.6 * w.novelty:
        return w.any_word()
    return w.rng.choice(_THINGS[w.unseen])


def _food(s: Slots) -> str:
    w = s.w
    if w.rng.random() < 0.5 * w.novelty:
        return w.novel()
    return w.rng.choice(_FOODS[w.unseen])


def _who(s: Slots) -> str:
    w = s.w
    return w.draw("person").replace(".", ". ") if w.rng.random() < 0.85 else w.name()


def _by_gender(key: str, him: str, her: str) -> Callable[[Slots], str]:
    return lambda s: her if _she(s[key]) else him


def _one_of(values: str) -> Callable[[Slots], str]:
    choices = tuple(values.split(", "))
    return lambda s: s.w.rng.choice(choices)


class Scene(Slots):
    """The slots of one paragraph."""

    makers: ClassVar[dict[str, Callable[[Slots], str]]] = {
        **Slots.makers,
        "who": _who,
        "he": _by_gender("who", "he", "she"),
        "He": _by_gender("who", "He", "She"),
        "him": _by_gender("who", "him", "her"),
        "his": _by_gender("who", "his", "her"),
        "His": _by_gender("who", "His", "Her"),
        "thing": _thing,
        "food": _food,
        "word": lambda s: s.w.any_word(),
        "day": lambda s: s.w.draw("day"),
        **{key: _one_of(values) for key, values in _LISTS},
    }
