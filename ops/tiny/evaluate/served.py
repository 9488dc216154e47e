"""Dialogues as the product serves them: ids by a file's own vocabulary, answers by its own reader.

Knows no task and no engine. Two files with different vocabularies are judged on the same dialogues
through two of these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.model import gguf
from ds4d.prompt import constants, render
from ds4d.prompt.arguments import dumps
from ds4d.prompt.ask import Ask, Call, Message, Tool
from ds4d.prompt.tokenizer import Tokenizer
from ds4d.prompt.toolcalls import CallArguments, CallEnd, CallStart, Content, End, Reader
from ops.tiny.encode import MARKERS, Marker, answer

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from ds4d.prompt.constants import Constants
    from ops.tiny.dialogue import Dialogue, Turn

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer as a client gets it. `whole`: it ended by itself, with nothing behind its calls,
    and the reader had to supply or drop nothing."""

    content: str
    calls: tuple[tuple[str, Json], ...]
    whole: bool


class Served:
    """One file's way from dialogues to ids and back."""

    def __init__(self, tokenizer: Tokenizer, texts: Constants) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self._markers = [tokenizer.markers.by_text[m] for m in MARKERS]

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> Served:
        """Raises ModelFileError for what is no model file."""
        with gguf.open_model(path) as file:
            v = file.vocabulary()
            return cls(Tokenizer(v.tokens, v.types.tolist(), v.merges), constants.load())

    def count(self, text: str) -> int:
        """Ids of a plain text."""
        return len(self.tokenizer.encode(text))

    def prompt(self, d: Dialogue) -> npt.NDArray[np.int32]:
        """Ids [n] of everything before the last turn, which is the answer."""
        rendered = render.render(ask_of(d, d.turns[:-1], self.texts), self.texts)
        return render.tokenize(rendered, self.tokenizer).ids

    def answer(self, d: Dialogue) -> npt.NDArray[np.int32]:
        """Ids [n] of the answer that is expected, end of turn included."""
        parts = [
            np.array([self._markers[piece]], np.int32)
            if isinstance(piece, Marker)
            else self.tokenizer.encode(piece)
            for piece, _ in answer(d.turns[-1], d.thinking)[1:]  # the prompt opened it
        ]
        return np.concatenate(parts)

    def read(self, ids: Sequence[int], d: Dialogue) -> Said:
        """What the product makes of `ids` as the answer of `d`."""
        marks = self.tokenizer.markers
        reader = Reader(self.tokenizer, thinking=d.thinking, tools=_tools(d))
        events, at = [], 0
        while at < len(ids) and not reader.is_over:
            events += reader.push(int(ids[at]))
            at += 1
        if not reader.is_over:
            events += reader.finish(cut=True)
        content, names, fragments, ended, clean = "", {}, {}, [], False
        for event in events:
            match event:
                case Content(text):
                    content += text
                case CallStart(index, name):
                    names[index], fragments[index] = name, ""
                case CallArguments(index, fragment):
                    fragments[index] += fragment
                case CallEnd(index):
                    ended.append((names[index], json.loads(fragments[index])))
                case End(finish=finish, tool_parse_failed=failed, n_duplicates=twice):
                    clean = finish != "length" and not failed and not twice
        # Every tag has one marker: a closing tag that the reader supplied is one too few.
        tags = 2 * (1 + len(ended) + sum(len(arguments) for _, arguments in ended)) if ended else 0
        closed = list(ids[at - 1 :]) == [marks.eos] or list(ids[at:]) == [marks.eos]
        spoken = sum(int(i) == marks.dsml for i in ids)
        return Said(content=content, calls=tuple(ended),
                    whole=clean and closed and (not ended or spoken == tags))  # fmt: skip

    def text(self, ids: Sequence[int]) -> str:
        """Ids as text, markers as their own text: for people."""
        return b"".join(self.tokenizer.token_bytes(int(i)) for i in ids).decode("utf-8", "replace")


def _tools(d: Dialogue) -> tuple[Tool, ...]:
    return tuple(Tool(function=f) for f in d.tools)


def ask_of(d: Dialogue, turns: Sequence[Turn], texts: Constants) -> Ask:
    """`turns` of a dialogue under its head, as a client would send them.

    Raises ValueError for a dialogue with a response schema and tools: the schema belongs behind the
    tools, where no message can put it.
    """
    system = d.system
    if d.schema is not None:
        if d.tools:
            raise ValueError("a dialogue has a response schema and tools; expected one of them")
        system += "\n\n" + texts.response_format_head + dumps(d.schema)
    messages = [Message(role="system", blocks=(system,))] if system else []
    called, n_results = 0, 0
    for i, turn in enumerate(turns):
        blocks = (turn.text,) if turn.text else ()
        if turn.role == "assistant":
            calls = tuple(
                Call(id=f"{i}-{k}", name=name, arguments=json.dumps(arguments))
                for k, (name, arguments) in enumerate(turn.calls)
            )
            called, n_results = i, 0
            messages.append(
                Message(role="assistant", blocks=blocks, reasoning=turn.reasoning or None,
                        calls=calls)
            )  # fmt: skip
        elif turn.role == "tool":
            messages.append(Message(role="tool", blocks=blocks, call_id=f"{called}-{n_results}"))
            n_results += 1
        else:
            messages.append(Message(role="user", blocks=blocks))
    return Ask(messages=tuple(messages), tools=_tools(d), thinking=d.thinking,
               effort=d.effort)  # fmt: skip
