"""Held-out tasks: the dialogues that ds4-tiny is judged on, the same for every file.

Each task has its own generator and draws only what training never draws. Only how much plain text
stands around a needle depends on a vocabulary, because its length counts in ids. A text holds
NEEDLES facts far apart; each is asked for in a prompt of its own.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from ops.tiny.dialogue import Dialogue, Turn, dialogue, system
from ops.tiny.encode import Plain, answer, rendered
from ops.tiny.tasks import about, calls, copying, facts, lists, objects, prose
from ops.tiny.words import Words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ops.tiny.dialogue import Step
    from ops.tiny.encode import Encoder

SEED = 20
NEEDLES = 4
TRIES = 40  # draws for each case before a task is taken to have no more
LONGEST_SENTENCE = 60  # words of plain text; longer ones would miss the lengths wanted
SLACK = 120  # ids that the last sentence may have been too long by


class TooShort(ValueError):
    """There is less plain text than a needle is to be hidden in."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    dialogue: Dialogue  # its last turn is the answer
    prompt: Sequence[int]
    expected: Sequence[int]  # end of turn included


class Coder(Protocol):
    """Ids by some vocabulary."""

    def count(self, text: str) -> int: ...

    def prompt(self, d: Dialogue) -> Sequence[int]: ...

    def answer(self, d: Dialogue) -> Sequence[int]: ...


class Trained:
    """Ids as training lays them out; `encoder` has the vocabulary that is trained."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def count(self, text: str) -> int:
        return len(self.encoder.text(text))

    def prompt(self, d: Dialogue) -> list[int]:
        opened = Dialogue(d.kind, d.turns[:-1], d.system, d.tools, d.thinking, d.effort, d.schema)
        return self.encoder.pieces(rendered(opened, self.encoder.texts))[0]

    def answer(self, d: Dialogue) -> list[int]:
        return self.encoder.pieces(answer(d.turns[-1], d.thinking)[1:])[0]


# --- the tasks -----------------------------------------------------------------------------------


def _one(kind: str, task: Callable[[Words], Step]) -> Callable[[Words], Dialogue]:
    return lambda w: dialogue(w, kind, [task(w)])


def _of_kind(make: Callable[[Words], Dialogue], *kinds: str) -> Callable[[Words], Dialogue]:
    def draw(w: Words) -> Dialogue:
        while (d := make(w)).kind not in kinds:
            pass
        return d

    return draw


def _extraction(w: Words) -> Dialogue:
    """One question about a text, or the last of several."""
    d = facts.extraction(w)
    d.turns = d.turns[: 2 * w.rng.randint(1, len(d.turns) // 2)]
    return d


def _json(w: Words) -> Step:
    """JSON from pairs; not the reading of it."""
    while (step := objects.pairs(w))[1][:1] not in "{[":
        pass
    return step


TASKS: dict[str, Callable[[Words], Dialogue]] = {
    "call, 1 tool": lambda w: calls.single_call(w, 1),
    "call, 2 tools": lambda w: calls.single_call(w, 2),
    "call, 3-4 tools": lambda w: calls.single_call(w, w.rng.randint(3, 4)),
    "call, 5-8 tools": lambda w: calls.single_call(w, w.rng.randint(5, 8)),
    "call, thinking": lambda w: calls.single_call(w, w.rng.randint(1, 4), thinking=True),
    "call, later turn": calls.later_call,
    "parallel": calls.parallel,
    "result": calls.answer_result,
    "decline": calls.declining,
    "no tool needed": calls.no_tool_needed,
    "extract": _extraction,
    "copy": _one("copy", copying.copying),
    "lookup": _one("lookup", copying.lookup),
    "remember": _of_kind(about.chat, "remember"),
    "chat": _of_kind(about.chat, "chat", "role"),
    "list": _one("list", lists.lists),
    "sum": _one("sum", lists.sums),
    "format": _one("format", lists.formats),
    "json": _one("json", _json),
    "json schema": objects.schema_json,
    "paragraph": _one("paragraph", prose.paragraph),
}
LENGTHS = {  # least and most ids of a needle's prompt
    "needle 1k": (900, 1_100), "needle 4k": (3_900, 4_150), "needle 8k": (7_600, 8_100),
}  # fmt: skip
KINDS = (*TASKS, *LENGTHS)


def dialogues(kind: str, n: int, seed: int = SEED) -> Iterator[Dialogue]:
    """Up to `n` dialogues of a task of TASKS, all different; fewer if it has no more to say."""
    w = Words(random.Random(f"{seed} {kind}"), unseen=True)
    seen: set[str] = set()
    for _ in range(n * TRIES):
        d = TASKS[kind](w)
        if kind != "call, thinking":
            d.thinking, d.effort = False, "low"
        key = json.dumps([d.system, d.tools, d.schema, [(t.text, t.calls) for t in d.turns[:-1]]])
        if key in seen:
            continue
        seen.add(key)
        yield d
        if len(seen) == n:
            return


# --- needles -------------------------------------------------------------------------------------


@cache
def filler(folder: Path) -> tuple[str, ...]:
    """Sentences, in their order, of the passages of plain text that training never sees."""
    passages = dict.fromkeys(Plain(None, folder, unseen=True).lines)
    return tuple(
        s for p in passages for s in re.split(r"(?<=[.!?]) ", p)
        if s and len(s.split()) <= LONGEST_SENTENCE
    )  # fmt: skip


def needles(
    kind: str, n: int, coder: Coder, text: Sequence[str], seed: int = SEED, most: int = 8_192
) -> Iterator[Dialogue]:
    """`n` dialogues of a task of LENGTHS, no prompt longer than `most` ids; none if all would be.

    Raises TooShort.
    """
    least, greatest = LENGTHS[kind]
    greatest = min(greatest, most)
    w = Words(random.Random(f"{seed} {kind}"), unseen=True)
    sizes = [coder.count(" " + s) for s in text]
    if sum(sizes) < greatest:
        raise TooShort(f"{kind}: {sum(sizes)} ids of plain text, expected at least {greatest}")
    while n > 0 and greatest >= least:
        for d in _one_text(w, coder, text, sizes, (least, greatest))[:n]:
            yield d
            n -= 1


def _one_text(
    w: Words, coder: Coder, text: Sequence[str], sizes: Sequence[int], lengths: tuple[int, int]
) -> list[Dialogue]:
    """The dialogues about one text. All draws come first, so that they do not hang on `coder`."""
    r = w.rng
    found = _facts(w)
    asks = [r.choice(f[1]) for f in found]
    depths = [r.random() for _ in found]
    start, share, in_system = r.randrange(len(text)), r.random(), r.random() < 0.3
    said = system(w)

    def made(n: int) -> list[Dialogue]:
        parts = [text[(start + i) % len(text)] for i in range(n)]
        at = sorted(zip((int(x * (n + 1)) for x in depths), found, strict=True),
                    key=lambda pair: -pair[0])  # fmt: skip
        for place, f in at:
            parts.insert(place, f[0])
        return [_asked(" ".join(parts), a, f[2], said, in_system)
                for a, f in zip(asks, found, strict=True)]  # fmt: skip

    least, most = lengths
    longest = min(most, least + SLACK + round(share * (most - least - SLACK)))
    bare = max(len(coder.prompt(d)) for d in made(0))
    n = 0
    while bare + sizes[(start + n) % len(sizes)] <= longest:
        bare += sizes[(start + n) % len(sizes)]
        n += 1
    out = made(n)
    while max(len(coder.prompt(d)) for d in out) > longest:  # joins cost an id now and then
        n -= 1
        out = made(n)
    return out


def _facts(w: Words) -> list[tuple[str, list[str], str, str]]:
    """Facts of which no question could mean another."""
    found: list[tuple[str, list[str], str, str]] = []
    while len(found) < NEEDLES:
        new = facts.fact(w)
        if not any(set(new[1]) & set(f[1]) or new[0] == f[0] for f in found):
            found.append(new)
    return found


def _asked(text: str, ask: str, answer: str, said: str, in_system: bool) -> Dialogue:
    """The question behind the text: harder than before it, and the text can be shared."""
    turns = [Turn("user", ask if in_system else f"{text}\n\n{ask}"), Turn("assistant", answer)]
    return Dialogue("needle", turns, f"{said}\n\n{text}".strip() if in_system else said)


# --- cases ---------------------------------------------------------------------------------------


def cases(
    kind: str, n: int, coder: Coder, text: Sequence[str], seed: int = SEED, longest: int = 8_192
) -> list[Case]:
    """Up to `n` cases of a task whose prompt and answer have at most `longest` ids together.
    `text`: sentences of `filler`, for needles alone."""
    room = 64  # for the answer to a needle
    found = (needles(kind, n, coder, text, seed, longest - room) if kind in LENGTHS
             else dialogues(kind, n, seed))  # fmt: skip
    made = (Case(kind, d, coder.prompt(d), coder.answer(d)) for d in found)
    return [c for c in made if len(c.prompt) + len(c.expected) <= longest]


def small(
    encoder: Encoder,
    n: int,
    seed: int = SEED,
    longest: int = 1_024,
    folder: Path | None = None,
) -> list[Case]:
    """Cases to look at while training, as training lays them out; needles only where there is a
    `folder` of plain text (see texts.py), and only those that fit."""
    kinds = [k for k in KINDS if k in TASKS or folder is not None]
    text = () if folder is None else filler(folder)
    coder = Trained(encoder)
    return [c for k in kinds for c in cases(k, n, coder, text, seed, longest)]
