"""Looking up: something found by what stands near it.

Owns the texts that are looked into (pairs in any notation, settings, sections, JSON, tables,
numbered lists, lines) and the questions about them, now and then one about what is not there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ops.tiny.tasks.phrasing import ABSENT, TABLES, Asked, chosen, different, joined, picks, posed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ops.tiny.dialogue import Json, Step
    from ops.tiny.words import Words

LOOK = TABLES["lookup"]
FORMS = ["{} = {}", "{}: {}", "{} -> {}", "{} is {}", "{}={}", "- {}: {}", "{} | {}", "{} - {}",
         "{}\t{}", "* {} = {}", "The {} is {}", "[{}] {}", "{} => {}", '"{}": "{}"']  # fmt: skip
_GAPS = ["\n", "\n", "\n", "; ", ", "]


def _keys(w: Words, n: int, taken: Iterable[str] = ()) -> list[str]:
    r, make = w.rng, w.any_word
    return different(lambda: make() if r.random() < 0.8 else f"{make()}_{make()}", n, taken)


def _pairs(w: Words, n: int) -> list[tuple[str, str]]:
    """`n` keys and values, all of them different."""
    r = w.rng
    kinds = (w.novel, w.novel, w.scrambled, w.any_word, w.code, w.path, w.name, w.phrase)
    for_all = r.choice(kinds) if r.random() < 0.6 else None
    keys = _keys(w, n)
    values = different(lambda: (for_all or r.choice(kinds))(), n, keys)
    return list(zip(keys, values, strict=True))


def _few(w: Words) -> int:
    return w.rng.choice((2, 3, 4, 5, 6, 8, 12))


def _values(w: Words) -> Asked:
    """Pairs in any notation, asked in any direction."""
    r = w.rng
    pairs = _pairs(w, _few(w))
    key, value = r.choice(pairs)
    form, gap = r.choice(FORMS), r.choice(_GAPS)
    text = gap.join([form.format(k, v) for k, v in pairs])
    x = r.random()
    if x < 0.16:
        head = chosen(w, LOOK["key"]).format(v=value)
        return Asked(head, text, key, f"The value {value} belongs to {key}.")
    if x < 0.34:
        some = r.sample(pairs, min(len(pairs), r.randint(2, 5)))
        names = [k for k, _ in some]
        if r.random() < 0.5:
            head = chosen(w, LOOK["several"]).format(k=joined(names))
        else:
            head = chosen(w, LOOK["translate"]).format(k=" ".join(names))
        why = " ".join([f"{k} is {v}." for k, v in some])
        return Asked(head, text, "; ".join([v for _, v in some]), why)
    return _one_value(w, [k for k, _ in pairs], key, value, text)


def _one_value(w: Words, keys: list[str], key: str, value: str, text: str) -> Asked:
    """The value of `key`, or now and then of a key that is not there."""
    if w.rng.random() < 0.09:
        key, value = _keys(w, 1, keys)[0], ABSENT
    why = f"There is no {key}." if value == ABSENT else f"The value of {key} stands there."
    return Asked(chosen(w, LOOK["value"]).format(k=key), text, value, why)


def _env(w: Words) -> Asked:
    r = w.rng
    pairs = {k.upper().replace("-", "_").replace(".", "_"): v for k, v in _pairs(w, _few(w))}
    key = r.choice(list(pairs))
    lead = r.choice(["", "", "", "export ", "set "])
    lines = [f'{lead}{k}="{v}"' if " " in v or r.random() < 0.1 else f"{lead}{k}={v}"
             for k, v in pairs.items()]  # fmt: skip
    if r.random() < 0.2:
        lines.insert(r.randint(0, len(lines)), f"# {w.phrase()}")
    return _one_value(w, list(pairs), key, pairs[key], "\n".join(lines))


def _sections(w: Words) -> Asked:
    """Pairs under names, as in ini and YAML; the same key may stand under several."""
    r = w.rng
    names = _keys(w, r.randint(2, 4))
    keys = _keys(w, r.randint(2, 4), names)
    values = iter(different(r.choice([w.novel, w.code, w.any_word, w.path]), 16, names + keys))
    made = {s: {k: next(values) for k in r.sample(keys, r.randint(1, len(keys)))} for s in names}
    section = r.choice(names)
    key = r.choice(list(made[section]))
    style = r.randint(0, 3)
    if style == 0:
        text = "\n".join(
            ["\n".join([f"[{s}]", *(f"{k} = {v}" for k, v in of.items())])
             for s, of in made.items()])  # fmt: skip
    elif style == 1:
        text = "\n".join(
            ["\n".join([f"{s}:", *(f"  {k}: {v}" for k, v in of.items())])
             for s, of in made.items()])  # fmt: skip
    else:
        text = json.dumps(made, indent=None if style == 2 else 2)
    value = made[section][key]
    missing = [k for k in keys if k not in made[section]]
    if missing and r.random() < 0.15:
        key, value = missing[0], ABSENT
    head = chosen(w, LOOK["nested"]).format(k=key, s=section)
    why = f"Under {section} there is no {key}." if value == ABSENT else f"Under {section}: {key}."
    return Asked(head, text, value, why)


def _members(w: Words) -> Asked:
    r = w.rng
    members: Json = {k: r.choice((v, v, w.number())) for k, v in _pairs(w, _few(w))}
    key = r.choice(list(members))
    text = json.dumps(members, indent=r.choice((None, None, 2)))
    return _one_value(w, list(members), key, str(members[key]), text)


def _table(w: Words) -> Asked:
    """A table with a header: markdown, CSV or columns."""
    r = w.rng
    n = r.randint(2, 7)
    heads = different(lambda: w.draw("field") if r.random() < 0.6 else w.any_word(),
                      r.randint(2, 4))  # fmt: skip
    kinds = (w.novel, w.code, w.any_word, w.name, w.place, lambda: str(w.number()), w.date)
    columns = [different(r.choice(kinds[:4] if not i else kinds), n) for i in range(len(heads))]
    rows = list(zip(*columns, strict=True))
    style = r.randint(0, 3)
    if style == 0:
        text = "\n".join([f"| {' | '.join(row)} |" for row in
                          [heads, ["---"] * len(heads), *rows]])  # fmt: skip
    else:
        gap = ("", ",", "\t", "; ")[style]
        text = "\n".join([gap.join(row) for row in [heads, *rows]])
    row, c = r.choice(rows), r.randrange(1, len(heads))
    x = r.random()
    if x < 0.25:
        head = chosen(w, LOOK["row"]).format(h=heads[0], c=heads[c], v=row[c])
        return Asked(head, text, row[0], f"The row with {row[c]} begins with {row[0]}.")
    key, value, why = row[0], row[c], f"The row of {row[0]}: {', '.join(row)}."
    if x > 0.92:
        key, value = different(w.novel, 1, columns[0])[0], ABSENT
        why = f"There is no row {key}."
    return Asked(chosen(w, LOOK["cell"]).format(c=heads[c], k=key), text, value, why)


def _numbered(w: Words) -> Asked:
    r = w.rng
    items = different(r.choice([w.any_word, w.phrase, w.name, w.novel, w.code]), r.randint(3, 12))
    i = r.randrange(len(items))
    form = r.choice(["{}. {}", "{}) {}", "{}: {}", "#{} {}", "({}) {}"])
    text = "\n".join([form.format(n + 1, a) for n, a in enumerate(items)])
    if r.random() < 0.35:
        head = chosen(w, LOOK["number"]).format(v=items[i])
        return Asked(head, text, str(i + 1), f"Number {i + 1} is {items[i]}.")
    n, answer = i + 1, items[i]
    if r.random() < 0.08:
        n, answer = len(items) + r.randint(1, 9), ABSENT
    why = f"The list ends at {len(items)}." if answer == ABSENT else f"I look for {n}."
    return Asked(chosen(w, LOOK["item"]).format(n=n), text, answer, why)


def _has(w: Words) -> Asked:
    r = w.rng
    words = different(w.any_word, r.randint(4, 20))
    size = r.choice((2, 3, 4))
    lines = [" ".join(words[i : i + size]) for i in range(0, len(words), size)]
    i = r.randrange(len(lines))
    word = r.choice(lines[i].split(" "))
    if r.random() < 0.3:
        head = chosen(w, LOOK["has number"]).format(v=word)
        return Asked(head, "\n".join(lines), str(i + 1), f"Line {i + 1} is: {lines[i]}")
    answer = lines[i]
    if r.random() < 0.08:
        word, answer = different(w.any_word, 1, words)[0], ABSENT
    why = f"No line has {word}." if answer == ABSENT else f"I look for {word}."
    return Asked(chosen(w, LOOK["has"]).format(v=word), "\n".join(lines), answer, why)


def _meanings(w: Words) -> Asked:
    r = w.rng
    pairs = _pairs(w, r.choice((2, 3, 4, 6, 8)))
    form = r.choice(["{} means {}", "{}: {}", "{} - {}", "{} stands for {}", "{} = {}"])
    text = r.choice(["\n", "\n", "; "]).join([form.format(k, v) for k, v in pairs])
    key, value = r.choice(pairs)
    if r.random() < 0.08:
        key, value = _keys(w, 1, [k for k, _ in pairs])[0], ABSENT
    why = f"There is no {key}." if value == ABSENT else f"The entry is {key}."
    return Asked(chosen(w, LOOK["means"]).format(k=key), text, value, why)


LOOKUPS: dict[str, tuple[int, Callable[[Words], Asked]]] = {
    "values": (30, _values), "env": (8, _env), "sections": (14, _sections),
    "members": (12, _members), "table": (16, _table), "numbered": (8, _numbered), "has": (8, _has),
    "means": (4, _meanings),
}  # fmt: skip
_LOOKUPS = picks(LOOKUPS)


def lookup(w: Words) -> Step:
    """Something found in pairs, tables, settings or lines."""
    return posed(w, w.rng.choice(_LOOKUPS)(w))
