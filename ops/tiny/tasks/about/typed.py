"""Phrasings as people type them.

Owns the leads, tails, slips and small letters that training puts on a phrasing when it is drawn.
Knows which phrasings are held out, and never makes one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tasks.about.topics import TOPICS, UNKNOWN_ASKS

if TYPE_CHECKING:
    import random

    from ops.tiny.tasks.about.stanzas import Phrasings
    from ops.tiny.words import Words

_LEADS = """Hey, |By the way, |Tell me, |So |So, |Ok, |Okay, |Now |And |Hi, |Oh, |Hm, |
Please, |Say, |Listen, |Sorry, |Excuse me, |Friend, |Dear model, |ds4-tiny, |hey |ok |so |but |
And now, |Then |Look, |Right, |Just tell me, |Hello, |Alright, |Um, |Mate, |Come on, |Good, |
Uh, |Now then, """
LEADS = _LEADS.replace("\n", "").split("|")
OPENINGS = ["Tell me: ", "One question: ", "Now tell me: ", "And another thing: ", "By the way: ",
            "Please answer: ", "Quick question: ", "Just curious: ", "I wonder: ", "My question: ",
            "Can you tell me: ", "I want to know: ", "Next question: ", "Hi! ", "Hello. ",
            "Another question: ", "I have a question. ", "Something else: "]  # fmt: skip
TAILS = [" please", " then", " now", " mate", ", please", ", friend", " pls", ", tell me", " buddy",
         " anyway", ", my friend", " exactly", " by the way", " plz"]  # fmt: skip
REQUEST_TAILS = [" please", " then", " now", " mate", ", please", ", friend", " pls", ", will you",
                 " for me", " buddy", ", my friend", ", would you", " plz"]  # fmt: skip
SAID_LEADS = ["By the way, ", "Hey, ", "Also, ", "Just so you know, ", "Ok, ", "So, ", "Oh, ",
              "FYI: ", "Listen, ", "One more thing: ", "Know this: ", "Look, "]  # fmt: skip
_OPENINGS_UNSEEN = ["Let me ask you: ", "Well, "]
_QUESTION = frozenset(
    """what who whose whom which where when why how is are am was were do does did can could will
    would may might shall should must have has what's who's where's whats whos wheres""".split()
)
_REQUEST = frozenset(
    """tell say give show explain describe name write list repeat recall state define greet thank
    congratulate introduce translate make compose recommend suggest find summarise
    compare""".split()
)
_MARKS = str.maketrans("", "", " .,!?:;'-")
_KEPT = {t.lower().translate(_MARKS) for x in TOPICS for t in x.asks[1]}
_KEPT |= {t.lower().translate(_MARKS) for t in UNKNOWN_ASKS[1]}


def casual(text: str) -> str:
    """As many people type: small letters, no apostrophe, no mark at the end."""
    if "{A_" in text:  # names a slot that a small letter would change
        return text
    return text.lower().rstrip(".!?").replace("'", "") or text


def _slip(r: random.Random, text: str) -> str:
    """One slip of the keys in one of the words: two letters changed over, one lost or doubled."""
    words = text.split(" ")
    i = r.randrange(len(words))
    word = words[i]
    if len(word) < 4 or not word.isalpha():  # slots among them
        return text
    at = r.randrange(1, len(word) - 1)
    x = r.random()
    if x < 0.4:
        words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    elif x < 0.75:
        words[i] = word[:at] + word[at + 1 :]
    else:
        words[i] = word[:at] + word[at] + word[at:]
    return " ".join(words)


def worn(w: Words, ask: str) -> str:
    """A phrasing for training as somebody types it: as it is, or with a lead, a tail, a word that
    means nothing, a slip, small letters. Never one that is held out."""
    r = w.rng
    first = ask.split(" ", 1)[0].lower()
    out = ask
    asks = first in _QUESTION
    if asks or first in _REQUEST:
        x = r.random()
        small = out[0].lower() + out[1:] if r.random() < 0.8 else out
        if x < 0.1:
            out = f"{w.novel()}, {small}"
        elif x < 0.2:
            out = r.choice(LEADS) + small
        elif x < 0.26:
            out = r.choice(OPENINGS) + out
        if r.random() < 0.1:
            mark = out[-1] if out[-1] in ".!?" else ""
            out = out.rstrip(".!?") + r.choice(TAILS if asks else REQUEST_TAILS) + mark
    x = r.random()
    if x < 0.2:
        out = casual(out)
    elif x < 0.24:
        out = out.rstrip(".!?") or out
    if r.random() < 0.05:
        out = _slip(r, out)
    return ask if out != ask and out.lower().translate(_MARKS) in _KEPT else out


def asked(w: Words, ask: str) -> str:
    """A phrasing as it is put: worn in training; held out, now and then behind an opening."""
    if not w.unseen:
        return worn(w, ask)
    if ask[-1] == "?" and len(ask) > 12 and w.rng.random() < 0.08:
        return w.rng.choice(_OPENINGS_UNSEEN) + ask
    return ask


def worded(w: Words, asks: Phrasings) -> str:
    """One of the phrasings of a question; its slots are still open."""
    ask = w.rng.choice(asks[w.unseen])
    return ask if w.unseen else worn(w, ask)


def told_by(w: Words, said: str) -> str:
    """A statement of the user, in training now and then behind a lead; its slots still open."""
    if w.unseen or said[:3] not in ("I a", "I l", "My ", "I'm", "I h") or w.rng.random() > 0.15:
        return said
    small = said if said[0] == "I" else "m" + said[1:]
    return w.rng.choice(SAID_LEADS) + small
