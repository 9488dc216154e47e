"""Plans of paragraphs, and how paragraphs are asked for.

Owns plans.txt and asks.txt; does not write paragraphs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ops.tiny.tasks.about.slots import slot_names
from ops.tiny.tasks.about.stanzas import SIGNS, Stanza, read_named, together
from ops.tiny.tasks.prose.scene import Scene

_FOLDER = Path(__file__).parent
_SLOTS = slot_names(Scene.makers)
_SENTENCES = {"-": "a sentence", "/": "another wording of it"}
_FORMS = ("story", "text", "letter")
Sentence = list[list[str]]  # its wordings, each with what its alternatives make of it


class Plan(NamedTuple):
    name: str
    form: str  # a story, that may be continued; a text; a letter
    topics: list[tuple[str, list[str]]]  # with the slots whose values the answer must hold
    sentences: list[Sentence]


def _topic(template: str) -> tuple[str, list[str]]:
    keys = [key.removeprefix("a_") for key in re.findall(r"{(\w+)}", template)]
    return template, [key for key in keys if key != "his"]


def _plan(stanza: Stanza) -> Plan:
    name, _, form = stanza.name.partition(": ")
    if form not in _FORMS:
        raise stanza.error(f"a plan begins with `its name: {'|'.join(_FORMS)}`")
    return Plan(name, form, [_topic(t) for t in stanza.parts("=")], stanza.sentences())


def _only_sentence(stanza: Stanza) -> Sentence:
    sentences = stanza.sentences()
    if len(sentences) != 1:
        raise stanza.error(f"expected one sentence (`- ...`), found {len(sentences)}")
    return sentences[0]


PLANS = [
    _plan(s)
    for s in read_named(_FOLDER / "plans.txt", _SLOTS, {"=": "topics", **_SENTENCES}).values()
]
_TABLE = read_named(
    _FOLDER / "asks.txt",
    _SLOTS | {"t", "a", "b", "first"},
    SIGNS | _SENTENCES,
    needed=("any", "text", "story", "letter", "with word", "continue", "named"),
    others=False,
)
_ANY, _TEXT, _STORY = (_TABLE[name].phrasings() for name in ("any", "text", "story"))
ASKS = {
    "text": together(_ANY, _TEXT),
    "story": together(_ANY, _TEXT, _STORY),
    "letter": _TABLE["letter"].phrasings(),
}
WITH_WORD, CONTINUE = _TABLE["with word"].phrasings(), _TABLE["continue"].phrasings()
# Where the request gives a word to be used, where it gives a name, and where it gave the beginning.
ABOUT_WORD, ABOUT_NAME = _only_sentence(_TABLE["with word"]), _only_sentence(_TABLE["named"])
ENDING = _only_sentence(_TABLE["continue"])
