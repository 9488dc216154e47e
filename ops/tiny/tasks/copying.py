"""Copying: a text repeated, cut or changed a little, of words that nobody has seen.

Owns the drills that everything else is made of. `lookup`, `recall` and `schemas` are found here
too, as the answers of all four stand in the prompt.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ops.tiny.tasks.lookup import lookup
from ops.tiny.tasks.phrasing import (
    NTH,
    NUMBERS,
    TABLES,
    Asked,
    chosen,
    different,
    picks,
    posed,
    sentence,
)
from ops.tiny.tasks.recall import recall
from ops.tiny.tasks.schemas import schemas

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

__all__ = ["copying", "lookup", "recall", "schemas"]

COPY = TABLES["copying"]
MARKS = {"brackets": "[]", "square brackets": "[]", "parentheses": "()", "braces": "{}",
         "marks": "[]", "round brackets": "()", "angle brackets": "<>", "bars": "||",
         "stars": "**", "hash marks": "##", "dollar signs": "$$", "slashes": "//",
         "percent signs": "%%", "quotes": '""', "backticks": "``"}  # fmt: skip
_MARKS = list(MARKS)
JOINS = {"": "", "without blanks": "", "with dashes": "-", "with underscores": "_",
         "with dots": ".", "with slashes": "/", "with plus signs": "+"}  # fmt: skip
_JOINS = list(JOINS)
_SPLITS = ["->", "=", ":", "|", "=>", ";", "//", "#", ">>", "+", "@"]
_SIGNS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_LEVELS = ["INFO", "WARN", "ERROR", "DEBUG", "info", "warning", "error"]


def _words(w: Words, low: int, high: int) -> list[str]:
    make = w.any_word
    return [make() for _ in range(w.rng.randint(low, high))]


def _line(w: Words) -> str:
    """A line as in logs, code and settings."""
    r = w.rng
    k = r.randint(0, 9)
    a, b = w.any_word(), w.any_word()
    if k == 0:
        return f"{w.date()} {w.clock()} {r.choice(_LEVELS)} {a}: {b} {w.integer()}"
    if k == 1:
        return f"[{r.choice(_LEVELS)}] {a} {b} failed after {w.integer()} ms"
    if k == 2:
        return f"{a} = {b}({w.any_word()}, {w.integer()})"
    if k == 3:
        return f"def {a}({b}, {w.any_word()}):"
    if k == 4:
        return f"    return {a}.{b}[{w.integer()}]"
    if k == 5:
        return f"if {a} > {w.integer()}: {b} += 1"
    if k == 6:
        return f"$ {a} --{b} {w.path()}"
    if k == 7:
        return f'"{a}": "{b}",'
    if k == 8:
        return f"import {a} from '{b}';"
    return f"{a.upper()}={b}"


def _lines(w: Words, low: int, high: int) -> list[str]:
    """Lines that differ, the first without an indent."""
    if w.rng.random() < 0.5:
        make = w.phrase if w.rng.random() < 0.7 else w.any_word
    else:
        make = partial(_line, w)
    lines = different(make, w.rng.randint(low, high))
    lines[0] = lines[0].lstrip()
    return lines


def _text(w: Words) -> str:
    """Any text from one invented word to forty words or some lines."""
    r = w.rng
    x = r.random()
    if x < 0.12:
        return w.novel()
    if x < 0.34:
        return " ".join(_words(w, 2, 12))
    if x < 0.4:
        return " ".join(_words(w, 12, 40))
    if x < 0.52:
        return " ".join([w.novel() for _ in range(r.randint(2, 10))])
    if x < 0.62:
        return " ".join([w.code() for _ in range(r.randint(1, 5))])
    if x < 0.72:
        return sentence(w) if x < 0.69 else f"{sentence(w)} {sentence(w)}"
    if x < 0.8:
        return r.choice([w.path, w.url, w.email, w.date, w.clock, w.name, w.place])()
    if x < 0.86:
        return "".join(r.choices(_SIGNS, k=r.randint(4, 24)))
    if x < 0.91:
        return " ".join([str(w.number()) for _ in range(r.randint(1, 6))])
    return "\n".join(_lines(w, 1, 4))


def _repeat(w: Words) -> Asked:
    text = _text(w)
    shown = f'"{text}"' if text[0] != '"' and w.rng.random() < 0.12 else text
    return Asked(chosen(w, COPY["repeat"]), shown, text, "I copy the text.", True)


def _times(w: Words) -> Asked:
    n = w.rng.choice([2, 2, 3, 3, 4])
    text = " ".join(_words(w, 1, 3))
    times = "twice" if n == 2 else f"{NUMBERS[n]} times"
    head = chosen(w, COPY["times"]).format(n=times)
    return Asked(head, text, " ".join([text] * n), f"I write it {times}.", True)


def _case(w: Words) -> Asked:
    text = " ".join(_words(w, 1, 6)) if w.rng.random() < 0.85 else sentence(w)
    k = w.rng.randint(0, 4)
    if k < 2:
        return Asked(chosen(w, COPY["upper"]), text, text.upper(), "Each letter as a capital.")
    if k < 4:
        if w.rng.random() < 0.6:
            text = text.title() if k == 2 else text.upper()
        return Asked(chosen(w, COPY["lower"]), text, text.lower(), "Each letter small.")
    titled = " ".join([a[0].upper() + a[1:] for a in text.split(" ")])
    return Asked(chosen(w, COPY["title"]), text, titled, "A capital at each start.")


def _nth(w: Words) -> Asked:
    words = _words(w, 2, 12) if w.rng.random() < 0.9 else _words(w, 10, 30)
    k = w.rng.randint(0, 9)
    if k < 2:
        i, n = len(words) - 1, "last"
    elif k == 2:
        i, n = len(words) - 2, "second to last"
    else:
        i = w.rng.randrange(min(len(words), 12 if k == 3 else 5))
        n = NTH[i]
    head = chosen(w, COPY["nth"]).format(n=n)
    before = f"{words[i - 1]} {words[i]}" if i else words[i]
    return Asked(head, " ".join(words), words[i], f"The {n} word, I count: {before}.")


def _some(w: Words) -> Asked:
    words = _words(w, 4, 14)
    n, first = w.rng.randint(2, min(5, len(words) - 1)), w.rng.random() < 0.55
    head = chosen(w, COPY["some"]).format(e="first" if first else "last", n=NUMBERS[n])
    part = words[:n] if first else words[-n:]
    return Asked(head, " ".join(words), " ".join(part), f"I copy {NUMBERS[n]} words.")


def _signs(w: Words) -> Asked:
    r = w.rng
    if r.random() < 0.6:
        word, s = w.novel() if r.random() < 0.6 else w.draw("word"), "letter"
    else:
        word, s = str(r.randint(100, 10 ** r.randint(4, 9))), "digit"
    n, first = r.choice([1, 1, 2, 3, 4]), r.random() < 0.5
    n = min(n, len(word))
    e, part = ("first", word[:n]) if first else ("last", word[-n:])
    if n == 1:
        head = chosen(w, COPY["sign"]).format(e=e, s=s, x=word)
    else:
        head = chosen(w, COPY["signs"]).format(e=e, n=NUMBERS[n], s=s + "s", x=word)
    return Asked(head, "", part, f"{'-'.join(word[:12])}." if len(word) < 13 else f"The {e} {s}.")


def _between(w: Words) -> Asked:
    name = w.rng.choice(_MARKS)
    opened, closed = MARKS[name]
    inner = " ".join(_words(w, 1, 6))
    text = f"{w.phrase(1, 4)} {opened}{inner}{closed} {w.phrase(1, 4)}"
    head = chosen(w, COPY["between"]).format(m=name)
    return Asked(head, text, inner, f"I look between {opened} and {closed}.")


def _quoted(w: Words) -> Asked:
    r = w.rng
    inner = " ".join(_words(w, 1, 8))
    who = w.draw("person").replace(".", ". ")
    quote = f'"{inner}"' if r.random() < 0.7 else f"'{inner}'"
    text = r.choice(["{p} says {q} to {x}.", "The {x} has the text {q} on it.", "{x} {q} {p}",
                     "{p} wrote {q} on the {x}.", "Error in {x}: {q} was not found.",
                     "print({q})", "{x} = {q}"])  # fmt: skip
    text = text.format(p=who, q=quote, x=w.any_word())
    return Asked(chosen(w, COPY["quoted"]), text, inner, "I look for the quotes.")


def _spell(w: Words) -> Asked:
    word = w.draw("word") if w.rng.random() < 0.5 else w.novel()[:10]
    mark, form = ("-", "spell") if w.rng.random() < 0.7 else (" ", "blanks")
    return Asked(chosen(w, COPY[form]), word, mark.join(word), "One letter after the other.", True)


def _side(w: Words) -> Asked:
    mark = w.rng.choice(_SPLITS)
    a, b = (" ".join([w.novel() for _ in range(w.rng.randint(1, 4))]) for _ in "ab")
    form = "before" if w.rng.random() < 0.5 else "after"
    head = chosen(w, COPY[form]).format(m=mark)
    gap = " " if w.rng.random() < 0.7 else ""
    answer = a if form == "before" else b
    return Asked(head, f"{a}{gap}{mark}{gap}{b}", answer, f"I look for {mark}.")


def _line_of(w: Words) -> Asked:
    lines = _lines(w, 2, 8)
    x = w.rng.random()
    if x < 0.2:
        e, i = ("first", 0) if x < 0.1 else ("last", len(lines) - 1)
        head = chosen(w, COPY["end line"]).format(e=e)
    else:
        i = w.rng.randrange(len(lines))
        head = chosen(w, COPY["line"]).format(n=i + 1)
    answer = lines[i].lstrip()
    return Asked(head, "\n".join(lines), answer, f"Line {i + 1} begins with {answer.split()[0]}.")


def _join(w: Words) -> Asked:
    words = [w.novel() for _ in range(w.rng.randint(2, 5))]
    how = w.rng.choice(_JOINS)
    head = chosen(w, COPY["join"]).format(m=how).rstrip()
    return Asked(head, " ".join(words), JOINS[how].join(words), "I leave no blank.")


def _plain(w: Words) -> list[str]:
    """Words that differ, for changing one of them."""
    if w.rng.random() < 0.3:
        words = sentence(w)[:-1].split(" ")
        if len(set(words)) == len(words):
            return words
    return different(w.any_word, w.rng.randint(3, 12))


def _replace(w: Words) -> Asked:
    words = _plain(w)
    a, b = w.rng.choice(words), different(w.any_word, 1, words)[0]
    if w.rng.random() < 0.15:
        words.insert(w.rng.randint(0, len(words)), a)
    head = chosen(w, COPY["replace"]).format(a=a, b=b)
    done = " ".join([b if word == a else word for word in words])
    return Asked(head, " ".join(words), done, f"I write {b} where {a} stands.")


def _remove(w: Words) -> Asked:
    words = _plain(w)
    a = w.rng.choice(words)
    head = chosen(w, COPY["remove"]).format(a=a)
    done = " ".join([word for word in words if word != a])
    return Asked(head, " ".join(words), done, f"I skip {a}.")


def _swap(w: Words) -> Asked:
    words = _plain(w)
    i, j = sorted(w.rng.sample(range(len(words)), 2))
    a, b = words[i], words[j]
    done = list(words)
    done[i], done[j] = b, a
    head = chosen(w, COPY["swap"]).format(a=a, b=b)
    return Asked(head, " ".join(words), " ".join(done), f"First {b}, later {a}.")


def _add(w: Words) -> Asked:
    words, b = _plain(w), w.any_word()
    end = w.rng.random() < 0.55
    head = chosen(w, COPY["add"]).format(b=b, e="end" if end else "beginning")
    done = [*words, b] if end else [b, *words]
    return Asked(head, " ".join(words), " ".join(done), f"I add {b}.")


COPYING: dict[str, tuple[int, Callable[[Words], Asked]]] = {
    "repeat": (30, _repeat), "times": (4, _times), "case": (8, _case), "nth": (7, _nth),
    "some": (4, _some), "signs": (2, _signs), "between": (6, _between), "quoted": (5, _quoted),
    "spell": (5, _spell), "side": (5, _side), "line": (5, _line_of), "join": (3, _join),
    "replace": (5, _replace), "remove": (4, _remove), "swap": (2, _swap), "add": (2, _add),
}  # fmt: skip
_COPYING = picks(COPYING)


def copying(w: Words) -> Step:
    """A text repeated, cut or changed a little."""
    return posed(w, w.rng.choice(_COPYING)(w))
