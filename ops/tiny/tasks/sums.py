"""Small sums: arithmetic of one and two digits, comparing, counting letters.

Owns the numbers, the stories they stand in, and the short way to each result, which is the
reasoning. The answer is the bare number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tasks.phrasing import TABLES, Asked, chosen, different, picks, posed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

SUM = TABLES["sums"]


def _sum_of(a: int, op: str, b: int) -> tuple[int, str]:
    """The result and the short way to it: tens and ones apart."""
    if op == "+":
        if a > 9 and b > 9:
            ones, tens = a % 10 + b % 10, a - a % 10 + b - b % 10
            way = f"{a - a % 10} + {b - b % 10} = {tens}, {a % 10} + {b % 10} = {ones}, "
            return a + b, f"{way}so {a + b}."
        return a + b, f"{a} + {b} = {a + b}."
    if op == "-":
        if b > 9 and b % 10:
            rest = a - (b - b % 10)
            return a - b, f"{a} - {b - b % 10} = {rest}, {rest} - {b % 10} = {a - b}."
        return a - b, f"{a} - {b} = {a - b}."
    if a > 10 and a % 10:
        tens, ones = (a - a % 10) * b, a % 10 * b
        way = f"{a - a % 10} * {b} = {tens}, {a % 10} * {b} = {ones}, "
        return a * b, f"{way}so {a * b}."
    return a * b, f"{a} * {b} = {a * b}."


def _two_numbers(w: Words, op: str) -> tuple[int, int]:
    r = w.rng
    if op == "*":
        return r.randint(0, 12), r.randint(0, 10)
    top = r.choice((9, 20, 99, 99))
    a, b = r.randint(0, top), r.randint(0, top)
    return (b, a) if op == "-" and b > a else (a, b)


def _sum(w: Words) -> Asked:
    r = w.rng
    op = r.choice("+++--**")
    a, b = _two_numbers(w, op)
    value, why = _sum_of(a, op, b)
    if r.random() < 0.4:
        name = {"+": "plus", "-": "minus", "*": "times"}[op]
        return Asked(chosen(w, SUM[name]).format(a=a, b=b), "", str(value), why)
    sign = r.choice("*x") if op == "*" and r.random() < 0.3 else op
    gap = "" if r.random() < 0.2 else " "
    return Asked(chosen(w, SUM["sum"]).format(s=f"{a}{gap}{sign}{gap}{b}"), "", str(value), why)


def _three(w: Words) -> Asked:
    r = w.rng
    top = r.choice((9, 9, 20, 50))
    numbers = [r.randint(0, top) for _ in range(3)]
    ops = ["+", r.choice("+-")]
    if sum(numbers[:2]) < numbers[2]:
        ops[1] = "+"
    a, b, c = numbers
    first = a + b
    value = first + c if ops[1] == "+" else first - c
    head = chosen(w, SUM["sum"]).format(s=f"{a} + {b} {ops[1]} {c}")
    return Asked(head, "", str(value), f"{a} + {b} = {first}, {first} {ops[1]} {c} = {value}.")


def _compare(w: Words) -> Asked:
    r = w.rng
    top = r.choice((9, 20, 99, 999, 9999))
    a, b = r.sample(range(top + 1), 2)
    low = r.random() < 0.45
    head = chosen(w, SUM["smaller" if low else "larger"]).format(a=a, b=b)
    why = f"{a} is {'smaller' if a < b else 'larger'} than {b}."
    return Asked(head, "", str(min(a, b) if low else max(a, b)), why)


def _around(w: Words) -> Asked:
    """The double, the half, the next and the previous number."""
    r = w.rng
    form = r.choice(("double", "half", "half", "next", "previous"))
    a = r.randint(1, r.choice((10, 50, 99)))
    if form == "half":
        head = chosen(w, SUM[form]).format(a=2 * a)
        return Asked(head, "", str(a), f"{a} + {a} = {2 * a}.")
    value = {"double": 2 * a, "next": a + 1, "previous": a - 1}[form]
    sign = {"double": f"+ {a}", "next": "+ 1", "previous": "- 1"}[form]
    return Asked(chosen(w, SUM[form]).format(a=a), "", str(value), f"{a} {sign} = {value}.")


def _letters(w: Words) -> Asked:
    r = w.rng
    word = w.draw("word") if r.random() < 0.7 else w.novel()[:9]
    if r.random() < 0.65:
        head = chosen(w, SUM["letters"]).format(x=word)
        why = ", ".join([f"{i + 1} {a}" for i, a in enumerate(word)])
        return Asked(head, "", str(len(word)), f"{why}.")
    letter = r.choice(word) if r.random() < 0.85 else r.choice("aeiourstn")
    head = chosen(w, SUM["letter"]).format(x=word, l=letter)
    return Asked(head, "", str(word.count(letter)), f"{'-'.join(word)}.")


def _story(w: Words) -> Asked:
    r = w.rng
    form = r.choice(("more", "more", "less", "less", "each"))
    op = {"more": "+", "less": "-", "each": "*"}[form]
    while True:
        a, b = _two_numbers(w, op)
        if a > 1 < b:
            break
    p, q = different(lambda: w.draw("person").replace(".", ". "), 2)
    things = w.draw("thing") if r.random() < 0.7 else w.novel().lower()
    head = chosen(w, SUM[form]).format(p=p, q=q, a=a, b=b, t=f"{things}s")
    value, why = _sum_of(a, op, b)
    return Asked(head, "", str(value), why)


SUMS: dict[str, tuple[int, Callable[[Words], Asked]]] = {
    "sum": (40, _sum), "three": (8, _three), "compare": (14, _compare), "around": (12, _around),
    "letters": (10, _letters), "story": (24, _story),
}  # fmt: skip
_SUMS = picks(SUMS)


def sums(w: Words) -> Step:
    """A small sum, answered with the bare number."""
    return posed(w, w.rng.choice(_SUMS)(w))
