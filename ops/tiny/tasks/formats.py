"""Following a format: an answer cast into the form that the prompt gives.

Owns the forms (patterns of a name and a value, dates, marks, tags, templates, CSV, tables, bullets)
and the facts that fill them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tasks.phrasing import TABLES, Asked, chosen, different, picks, posed, some_items

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

FORMAT = TABLES["formats"]
# Places of a name and of its value; those that do not say which is which keep their order.
_CLEAR = [("NAME", "VALUE"), ("KEY", "VALUE"), ("name", "value"), ("key", "value"),
          ("FIELD", "VALUE")]  # fmt: skip
_PLACES = [*_CLEAR, *_CLEAR, ("x", "y"), ("A", "B"), ("LABEL", "TEXT"), ("WHAT", "ANSWER"),
           ("TITLE", "DATA")]  # fmt: skip
_BLANKS = ["{}", "<>", "[]"]  # around the blanks of a template
_MIDS = [": ", " = ", "=", " -> ", " is ", "|", " / ", ":", " => ", " - ", "(%)", "[%]", "~"]
DATES = ["DD.MM.YYYY", "DD/MM/YYYY", "MM/DD/YYYY", "YYYY/MM/DD", "DD-MM-YYYY", "YYYY.MM.DD",
         "YYYYMMDD", "DD.MM.", "MM/YYYY", "YYYY", "MM-DD-YYYY", "YYYY-MM-DD",
         "MM.YYYY"]  # fmt: skip
MONTHS = """January February March April May June July August September October November
December""".split()
WRAPS = {"brackets": "[]", "parentheses": "()", "double quotes": '""', "angle brackets": "<>",
         "stars": "**", "braces": "{}", "single quotes": "''", "square brackets": "[]",
         "bars": "||", "underscores": "__"}  # fmt: skip
_WRAPS = list(WRAPS)
SEPARATORS = {"semicolons": "; ", "commas": ", ", "slashes": "/", "dashes": "-", "bars": " | ",
              "plus signs": " + ", "arrows": " -> ", "dots": ".", "underscores": "_",
              "colons": ":"}  # fmt: skip
_SEPARATORS = list(SEPARATORS)
_TAGS = ["b", "i", "p", "h1", "code", "em", "div", "span", "title", "strong", "li", "a", "td"]
_BULLETS = ["*", "+", "o", "#", ">", "->", "--", "~", "=", "**", "::", "[ ]", "[x]", "@"]


def _facts(w: Words, n: int) -> list[tuple[str, str]]:
    """Names and values of one fact each; neither has a comma."""
    r = w.rng
    names = different(lambda: w.draw("field") if r.random() < 0.6 else w.any_word(), n)
    kinds = (w.any_word, w.novel, w.code, lambda: str(w.number()), w.phrase, w.place)
    return [(name, r.choice(kinds)()) for name in names]


def _stated(w: Words, facts: list[tuple[str, str]]) -> str:
    form, gap = w.rng.choice(
        (("The {} is {}.", " "), ("{}: {}", "\n"), ("{} = {}", ", "), ("{}: {}", "; "),
         ("{} is {}", ", "), ("- {}: {}", "\n"))
    )  # fmt: skip
    return gap.join([form.format(k, v) for k, v in facts])


def _form(w: Words) -> tuple[str, Callable[[str, str], str]]:
    """A pattern of a name and a value, as shown, and what fills it."""
    r = w.rng
    places, mid = r.choice(_PLACES), r.choice(_MIDS)
    a, b = places
    mark = r.choice(("{}", "{}", "<>", "<>", "$ ", "", "", ""))
    if mark:  # no part of the answer; other brackets would be
        a, b = (f"{mark[0]}{x}{mark[1]}".rstrip() for x in places)
    turned = places in _CLEAR and r.random() < 0.2

    def fill(name: str, value: str) -> str:
        x, y = (value, name) if turned else (name, value)
        return f"{x}{mid.replace('%', y)}" if "%" in mid else f"{x}{mid}{y}"

    return fill(a, b), fill


def _pair(w: Words) -> Asked:
    facts = _facts(w, w.rng.choice((1, 2, 3, 4)))
    name, value = w.rng.choice(facts)
    pattern, fill = _form(w)
    question = w.rng.choice(("What is the {}? ", "Give me the {}. ", "Which {} is it? ")).format(
        name
    )
    head = chosen(w, FORMAT["pair"]).format(f=pattern)
    text = f"{question}{_stated(w, facts)}" if w.rng.random() < 0.5 else (
        f"{_stated(w, facts)} {question}".rstrip())  # fmt: skip
    return Asked(head, text, fill(name, value), f"The {name} is {value}.")


def _all_pairs(w: Words) -> Asked:
    r = w.rng
    facts = _facts(w, r.choice((2, 3, 4)))
    pattern, fill = _form(w)
    gap, shown_gap = r.choice(
        (("; ", "; ..."), ("\n", ", one per line"), (" ", " with blanks between"))
    )
    head = chosen(w, FORMAT["pairs"]).format(f=pattern + shown_gap)
    done = gap.join([fill(k, v) for k, v in facts])
    return Asked(head, _stated(w, facts), done, "I fill the form for each.")


def _date(w: Words) -> Asked:
    r = w.rng
    year, month, day = r.randint(1950, 2049), r.randint(1, 12), r.randint(1, 28)
    form = r.choice(DATES)
    x = r.random()
    text = (f"{year}-{month:02d}-{day:02d}" if x < 0.6 else f"{day} {MONTHS[month - 1]} {year}"
            if x < 0.8 else f"{MONTHS[month - 1]} {day}, {year}" if x < 0.9
            else f"{year}/{month:02d}/{day:02d}")  # fmt: skip
    done = form.replace("YYYY", str(year)).replace("MM", f"{month:02d}")
    done = done.replace("DD", f"{day:02d}")
    why = f"YYYY is {year}, MM is {month:02d}, DD is {day:02d}."
    return Asked(chosen(w, FORMAT["date"]).format(f=form), text, done, why)


def _some_words(w: Words, low: int, high: int) -> list[str]:
    return [w.any_word() for _ in range(w.rng.randint(low, high))]


def _wrap(w: Words) -> Asked:
    words, name = _some_words(w, 1, 8), w.rng.choice(_WRAPS)
    left, right = WRAPS[name]
    head = chosen(w, FORMAT["each word"]).format(m=name)
    done = " ".join([f"{left}{word}{right}" for word in words])
    return Asked(head, " ".join(words), done, f"{left} before and {right} behind each word.")


def _separate(w: Words) -> Asked:
    words, name = _some_words(w, 2, 8), w.rng.choice(_SEPARATORS)
    head = chosen(w, FORMAT["separate"]).format(m=name)
    return Asked(head, " ".join(words), SEPARATORS[name].join(words), f"I put {name} between.")


def _tag(w: Words) -> Asked:
    tag = w.rng.choice(_TAGS) if w.rng.random() < 0.5 else w.any_word()
    text = " ".join(_some_words(w, 1, 7))
    head = chosen(w, FORMAT["tag"]).format(t=f"<{tag}>")
    return Asked(head, text, f"<{tag}>{text}</{tag}>", f"It begins with <{tag}>.")


def _name(w: Words) -> Asked:
    r = w.rng
    who = w.name() if r.random() < 0.4 else w.draw("person").replace(".", ". ")
    form = r.choice(("{p} likes {f}.", "{p} has a {c} {t}.", "The {t} of {p} is {c}.",
                     "A {t} was given to {p}.", "{p} is a {j}.", "I saw {p} with a {t}.",
                     "The {j} is called {p}.", "{p} sold the {c} {t} to me."))  # fmt: skip
    text = form.format(p="%", f=w.draw("food"), c=w.draw("color"), t=w.any_word(), j=w.draw("job"))
    head = chosen(w, FORMAT["name"])
    done = text.replace("%", who.upper())
    return Asked(head, text.replace("%", who), done, f"The name is {who}.")


def _yes(w: Words) -> Asked:
    r = w.rng
    x = r.random()
    if x < 0.4:
        a, b = r.sample(range(r.choice((10, 100, 1000))), 2)
        more = r.random() < 0.5
        text = f"Is {a} {r.choice(('larger', 'more') if more else ('smaller', 'less'))} than {b}?"
        yes, why = (a > b) is more, f"{a} is {'larger' if a > b else 'smaller'} than {b}."
    elif x < 0.7:
        items = some_items(w, 2, 6)
        yes = r.random() < 0.5
        item = r.choice(items) if yes else different(w.any_word, 1, items)[0]
        text = f"Is {item} one of these: {', '.join(items)}?"
        why = f"{item} is {'' if yes else 'not '}there."
    else:
        facts = _facts(w, r.randint(1, 3))
        name, value = r.choice(facts)
        yes = r.random() < 0.5
        said = value if yes else different(w.any_word, 1, [v for _, v in facts])[0]
        text = f"{_stated(w, facts)}\nIs the {name} {said}?"
        why = f"The {name} is {value}."
    return Asked(chosen(w, FORMAT["yes"]), text, "yes" if yes else "no", why)


_TEMPLATES = ["Dear %, your order % was sent to %.", "Hello %, your code is %.",
              "% meets % in % at %.", "The % of % costs % euros.", "% is %, and % is %.",
              "Invoice % for %: % euros.", "Hi %! Please bring % to %.", "%-%-%", "From % to %: %",
              "Welcome, %! Your room is %.", "Ticket %: % (%)", "% / % / %", "To: %\nSubject: %",
              "User % has the role %.", "Meeting: %\nPlace: %\nTime: %", "mv % %", "%@%.com",
              "SELECT % FROM % WHERE % = 1", "https://%.com/%", "%(%, %)", "- %\n- %\n- %",
              "The % goes with the %.", "%: % [%]", "Name: %; Id: %"]  # fmt: skip


def _fill(w: Words) -> Asked:
    r = w.rng
    if r.random() < 0.6:
        parts = r.choice(_TEMPLATES).split("%")
    else:  # any words, with blanks anywhere
        parts = [f" {' '.join(_some_words(w, 1, 3))} " for _ in range(r.randint(2, 5))]
        parts[0], parts[-1] = parts[0].lstrip(), parts[-1].rstrip()
    facts = _facts(w, len(parts) - 1)
    mark = r.choice(_BLANKS)
    template, done = parts[0], parts[0]
    for (name, value), part in zip(facts, parts[1:], strict=True):
        template += f"{mark[0]}{name}{mark[1]}{part}"
        done += value + part
    told = r.sample(facts, len(facts))
    text = (f"{template}\n\n{_stated(w, told)}" if r.random() < 0.5
            else f"{_stated(w, told)}\n\n{template}")  # fmt: skip
    why = " ".join([f"{k} is {v}." for k, v in facts])
    return Asked(chosen(w, FORMAT["fill"]), text, done, why)


def _csv(w: Words) -> Asked:
    facts = _facts(w, w.rng.randint(2, 4))
    told = w.rng.sample(facts, len(facts))
    head = f"{chosen(w, FORMAT['csv'])} ({','.join([k for k, _ in facts])})"
    return Asked(head, _stated(w, told), ",".join([v for _, v in facts]), "One after the other.")


def _table(w: Words) -> Asked:
    facts = _facts(w, w.rng.randint(1, 4))
    a, b = different(lambda: w.draw("field"), 2)
    head = f"{chosen(w, FORMAT['table'])} with the columns {a} and {b}"
    rows = [f"| {a} | {b} |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in facts)]
    return Asked(head, _stated(w, facts), "\n".join(rows), "A row for each pair.")


def _ends(w: Words) -> Asked:
    """A fixed text before or behind the answer, or the answer in capitals."""
    r = w.rng
    facts = _facts(w, r.randint(1, 3))
    name, value = r.choice(facts)
    text = f"{_stated(w, facts)}\n{r.choice(('What is the {}?', 'Give me the {}.')).format(name)}"
    why = f"The {name} is {value}."
    x = r.random()
    if x < 0.25:
        return Asked(chosen(w, FORMAT["caps answer"]), text, value.upper(), why)
    part = w.any_word() if r.random() < 0.6 else w.phrase(1, 3)
    if x < 0.65:
        part += r.choice((":", "", " ->", " is", "!"))
        head, answer = chosen(w, FORMAT["begin"]), f"{part} {value}"
    else:
        head, answer = chosen(w, FORMAT["end"]), f"{value} {part}"
    mark = r.choice("'\"")
    return Asked(head.format(p=f"{mark}{part}{mark}"), text, answer, why)


def _bullets(w: Words) -> Asked:
    items, mark = some_items(w, 2, 6), w.rng.choice(_BULLETS)
    head = chosen(w, FORMAT["bullets"]).format(m=f"'{mark}'")
    done = "\n".join([f"{mark} {item}" for item in items])
    return Asked(head, ", ".join(items), done, f"Each line begins with {mark}.")


FORMATS: dict[str, tuple[int, Callable[[Words], Asked]]] = {
    "pair": (10, _pair), "all pairs": (8, _all_pairs), "date": (8, _date), "wrap": (8, _wrap),
    "separate": (8, _separate), "tag": (7, _tag), "name": (6, _name), "yes": (8, _yes),
    "fill": (14, _fill), "csv": (6, _csv), "table": (5, _table), "ends": (10, _ends),
    "bullets": (5, _bullets),
}  # fmt: skip
_FORMATS = picks(FORMATS)


def formats(w: Words) -> Step:
    """An answer in the form that the prompt asks for."""
    return posed(w, w.rng.choice(_FORMATS)(w))
