"""What the short tasks share: tables of phrasings, and how a task is put into words.

Owns how phrasings/*.txt are read (their format is explained at the head of each) and what is held
out of them, how an instruction and its text become what a person types, and the few things
that several tasks draw or say. Knows no task.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ops.tiny.tasks.alternatives import balanced, expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ops.tiny.dialogue import Step
    from ops.tiny.words import Words

# Phrasings of training and of evaluation: each a pattern's expansions, one to draw from.
Pair = tuple[list[list[str]], list[list[str]]]
Phrases = dict[str, Pair]  # by form

ABSENT = "It is not there."
NTH = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth",
       "tenth", "eleventh", "twelfth"]  # fmt: skip
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve"]  # fmt: skip

# --- tables of phrasings --------------------------------------------------------------------------


@cache
def _tokens(phrase: str) -> tuple[str, ...]:
    return tuple(t.strip("?.:,!") for t in phrase.lower().split())


def near(phrase: str, held: str) -> bool:
    """Whether a phrasing is a held-out one but for a word put in, left out or exchanged. A held-out
    one of a single word and places is only near itself: any other verb would differ in one word."""
    a, b = _tokens(phrase), _tokens(held)
    if a == b or abs(len(a) - len(b)) > 1 or sum("{" not in t for t in b) < 2:
        return a == b
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    a, b = a[same:], b[same:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:]


_FORM = re.compile(r"([a-z][a-z ]*?)((?: \??\{[a-z]?\})*)")
_PLACE = re.compile(r"\{([^{}]*)\}")


@dataclass(slots=True)
class _Form:
    """A form as its file writes it: patterns with their expansions. `where` names it in what is
    said of an error."""

    where: str
    places: set[str]
    optional: set[str]
    seen: dict[str, list[str]] = field(default_factory=dict)
    unseen: dict[str, list[str]] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """The phrasings of one line."""
        held = line[0] == "!"
        for pattern in line.removeprefix("!").split(" / "):
            pattern = pattern.strip()
            if not pattern:
                raise ValueError(f"{self.where}: an empty phrasing; write one between ` / `")
            if pattern[0] == "!":
                raise ValueError(
                    f"{self.where}: {pattern!r} stands within a line; `!` begins a line, all of "
                    "which is held out"
                )
            if pattern in self.seen or pattern in self.unseen:
                raise ValueError(f"{self.where}: {pattern!r} is written twice; once is enough")
            made = self._expanded(pattern)
            if held and len(made) > 1:
                raise ValueError(
                    f"{self.where}: {pattern!r} is held out and has alternatives; "
                    "write each as a phrasing of its own"
                )
            (self.unseen if held else self.seen)[pattern] = made

    def _expanded(self, pattern: str) -> list[str]:
        """The phrasings of a pattern, all of them of this form."""
        said = f"{self.where}: {pattern!r}"
        if not pattern.isascii():
            raise ValueError(f"{said} is not ASCII, which is all that training writes")
        if not balanced(pattern):
            raise ValueError(f"{said} has a brace without its partner; write {{one|another}}")
        made = expanded(pattern)
        for phrase in made:
            if "|" in phrase:
                raise ValueError(f"{said} has a `|` outside braces; write {{one|another}}")
            if phrase != " ".join(phrase.split()):
                raise ValueError(
                    f"{said} gives {phrase!r}; blanks stand alone and between words, "
                    "so move this one into an alternative"
                )
            has = set(_PLACE.findall(phrase))
            if not self.places <= has or not has <= self.places | self.optional:
                raise ValueError(
                    f"{said} has the places {_listed(has)}; those of its form are "
                    f"{_listed(self.places, self.optional)}"
                )
        return made

    def pair(self) -> Pair:
        """The table's entry: a pattern of many phrasings counts up to three times."""
        if not self.seen or not self.unseen:
            missing = "held-out phrasing, on a line with `!`" if self.seen else "phrasing"
            raise ValueError(f"{self.where}: it needs a {missing}")
        held = [phrase for made in self.unseen.values() for phrase in made]
        found: list[list[str]] = []
        for pattern, made in self.seen.items():
            kept = [p for p in made if not any(near(p, h) for h in held)]
            if not kept:
                raise ValueError(
                    f"{self.where}: {pattern!r} differs by one word or none from a held-out "
                    "phrasing; take out one of the two"
                )
            found += [kept] * min(3, isqrt(len(kept)))
        return found, [[phrase] for phrase in held]


def _listed(places: set[str], optional: Iterable[str] = ()) -> str:
    shown = [f"{{{p}}}" for p in sorted(places)] + [f"?{{{p}}}" for p in sorted(optional)]
    return " ".join(shown) or "none"


def parse(text: str, file: str) -> Phrases:
    """The phrasings of a table, by form. Raises ValueError naming the file, the form and what would
    be right."""
    forms: dict[str, _Form] = {}
    form = None
    for line in text.splitlines():
        if not line.strip() or line.lstrip()[0] == "#":
            continue
        if line[0] == " ":
            if form is None:
                raise ValueError(f"{file}: {line.strip()!r} stands before any form; name one first")
            form.add(line.strip())
            continue
        found = _FORM.fullmatch(line.rstrip())
        if found is None:
            raise ValueError(
                f"{file}: {line!r} is no form; a form is small letters, then its places as "
                "{a} or ?{a}, and its phrasings are indented by blanks"
            )
        name, places = found[1], found[2].split()
        if name in forms:
            raise ValueError(f"{file}, {name}: two forms have this name; put them together")
        form = forms[name] = _Form(
            f"{file}, {name}",
            {p.strip("{}") for p in places if p[0] != "?"},
            {p.strip("?{}") for p in places if p[0] == "?"},
        )
    return {name: form.pair() for name, form in forms.items()}


# By name of file. All of them, whichever task is imported: `_FIRST` depends on each.
TABLES = {
    path.stem: parse(path.read_text("utf-8"), path.name)
    for path in sorted((Path(__file__).parent / "phrasings").glob("*.txt"))
}
MANNER = TABLES["manner"]


def picks(forms: dict[str, tuple[int, Callable[[Words], Any]]]) -> list[Callable[[Words], Any]]:
    """Each form as often as its weight says: one plain choice draws it."""
    return [make for weight, make in forms.values() for _ in range(weight)]


def chosen(w: Words, pair: Pair) -> str:
    """A phrasing of a form, of training or of evaluation as the words are."""
    return w.rng.choice(w.rng.choice(w.either(*pair)))


# --- how a person types it ------------------------------------------------------------------------


class Asked(NamedTuple):
    """One small task before it is put into words. `text` may stand on either side of `head`
    unless `follows`: then only behind it."""

    head: str
    text: str
    answer: str
    why: str
    follows: bool = False


def _first_words() -> Iterator[str]:
    for table in TABLES.values():
        for pair in table.values():
            for phrase in (p for of in pair for kept in of for p in kept):
                first = phrase.split(" ")[0].rstrip("?")
                if first[:1] != "{" and first != "I" and (len(first) == 1 or not first.isupper()):
                    yield first


_FIRST = frozenset(_first_words())  # words of instructions that may lose their capital
_VERBS = frozenset(
    """Add Alphabetize Amend Answer Append Apply Arrange Ask Assemble Attach Begin Bind Bracket
    Break Bring Build Calculate Call Cancel Capitalize Cast Chain Change Check Choose Cite Clean
    Clear Close Collapse Collect Combine Compare Complete Compose Compute Concatenate Condense
    Connect Construct Consult Continue Convert Copy Correct Count Create Cross Cut Decide Decode
    Decrement Deduct Deduplicate Define Delete Deliver Describe Determine Dictate Diminish
    Discard Display Dissect Divide Do Double Draw Dress Drop Dump Duplicate Echo Edit Eliminate
    Embed Emit Encase Enclose Encode End Enlarge Enter Enumerate Erase Evaluate Exchange Exclude
    Expand Explain Export Express Extend Extract Fetch File Fill Filter Find Finish Flank
    Flatten Flip Fold Follow Form Format Frame Fuse Gather Generate Get Give Glue Go Grab Grant
    Grep Halve Hand Have Highlight Hyphenate Identify Ignore Imitate Include Increase Increment
    Inform Insert Interchange Interpret Invert Isolate Itemize Join Jump Keep Kick Label Lay
    Lead Leave Lengthen Lessen Let Limit Link List Locate Look Lookup Lower Lowercase Make Map
    Mark Match Mend Mention Merge Mimic Mirror Modify Move Multiply Name Nest Note Number Obtain
    Omit Open Order Organize Output Overwrite Pack Parrot Parse Pass Paste Phrase Pick Place
    Point Pool Populate Pour Prefix Prepend Present Press Print Produce Prune Pull Purge Put
    Quote Raise Rank Read Rearrange Recast Recite Reckon Record Reduce Reformat Relabel Relay
    Remove Rename Render Reorder Reorganize Repeat Replace Replicate Reply Report Represent
    Reproduce Reset Reshape Resolve Respond Restate Retain Retitle Retrieve Return Retype Reveal
    Reverse Rewrite Save Say Scan Scrap Search Seek Select Send Separate Serialize Set Share
    Shift Shorten Shout Show Simplify Single Skip Solve Sort Space Speak Spell Split Spot Spread
    Squeeze Stack Start State Step Stick Stitch Stop Store Straighten Stretch Strike String
    Strip Structure Substitute Subtract Sum Supplement Surround Swap Switch Tabulate Tag Take
    Tally Tell Test Throw Tidy Total Trade Transcribe Transform Translate Transpose Trim Turn
    Type Unite Unset Unwrap Update Uppercase Use Verify Weed Weigh Widen Wipe Withdraw Work Wrap
    Write Yell""".split()
)
# What else stands around a task in training: words before its text and after it.
_LABELS = """Given:|Input:|Here it is:|This is given:|I have this:|Look at this:|Take this:|Here:|
My input:|This is it:|Work on this:|What I have:|From me:|Below:|See here:|The input:""".replace(
    "\n", ""
).split("|")
_TAILS = """Thanks.|Thank you.|Thanks!|Please.|That is all.|Only the answer, please.|Nothing else.|
Just the answer.|Thanks in advance!|No explanation.|Keep it short.|I wait for your answer.|
Can you do that?|Go.|Be exact.|That is the task.""".replace("\n", "").split("|")


def _noise(w: Words) -> str:
    """One or two words that say nothing, to be passed over."""
    r = w.rng
    said = w.novel() if r.random() < 0.7 else w.draw("word")
    if r.random() < 0.35:
        said += f" {w.novel()}"
    return said.capitalize() if r.random() < 0.6 else said


def _headed(w: Words, head: str) -> tuple[str, str]:
    """An instruction or question with the manners of a person, and the mark at its end."""
    r = w.rng
    question = head[-1] == "?"
    end = "?" if question else "." if head[-1].isalnum() or head[-1] in ")]}>'\"" else ""
    if question:
        head = head[:-1]
    x, first = r.random(), head.partition(" ")[0]
    if first not in _FIRST and x < 0.28:  # a key may stand there, which keeps its letters
        x = 0.5
    if x < 0.1:
        head = head[0].lower() + head[1:]
    elif x < 0.28 and (question or first in _VERBS):
        lead = chosen(w, MANNER["question" if question else "command"])
        if lead.startswith(("Can ", "Could ", "Will ", "Would ")) and lead[-1] != ":":
            end = "?"
        head = f"{lead} {head[0].lower()}{head[1:]}"
    elif x < 0.34:
        head = f"{chosen(w, MANNER['greeting'])} {head}"
    elif not w.unseen and x < 0.42 and first in _FIRST:
        head = f"{_noise(w)}{r.choice((':', ':', ',', '.', '!', ' -', ' >'))} {head}"
    return head, "" if x > 0.93 else end


def posed(w: Words, asked: Asked) -> Step:
    """The task as a person might type it: polite or curt, the text behind or in front, and in
    training words around it that mean nothing."""
    r = w.rng
    text = asked.text
    head, end = _headed(w, asked.head)
    y, lines = r.random(), "\n" in text
    around = 1.0 if w.unseen else r.random()
    if not text or (y < 0.3 and not asked.follows):
        done = head + end
        if end and around < 0.15:  # a mark keeps it apart from a key
            done += r.choice((" ({})", " [{}]", " {}.", " -- {}")).format(_noise(w))
        if not text:
            return done, asked.answer, asked.why
        if around > 0.75 and around < 1.0:
            text = f"{r.choice(_LABELS)}{chr(10) if lines else ' '}{text}"
        return f"{text}{chr(10) if y < 0.2 else chr(10) * 2}{done}", asked.answer, asked.why
    if around < 0.1 and not asked.follows:
        gap = f"{end}\n{r.choice(_LABELS)}{chr(10) if lines else ' '}"
    elif end == "?" and asked.head[-1] == "?":
        gap = "?\n" if lines or y > 0.75 else "? "
    else:
        gap = ":\n" if lines or y > 0.88 else ": "
    if 0.1 < around < 0.18 and not asked.follows and not lines:
        text = f"{text}\n\n{r.choice(_TAILS)}"
    return head + gap + text, asked.answer, asked.why


def plainly(w: Words, head: str) -> str:
    """A question with nothing around it, as of what stands far back."""
    x = w.rng.random()
    if head[-1] == "?":
        return head if x < 0.9 else head[:-1]
    return f"{head}." if x < 0.8 and head[-1] != "." else head


# --- what several tasks draw and say --------------------------------------------------------------

_POOLS = ["food", "thing", "animal", "person", "city", "word", "noun", "color"]


def joined(items: list[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def different(make: Callable[[], str], n: int, taken: Iterable[str] = ()) -> list[str]:
    """`n` draws that differ from each other and from `taken`."""
    out = dict.fromkeys(taken)
    skipped = len(out)
    while len(out) < n + skipped:
        out[make()] = None
    return list(out)[skipped:]


def sentence(w: Words) -> str:
    """A plain statement, made fast."""
    r = w.rng
    x = r.random()
    who, what = w.draw("person").replace(".", ". "), w.any_word()
    if x < 0.25:
        return f"{who} has a {w.draw('color')} {what}."
    if x < 0.5:
        return f"The {what} of {who} is in the {w.draw('thing')}."
    if x < 0.75:
        return f"{who} likes {w.draw('food')} and {what}."
    return f"{who} gave the {what} to {w.any_word()} on {w.draw('day')}."


def some_items(w: Words, low: int = 2, high: int = 7) -> list[str]:
    """Different items of one kind, of one word mostly."""
    r = w.rng
    n = r.randint(low, high)
    if r.random() < 0.25:
        return different(w.novel if r.random() < 0.6 else w.any_word, n)
    pool = r.choice(_POOLS[:7] if n > 5 else _POOLS)
    return [item.replace(".", ". ") for item in different(lambda: w.draw(pool), n)]
