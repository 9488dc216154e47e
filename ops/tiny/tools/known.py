"""Tools of the catalogue under one of their many names, some with invented words in them."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from ops.tiny import catalog
from ops.tiny.tools.made import Made
from ops.tiny.tools.values import Json, join, schema, value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.tiny.catalog import Entry, Kind, Request
    from ops.tiny.words import Words

RENAMED = 0.25  # share of tools whose own words are replaced by invented ones
IMPLYING = 0.25  # how often a request comes that says a value without naming it, beside others
NOISE = 0.18  # share of requests in which a word that does not matter is replaced
# Verbs that say nothing about which tool it is.
_GENERIC = frozenset(
    """make show list find read open info data name with from lookup fetch check create delete
    remove update search query send start stop item items tool value current call user write
    status report state this that text change manage request service where when what which each
    every does have time""".split()
)


@cache
def topics(entry: Entry) -> frozenset[str]:
    """The words in any of its names that are its own."""
    parts = {p for name in entry.names for p in words_of(name)}
    return frozenset(p for p in parts if len(p) >= 4 and p not in _GENERIC)


@cache
def words_of(name: str) -> tuple[str, ...]:
    """`get_user`, `getUser`, `get-user`, `get.user` -> get, user."""
    return tuple(p.lower() for p in re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def known(w: Words) -> Made:
    return from_entry(w, w.rng.choice(catalog.held_out() if w.unseen else catalog.training()))


def from_entry(w: Words, entry: Entry) -> Made:
    """A tool of the catalogue with one of its requests."""
    r = w.rng
    name = r.choice(entry.names)
    description = r.choice(entry.descriptions)
    request = _chosen(w, entry.requests)
    # What words imply is lost with the words.
    may = not (w.unseen or request.implied) and r.random() < RENAMED
    swap = _replaced(w, name, entry, request) if may else {}
    kept = [
        i
        for i, p in enumerate(entry.params)
        if not p.optional or i in request.used or r.random() < 0.6
    ]
    chosen: dict[int, str] = {}
    properties: Json = {}
    for i in kept:
        param = entry.params[i]
        alias = r.choice(param.names)
        if alias in properties:
            alias = next((a for a in param.names if a not in properties), f"{alias}_2")
        chosen[i] = alias = _swapped(alias, swap)
        properties[alias] = schema(param.kind, _swapped(_describe(w, alias, param, r), swap), w)
    required = [chosen[i] for i in kept if not entry.params[i].optional]
    if r.random() < 0.08:
        name = f"{w.any_word()}_{name}"
    made = function(w, _swapped(name, swap), _swapped(description, swap), properties, required)

    def ask(w: Words, request: Request) -> Made:
        text, arguments = _filled(w, entry, request, swap)
        ordered = {chosen[i]: arguments[i] for i in kept if i in arguments}
        found = topics(entry)
        if swap:
            found = frozenset(_swapped(t, swap) for t in found)
        fixed = not request.pieces[0]
        text = manner(w, text, fixed)
        return Made(made, text, ordered, list(entry.results), found, origin=entry, fixed=fixed)

    usable = [q for q in entry.requests if q.used <= chosen.keys() and not (swap and q.implied)]

    def again(w: Words) -> Made:
        return ask(w, _chosen(w, usable))

    def several(w: Words) -> tuple[str, list[Json]] | None:
        return _listed(w, entry, usable, chosen, swap)

    out = ask(w, request)
    out.again, out.several = again, several
    return out


def _chosen(w: Words, requests: Sequence[Request]) -> Request:
    """One of them. What a request implies has to be known tool by tool, while the reading of what
    is said serves every tool: training gets less of the former than the tables hold."""
    if w.unseen:
        return w.rng.choice(requests)
    return w.rng.choices(requests, [IMPLYING if q.implied else 1.0 for q in requests])[0]


def _describe(w: Words, alias: str, param: catalog.Param, r: Any) -> str:
    x = r.random()
    if param.descriptions and x < 0.6:
        return str(r.choice(param.descriptions))
    if x < 0.7:
        return f"The {alias.replace('_', ' ')}"
    return _example(w, param.kind) if x < 0.8 else ""


def _example(w: Words, kind: Kind) -> str:
    """A description whose example is not meant."""
    if kind.sort == "enum":
        return "One of " + ", ".join(kind.choices)
    if kind.sort in ("list", "object", "bool"):
        return ""
    return w.rng.choice(("For example {}", "e.g. {}")).format(value(w, kind)[0])


def _replaced(w: Words, name: str, entry: Entry, request: Request) -> dict[str, str]:
    """Invented words for up to two of the tool's own that its request uses."""
    said = " ".join(p for p in request.pieces if isinstance(p, str)).lower()
    mine = sorted(t for t in topics(entry) if t in said)
    if not mine:
        return {}
    w.rng.shuffle(mine)
    return {word: w.novel().lower() for word in mine[: w.rng.choice((1, 1, 2))]}


def _swapped(text: str, swap: dict[str, str]) -> str:
    for old, new in swap.items():
        text = text.replace(old, new).replace(old.capitalize(), new.capitalize())
    return text


def _filled(
    w: Words, entry: Entry, request: Request, swap: dict[str, str]
) -> tuple[str, dict[int, Any]]:
    """A request with values, and what the call must carry."""
    arguments: dict[int, Any] = dict(request.implied)
    out = []
    noise = not w.unseen and not request.implied and w.rng.random() < NOISE
    for piece in _noisy(w, entry, request) if noise else request.pieces:
        if isinstance(piece, str):
            out.append(_swapped(piece, swap) if swap else piece)
            continue
        i, key = piece
        kind = entry.params[i].kind
        if key:
            member = next(k for name, k in kind.members if name == key)
            v, said = value(w, member)
            arguments.setdefault(i, {name: None for name, _ in kind.members})[key] = v
        elif i in arguments:
            said = said_again(arguments[i])
        else:
            arguments[i], said = value(w, kind)
        out.append(said)
    return _opened(request, "".join(out)), arguments


def _opened(request: Request, text: str) -> str:
    """With a capital, unless it begins with a value, which has to stand as the call carries it."""
    return text[:1].upper() + text[1:] if request.pieces[0] else text


# Words that tell which value is which.
_TELLING = frozenset(
    """from with than until before after without between under over near below above less more into
    about against every each both only never""".split()
)


def _noisy(w: Words, entry: Entry, request: Request) -> list[str | tuple[int, str]]:
    """The request's pieces with one word that is not the tool's own replaced by any other: a reader
    has to do without a word now and then."""
    own = topics(entry)
    places = [
        (i, word)
        for i, piece in enumerate(request.pieces)
        if isinstance(piece, str)
        for word in piece.split()
        if len(word) >= 4 and word.isalpha() and word.islower() and word not in _TELLING
        and not any(o in word or word in o for o in own)
    ]  # fmt: skip
    pieces = list(request.pieces)
    if places:
        i, word = w.rng.choice(places)
        pieces[i] = str(pieces[i]).replace(word, w.any_word(), 1)
    return pieces


def said_again(v: Any) -> str:
    return join([str(x) for x in v]) if isinstance(v, list) else str(v).replace("_", " ")


_LISTABLE = frozenset(
    "place name code path word food thing email language color animal day".split()
)


def _listed(
    w: Words, entry: Entry, usable: list[Request], chosen: dict[int, str], swap: dict[str, str]
) -> tuple[str, list[Json]] | None:
    """One sentence that asks the same of two or three values: a call for each."""
    single = [
        q for q in usable
        if len(q.pieces) == 3 and not q.implied
        and entry.params[q.pieces[1][0]].kind.sort in _LISTABLE  # type: ignore[index]
    ]  # fmt: skip
    if not single:
        return None
    request = w.rng.choice(single)
    i = next(iter(request.used))
    values: list[str] = []
    for _ in range(w.rng.choice((2, 2, 3))):
        v = value(w, entry.params[i].kind)[0]
        if v not in values:
            values.append(v)
    if len(values) < 2:
        return None
    before, after = (_swapped(str(request.pieces[k]), swap) for k in (0, 2))
    text = f"{before}{join(values)}{after}"
    return _opened(request, text), [{chosen[i]: v} for v in values]


def function(w: Words, name: str, description: str, properties: Json, required: list[str]) -> Json:
    """The function object, in one of the shapes that clients write."""
    r = w.rng
    parameters: Json = {"type": "object", "properties": properties}
    if required or r.random() < 0.3:
        parameters["required"] = required
    if r.random() < 0.08:
        parameters["additionalProperties"] = False
    out: Json = {"name": name}
    if r.random() < 0.95:
        out["description"] = description + r.choice(("", "", "."))
    out["parameters"] = parameters
    return out


_BEFORE = ["Please ", "Can you ", "Could you ", "I want you to ", "Hey, ", "Now ", "Will you ",
           "I need you to ", "Let us ", "We have to ", "I would like you to ", "Quickly ",
           "Would you ", "You should ", "Go ahead and ", "Next, ", "For me, ", "You can ",
           "Try to ", "I need somebody to ", "Do me a favour and ", "Be so kind and ", "Then ",
           "You have to ", "Could somebody ", "It would be nice if you could ", "I ask you to ",
           "I want to ", "I have to ", "I would love to ", "Just ", "Simply ", "Today, ",
           "At last, ", "First "]  # fmt: skip
_BEFORE_UNSEEN = ["Would you kindly ", "It is time to ", "Be so good as to "]
_FIRST = ["Hello! ", "Hi. ", "OK. ", "Good morning. ", "Next. ", "One more thing. ", "Well, ",
          "So: ", "Hey, ", "And now: ", "Listen. ", "I have a task. ", "Thanks. ", "Right. ",
          "Quick one: ",
          "A question: ", "Hi there! ", "Another one. ",
          "Good evening. ", "Thank you. ", "Yes. ", "Great. ", "Now this: ", "Next up: ", "Task: ",
          "Sorry to bother you. ", "I hope you can help. ", "Job for you: ", "Here we go: ",
          "First of all, ", "By the way, ", "Last thing: ", "It is me again. ", "Fine. ",
          "Let us see. ", "Back to work. ", "New request: ", "Something else: ", "Okay, ",
          "Perfect. ", "One question: ", "Do this: ", "For today: ", "In short: "]  # fmt: skip
_MARKED = ("{}, ", "{}: ", "{}. ", "{}! ", "{} - ")
_FIRST_UNSEEN = ["Good day. ", "All right. ", "Here is what I need. "]
_LAST = [" Thanks.", " Thank you!", " Please.",
         " That is all.", " Cheers.", " Thanks a lot!",
         " Thank you very much.", " I count on you.", " Can you do that?",
         " Will you?", " That would be great.", " Let me know.", " As always.",
         " When you can.", " If possible.", " Thank you so much!"]  # fmt: skip
_LAST_UNSEEN = [" Many thanks.", " No hurry."]
_IMPERATIVE = frozenset(
    """Send Email Write Tell Text Message Read Open Show Save Create Put Delete Remove Get List Run
    Execute Search Find Look Fetch Calculate Compute Add Sum Multiply Translate Say Convert Exchange
    Wake Set Start Remind Schedule Plan Play Turn Switch Heat Book Reserve Take Give Order Track
    Cancel Register Report Close Resolve Define Pick Query Commit Test Resize Make Post Publish Call
    Phone Pay Transfer Check Rent Water Ship Invite Charge Rotate Stop Move Copy Rename Print Count
    Measure Change Update Let Compare Share Buy Sell Lock Unlock Note Record Mark Assign Approve
    Reject Restart Deploy Build Install Upload Download Draw Plot Sort Merge Split Join
    Scan""".split()
)


def manner(w: Words, text: str, fixed: bool = False) -> str:
    """The same request a little differently; `fixed`: its first word is a value."""
    r = w.rng
    x = r.random()
    if x < 0.07:
        return text if fixed or text[1:2].isupper() else text[0].lower() + text[1:]
    if x < 0.14 and text.endswith("."):
        return text[:-1]
    if x < 0.21:
        return text + ("" if text[-1] in ".?!" else ".") + r.choice(w.either(_LAST, _LAST_UNSEEN))
    if x < 0.28:
        return r.choice(w.either(_FIRST, _FIRST_UNSEEN)) + text
    if x < 0.32 and not w.unseen:
        return r.choice(_MARKED).replace("{}", w.marker()) + text
    if x < 0.42 and text.endswith(".") and text.split(" ", 1)[0] in _IMPERATIVE:
        lead = r.choice(w.either(_BEFORE, _BEFORE_UNSEEN))
        asks = lead.startswith(("Can", "Could", "Will", "Would"))
        return lead + text[0].lower() + (text[1:-1] + "?" if asks else text[1:])
    return text
