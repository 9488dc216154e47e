"""Facts in a text: finding, quoting, checking and missing them, in a short text or a long one.

Owns the kinds of facts (facts.txt says how they are written), the texts that hold them and the rule
that a question has one right answer: the facts of a `Story` never answer the same question. Knows
no other task; the tokenizer only as the measure of how long a long text is.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ops.tiny.dialogue import dialogue
from ops.tiny.tasks.alternatives import expanded
from ops.tiny.tasks.phrasing import TABLES
from ops.tiny.words import POOLS, Words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from ops.tiny.dialogue import Dialogue, Step
    from ops.tiny.encode import Encoder

UNSAID = "The text does not say that."
SHORTEST = 128  # tokens: a needle needs some hay
_MARK = "\x00."  # stands for the text while all around it is measured

# --- what values are made of ---------------------------------------------------------------------

_SHOPS = """bakery library museum pharmacy bank gym school theater market garage clinic station hall
pool zoo cafe bar workshop lab office church hotel kitchen cellar harbor airport castle tower garden
stadium studio warehouse factory bookshop court""".split()
_SUBJECTS = """math history physics biology music law art chemistry geography medicine economics
drama logic grammar design farming astronomy botany geology poetry""".split()
_ENDINGS = ("", "", "", " Ltd", " Works", " Group", " and Sons", " Bank", " Motors", " Labs")


def _given(w: Words) -> str:
    return (w.pseudo() if w.rng.random() < 0.6 else w.novel()).capitalize()


def _thing(w: Words) -> str:
    return w.draw("thing") if w.rng.random() < 0.7 else _uncommon(w)


def _uncommon(w: Words) -> str:
    """Any word that no wording of the table and no thing is called by."""
    while (word := w.any_word()).lower() in _COMMON:
        pass
    return word


def _shop(w: Words) -> str:
    shop = w.rng.choice(_SHOPS)
    return f"{shop} {_given(w)}" if w.rng.random() < 0.4 else shop


def _price(w: Words) -> str:
    return str(w.integer()) if w.rng.random() < 0.6 else f"{w.rng.uniform(0.5, 200):.2f}"


def _phone(w: Words) -> str:
    r = w.rng
    digits = str(r.randint(10**5, 10**8))
    return f"{digits[:3]}-{digits[3:]}" if r.random() < 0.5 else "0" + digits


def _version(w: Words) -> str:
    return ".".join(str(w.rng.randint(0, 20)) for _ in range(w.rng.randint(2, 3)))


def _ip(w: Words) -> str:
    return ".".join(str(w.rng.randint(1, 254)) for _ in range(4))


def _acronym(w: Words) -> str:
    return "".join(w.rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=w.rng.randint(2, 5)))


MAKERS: dict[str, Callable[[Words], str]] = {
    "name": Words.name, "place": Words.place, "thing": _thing, "word": _uncommon,
    "prop": _uncommon, "code": Words.code, "scrambled": Words.scrambled, "phrase": Words.phrase,
    "title": Words.phrase, "pseudo": Words.pseudo, "date": Words.date, "clock": Words.clock,
    "email": Words.email, "path": Words.path, "url": Words.url, "given": _given, "shop": _shop,
    "firm": lambda w: _given(w) + w.rng.choice(_ENDINGS), "price": _price, "phone": _phone,
    "version": _version, "ip": _ip, "acronym": _acronym,
    "int": lambda w: str(w.integer()), "number": lambda w: str(w.number()),
    "decimal": lambda w: str(w.decimal()), "small": lambda w: str(w.rng.randint(1, 12)),
    "percent": lambda w: str(w.rng.randint(0, 100)), "age": lambda w: str(w.rng.randint(5, 99)),
    "tall": lambda w: str(w.rng.randint(110, 215)),
    "year": lambda w: str(w.rng.randint(1900, 2031)),
    "subject": lambda w: w.rng.choice(_SUBJECTS),
    "animal": lambda w: w.draw("animal"), "food": lambda w: w.draw("food"),
    "noun": lambda w: w.draw("noun"), "field": lambda w: w.draw("field"),
    "job": lambda w: w.draw("job"), "color": lambda w: w.draw("color"),
    "language": lambda w: w.draw("language"), "day": lambda w: w.draw("day"),
}  # fmt: skip


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A value of a kind of fact. `subject`: facts of a text share it; `article`: stands behind
    "a", so it begins with no vowel."""

    name: str
    type: str
    make: Callable[[Words], str]
    subject: bool
    article: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One value of a kind that can be asked for. Texts are for `str.format` with the fact's values;
    `about`: which values the questions name."""

    slot: int
    about: tuple[int, ...]
    seen: list[str]
    unseen: list[str]
    answer: str
    checks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    name: str
    families: tuple[str, ...]
    slots: tuple[Slot, ...]
    statements: list[str]
    orders: list[list[int]]  # of each statement: its slots from left to right
    label: str
    asks: list[Ask]

    @property
    def one_value(self) -> bool:
        return "u" not in [s.name for s in self.slots]


_LINE = re.compile(r"(\w*)([-?!=~:]) (.+)")
_SLOT = re.compile(r"\{(\w+)(?::([^}]+))?\}")


def parse(text: str) -> list[Kind]:
    """The kinds of facts of a table. Raises ValueError naming the kind that breaks a rule."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    stanzas = [s.strip() for s in "\n".join(lines).split("\n\n")]
    kinds = [_kind(s.split("\n")) for s in stanzas if s]
    names = [k.name for k in kinds]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name}: two kinds of facts have this name")
    return kinds


def _kind(lines: list[str]) -> Kind:
    head = re.fullmatch(r"(\w+)(?: \[([\w, ]+)\])?", lines[0])
    if head is None:
        raise ValueError(f"{lines[0]}: a kind begins with its name, then [its families] or nothing")
    name = head[1]
    parts: dict[tuple[str, str], list[str]] = {}
    for line in lines[1:]:
        found = _LINE.fullmatch(line.strip())
        if found is None:
            raise ValueError(f"{name}: {line.strip()!r} begins with none of - ? ! = ~ :")
        slot, sign, said = found.groups()
        slot = slot or ("" if sign in "-:" else "v")
        parts.setdefault((slot, sign), []).extend([said] if sign in "-=:" else said.split(" / "))
    if not parts.get(("", "-")) or not parts.get(("", ":")):
        raise ValueError(f"{name}: it needs statements (-) and what they are about (:)")
    slots = _slots(name, parts)
    index = {s.name: i for i, s in enumerate(slots)}

    def place(found: re.Match[str]) -> int:
        if found[1] not in index:
            raise ValueError(f"{name}: no statement holds {{{found[1]}}}")
        return index[found[1]]

    def used(text: str) -> list[int]:
        return [place(m) for m in _SLOT.finditer(text)]

    def compiled(texts: Iterable[str]) -> list[str]:
        return [_SLOT.sub(lambda m: f"{{{place(m)}}}", t) for t in texts]

    for text in parts["", "-"]:
        if sorted(used(text)) != list(range(len(slots))):
            raise ValueError(f"{name}: a statement must hold every value once: {text}")
    asks = []
    for slot in [s.name for s in slots if (s.name, "?") in parts]:
        seen, unseen = parts[slot, "?"], parts.get((slot, "!"), [])
        if not unseen or set(seen) & set(unseen):
            raise ValueError(f"{name}: {slot} needs questions for evaluation only (!)")
        answer = (parts.get((slot, "=")) or parts.get(("v", "=")) or [""])[0]
        checks = parts.get((slot, "~"), [])
        about = sorted(set(used(seen[0])))
        if any(sorted(set(used(t))) != about for t in seen + unseen) or index[slot] in about:
            raise ValueError(f"{name}: all questions for {slot} must name the same other values")
        if not {index[slot], *about} >= set(used(answer)) or index[slot] not in used(answer):
            raise ValueError(f"{name}: the answer for {slot} holds it and what its questions name")
        if any(set(used(t)) != {index[slot], *about} for t in checks):
            raise ValueError(f"{name}: yes or no holds {slot} and what its questions name")
        asks.append(
            Ask(
                slot=index[slot], about=tuple(about), seen=compiled(seen),
                unseen=compiled(unseen), answer=compiled([answer])[0], checks=compiled(checks),
            )
        )  # fmt: skip
    if not asks:
        raise ValueError(f"{name}: it has no question")
    asks.sort(key=lambda a: slots[a.slot].name != "v")
    return Kind(
        name=name, slots=slots, statements=compiled(parts["", "-"]), asks=asks,
        families=tuple(f.strip() for f in (head[2] or name).split(",")),
        orders=[used(text) for text in parts["", "-"]], label=compiled(parts["", ":"])[0],
    )  # fmt: skip


def _slots(name: str, parts: dict[tuple[str, str], list[str]]) -> tuple[Slot, ...]:
    """The values that the statements of a kind hold, in the order of the first one."""
    types: dict[str, str] = {}
    for m in _SLOT.finditer(" ".join(parts["", "-"])):
        known = types.setdefault(m[1], m[2] or m[1])
        if m[2] and m[2] != known:
            raise ValueError(f"{name}: {m[1]} is both {known} and {m[2]}")
    articles = {
        m[1]
        for texts in parts.values()
        for text in texts
        for m in re.finditer(r"\b[aA] \{(\w+)", text)
    }
    return tuple(
        Slot(name=s, type=t, make=_maker(name, t, s in articles), subject=s not in "vu",
             article=s in articles)
        for s, t in types.items()
    )  # fmt: skip


def _maker(name: str, type_: str, article: bool) -> Callable[[Words], str]:
    if "|" in type_:
        options = type_.split("|")
        return lambda w: w.rng.choice(options)
    if type_ not in MAKERS:
        raise ValueError(f"{name}: no values are of the kind {type_}")
    make = MAKERS[type_]

    def consonant(w: Words) -> str:
        while (word := make(w))[0] in "aeiouAEIOU":
            pass
        return word

    return consonant if article else make


_TABLE = (Path(__file__).parent / "facts.txt").read_text("utf-8")
KINDS = parse(_TABLE)
# Words that ask nothing; a driver or a cake is asked for, though other questions speak of them too.
_LITERAL = set(re.findall(r"[A-Za-z]+", _SLOT.sub("", _TABLE))) - {
    word for pool in ("thing", "animal", "food", "job") for word in POOLS[pool].split()
}
# What an invented property or subject is never called: the words of the table and of the pools.
_COMMON = {word.lower() for word in re.findall(r"[A-Za-z]+", _TABLE)} | {
    word for pool in ("thing", "noun", "animal") for word in POOLS[pool].split()
}
_FAMILIES = [f for k in KINDS for f in k.families]
_SHARED = {f for f in _FAMILIES if _FAMILIES.count(f) > 1}


# --- facts of one text ---------------------------------------------------------------------------


class Fact:
    """A kind with values; `said` is the sentence as it stands in the text, `order` its values from
    left to right."""

    __slots__ = ("kind", "order", "said", "values")

    def __init__(self, r: random.Random, kind: Kind, values: list[str]) -> None:
        i = int(r.random() * len(kind.statements))
        self.kind, self.values = kind, values
        self.said, self.order = kind.statements[i].format(*values), kind.orders[i]

    def label(self) -> str:
        return self.kind.label.format(*self.values)


def _first(value: str) -> str:
    return value.partition(" ")[0]


class Story:
    """Facts of which no two answer the same question. "Ana" and "Ana Moko" count as one name, for
    a question about Ana would be a question about either."""

    def __init__(self, w: Words) -> None:
        self.w = w
        self.facts: list[Fact] = []
        self.cast: dict[str, list[str]] = {}  # values by type
        self._asked: set[tuple[str, ...]] = set()
        self._kinds: dict[tuple[str, str], str] = {}

    def draw(self, kinds: list[Kind], share: float) -> Fact | None:
        """A fact that fits in, not yet in the text; of its subjects, `share` are of other facts.
        None: none was found, as the closed pools hold only so many values."""
        r = self.w.rng
        for _ in range(12):
            kind = kinds[int(r.random() * len(kinds))]
            values = [self._value(slot, share) for slot in kind.slots]
            if len(values) == len(set(values)) and self._fits(kind, values):
                return Fact(r, kind, values)
        return None

    def add(self, fact: Fact) -> None:
        self.facts.append(fact)
        kind, firsts = fact.kind, [_first(v) for v in fact.values]
        for family in kind.families:
            for ask in kind.asks:
                self._asked.add((family, *[firsts[i] for i in ask.about]))
            if family in _SHARED:
                for first in firsts:
                    self._kinds[family, first] = kind.name
        for slot, value in zip(kind.slots, fact.values, strict=True):
            self.cast.setdefault(slot.type, []).append(value)

    def fill(self, n: int, kinds: list[Kind], share: float) -> None:
        """Up to `n` more facts, fewer where the closed pools are used up."""
        for _ in range(n):
            fact = self.draw(kinds, share)
            if fact is not None:
                self.add(fact)

    def _value(self, slot: Slot, share: float) -> str:
        if slot.subject and self.cast and self.w.rng.random() < share:
            known = self.cast.get(slot.type)
            if known:
                value = known[int(self.w.rng.random() * len(known))]
                if not (slot.article and value[0] in "aeiouAEIOU"):
                    return value
        return slot.make(self.w)

    def _fits(self, kind: Kind, values: list[str]) -> bool:
        firsts = [_first(v) for v in values]
        for family in kind.families:
            for ask in kind.asks:
                if (family, *[firsts[i] for i in ask.about]) in self._asked:
                    return False
            if family in _SHARED and any(
                self._kinds.get((family, f), kind.name) != kind.name for f in firsts
            ):
                return False
        return True


# --- how it is asked -----------------------------------------------------------------------------

MARKED = 0.04  # share of questions behind a word that means nothing
ASKED = TABLES["facts"]


def _forms(name: str) -> tuple[list[str], list[str]]:
    """Wordings of a form of phrasings/facts.txt, of training and held out."""
    seen, unseen = ([p.replace("{x}", "{}") for of in kept for p in of] for kept in ASKED[name])
    return seen, unseen


BEFORE, BEFORE_UNSEEN = ([f"{p} " for p in kept] for kept in _forms("before"))
BARE, BARE_UNSEEN = _forms("bare")
ONE_WORD, ONE_WORD_UNSEEN = _forms("one word")
QUOTE, QUOTE_UNSEEN = _forms("quote")
TRUE, TRUE_UNSEEN = _forms("true")
ABOUT, ABOUT_UNSEEN = _forms("about")
LIST, LIST_UNSEEN = _forms("list")
INTROS, INTROS_UNSEEN = _forms("intro")
EXTRACT = [  # with the sentence, which may be a line of its own
    form
    for pattern in (
        "{Extract|Find|Fetch|Copy|Isolate|Note|Get|Grab|Read} the {}{| in this| here}: {}",
        "{Pull|Take|Cut|Copy|Read|Filter|Get} the {} {out|out of this|from this line|here}: {}",
        "{Which|What} {} {is in this sentence|does this hold|is named here|do you see here}? {}",
        "{Tell me|Show me|Give me|I need|I want|Say|Write down} {the|only the|just the} {}: {}",
        "{The|Only the|Just the} {} {of this|in this|from this sentence}{|, please}: {}",
        "What is the {} {here|in this|in this line|of this sentence}? {}",
        "{Say|Tell me} which {} {this holds|is in this|this is about}: {}",
        "{Look for|Search for|Pay attention to|All I need is|I care for} the {}: {}",
        "{1}\n{Extract|Give me|Write down|Copy|Fetch|Name|Find|Show} the {0}.",
        "{1}\n{The|Only the|Just the} {0}{|, please}.",
        "{1}\n{Which|What} {0} {is it|is that|is named|do you find}?",
        "{1} {Give me only|I only need|Tell me just|Now say} the {0}.",
        "{}: {}", "{1} -> {0}?", "{1} ({0}?)", "{0} in \"{1}\"",
    )
    for form in expanded(pattern)
]  # fmt: skip
EXTRACT_UNSEEN = ["Pick the {} from: {}", "{1}\nWhat is the {0} in there? Only that."]
# Types of which a text can be asked for all: what they are called, and what looks like them.
_NUMBERS = "int number decimal small percent age tall year price phone version ip code scrambled"
LISTED = {
    "name": (("name", "names of people"), "given firm"),
    "place": (("city", "cities"), "given firm"),
    "date": (("date", "dates"), "year"), "clock": (("time", "times"), "date"),
    "email": (("email", "emails"), "url"), "url": (("link", "links"), "email path"),
    "path": (("path", "paths"), "url"), "color": (("color", "colors"), ""),
    "day": (("day", "days"), "date"), "job": (("job", "jobs"), ""),
    "animal": (("animal", "animals"), "given"), "food": (("food", "foods"), ""),
    "language": (("language", "languages"), ""), "code": (("code", "codes"), _NUMBERS),
    "price": (("price", "prices"), _NUMBERS), "ip": (("address", "addresses"), _NUMBERS),
    "phone": (("phone number", "phone numbers"), _NUMBERS),
    "version": (("version", "versions"), _NUMBERS),
    "year": (("year", "years"), _NUMBERS + " date"),
    "firm": (("firm", "firms"), "name given place"),
    "percent": (("percent value", "percent values"), _NUMBERS),
}  # fmt: skip


def _with(type_: str) -> tuple[list[Kind], list[Kind]]:
    """Kinds with values of a type and nothing that looks like one, and kinds with neither."""
    like = set(LISTED[type_][1].split()) - {type_}
    clear = [k for k in KINDS if not like & {s.type for s in k.slots}]
    have = [k for k in clear if any(s.type == type_ for s in k.slots)]
    return have, [k for k in clear if k not in have]


_LISTABLE = {t: _with(t) for t in LISTED}
_SINGLE = {  # kinds with one value of the type, and which
    t: [(k, [s.type for s in k.slots].index(t)) for k in have
        if sum(s.type == t for s in k.slots) == 1]
    for t, (have, _) in _LISTABLE.items()
}  # fmt: skip
_TYPES = [t for t in LISTED if _SINGLE[t]]


def _question(w: Words, ask: Ask, values: list[str], last: bool = True) -> str:
    """A question, now and then in small letters, behind some words, or, if nothing follows it,
    without its mark."""
    r = w.rng
    form = r.choice(ask.unseen if w.unseen else ask.seen)
    text = form.format(*values)
    x = r.random()
    if x > 1 - MARKED and not w.unseen:
        return f"{w.marker()}{r.choice((', ', ': ', '. '))}{text}"
    if x < 0.74:
        return text
    if x < 0.8:
        return text[:-1] if last else text
    if form[0] != "{":
        text = text[0].lower() + text[1:]
    return text if x < 0.86 else r.choice(w.either(BEFORE, BEFORE_UNSEEN)) + text


def _clause(form: str, values: list[str]) -> str:
    """An answer as part of a sentence: no capital that is not a name's, no full stop."""
    text = form.format(*values)[:-1]
    return text if form[0] == "{" else text[0].lower() + text[1:]


def _pick(r: random.Random, kind: Kind) -> Ask:
    asks = kind.asks
    return asks[0] if len(asks) == 1 or r.random() < 0.5 else r.choice(asks)


def _plain(w: Words, fact: Fact, bare: float) -> Step:
    """A question; `bare` is the share of those that ask for the value alone."""
    r = w.rng
    ask = _pick(r, fact.kind)
    whole = r.random() >= bare
    text, value = _question(w, ask, fact.values, whole), fact.values[ask.slot]
    reasoning = "The text says: " + fact.said
    if whole:
        return text, ask.answer.format(*fact.values), reasoning
    forms = w.either(BARE, BARE_UNSEEN)
    if " " not in value and r.random() < 0.4:
        forms = w.either(ONE_WORD, ONE_WORD_UNSEEN)
    return f"{text} {r.choice(forms)}", value, reasoning


def _quote(w: Words, fact: Fact) -> Step:
    text = _question(w, _pick(w.rng, fact.kind), fact.values, False)
    form = w.rng.choice(w.either(QUOTE, QUOTE_UNSEEN))
    return f"{text} {form}", fact.said, "The text says: " + fact.said


def _about(w: Words, fact: Fact) -> Step:
    form = w.rng.choice(w.either(ABOUT, ABOUT_UNSEEN))
    return form.format(fact.label()), fact.said, "The text says: " + fact.said


def _check(w: Words, story: Story, fact: Fact) -> Step:
    """Yes or no; a wrong value is often one of another fact of the text."""
    r, kind = w.rng, fact.kind
    ask = r.choice([a for a in kind.asks if not kind.slots[a.slot].subject])
    slot, values = kind.slots[ask.slot], fact.values
    right, reasoning = values[ask.slot], "The text says: " + fact.said
    asked = right
    if r.random() < 0.5:
        others = story.cast[slot.type]
        asked = r.choice(others) if r.random() < 0.6 else slot.make(w)
        while asked.lower() == right.lower() or (slot.article and asked[0] in "aeiouAEIOU"):
            asked = slot.make(w)
    claim = [*values]
    claim[ask.slot] = asked
    if ask.checks and not w.unseen and r.random() < 0.6:
        text = r.choice(ask.checks).format(*claim)
    else:
        text = r.choice(w.either(TRUE, TRUE_UNSEEN)).format(_clause(ask.answer, claim))
    if asked == right:
        return text, "Yes.", reasoning
    return text, f"No, {_clause(ask.answer, values)}.", reasoning


def _extract(w: Words) -> Step:
    """One value out of a sentence that the question holds."""
    r = w.rng
    type_ = r.choice(_TYPES)
    kind, slot = r.choice(_SINGLE[type_])
    fact = Fact(r, kind, [s.make(w) for s in kind.slots])
    form = r.choice(w.either(EXTRACT, EXTRACT_UNSEEN))
    text = form.format(LISTED[type_][0][0], fact.said)
    return text, fact.values[slot], "The text says: " + fact.said


def _missing(w: Words, story: Story) -> tuple[Step, Fact] | None:
    """A question that no fact of the text answers, mostly a near miss, and what it is about."""
    r = w.rng
    x = r.random()
    if x < 0.4:  # another subject
        fact = story.draw([r.choice(story.facts).kind], 0.0)
    else:  # another kind, of a known subject if there is one
        fact = story.draw(KINDS, 1.0 if x < 0.8 else 0.0)
    if fact is None:
        return None
    text = _question(w, _pick(r, fact.kind), fact.values)
    return (text, UNSAID, "The text does not say it."), fact


def fact(w: Words) -> tuple[str, list[str], str, str]:
    """A statement, questions about it, the answer as a sentence, and the bare value."""
    one = _sole(w)
    ask = _pick(w.rng, one.kind)
    questions = [q.format(*one.values) for q in (ask.unseen if w.unseen else ask.seen)]
    return one.said, questions, ask.answer.format(*one.values), one.values[ask.slot]


def _sole(w: Words) -> Fact:
    while (one := Story(w).draw(KINDS, 0.0)) is None:
        pass
    return one


# --- short texts ---------------------------------------------------------------------------------

ASIDES = ["That is all for today.", "Please read this with care.", "Here is the news.",
          "I hope you are well.", "Thank you for your help.", "It was a long day.",
          "More will follow soon.", "Please keep this in mind.", "Some of it is old.",
          "I wrote this in a hurry.", "Nothing else has changed.", "See below.",
          "As you may know, much has changed.", "We talked about it for an hour.",
          "Let us go on.", "So much for that.", "This is not a secret.", "Ask if in doubt.",
          "I was asked to write this down.", "The rest can wait."]  # fmt: skip
LAYOUTS = ("text", "paragraphs", "dashes", "stars", "numbers", "brackets", "lines", "pairs",
           "email", "note", "chat")  # fmt: skip
_LAYOUT_WEIGHTS = (34, 6, 10, 4, 8, 3, 9, 9, 6, 4, 7)
_PLAIN_LAYOUTS = LAYOUTS[:7]
_HELLOS = ("Hi", "Hello", "Dear", "Good morning,", "Hey")
_ENDS = ("Best regards,", "Best,", "Yours,", "Thanks,", "See you,", "Kind regards,", "Regards,")


def _words_of(facts: Iterable[Fact]) -> set[str]:
    return {word for f in facts for value in f.values for word in value.split()}


def _aside(w: Words, taken: set[str]) -> str:
    """A sentence that says nothing about anybody in `taken`."""
    r = w.rng
    for _ in range(3):
        said = w.sentence()
        if taken.isdisjoint(said[:-1].split()):
            return said
    return r.choice(ASIDES)


def _stranger(w: Words, taken: set[str]) -> str:
    """The first name of somebody who is not in `taken`."""
    while (name := w.draw("person").split(".")[-1]) in taken:
        pass
    return name


def _layout(w: Words, form: str, lines: list[str], taken: set[str]) -> str:
    r = w.rng
    if form == "text":
        return " ".join(lines)
    if form == "paragraphs":
        at = r.randint(1, len(lines))
        return (" ".join(lines[:at]) + "\n\n" + " ".join(lines[at:])).strip()
    if form in ("lines", "pairs"):
        return "\n".join(lines)
    if form in ("dashes", "stars"):
        sign = "- " if form == "dashes" else "* "
        return sign + ("\n" + sign).join(lines)
    if form in ("numbers", "brackets"):
        mark = "." if form == "numbers" else ")"
        return "\n".join([f"{i}{mark} {line}" for i, line in enumerate(lines, 1)])
    if form == "chat":
        people = [_stranger(w, taken) for _ in range(r.randint(2, 3))]
        if r.random() < 0.3:
            people = [f"[{r.randint(0, 23):02d}:{r.randint(0, 59):02d}] {p}" for p in people]
        return "\n".join([f"{r.choice(people)}: {line}" for line in lines])
    writer, reader = _stranger(w, taken), _stranger(w, taken)
    if form == "note":
        return f"Note for {reader}: {' '.join(lines)} {r.choice(['-- ', '- ', ''])}{writer}"
    body, gap = " ".join(lines), r.choice(["\n\n", "\n"])
    letter = f"{r.choice(_HELLOS)} {reader},{gap}{body}{gap}{r.choice(_ENDS)}\n{writer}"
    return letter if r.random() < 0.7 else f"From: {writer}\nTo: {reader}\n\n{letter}"


def _pair_up(r: random.Random, facts: list[Fact]) -> None:
    """Facts with one value said as in a table: what it is about, then the value."""
    sign = r.choice([": ", ": ", " = ", " - ", " -> "])
    for f in facts:
        if f.kind.one_value:
            slot = [s.name for s in f.kind.slots].index("v")
            f.said = f"{f.label()}{sign}{f.values[slot]}"


def _headed(w: Words, text: str) -> str:
    r = w.rng
    if r.random() < 0.65:
        return text
    return r.choice(w.either(INTROS, INTROS_UNSEEN)) + r.choice(["\n", "\n", " ", "\n\n"]) + text


def reading(w: Words) -> tuple[str, list[Step]]:
    """A text of 1 to 12 facts and 1 to 4 questions about it; the text, which may be empty, is to go
    before the first question."""
    r = w.rng
    x = r.random()
    if x < 0.06:
        return "", [_extract(w) for _ in range(r.choice((1, 1, 2, 3)))]
    if x < 0.13:
        return _listing(w)
    story = Story(w)
    n = r.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12))
    y = r.random()
    if y < 0.35:  # the same about others
        kind = r.choice(KINDS)
        story.fill(max(1, n * 2 // 3), [kind], 0.1)
        story.fill(n - len(story.facts), KINDS, 0.3)
    else:
        story.fill(n, KINDS, 0.15 if y < 0.65 else 0.7)
    facts = story.facts
    r.shuffle(facts)
    form = r.choices(LAYOUTS, _LAYOUT_WEIGHTS)[0]
    if form == "pairs":
        _pair_up(r, facts)
    elif form not in ("text", "paragraphs", "email", "note") and r.random() < 0.25:
        for f in facts:
            f.said = f.said.removesuffix(".")
    steps: list[Step] = []
    taken = _words_of(facts)
    n_steps = r.choice((1, 1, 1, 2, 2, 3, 4))
    asked = r.sample(facts, min(n_steps, len(facts)))
    for f in asked + r.choices(facts, k=n_steps - len(asked)):
        z = r.random()
        if z < 0.1 and (found := _missing(w, story)) is not None:
            step, about = found
            taken |= _words_of([about])
        elif z < 0.22:
            step = _check(w, story, f)
        elif z < 0.3:
            step = _quote(w, f)
        elif z < 0.34:
            step = _about(w, f)
        elif z < 0.36:
            step = _extract(w)
        else:
            step = _plain(w, f, 0.28)
        if step[0] not in [s[0] for s in steps]:
            steps.append(step)
    lines = [f.said for f in facts]
    for _ in range(r.choice((0, 0, 0, 1, 1, 2, 3))):
        said = _aside(w, taken) if r.random() < 0.8 else r.choice(ASIDES)
        lines.insert(r.randint(0, len(lines)), said)
    return _headed(w, _layout(w, form, lines, taken)), steps


def _listing(w: Words) -> tuple[str, list[Step]]:
    """All values of one type, in the order of the text, in which nothing else looks like them."""
    r = w.rng
    type_ = r.choice(list(LISTED))
    have, lack = _LISTABLE[type_]
    story = Story(w)
    kinds = [r.choice(have)] if r.random() < 0.4 else have
    story.fill(r.choice((1, 2, 3, 3, 4, 5, 6)), kinds, 0.1)
    story.fill(r.choice((0, 0, 1, 2, 3)), lack, 0.1)
    facts = story.facts
    r.shuffle(facts)
    found = dict.fromkeys(
        f.values[i] for f in facts for i in f.order if f.kind.slots[i].type == type_
    )
    lines = [f.said for f in facts]
    if r.random() < 0.3:
        lines.insert(r.randint(0, len(lines)), r.choice(ASIDES))
    text = _layout(w, r.choice(_PLAIN_LAYOUTS), lines, set())
    one, many = LISTED[type_][0]
    ask = r.choice(w.either(LIST, LIST_UNSEEN)).format(many)
    answer = ", ".join(found)
    steps = [(ask, answer, f"I look for each {one}.")]
    if r.random() < 0.3:
        steps.append(_plain(w, r.choice(facts), 0.3))
    return _headed(w, text), steps


def extraction(w: Words) -> Dialogue:
    """Questions about a short text, which stands before the first one or in the system prompt."""
    text, steps = reading(w)
    return _asking(w, "extract", steps, text, 0.25)


def _asking(w: Words, kind: str, steps: list[Step], text: str, in_system: float) -> Dialogue:
    """A dialogue about a text, which is in the system prompt with the share `in_system`. What else
    the system prompt says is left out if it is about something that is asked for."""
    d = dialogue(w, kind, steps, text, w.rng.random() < in_system)
    said = d.system.removesuffix(text) if text else d.system
    if said.count(".") > 1:
        asked = {word.strip('?.,:;"').removesuffix("'s") for s in steps for word in s[0].split()}
        if not (asked - _LITERAL).isdisjoint(said.replace(".", "").split()):
            d.system = d.system[len(said) :]
    return d


# --- long texts ----------------------------------------------------------------------------------

_SHORT = ("So it goes.", "Well.", "And so on.", "That is that.", "All is well.", "Go on.", "So.")
_TITLES = ("Mr", "Mrs", "Dr")  # their full stop ends no sentence
_LEVELS = ("INFO", "INFO", "INFO", "DEBUG", "WARN", "ERROR")
_STYLES = ("prose", "mixed", "sentences", "facts", "log", "numbers")
_lengths: dict[str, int] = {}  # tokens of passages, which come again


@cache
def _encoder() -> Encoder:
    from ops.tiny.encode import Encoder  # not above: it imports what mixes the tasks

    return Encoder()


def _count(text: str) -> int:
    """Tokens of a piece of text and the end of its line."""
    return len(_encoder().tokenizer.encode(text + "\n", add_special_tokens=False))


class Hay:
    """Pieces of a long text that say nothing about the facts to be found in it."""

    def __init__(self, w: Words, filler: list[str], story: Story, style: str) -> None:
        self.w, self.filler, self.story, self.style = w, filler, story, style
        self.taken = _words_of(story.facts)
        self.subjects = [
            v for f in story.facts for s, v in zip(f.kind.slots, f.values, strict=True)
            if s.subject and len(v) > 2
        ]  # fmt: skip

    def piece(self, room: int) -> tuple[str, int]:
        """A piece and its tokens, cut so as not to go far beyond `room`."""
        r = self.w.rng
        prose = self.style == "prose" or (self.style == "mixed" and r.random() < 0.5)
        if prose and self.filler and room > 40:
            passage = self.filler[int(r.random() * len(self.filler))]
            if not any(subject in passage for subject in self.subjects):
                return self._passage(passage, room)
        if self.style == "facts" or (self.style != "sentences" and r.random() < 0.5):
            other = self.story.draw(KINDS, 0.0)
            if other is not None:
                self.story.add(other)
                return self._line(other.said)
        if self.style == "sentences" and room > 120:
            n = r.randint(2, 7)
            return self._line(" ".join([_aside(self.w, self.taken) for _ in range(n)]))
        return self._line(_aside(self.w, self.taken))

    def _passage(self, passage: str, room: int) -> tuple[str, int]:
        n = _lengths.get(passage)
        if n is None:
            n = _lengths[passage] = _count(passage)
        if n <= room:
            return passage, n
        end = passage.rfind(" ", 0, len(passage) * room * 15 // (n * 16))
        cut = passage[:end] if end > 0 else passage.partition(" ")[0]
        return cut, _count(cut)

    def _line(self, said: str) -> tuple[str, int]:
        line = self.dressed(said)
        return line, self._count(line)

    def _count(self, line: str) -> int:
        return _count(" " + line if self.style == "numbers" else line)

    def dressed(self, said: str) -> str:
        """A sentence as a line of this text; numbers come when all lines are there."""
        if self.style != "log":
            return said
        r = self.w.rng
        at = f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}:{r.randint(0, 59):02d}"
        return f"{at} {r.choice(_LEVELS)} {said}"

    def stack(self, needles: list[str], n_tokens: int, at: float | None) -> list[str]:
        """Lines of at most `n_tokens` tokens with the needles at the relative depth `at`, or
        anywhere."""
        r = self.w.rng
        hidden = [(line, _count(" " + line)) for line in map(self.dressed, needles)]
        pieces: list[str] = []
        counts: list[int] = []
        n_lines = len(hidden)
        room = n_tokens - n_tokens // 200 - sum(n for _, n in hidden)
        room -= sum(self._number(i + 1) for i in range(n_lines))
        short = [(said, self._count(said)) for said in _SHORT]
        misses = 0
        while room > 0:
            extra = self._number(n_lines + 1)
            piece, n = self.piece(room - extra) if misses < 8 else ("", room + 1)
            if n + extra > room:  # the last few tokens
                misses += 1
                if misses < 8:
                    continue
                fit = [(said, n) for said, n in short if n + extra <= room]
                if not fit:
                    break
                piece, n = r.choice(fit)
            pieces.append(piece)
            counts.append(n)
            room -= n + extra
            n_lines += 1
        for line, n in hidden:
            _insert(pieces, counts, r.random() if at is None else at, line, n)
        return pieces

    def _number(self, i: int) -> int:
        """Tokens of the number of line `i`: its digits and a full stop."""
        return len(str(i)) + 1 if self.style == "numbers" else 0


def _planted(w: Words, n_tokens: int, n_facts: int, steps: int) -> tuple[Story, list[Step]]:
    """Facts and questions about them, as many as two thirds of the length have room for."""
    r = w.rng
    story, used = Story(w), 0
    asked: list[Step] = []
    longest = max(16, n_tokens // 10)
    share = r.choice((0.0, 0.2, 0.5))
    kinds = [r.choice(KINDS)] if n_facts > 1 and r.random() < 0.15 else KINDS
    for _ in range(4 * n_facts):
        if len(story.facts) == n_facts or used > n_tokens * 3 // 10:
            break
        found = story.draw(kinds, share)
        if found is None:  # a kind with few values is used up
            kinds = KINDS
        elif (n := _count(found.said)) <= longest:
            story.add(found)
            used += n
    if not story.facts:
        return _planted(w, n_tokens, n_facts, steps)
    order = r.sample(story.facts, len(story.facts))
    for i in range(steps):
        f = order[i % len(order)]
        step = _about(w, f) if r.random() < 0.12 else _plain(w, f, 0.25)
        if step[0] in [s[0] for s in asked]:
            continue
        used += _count(step[0]) + _count(step[1]) + 3
        if asked and used > n_tokens * 7 // 10 - 48:  # so much for what else there is
            break
        asked.append(step)
    return story, asked


def _sentence_end(text: str, start: int) -> int:
    """Where the first sentence that ends behind `start` ends, 0 if none does before the last."""
    stop = text.find(". ", start)
    while stop >= 0 and text.endswith(_TITLES, 0, stop):
        stop = text.find(". ", stop + 1)
    return stop + 1


def _insert(pieces: list[str], counts: list[int], at: float, said: str, n: int) -> None:
    """Put a line at the relative depth `at`, into a long piece between two of its sentences."""
    sums = list(accumulate(counts))
    target = at * (sums[-1] if sums else 0)
    i = bisect_left(sums, target)
    if i < len(pieces) and counts[i] > 40:
        piece = pieces[i]
        inside = (target - (sums[i] - counts[i])) / counts[i]
        cut = _sentence_end(piece, int(inside * len(piece)))
        if cut:
            pieces[i] = f"{piece[:cut]} {said}{piece[cut:]}"
            counts[i] += n
            return
        i += inside > 0.5
    elif i < len(pieces) and target > sums[i] - counts[i] / 2:
        i += 1
    pieces.insert(i, said)
    counts.insert(i, n)


def needle(
    w: Words,
    n_tokens: int,
    filler: list[str],
    n_facts: int = 1,
    steps: int = 1,
    at: float | None = None,
) -> Dialogue:
    """`n_facts` facts in a long text and `steps` questions about them; fewer of both where the
    length has no room for them. The whole dialogue has at most `n_tokens` tokens, and nearly as
    many. `filler`: passages of plain text; `at`: relative depth 0..1 of the facts, None for
    anywhere. Raises ValueError for fewer than `SHORTEST` tokens, no fact, no question or a depth
    outside the text."""
    if n_tokens < SHORTEST or n_facts < 1 or steps < 1 or (at is not None and not 0 <= at <= 1):
        raise ValueError(
            f"needle: {n_tokens} tokens, {n_facts} facts, {steps} steps, at {at}; it takes "
            f"{SHORTEST} tokens or more, a fact, a step, and a depth from 0 to 1"
        )
    r = w.rng
    story, asked = _planted(w, n_tokens, n_facts, steps)
    facts = [*story.facts]
    lead = _headed(w, _MARK)
    d = _asking(w, "needle", asked, lead, 0.3)
    around = len(_encoder().dialogue(d)[0])
    hidden = sum(_count(f.said) for f in facts)
    if around + hidden > n_tokens * 4 // 5:
        d.system = lead if _MARK in d.system else ""
        around = len(_encoder().dialogue(d)[0])
    if around + hidden > n_tokens - 8:  # one very long question
        return needle(w, n_tokens, filler, n_facts, steps, at)
    style = r.choice(_STYLES if filler else _STYLES[1:])
    if n_tokens < 64 * len(facts) and style in ("log", "numbers"):
        style = "mixed"  # what stands before each line would take the room
    hay = Hay(w, filler, story, style)
    pieces = hay.stack([f.said for f in facts], n_tokens - around, at)
    if hay.style == "numbers":
        pieces = [f"{i}. {p}" for i, p in enumerate(pieces, 1)]
    text = "\n".join(pieces)
    if _MARK in d.system:
        d.system = d.system.replace(_MARK, text)
    else:
        d.turns[0].text = d.turns[0].text.replace(_MARK, text)
    return d
