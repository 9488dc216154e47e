"""Lists: sorted, counted, filtered, joined, and written in another way.

Owns what is asked of a list; the answer is written with commas unless another way is asked for.
`sums` and `formats` are found here too: all three compute or cast what the others only copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tasks.formats import formats
from ops.tiny.tasks.phrasing import (
    NTH,
    NUMBERS,
    TABLES,
    Asked,
    chosen,
    different,
    joined,
    picks,
    posed,
    some_items,
)
from ops.tiny.tasks.sums import sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

__all__ = ["formats", "lists", "sums"]

LIST = TABLES["lists"]
NOTHING = "None."
_INPUTS = ["comma", "comma", "comma", "comma", "blank", "lines", "dashes", "numbers", "semicolons",
           "and"]  # fmt: skip


def _numbers(w: Words, low: int = 2, high: int = 8) -> list[int]:
    r = w.rng
    top = r.choice((9, 20, 99, 99, 99, 999, 999, 9999))
    n = min(r.randint(low, high), 8 if top > 9 else 6)
    return r.sample(range(top + 1), n)


def written(items: list[str], kind: str) -> str:
    """A list in one of the ways that people write lists."""
    if kind == "lines":
        return "\n".join(items)
    if kind == "dashes":
        return "\n".join([f"- {item}" for item in items])
    if kind == "numbers":
        return "\n".join([f"{i + 1}. {item}" for i, item in enumerate(items)])
    if kind == "and":
        return joined(items)
    return {"comma": ", ", "blank": " ", "semicolons": "; "}[kind].join(items)


def shown(w: Words, items: list[str], kind: str = "") -> str:
    """A list in any way that keeps its items apart."""
    kind = kind or w.rng.choice(_INPUTS)
    if kind == "blank":
        kind = "comma" if any(" " in item for item in items) else kind
    if kind in ("comma", "and"):
        kind = "semicolons" if any(" and " in f" {item} " for item in items) else kind
    return written(items, kind)


def _numbers_shown(w: Words, numbers: list[int]) -> str:
    return shown(w, [str(n) for n in numbers], w.rng.choice(("comma", "comma", "blank", "lines")))


def _sort(w: Words) -> Asked:
    numbers, down = _numbers(w), w.rng.random() < 0.35
    if w.rng.random() < 0.1:
        numbers.append(w.rng.choice(numbers))
    head = chosen(w, LIST["sort down" if down else "sort"])
    done = ", ".join([str(n) for n in sorted(numbers, reverse=down)])
    why = f"The {'largest' if down else 'smallest'} is {max(numbers) if down else min(numbers)}."
    return Asked(head, _numbers_shown(w, numbers), done, why)


def _sort_words(w: Words) -> Asked:
    items = some_items(w, 2, 6)
    done = sorted(items, key=str.lower)
    initials = " ".join([item[0].lower() for item in done])
    return Asked(chosen(w, LIST["sort words"]), shown(w, items), ", ".join(done), f"{initials}.")


def _reverse(w: Words) -> Asked:
    items = some_items(w) if w.rng.random() < 0.8 else [str(n) for n in _numbers(w)]
    head = chosen(w, LIST["reverse"])
    return Asked(head, shown(w, items), ", ".join(items[::-1]), f"The last is {items[-1]}.")


def _count(w: Words) -> Asked:
    items = some_items(w, 2, 10)
    why = ", ".join([f"{i + 1} {item}" for i, item in enumerate(items)])
    return Asked(chosen(w, LIST["count"]), shown(w, items), str(len(items)), f"I count: {why}.")


def _nth(w: Words) -> Asked:
    items = some_items(w, 2, 9)
    x = w.rng.random()
    i = len(items) - 1 if x < 0.25 else w.rng.randrange(min(len(items), 5 if x < 0.8 else 9))
    n = "last" if x < 0.25 else NTH[i]
    head = chosen(w, LIST["nth"]).format(n=n)
    why = ", ".join(items[: i + 1]) if x >= 0.25 else items[i]
    return Asked(head, shown(w, items), items[i], f"I count: {why}.")


def _extreme(w: Words) -> Asked:
    numbers, low = _numbers(w), w.rng.random() < 0.45
    head = chosen(w, LIST["smallest" if low else "largest"])
    answer = min(numbers) if low else max(numbers)
    return Asked(head, _numbers_shown(w, numbers), str(answer), "I compare the numbers.")


def _length(w: Words) -> Asked:
    """Words whose longest or shortest is the only one of its length."""
    r, low = w.rng, w.rng.random() < 0.45
    pick = min if low else max
    while True:
        items = different(w.novel if r.random() < 0.3 else lambda: w.draw("word"), r.randint(2, 5))
        sizes = [len(item) for item in items]
        if sizes.count(pick(sizes)) == 1:
            break
    answer = items[sizes.index(pick(sizes))]
    why = ", ".join([f"{item} {n}" for item, n in zip(items, sizes, strict=True)])
    head = chosen(w, LIST["shortest" if low else "longest"])
    return Asked(head, shown(w, items), answer, f"{why}.")


def _doubles(w: Words) -> Asked:
    """A list with repetitions: each once, those that come once, the one that comes twice."""
    r = w.rng
    items = some_items(w, 2, 6)
    form = r.choice(("unique", "unique", "once", "twice"))
    again = r.sample(items, 1 if form == "twice" else r.randint(1, min(3, len(items))))
    whole = items + again
    r.shuffle(whole)
    order = list(dict.fromkeys(whole))
    head, text = chosen(w, LIST[form]), shown(w, whole)
    why = f"{joined(again)} {'comes' if len(again) == 1 else 'come'} twice."
    if form == "twice":
        return Asked(head, text, again[0], why)
    kept = order if form == "unique" else [item for item in order if item not in again]
    return Asked(head, text, ", ".join(kept) or NOTHING, why)


def _begin(w: Words) -> Asked:
    r = w.rng
    items = some_items(w, 3, 8)
    letter = r.choice(items)[0].lower() if r.random() < 0.9 else r.choice("abcdefghijklm")
    if not letter.isalpha():
        letter = "a"
    if r.random() < 0.3:
        letter = letter.upper()
    found = [item for item in items if item[0].lower() == letter.lower()]
    head = chosen(w, LIST["begin"]).format(l=letter)
    return Asked(head, shown(w, items), ", ".join(found) or NOTHING, "I read the first letters.")


def _contains(w: Words) -> Asked:
    items = some_items(w, 2, 8)
    there = w.rng.random() < 0.5
    x = w.rng.choice(items) if there else different(w.any_word, 1, items)[0]
    if not there and w.rng.random() < 0.5:
        x = different(lambda: w.draw("food"), 1, items)[0]
    head = chosen(w, LIST["contains"]).format(x=x)
    why = f"{x} is there." if there else f"{x} is not there."
    return Asked(head, shown(w, items), "Yes." if there else "No.", why)


_TARGETS = {"lines": "lines", "dashes": "dashes", "numbered": "numbers", "commas": "comma"}


def _convert(w: Words) -> Asked:
    r = w.rng
    items = (
        some_items(w, 2, 8)
        if r.random() < 0.7
        else [w.phrase(1, 3) for _ in range(r.randint(2, 5))]
    )
    form = r.choice(list(_TARGETS))
    source = r.choice(("lines", "dashes", "numbers", "semicolons")) if form == "commas" else (
        r.choice(("comma", "comma", "semicolons", "and")))  # fmt: skip
    head = chosen(w, LIST[form])
    return Asked(head, shown(w, items, source), written(items, _TARGETS[form]), "In this order.")


def _two(w: Words) -> tuple[list[str], list[str], str]:
    """Two lists and how they stand in a prompt."""
    r = w.rng
    items = some_items(w, 4, 9)
    cut = r.randint(1, len(items) - 1)
    a, b = items[:cut], items[cut:]
    if r.random() < 0.5:  # some in both
        b = [*b, *r.sample(a, r.randint(1, len(a)))]
    form = r.choice(("{a}\n{b}", "[{a}] and [{b}]", "{a}; {b}", "A: {a}\nB: {b}", "[{a}] [{b}]",
                     "First: {a}. Second: {b}."))  # fmt: skip
    return a, b, form.format(a=", ".join(a), b=", ".join(b))


def _merge(w: Words) -> Asked:
    a, b, text = _two(w)
    return Asked(chosen(w, LIST["merge"]), text, ", ".join(a + b), f"After {a[-1]} comes {b[0]}.")


def _common(w: Words) -> Asked:
    a, b, text = _two(w)
    both = [item for item in a if item in b]
    head = chosen(w, LIST["common"])
    return Asked(head, text, ", ".join(both) or NOTHING, "I look for each of the first list.")


def _every_second(w: Words) -> Asked:
    items = some_items(w, 3, 8)
    head = chosen(w, LIST["every second"])
    return Asked(head, shown(w, items), ", ".join(items[::2]), "I take one and skip one.")


def _position(w: Words) -> Asked:
    items = some_items(w, 3, 10)
    i = w.rng.randrange(len(items))
    why = ", ".join([f"{n + 1} {item}" for n, item in enumerate(items[: i + 1])])
    head = chosen(w, LIST["position"]).format(x=items[i])
    return Asked(head, shown(w, items), str(i + 1), f"{why}.")


def _times(w: Words) -> Asked:
    r = w.rng
    items = some_items(w, 2, 4)
    whole = r.choices(items, k=r.randint(3, 8))
    x = r.choice(items)
    head = chosen(w, LIST["times"]).format(x=x)
    return Asked(head, shown(w, whole), str(whole.count(x)), f"I count only {x}.")


def _part(w: Words) -> Asked:
    items = some_items(w, 3, 9)
    n, first = w.rng.randint(2, min(5, len(items) - 1)), w.rng.random() < 0.6
    head = chosen(w, LIST["head"]).format(e="first" if first else "last", n=NUMBERS[n])
    part = items[:n] if first else items[-n:]
    return Asked(head, shown(w, items), ", ".join(part), f"I copy {NUMBERS[n]}.")


def _change(w: Words) -> Asked:
    items = some_items(w, 2, 8)
    if w.rng.random() < 0.5:
        x = w.rng.choice(items)
        done = [item for item in items if item != x]
        head = chosen(w, LIST["without"]).format(x=x)
        return Asked(head, shown(w, items), ", ".join(done), f"I skip {x}.")
    x = different(w.any_word, 1, items)[0]
    head = chosen(w, LIST["with"]).format(x=x)
    return Asked(head, shown(w, items), ", ".join([*items, x]), f"{x} comes last.")


def _filter(w: Words) -> Asked:
    r = w.rng
    numbers = _numbers(w, 3)
    form = r.choice(("above", "below", "even", "odd"))
    n = sorted(numbers)[len(numbers) // 2] + r.choice((-1, 0, 1))
    if form in ("above", "below"):
        found = [a for a in numbers if (a > n if form == "above" else a < n)]
    else:
        found = [a for a in numbers if a % 2 == (form == "odd")]
    head = chosen(w, LIST[form]).format(n=n)
    answer = ", ".join([str(a) for a in found]) or NOTHING
    return Asked(head, _numbers_shown(w, numbers), answer, "I look at one number after the other.")


LISTS: dict[str, tuple[int, Callable[[Words], Asked]]] = {
    "sort": (18, _sort), "sort words": (10, _sort_words), "reverse": (7, _reverse),
    "count": (8, _count), "nth": (7, _nth), "extreme": (8, _extreme), "length": (4, _length),
    "doubles": (6, _doubles), "begin": (5, _begin), "contains": (6, _contains),
    "convert": (10, _convert), "merge": (3, _merge), "common": (2, _common),
    "every second": (2, _every_second), "position": (4, _position), "times": (3, _times),
    "part": (4, _part), "change": (5, _change), "filter": (5, _filter),
}  # fmt: skip
_LISTS = picks(LISTS)


def lists(w: Words) -> Step:
    """Something done to a list."""
    return posed(w, w.rng.choice(_LISTS)(w))
