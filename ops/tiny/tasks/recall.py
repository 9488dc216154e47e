"""Looking far back: many questions about one long list that stands only once.

Owns the list, which has as many entries as it is told, and the order of the questions. How one
entry is asked for is what `lookup` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.dialogue import dialogue
from ops.tiny.tasks.lookup import FORMS, LOOK
from ops.tiny.tasks.phrasing import ABSENT, TABLES, chosen, different, plainly

if TYPE_CHECKING:
    from ops.tiny.dialogue import Dialogue, Step
    from ops.tiny.words import Words

RECALL = TABLES["recall"]
_FORMS = [*FORMS[:8], "{} {}", "{},{}", "| {} | {} |"]


def recall(w: Words, n_pairs: int) -> Dialogue:
    """A list of `n_pairs` entries, then 10 to 40 questions about any of them."""
    r = w.rng
    short = (w.novel, w.novel, w.scrambled, w.any_word, w.any_word)
    keys = different(r.choice(short), n_pairs)
    kind = r.random()
    value = r.choice((*short, w.code, lambda: str(r.randint(10, 99999))))
    values = different(value, n_pairs, keys)
    heads: list[str] = []
    if kind < 0.15:  # a numbered list
        keys = [str(i + 1) for i in range(n_pairs)]
        values = different(w.any_word, n_pairs, keys)
        form = r.choice(["{}. {}", "{}) {}", "{}: {}"])
        rows = [form.format(k, v) for k, v in zip(keys, values, strict=True)]
    elif kind < 0.4:  # a table
        heads = different(lambda: w.draw("field"), 3)
        others = different(value, n_pairs, [*keys, *values])
        gap = r.choice([" | ", ",", "\t", " "])
        rows = [gap.join(row) for row in zip(keys, values, others, strict=True)]
        rows.insert(0, gap.join(heads))
    else:
        form = r.choice(_FORMS)
        rows = [form.format(k, v) for k, v in zip(keys, values, strict=True)]
    gap = "\n" if heads or r.random() < 0.8 else r.choice(["; ", ", "])
    text = gap.join(rows)
    steps: list[Step] = []
    for _ in range(r.randint(10, 40)):
        i = r.randrange(n_pairs)
        key, answer, x = keys[i], values[i], r.random()
        if x < 0.04 and kind >= 0.15:
            key, answer = different(w.novel, 1, keys)[0], ABSENT
        if heads:
            column = r.randint(1, 2)
            answer = answer if column == 1 or answer == ABSENT else others[i]
            head = chosen(w, RECALL["column"]).format(c=heads[column], k=key)
        elif kind < 0.15:
            head = chosen(w, LOOK["item"]).format(n=key)
            if x > 0.7:
                head, answer = chosen(w, LOOK["number"]).format(v=values[i]), key
        elif x > 0.85:
            head, answer = chosen(w, LOOK["key"]).format(v=values[i]), key
        elif x > 0.8 and i + 1 < n_pairs:
            head, answer = chosen(w, RECALL["next"]).format(k=key), keys[i + 1]
        else:
            head = chosen(w, LOOK["value"]).format(k=key)
        why = "It is not in the list." if answer == ABSENT else "I look it up in the list."
        steps.append((plainly(w, head), answer, why))
    lead = text if r.random() < 0.3 else f"{chosen(w, RECALL['lead'])}\n{text}"
    if r.random() < 0.3:
        return dialogue(w, "recall", steps, lead, lead_in_system=True)
    steps[0] = (f"{lead}\n\n{steps[0][0]}", *steps[0][1:])
    return dialogue(w, "recall", steps)
