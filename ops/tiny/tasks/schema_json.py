"""JSON to a given schema: what a text says, as an object with the members that the schema asks for.

Owns the schemas, the texts, and the rule that each property can be found in one way only: by its
name, by its description, by the kind of its value, or by its choices. Members are in the order of
the schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.tiny.dialogue import dialogue
from ops.tiny.tasks.json_values import bare, dumps, text_word
from ops.tiny.tasks.phrasing import TABLES, Asked, chosen, different, joined, posed, sentence

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.dialogue import Dialogue, Json, Step
    from ops.tiny.words import Words

SCHEMA = TABLES["schema_json"]
WORN = 0.2  # share of sentences with a word that says nothing
# Kinds of values that a text can show without naming the property.
SAID = TABLES["said"]
# The type of each, and names that say it.
KINDS = {
    "name": ("string", "name person customer guest full_name owner client author contact"),
    "place": ("string", "city place town location where destination"),
    "date": ("string", "date day when due_date on_date deadline"),
    "clock": ("string", "time at start_time hour clock"),
    "email": ("string", "email mail email_address contact_email reply_to"),
    "code": ("string", "code id order_id number_plate serial ticket_id ref"),
    "path": ("string", "path file filename source_file document"),
    "title": ("string", "title subject headline message text topic"),
    "color": ("string", "color colour paint"),
    "price": ("number", "price cost total amount_eur fee"),
    "weight": ("number", "weight kilos weight_kg mass"),
    "count": ("integer", "count quantity how_many pieces number_of_items"),
    "age": ("integer", "age years_old age_in_years"),
    "guests": ("integer", "guests people seats persons visitors"),
    "days": ("integer", "days nights duration_days n_days"),
    "names": ("strings", "guest_list people_names members attendees team"),
    "foods": ("strings", "foods dishes ingredients meal menu"),
}
_KIND_NAMES = list(KINDS)
_NAMED = {kind: names.split() for kind, (_, names) in KINDS.items()}
# Kinds that a reader could take for each other: one of them only shows itself by its kind.
_ALIKE = [{"name", "names"}, {"price", "weight"}, {"count", "guests", "days", "age"},
          {"date", "clock"}, {"code", "path", "email"}]  # fmt: skip


_MAKE: dict[str, Callable[[Words], Any]] = {
    "name": lambda w: w.name(), "place": lambda w: w.place(), "date": lambda w: w.date(),
    "clock": lambda w: w.clock(), "email": lambda w: w.email(), "code": lambda w: w.code(),
    "path": lambda w: w.path(), "title": lambda w: w.phrase(1, 4),
    "color": lambda w: w.draw("color"), "price": lambda w: w.decimal(),
    "weight": lambda w: w.decimal(), "count": lambda w: w.integer(),
    "age": lambda w: w.rng.randint(1, 99), "guests": lambda w: w.rng.randint(2, 60),
    "days": lambda w: w.rng.randint(2, 60),
    "names": lambda w: different(lambda: w.draw("person").replace(".", ". "),
                                 w.rng.randint(1, 4)),
    "foods": lambda w: different(lambda: w.draw("food"), w.rng.randint(1, 4)),
}  # fmt: skip

_STRINGS = ["word", "word", "phrase", "code", "name", "place", "date", "clock", "email", "path"]
_SHAPES = ["string"] * 9 + ["integer"] * 4 + ["number"] * 2 + ["boolean"] * 3 + ["enum"] * 4 + [
    "strings", "strings", "integers", "enums", "object", "object", "objects"]  # fmt: skip


@dataclass(slots=True)
class Property:
    """A property, how a text says it, and how its value is made. With `label` the text names it;
    without, only the kind of the value shows whose it is."""

    name: str
    shape: str
    schema: Json
    label: str
    make: Callable[[Words], Any]
    kind: str = ""  # how it is said without a label: a name in `SAID`
    members: tuple[str, ...] = ()  # of an object
    flag: str = ""  # what a true value says
    required: bool = True


def _choices(w: Words, taken: set[str], low: int = 2) -> list[str]:
    r = w.rng

    def one() -> str:
        return w.draw("choice") if r.random() < 0.6 else text_word(w)

    out = different(one, r.randint(low, 5), taken)
    taken.update(out)
    return out


def _scalar(w: Words, shape: str, taken: set[str]) -> tuple[Json, Callable[[Words], Any]]:
    """A schema of one plain value, and what makes it."""
    r = w.rng
    if shape == "integer":
        return {"type": "integer"}, lambda w: w.number()
    if shape == "number":
        whole = r.random() < 0.2
        return {"type": "number"}, lambda w: w.integer() if whole else w.decimal()
    if shape == "boolean":
        return {"type": "boolean"}, lambda w: w.rng.random() < 0.6
    if shape == "enum":
        choices = _choices(w, taken)
        schema: Json = {"type": "string", "enum": choices}
        return schema if r.random() < 0.85 else {"enum": choices}, lambda w: w.rng.choice(choices)
    kind = r.choice(_STRINGS)
    if kind in ("word", "phrase"):
        return {"type": "string"}, text_word if kind == "word" else lambda w: w.phrase(2, 4)
    return {"type": "string"}, _MAKE[kind]


def _members(w: Words, n: int, taken: set[str]) -> tuple[Json, dict[str, Callable[[Words], Any]]]:
    """The schema of a small object of plain values of one word."""
    r = w.rng
    properties: Json = {}
    makes: dict[str, Callable[[Words], Any]] = {}
    for name in different(lambda: w.draw("field") if r.random() < 0.5 else w.any_word(), n):
        x = r.random()
        if x < 0.3:
            properties[name], makes[name] = {"type": "integer"}, lambda w: w.integer()
        elif x < 0.42:
            properties[name], makes[name] = _scalar(w, "enum", taken)
        elif x < 0.5:
            properties[name], makes[name] = {"type": "number"}, lambda w: w.decimal()
        else:
            properties[name], makes[name] = {"type": "string"}, text_word
    schema: Json = {"type": "object", "properties": properties}
    if r.random() < 0.8:
        schema["required"] = list(properties)
    if r.random() < 0.25:
        schema["additionalProperties"] = False
    return schema, makes


def _shape(w: Words, shape: str, taken: set[str]) -> tuple[Json, Callable[[Words], Any], list[str]]:
    """A schema of any shape, what makes its value, and the members of an object."""
    r = w.rng
    if shape in ("strings", "integers", "enums"):
        if shape == "enums":
            choices = _choices(w, taken, 3)
            schema: Json = {"type": "array", "items": {"type": "string", "enum": choices}}
            return schema, lambda w: w.rng.sample(choices, w.rng.randint(1, 3)), []
        one = text_word if shape == "strings" else lambda w: w.integer()
        item = "string" if shape == "strings" else r.choice(("integer", "integer", "number"))
        schema = {"type": "array", "items": {"type": item}}
        return schema, lambda w: [one(w) for _ in range(w.rng.randint(1, 4))], []
    if shape in ("object", "objects"):
        schema, makes = _members(w, r.randint(1, 3) if shape == "object" else 2, taken)

        def make(w: Words) -> Json:
            return {name: of(w) for name, of in makes.items()}

        if shape == "object":
            return schema, make, list(makes)
        many: Json = {"type": "array", "items": schema}
        return many, lambda w: [make(w) for _ in range(w.rng.randint(1, 3))], list(makes)
    schema, one = _scalar(w, shape, taken)
    return schema, one, []


def _unusual(w: Words) -> str:
    """A name that says nothing, in the ways that names are written."""
    x = w.rng.random()
    if x < 0.6:
        return w.any_word()
    a, b = w.any_word(), w.any_word() if w.rng.random() < 0.5 else w.draw("field")
    if x < 0.85:
        return f"{a}_{b}"
    return f"{a}{b[0].upper()}{b[1:]}"


def _by_kind(w: Words, kinds: set[str], labels: set[str]) -> Property | None:
    """A property that only the kind of its value shows; None where another could be meant."""
    r = w.rng
    kind = r.choice(_KIND_NAMES)
    if any(kind == k or any({kind, k} <= alike for alike in _ALIKE) for k in kinds):
        return None
    kinds.add(kind)
    shape, names = KINDS[kind][0], _NAMED[kind]
    name = r.choice(names) if r.random() < 0.6 else _unusual(w)
    if name in labels:
        return None
    schema: Json = {"type": shape}
    if shape == "strings":
        schema = {"type": "array", "items": {"type": "string"}}
    if name not in names or r.random() < 0.35:
        schema["description"] = chosen(w, SAID[f"{kind} is"])
    return Property(name, shape, schema, "", _MAKE[kind], kind)


def _by_flag(w: Words) -> Property:
    """A truth value whose name is a word that is said, or said not to be."""
    r = w.rng
    flag = w.draw("flag") if r.random() < 0.6 else w.any_word()
    plain = flag.replace("_", " ")
    schema = {"type": "boolean"}
    if r.random() < 0.3:
        schema["description"] = f"Whether it is {plain}"
    name = r.choice((flag, flag, f"is_{flag}"))
    return Property(name, "flag", schema, "", lambda w: w.rng.random() < 0.6, "flag", flag=plain)


def _by_choice(w: Words, taken: set[str]) -> Property:
    """A choice that only one property offers."""
    choices = _choices(w, taken)
    name = w.draw("field") if w.rng.random() < 0.5 else _unusual(w)
    schema: Json = {"type": "string", "enum": choices}
    if w.rng.random() < 0.25:
        schema["description"] = "One of the choices"
    return Property(name, "enum", schema, "", lambda w: w.rng.choice(choices), "choice")


def _by_label(w: Words, taken: set[str]) -> Property:
    """A property that the text names, by its name or by its description."""
    r = w.rng
    shape = r.choice(_SHAPES)
    schema, make, members = _shape(w, shape, taken)
    name = w.draw("field") if r.random() < 0.45 else _unusual(w)
    label = name.replace("_", " ") if r.random() < 0.5 else name
    x = r.random()
    if x < 0.3:  # the text says the description's words
        label = f"{w.any_word()} {w.draw('noun')}" if r.random() < 0.6 else w.draw("noun")
        describe = chosen(w, SAID["labelled is"]).format(label)
        schema = {**schema, "description": describe}
    elif x < 0.45:
        schema = {**schema, "description": f"The {label}"}
    return Property(name, shape, schema, label, make, members=tuple(members))


def properties(w: Words) -> tuple[list[Property], set[str]]:
    """One to six properties of which each can be found, and the kinds that are taken."""
    r = w.rng
    n = r.choices((1, 2, 3, 4, 5, 6), (12, 22, 26, 20, 12, 8))[0]
    out: list[Property] = []
    kinds: set[str] = set()
    words: set[str] = set()  # names, labels and choices: all differ
    share = r.choice((0.0, 0.3, 0.5, 1.0))
    while len(out) < n:
        if r.random() < share:
            x = r.random()
            p = (_by_flag(w) if x < 0.12 else _by_choice(w, words) if x < 0.25
                 else _by_kind(w, kinds, words))  # fmt: skip
        else:
            p = _by_label(w, words)
        if p is None or p.name in words or (p.label and p.label in words - {p.name}):
            continue
        words.update((p.name, p.label))
        out.append(p)
    if r.random() < 0.5:
        for p in out:
            p.required = r.random() < 0.6
    return out, kinds


def schema_of(w: Words, made: list[Property]) -> Json:
    """The schema in one of the shapes that clients write."""
    r = w.rng
    titled = r.random() < 0.1  # as libraries write it that make schemas of classes
    found = {
        p.name: {"title": p.name.replace("_", " ").title(), **p.schema} if titled else p.schema
        for p in made
    }
    schema: Json = {"type": "object", "properties": found}
    required = [p.name for p in made if p.required]
    if required:
        schema["required"] = required
    if r.random() < 0.4:
        schema["additionalProperties"] = False
    if titled:
        schema["title"] = w.any_word().title()
    elif r.random() < 0.1:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return schema


def _value_said(w: Words, p: Property, value: Any, gap: str) -> str:
    """A value as a text says it; `gap` stands between the items of a list."""
    r = w.rng
    if isinstance(value, bool):
        return r.choice(("yes", "true") if value else ("no", "false"))
    if isinstance(value, list):
        if p.members:
            return gap.join([_value_said(w, p, one, gap) for one in value])
        return joined([str(v) for v in value]) if gap == "; " else gap.join(map(str, value))
    if isinstance(value, dict):
        form = "{} {}" if p.shape == "objects" or r.random() < 0.6 else "{} = {}"
        return ", ".join([form.format(k, v) for k, v in value.items()])
    return str(value)


_FORMS = ["{}: {}", "{}: {}", "- {}: {}", "{} = {}", "* {}: {}", "{}\t{}", "{} -> {}",
          "| {} | {} |", "**{}**: {}", "{} is {}"]  # fmt: skip


def _line(w: Words, p: Property, value: Any, form: str) -> str:
    """A line of a form; a list of objects may have a line for each."""
    label = p.label if p.label else p.name
    if p.shape == "objects" and form in ("{}: {}", "{} = {}") and w.rng.random() < 0.5:
        return "\n".join([f"{label}:", *(f"- {_value_said(w, p, one, '; ')}" for one in value)])
    if w.rng.random() < 0.25 and label.islower():
        label = label.capitalize()
    return form.format(label, _value_said(w, p, value, ", " if not p.members else "; "))


def _sentence(w: Words, p: Property, value: Any) -> str:
    """A sentence with the value, named by its label or shown by its kind."""
    if p.flag:
        return chosen(w, SAID["flag" if value else "not flag"]).format(p.flag)
    said = _value_said(w, p, value, "; ")
    if p.label:
        return _worn(w, chosen(w, SAID["labelled"])).format(l=p.label, v=said)
    return _worn(w, chosen(w, SAID[p.kind])).format(said)


def _worn(w: Words, form: str) -> str:
    """A wording, in training now and then with one of its words replaced by any other: a reader
    finds the value by where it stands and by what it is."""
    if w.unseen or w.rng.random() >= WORN:
        return form
    words = form.split(" ")
    places = [i for i, word in enumerate(words) if len(word) >= 2 and word.isalpha()]
    if places:
        i = w.rng.choice(places)
        new = w.any_word() if w.rng.random() < 0.5 else w.draw("word")
        words[i] = new.capitalize() if words[i][0].isupper() else new
    return " ".join(words)


def _stray(w: Words, made: list[Property], kinds: set[str]) -> Property:
    """A fact that the schema does not ask for, of a kind that no property is found by."""
    while True:
        label = f"{w.any_word()} {w.draw('noun')}" if w.rng.random() < 0.5 else w.any_word()
        if all(label not in (p.label, p.name) for p in made):
            break
    make: Callable[[Words], Any] = text_word
    if not kinds:
        make = w.rng.choice((text_word, lambda w: w.integer(), _MAKE["code"], _MAKE["date"]))
    return Property(label, "string", {}, label, make)


def told(w: Words, made: list[Property], kinds: set[str]) -> tuple[str, Json]:
    """A text with values for the properties, and the object; some optional ones are left out."""
    r = w.rng
    given = [p for p in made if p.required or r.random() < 0.5] or [r.choice(made)]
    values = {p.name: p.make(w) for p in given}
    items = [(p, values[p.name]) for p in given]
    strays = [_stray(w, made, kinds) for _ in range(r.choice((0, 0, 0, 1, 1, 2, 3)))]
    items += [(p, p.make(w)) for p in strays]
    if r.random() < 0.6:
        r.shuffle(items)
    x = r.random()
    form = r.choice(_FORMS)
    if x < 0.4:  # a form
        lines = [_line(w, p, v, form) if p.label else _sentence(w, p, v) for p, v in items]
        return "\n".join(lines), values
    if x < 0.5:  # one line
        said = [_sentence(w, p, v).rstrip(".") if not p.label
                else f"{p.label} {'is' if r.random() < 0.5 else '='} {_value_said(w, p, v, '; ')}"
                for p, v in items]  # fmt: skip
        return " | ".join(said), values
    said = [_sentence(w, p, v) for p, v in items]
    if x < 0.7:
        return " ".join(said), values
    if x < 0.8:
        return "\n".join([f"- {a}" for a in said]), values
    if x < 0.9 and not kinds:
        said.insert(r.randint(0, len(said)), sentence(w))
        return " ".join(said), values
    gap = "\n" if r.random() < 0.4 else " "
    body = gap.join(said)
    if r.random() < 0.3:
        body = f"{chosen(w, SCHEMA['lead'])}\n{body}"
    return f"{chosen(w, SCHEMA['open'])}\n\n{body}\n\n{chosen(w, SCHEMA['close'])}", values


def _reason(values: Json) -> str:
    """The members in short, in the schema's order."""
    return " ".join([f"{name}: {bare(v)}." for name, v in values.items()])


def schema_json(w: Words) -> Dialogue:
    """A text, and JSON of what it says to a schema: one that the server puts into the prompt, one
    in the question, or one in the system prompt."""
    r = w.rng
    made, kinds = properties(w)
    schema = schema_of(w, made)
    where = r.randint(0, 2)
    n = 1 if where == 1 or r.random() < 0.75 else r.randint(2, 3)
    steps: list[Step] = []
    for _ in range(n):
        text, values = told(w, made, kinds)
        ordered = {p.name: values[p.name] for p in made if p.name in values}
        if where == 1:
            shown = json.dumps(schema, indent=2 if r.random() < 0.1 else None)
            ask = chosen(w, SCHEMA["own"]).replace("{s}", shown)
            text = f"{ask}\n\n{text}" if r.random() < 0.6 else f"{text}\n\n{ask}"
        elif r.random() < 0.6:
            text = posed(w, Asked(chosen(w, SCHEMA["ask"]), text, "", ""))[0]
        steps.append((text, dumps(ordered), _reason(ordered)))
    if where == 2:
        lead = chosen(w, SCHEMA["system"]).replace("{s}", json.dumps(schema))
        return dialogue(w, "json schema", steps, lead, lead_in_system=True)
    d = dialogue(w, "json schema", steps)
    if where == 0:
        d.schema = schema
    return d
