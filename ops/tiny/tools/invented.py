"""Tools that nobody has, of random words.

A *composed* tool is asked for by its parameters' names. An *implied* one is asked for in a plain
sentence: which tool it means shows only in the words that it shares with a schema, and which
parameter a value belongs to only in what kind of value it is.
"""

# ruff: noqa: E501 - a table with a kind of value a line

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.tiny.catalog import Kind
from ops.tiny.tools.known import function
from ops.tiny.tools.made import Made
from ops.tiny.tools.values import Json, join, schema, value

if TYPE_CHECKING:
    from ops.tiny.words import Words

INT, DECIMAL, BOOL = Kind("int"), Kind("decimal"), Kind("bool")
WORDS, NAMES, NUMBERS = (Kind("list", items=Kind(k)) for k in ("word", "name", "int"))
_SCALARS = [Kind(k) for k in ("word", "phrase", "name", "place", "date", "code", "int")]


def _names(w: Words, verb: str, noun: str) -> tuple[str, str]:
    """Verb and noun, where they are not given."""
    r = w.rng
    verb = verb or (w.draw("verb") if r.random() < 0.85 else w.any_word())
    noun = noun or (w.draw("noun") if r.random() < 0.6 else w.any_word())
    return verb, noun


def _choices(w: Words) -> Kind:
    """Two to five different choices."""
    n, out = w.rng.randint(2, 5), dict[str, None]()
    while len(out) < n:
        out[w.draw("choice") if w.rng.random() < 0.7 else w.any_word()] = None
    return Kind("enum", choices=tuple(out))


def _object(w: Words) -> Kind:
    n, out = w.rng.randint(2, 3), dict[str, Kind]()
    while len(out) < n:
        out[w.draw("field") if w.rng.random() < 0.7 else w.any_word()] = w.rng.choice(_SCALARS)
    return Kind("object", members=tuple(out.items()))


def _results(w: Words, noun: str) -> list[tuple[str, Kind]]:
    r = w.rng
    out: dict[str, Kind] = {}
    for _ in range(r.choice((1, 1, 2, 2, 3))):
        key = noun if r.random() < 0.25 else w.any_word() if r.random() < 0.4 else w.draw("field")
        out[key] = r.choice((*_SCALARS, DECIMAL, BOOL, WORDS, Kind("year"), Kind("clock")))
    return list(out.items())


# --- composed ------------------------------------------------------------------------------------

_LEADS = [
    "",
    "",
    "",
    "",
    "Please ",
    "Can you ",
    "I need to ",
    "Now ",
    "I want to ",
    "Let us ",
    "Could you ",
    "We have to ",
    "I would like to ",
    "Time to ",
    "Help me ",
    "Try to ",
    "You should ",
    "Then ",
]
_LEADS_UNSEEN = ["", "", "Kindly ", "It is time to ", "Would you "]
_ASKING = ("Can", "Could", "Would", "Will")


def _spoken(w: Words, name: str, kind: Kind) -> tuple[Any, str]:
    """A value of a parameter and the words that give it by name."""
    r = w.rng
    plain = name.replace("_", " ")
    if kind.sort == "bool":
        on = r.random() < 0.5
        forms = (
            ("with {}", "{} on", "{} true", "{} yes")
            if on
            else ("without {}", "{} off", "{} false", "{} no")
        )
        return on, r.choice(forms).replace("{}", plain)
    if kind.sort == "object":
        made, said = {}, []
        for key, member in kind.members:
            made[key], text = value(w, member)
            said.append(f"{key.replace('_', ' ')} {text}")
        return (
            made,
            f"{plain} with {join(said)}" if r.random() < 0.5 else f"{plain} ({', '.join(said)})",
        )
    if kind.sort == "text":
        v: Any = w.string(name)
        s = f"'{v}'" if " " in v and r.random() < 0.4 else v
    else:
        v, s = value(w, kind)
    form = r.choice(
        (
            "{n} {v}",
            "{n} {v}",
            "{n}: {v}",
            "{n} = {v}",
            "{v} as {n}",
            "the {n} is {v}",
            "{n} set to {v}",
        )
    )
    if kind.sort == "list":
        form = r.choice(("{n} {v}", "{n}: {v}", "the {n} are {v}"))
    return v, form.replace("{n}", plain).replace("{v}", s)


def _any_kind(w: Words) -> Kind:
    x = w.rng.random()
    return (Kind("text") if x < 0.46 else INT if x < 0.6 else DECIMAL if x < 0.66 else BOOL if x < 0.76
            else _choices(w) if x < 0.88 else WORDS if x < 0.93 else NUMBERS if x < 0.95 else _object(w))  # fmt: skip


def composed(w: Words, verb: str = "", noun: str = "") -> Made:
    """Random verb, noun and parameters, all of them said."""
    r = w.rng
    verb, noun = _names(w, verb, noun)
    extra = f" {w.any_word()}" if r.random() < 0.25 else ""
    form = r.choice(("{}_{}", "{}_{}", "{}_{}", "{}-{}", "{}.{}", "{}"))
    name = form.format(verb, noun) if form != "{}" else verb + noun.capitalize()
    name += extra.replace(" ", "_")
    properties: Json = {}
    required: list[str] = []
    arguments: Json = {}
    phrases: list[str] = []
    for _ in range(r.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5))):
        kind = _any_kind(w)
        key = (
            w.draw("flag")
            if kind is BOOL
            else w.draw("field")
            if r.random() < 0.65
            else w.any_word()
        )
        if r.random() < 0.15 and kind is not BOOL:
            key = f"{w.any_word()}_{key}"
        if key in properties:
            key = w.pseudo()
        plain = key.replace("_", " ")
        say = r.choice(
            (
                "",
                "",
                f"The {plain}",
                f"{plain.capitalize()} of the {noun}",
                f"Which {plain}",
                f"The {plain} of the {noun} to {verb}",
            )
        )
        properties[key] = schema(kind, say, w)
        if r.random() < 0.7:
            required.append(key)
        elif r.random() < 0.5:
            continue
        arguments[key], phrase = _spoken(w, key, kind)
        phrases.append(phrase)
    order = list(range(len(phrases)))
    if r.random() < 0.5:
        r.shuffle(order)
    said = [phrases[i] for i in order]
    listed = (
        ", ".join(said[:-1]) + r.choice((" and ", ", ")) + said[-1]
        if len(said) > 1
        else "".join(said)
    )
    lead = r.choice(w.either(_LEADS, _LEADS_UNSEEN))
    article = r.choice(("the ", "a ", "", "my "))
    ask = f"{verb} {article}{noun}{extra}"
    if r.random() < 0.12:
        ask = f"use {name}" if r.random() < 0.5 else f"call {name}"
    text = lead + ask
    if listed:
        text += r.choice((" with ", ", ", ": ", " for ", ". Use ")) + listed
    text = text[0].upper() + text[1:]
    text += "?" if lead.startswith(_ASKING) else r.choice((".", ".", ""))
    description = r.choice((
        f"{verb.capitalize()} {article or 'a '}{noun}{extra}", f"{verb.capitalize()} {noun}{extra}.",
        f"Tool to {verb} {noun}{extra}.", f"{verb.capitalize()} something: {noun}{extra}",
    ))  # fmt: skip
    return Made(
        function(w, name, description, properties, required), text, arguments, _results(w, noun),
        frozenset((verb, noun)), (verb, noun),
    )  # fmt: skip


# --- implied -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """A kind of value that shows what it is: names of its parameter, how a request says it ({} is
    the value), descriptions. `{noun}` is the tool's, `{unit}` that of a number."""

    names: list[str]
    phrases: list[str]
    describes: list[str]


def _slot(names: str, phrases: str, describes: str) -> _Slot:
    return _Slot(names.split(), phrases.split("/"), describes.split("/"))


_SLOTS = {
    "path": _slot("path file filename source input document image file_path target location picture", "in {}/from {}/to {}/of {}/with {}", "Path of the file/The file/File to {verb}/Which file/Path to the {noun}"),
    "url": _slot("url address link page site", "on {}/from {}/at {}/of {}", "The address/Address of the page/Link to the {noun}"),
    "int": _slot("{unit} {unit} n_{unit} {unit}_count amount number count value quantity how_many", "for {} {unit}/by {} {unit}/to {} {unit}/of {} {unit}/with {} {unit}/within {} {unit}/after {} {unit}", "Number of {unit}/How many {unit}/Amount in {unit}/{unit}/The {unit} of the {noun}"),
    "decimal": _slot("{unit} {unit} amount value weight size level", "of {} {unit}/by {} {unit}/to {} {unit}/with {} {unit}", "In {unit}/How many {unit}/Value in {unit}/{unit}"),
    "place": _slot("city location place town where area region spot", "in {}/in {}/at {}/near {}/around {}", "The city/City or place/Where/Name of the place/Place of the {noun}/Location"),
    "from": _slot("from origin start source departure from_city start_place", "from {}", "Where it begins/City of departure/Origin/The first city"),
    "to": _slot("to destination target end arrival to_city end_place", "to {}", "Where it ends/City of arrival/Destination/The last city"),
    "name": _slot("person recipient name user author owner contact who guest customer writer receiver", "for {}/to {}/with {}/by {}/of {}", "Name of the person/The person/Who gets the {noun}/Who/Full name/Owner of the {noun}"),
    "date": _slot("date day on when start due deadline start_date", "on {}/for {}/on {}/from {}/until {}", "The date/Day of the {noun}/When/On which day"),
    "clock": _slot("time at start hour clock begin start_time", "at {}/at {}/starting at {}/before {}/from {}", "Time of day/The time/When it starts/Hour of the {noun}"),
    "email": _slot("email address mail recipient to send_to account", "to {}/for {}/with {}", "Email address/Address of the person/Where to send it"),
    "phrase": _slot("title name text subject label message query topic content body note comment", "called {q}/titled {q}/saying {q}/with the text {q}/about {}/that says {q}/: {}/named {q}", "The text/Title of the {noun}/Any text/Name of the {noun}/Words of the {noun}/What it says"),
    "code": _slot("id number code ref key serial {noun}_id {noun}_number device", "number {}/with the code {}/with id {}/of {}/for {}/{}", "Number of the {noun}/Id/Code of the {noun}/The device"),
    "names": _slot("people guests names members attendees persons team friends", "with {}/for {}/to {}", "The people/List of names/Who comes/Names"),
    "enum": _slot("mode type kind category size level state status style format action option", "as {}/in {} mode/set to {}/in {}", "/One of the values/Kind of {noun}/Which one"),
    "bool": _slot("{flag} {flag} {flag} is_{flag} {flag}_mode", "{flag}/and {flag}/as {flag}/, {flag}", "Whether it is {flag}/{flag} or not/True if {flag}/"),
    "word": _slot("name item product label key tag room table thing word object zone symbol", "called {}/of {}/for {}/with {}/in the {}/on {}", "Name of the {noun}/The thing/Which {noun}/Any word"),
}  # fmt: skip
# Kinds that a reader could take for each other; the second gives way.
_ALIKE = [("place", "from"), ("place", "to"), ("name", "names"), ("word", "phrase"), ("path", "url"),
          ("int", "decimal"), ("code", "word"), ("to", "name"), ("to", "names")]  # fmt: skip
_UNITS = """days minutes hours degrees percent kilos people guests pages rows seconds nights meters
liters miles seats points euros dollars weeks steps pieces times grams pixels copies""".split()
_COMMANDS = ["{V} {o}{m}.", "{V} {o}{m}.", "{V} {o}{m}.", "{V} {o}{m}", "Please {v} {o}{m}.",
             "Can you {v} {o}{m}?", "I need to {v} {o}{m}.", "I want to {v} {o}{m}.",
             "Could you {v} {o}{m}?", "{V} {o}{m}, please.", "We have to {v} {o}{m}.",
             "You should {v} {o}{m}.", "Help me {v} {o}{m}.", "Go and {v} {o}{m}.",
             "{V} {o} now{m}.", "How do I {v} {o}{m}?", "Try to {v} {o}{m}."]  # fmt: skip
_QUESTIONS = ["When does the {n} {v}{m}?", "Does the {n} {v}{m}?", "Where does the {n} {v}{m}?",
              "Why does the {n} {v}{m}?", "How much does the {n} {v}{m}?",
              "What does the {n} {v}{m}?", "Will the {n} {v}{m}?", "Which {n} do I {v}{m}?",
              "Should we {v} the {n}{m}?", "Who can {v} the {n}{m}?"]  # fmt: skip
_NOUN_ONLY = ["What is the {n}{m}?", "How {a} is the {n}{m}?", "Is there a {n}{m}?", "Where is the {n}{m}?",
              "I need a {n}{m}.", "I need a {a} {n}{m}.", "Give me the {n}{m}.", "Show me the {n}{m}.",
              "Tell me the {n}{m}.", "{N}{m}?", "{N}{m}, please.", "Do we have a {n}{m}?",
              "What {n} is there{m}?", "I am looking for a {n}{m}.", "Is the {n} {a}{m}?",
              "What about the {n}{m}?", "I want the {n}{m}.", "How is the {n}{m}?",
              "How many {n} are there{m}?", "Any {n}{m}?", "Who has the {n}{m}?"]  # fmt: skip
_ADJECTIVES = """high low warm cold big small long fast far old new cheap good deep strong late early
free heavy bright full dry wet quick""".split()


def implied(w: Words, verb: str = "", noun: str = "") -> Made:
    """A tool whose request is an ordinary sentence that names no parameter."""
    r = w.rng
    given = bool(verb or noun)
    verb, noun = _names(w, verb, noun)
    kinds = r.sample(list(_SLOTS), r.choice([1, 1, 1, 2, 2, 2, 3, 3, 4]))
    for one, other in _ALIKE:
        if one in kinds and other in kinds:
            kinds.remove(other)
    properties: Json = {}
    required: list[str] = []
    arguments: Json = {}
    mods: list[str] = []
    objects: list[str] = []
    for sort in kinds:
        unit = r.choice(_UNITS) if r.random() < 0.6 else f"{w.any_word()}s"
        flag = w.draw("flag").replace("_", " ")
        words = {"unit": unit, "noun": noun, "verb": verb, "flag": flag}
        slot = _SLOTS[sort]
        kind = (_choices(w) if sort == "enum" else NAMES if sort == "names"
                else Kind({"from": "place", "to": "place"}.get(sort, sort)))  # fmt: skip
        name = r.choice(slot.names).format(**words).replace(" ", "_")
        say = r.choice([*slot.describes, ""]).format(**words)
        if r.random() < 0.25:  # only the description says what it is
            name = w.any_word()
            said = [d for d in slot.describes if d] or ["One of " + ", ".join(kind.choices)]
            say = r.choice(said).format(**words)
        if name in properties:
            name = w.any_word()
        properties[name] = schema(kind, say[:1].upper() + say[1:], w)
        optional = r.random() < 0.3
        if not optional:
            required.append(name)
        elif len(kinds) > 1 and r.random() < 0.4:
            continue
        phrase = r.choice(slot.phrases)
        if sort == "bool":
            arguments[name] = True
            if r.random() < 0.25:
                arguments[name], phrase = False, "not {flag}"
            shown = ""
        else:
            arguments[name], shown = value(w, kind)
        quoted = shown if shown[:1] in ("'", '"') else f"'{shown}'"
        text = phrase.replace("{q}", r.choice(["{}", quoted, quoted.replace("'", '"')]))
        if sort in ("path", "word", "code", "url", "phrase") and not objects and r.random() < 0.35:
            objects.append(_fill(r.choice(["{}", "the {noun} {}", "{noun} {}"]), shown, words))
        elif sort == "enum" and r.random() < 0.3 and not objects:
            objects.append(_fill("the {} {noun}", shown, words))
        else:
            mods.append(_fill(text, shown, words))
    r.shuffle(mods)
    # A free text without quotes ends the sentence, else nobody knew where it ends.
    mods.sort(key=lambda m: m.startswith((":", "about")))
    m = "".join(t if t.startswith((":", ",")) else f" {t}" for t in mods)
    names_noun = not objects or noun in objects[0]
    o = objects[0] if objects else f"{r.choice(['the', 'a', 'my', 'this', 'our'])} {noun}"
    x = r.random()
    questions = not objects and not given
    forms = (
        _NOUN_ONLY if x < 0.3 and questions else _QUESTIONS if x < 0.45 and questions else _COMMANDS
    )
    text = r.choice(forms).format(
        v=verb, V=_upper(verb), n=noun, N=_upper(noun), o=o, m=m, a=r.choice(_ADJECTIVES)
    )
    # At least one word of the request stands in the schema; often the name alone does not have it.
    shared = noun if forms is _NOUN_ONLY else verb if not names_noun else r.choice([verb, noun])
    other = w.any_word()
    name = r.choice(["{v}_{n}", "{v}_{n}", "{n}_{v}", "{s}", "{s}_{x}", "{x}_{s}", "get_{s}", "{x}",
                     "{v}-{n}", "{v}{N}", "{s}_tool", "do_{s}"])  # fmt: skip
    if given:
        name = r.choice(["{v}_{n}", "{n}_{v}", "{v}-{n}", "{v}{N}"])
    name = name.format(v=verb, n=noun, N=_upper(noun), s=shared, x=other)
    about = r.choice(["in a city", "of a place", "for somebody", "by its name", "", "", ""])
    description = r.choice([
        "{V} a {n} {x}", "{V} the {n} {x}", "{V} {n} {x}", "When the {n} {v}s {x}", "{N} {v} {x}",
        "{V}s the {n} {x}", "Tool to {v} the {n} {x}", "{V} something, the {n} {x}",
    ]).format(v=verb, V=_upper(verb), n=noun, N=_upper(noun), x=about).strip()  # fmt: skip
    made = function(w, name, description, properties, required)
    if shared not in name:
        made = {"name": name, "description": description, "parameters": made["parameters"]}
    return Made(
        made, _upper(text), arguments, _results(w, noun), frozenset((verb, noun)), (verb, noun)
    )


def _upper(word: str) -> str:
    return word[0].upper() + word[1:]


def _fill(pattern: str, said: str, words: dict[str, str]) -> str:
    """`pattern` with its names and, last, the value: a value's braces stay text."""
    for key, word in words.items():
        pattern = pattern.replace("{" + key + "}", word)
    return pattern.replace("{}", said)
