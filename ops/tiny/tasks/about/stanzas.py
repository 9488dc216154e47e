"""Tables of phrasings as people write them: the text format and its refusals.

Owns how a table is read; knows nothing of what its phrasings mean. A stanza per thing, a blank line
between; `#` at the left starts a comment line:

    a question about my name
      = My name is ds4-tiny.
      ? What is your name? / {Say|Write} your name.
      ? I am {name}, and you?
      ! By what name do I address you?

The name stands at the left, indented lines below it, each with a sign. A table says which signs it
has; mostly `=` is the answer, `?` phrasings for training and `!` phrasings held out for evaluation.
Phrasings are separated by ` / `, and one that comes twice counts once. `{a|b|c}` stands for one
phrasing with each of the alternatives, `{name}` is a slot. A text of whole sentences has a line for
every wording: `-` begins a sentence, `/` is another wording of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ops.tiny.tasks.alternatives import balanced, expanded

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping
    from pathlib import Path

Phrasings = tuple[list[str], list[str]]  # for training; held out

SIGNS = {"=": "the answer", "?": "phrasings for training", "!": "phrasings held out"}
_SLOT = re.compile(r"\{(\w*)\}")


class TableError(Exception):
    """A stanza that does not follow the format; says where and what would be right."""


def together(*many: Phrasings) -> Phrasings:
    """All of several lists of phrasings, none twice."""
    seen, unseen = (list(dict.fromkeys(x for p in many for x in p[side])) for side in (0, 1))
    return seen, unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Stanza:
    """A stanza of a table. Every method raises TableError where it breaks the format."""

    source: str  # the file's name
    name: str
    lines: tuple[tuple[str, str], ...]  # sign, text
    slots: Container[str]  # what `{...}` may name

    def error(self, what: str) -> TableError:
        return TableError(f"{self.source}: {self.name}: {what}")

    def one(self, sign: str = "=") -> str:
        """The text of the only line with a sign, as it stands."""
        texts = [text for s, text in self.lines if s == sign]
        if len(texts) != 1:
            raise self.error(f"expected one line `{sign} ...`, found {len(texts)}")
        return self.check(texts[0])

    def parts(self, sign: str) -> list[str]:
        """All phrasings behind a sign, their alternatives expanded, none twice."""
        texts = [part for s, text in self.lines if s == sign for part in text.split(" / ")]
        if not texts:
            raise self.error(f"it has no line `{sign} ...`")
        return list(dict.fromkeys(x for text in texts for x in self._expanded(text)))

    def phrasings(self, seen: str = "?", unseen: str = "!") -> Phrasings:
        """Those for training and those held out. No phrasing may be both."""
        both = self.parts(seen), self.parts(unseen)
        twice = sorted(set(both[0]) & set(both[1]))
        if twice:
            raise self.error(f"{twice[0]!r} is held out (`{unseen}`), so no line `{seen}` has it")
        return both

    def sentences(self) -> list[list[list[str]]]:
        """The wordings of every sentence, each with what its alternatives make of it."""
        out: list[list[list[str]]] = []
        for sign, text in self.lines:
            if sign == "-":
                out.append([])
            elif sign != "/":
                continue
            elif not out:
                raise self.error(f"{text!r}: `-` begins a sentence, `/` is another wording of it")
            out[-1].append(self._expanded(text))
        if not out:
            raise self.error("it has no sentence (`- ...`)")
        return out

    def check(self, text: str) -> str:
        """The text itself, where it is a phrasing that can be drawn."""
        self._expanded(text)
        return text

    def _expanded(self, text: str) -> list[str]:
        if not text.strip() or text.startswith("/ ") or text.endswith(" /"):
            raise self.error(f"{text!r}: a phrasing stands on both sides of ` / `")
        if not text.isascii():
            raise self.error(f"{text!r}: expected ASCII only")
        braces = f"{text!r}: braces hold a slot {{name}} or alternatives {{a|b}}"
        if not balanced(text):
            raise self.error(braces)
        out = expanded(text)
        for phrasing in out:
            bare = _SLOT.sub("", phrasing)
            if "{" in bare or "}" in bare:
                raise self.error(braces)
            if phrasing != " ".join(phrasing.split()):
                raise self.error(f"{text!r}: one blank stands between words, none around them")
            if "|" in bare:
                raise self.error(f"{text!r}: `|` stands in braces; phrasings are cut by ` / `")
            for key in _SLOT.findall(phrasing):
                if key not in self.slots:
                    raise self.error(f"{text!r}: no slot {{{key}}} in this table")
        return out


def parse(
    text: str, source: str, slots: Container[str], signs: Mapping[str, str] = SIGNS
) -> list[Stanza]:
    """The stanzas of a table; `signs`: those it has, and what they are. Raises TableError."""
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    out = []
    for block in re.split(r"\n{2,}", "\n".join(lines).strip("\n")):
        if not block:
            continue
        name, *body = block.split("\n")
        stanza = Stanza(
            source=source,
            name=name.strip(),
            lines=tuple(_line(source, name.strip(), line, signs) for line in body),
            slots=slots,
        )
        if name[0].isspace():
            raise stanza.error("a stanza begins with its name at the left, then indented lines")
        if not body:
            raise stanza.error("its lines are missing; no blank line stands below a name")
        stanza.check(stanza.name)
        out.append(stanza)
    return out


def _line(source: str, name: str, line: str, signs: Mapping[str, str]) -> tuple[str, str]:
    where = f"{source}: {name}: {line.strip()!r}"
    if not line[0].isspace():
        raise TableError(f"{where}: indent it, or put a blank line before the next stanza")
    sign, _, text = line.strip().partition(" ")
    if sign not in signs:
        known = ", ".join(f"`{sign}` ({what})" for sign, what in signs.items())
        raise TableError(f"{where} begins with none of {known}")
    if not text:
        raise TableError(f"{where}: nothing stands behind `{sign}`, {signs[sign]}")
    return sign, text


def read(path: Path, slots: Container[str], signs: Mapping[str, str] = SIGNS) -> list[Stanza]:
    """The stanzas of a file. Raises TableError, OSError."""
    return parse(path.read_text("utf-8"), path.name, slots, signs)


def read_named(
    path: Path,
    slots: Container[str],
    signs: Mapping[str, str] = SIGNS,
    *,
    needed: Collection[str] = (),
    others: bool = True,
) -> dict[str, Stanza]:
    """The stanzas of a file by their names: those that are needed, and others where it may have
    some. Raises TableError, OSError."""
    out: dict[str, Stanza] = {}
    for stanza in read(path, slots, signs):
        if stanza.name in out:
            raise stanza.error("two stanzas have this name; give one of them another")
        if not others and stanza.name not in needed:
            raise stanza.error(f"nothing reads this stanza; there are {', '.join(needed)}")
        out[stanza.name] = stanza
    for name in needed:
        if name not in out:
            raise TableError(f"{path.name}: {name}: this stanza is missing")
    return out
