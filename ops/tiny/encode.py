"""Dialogues to token ids and loss weights, packed into rows; many processes, one queue.

Owns the fast form of the prompt rendering. tests/unit/test_tiny_data.py holds it equal to
`ds4d.prompt.render`, so that training sees exactly what serving sends.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from ops.tiny import mixture
from ops.tiny.words import Words

if TYPE_CHECKING:
    from ops.tiny.dialogue import Dialogue, Turn

PATH = Path(__file__).parent / "vocabulary.json"
BLOCK = 128  # dialogues start at multiples of it: a ratio-128 row then never mixes two
PROMPT, ANSWER, PLAIN = 0.015, 1.0, 0.15  # loss weights of tokens by what they are
NOVELTY, NOVELTY_LAST = 0.5, 0.3  # share of novel words, falling in the second half
HELD_OUT = 20  # passages of plain text between two that are kept for evaluation
LONG_FROM, LONG_ALL, LONG_ROWS = 0.08, 0.3, 0.5  # share of rows that begin with a long dialogue

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, THINK, END_THINK, DSML = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
)


class Marker(int):
    """A special token in a rendered dialogue: an index into MARKERS."""


MARKERS = [BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML]
_BOS, _EOS, _USER, _ASSISTANT, _THINK, _END_THINK, _DSML = (Marker(i) for i in range(7))


def _byte_tokens() -> list[str]:
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_in, table = 256, []
    for b in range(256):
        if b in keep:
            table.append(chr(b))
        else:
            table.append(chr(stand_in))
            stand_in += 1
    return table


BYTES = _byte_tokens()


def constants() -> dict[str, str]:
    """ds4-tiny's prompt texts."""
    path = Path(__file__).parents[2] / "ds4d" / "data" / "prompt.json"
    out: dict[str, str] = json.loads(path.read_text("utf-8"))
    return out


def splitter() -> pre_tokenizers.PreTokenizer:
    """The V4 pre-tokeniser (spec/model.md 8)."""
    word = (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cjk = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in (r"\p{N}{1,3}", cjk, word)]
    end = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, end])


Piece = tuple["str | Marker", float]  # text or marker, loss weight


def rendered(d: Dialogue, texts: dict[str, str]) -> list[Piece]:
    """The whole dialogue as pieces of text and markers (spec/api.md 1.3)."""
    out: list[Piece] = [(_BOS, 0.0)]
    head = texts[f"effort_{d.effort}"] if d.thinking and d.effort != "low" else ""
    head += d.system
    if d.tools:
        schemas = "\n".join(json.dumps(f, ensure_ascii=False) for f in d.tools)
        head += "\n\n" + texts["tools_head"] + schemas + texts["tools_tail"]
    if d.schema is not None:
        head += "\n\n" + texts["response_format_head"] + json.dumps(d.schema, ensure_ascii=False)
    if head:
        out.append((head, PROMPT))
    last = max(i for i, t in enumerate(d.turns) if t.role != "assistant")
    blocks: list[str] = []
    for i, turn in enumerate(d.turns):
        if turn.role == "user":
            blocks.append(turn.text)
        elif turn.role == "tool":
            blocks.append(f"<tool_result>{turn.text}</tool_result>")
        else:
            out += [(_USER, 0.0), ("\n\n".join(blocks), PROMPT), (_ASSISTANT, 0.0)]
            blocks = []
            out += answer(turn, d.thinking and bool(turn.reasoning) and (bool(d.tools) or i > last))
    if blocks:
        out += [(_USER, 0.0), ("\n\n".join(blocks), PROMPT), (_ASSISTANT, 0.0)]
        out.append((_THINK if d.thinking else _END_THINK, 0.0))
    return out


def answer(turn: Turn, thinking: bool) -> list[Piece]:
    """An assistant turn: its opening marker is given, the rest is learned."""
    out: list[Piece] = [(_END_THINK, 0.0)]
    if thinking:
        out = [(_THINK, 0.0), (turn.reasoning, ANSWER), (_END_THINK, ANSWER)]
    text = turn.text
    if turn.calls:
        text += "\n\n<"
        out += [(text, ANSWER), (_DSML, ANSWER)]
        text = "tool_calls>\n<"
        for name, arguments in turn.calls:
            out += [(text, ANSWER), (_DSML, ANSWER)]
            text = f'invoke name="{name}">\n'
            for key, value in arguments.items():
                is_text = isinstance(value, str)
                shown = value if is_text else json.dumps(value, ensure_ascii=False)
                out += [(text + "<", ANSWER), (_DSML, ANSWER)]
                out += [
                    (f'parameter name="{key}" string="{str(is_text).lower()}">{shown}</', ANSWER)
                ]
                out.append((_DSML, ANSWER))
                text = "parameter>\n"
            text += "</" if arguments else "\n</"
            out += [(text, ANSWER), (_DSML, ANSWER)]
            text = "invoke>\n<"
        out += [(text[:-1] + "</", ANSWER), (_DSML, ANSWER), ("tool_calls>", ANSWER)]
    elif text:
        out.append((text, ANSWER))
    return [*out, (_EOS, ANSWER)]


class Encoder:
    """Text to ids with ds4-tiny's vocabulary; markers only where the renderer puts them."""

    def __init__(self) -> None:
        made: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
        self.tokens: list[str] = made["tokens"]
        ids = {t: i for i, t in enumerate(self.tokens)}
        self.markers = [ids[m] for m in MARKERS]
        self.bos, self.eos, self.pad = 0, 1, 2
        merges = [tuple(m.split(" ")) for m in made["merges"]]
        usual = {t: i for t, i in ids.items() if made["types"][i] == 1}
        self.tokenizer = Tokenizer(models.BPE(vocab=usual, merges=merges))
        self.tokenizer.pre_tokenizer = splitter()
        self.texts = constants()
        self._memo: dict[str, list[int]] = {}
        self._bytes = {c: b for b, c in enumerate(BYTES)}

    def text(self, text: str) -> list[int]:
        ids = self._memo.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._memo) < 20000 and len(text) < 200:
                self._memo[text] = ids
        return ids

    def pieces(self, pieces: list[Piece]) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for piece, weight in pieces:
            some = [self.markers[piece]] if isinstance(piece, Marker) else self.text(piece)
            ids += some
            weights += [weight] * len(some)
        return ids, weights

    def dialogue(self, d: Dialogue) -> tuple[list[int], list[float]]:
        return self.pieces(rendered(d, self.texts))

    def decode(self, ids: list[int]) -> str:
        """Ids to text; special tokens as their own text."""
        out, run = [], bytearray()
        for i in ids:
            token = self.tokens[i]
            if 3 <= i < len(self.tokens) - 16:
                run += bytes(self._bytes[c] for c in token)
            else:
                out += [run.decode("utf-8", "replace"), token]
                run = bytearray()
        return "".join(out) + run.decode("utf-8", "replace")


class Plain:
    """Passages of plain text. Every HELD_OUT-th is kept for evaluation."""

    def __init__(self, encoder: Encoder, folder: Path | None, unseen: bool = False) -> None:
        self.lines: list[str] = []
        self.encoder = encoder
        for name, times in () if folder is None else (("kjv.txt", 1), ("chat.txt", 2)):
            lines = (folder / name).read_text("utf-8").splitlines()
            self.lines += [x for i, x in enumerate(lines) if (i % HELD_OUT == 0) is unseen] * times

    def take(self, rng: random.Random, n: int) -> list[int]:
        """`n` tokens of passages, fewer if there are none."""
        ids: list[int] = []
        while self.lines and len(ids) < n:
            ids += [*self.encoder.text(rng.choice(self.lines)), *self.encoder.text("\n")]
        return ids[:n]


Row = tuple[np.ndarray, np.ndarray, np.ndarray]


class Rows:
    """Packed rows without end: ids int16 [length], loss weight of predicting each id from the one
    before it f16 [length], number of the dialogue of each block int16 [length / 128].

    A dialogue starts at a multiple of 128; the rest of its last block is filled with short
    dialogues and plain text, which it cannot see, though they see it. `stage` 0..1 is how far the
    training is: long dialogues come in between LONG_FROM and LONG_ALL."""

    def __init__(self, rng: random.Random, encoder: Encoder, plain: Plain, length: int) -> None:
        self.rng, self.encoder, self.plain, self.length = rng, encoder, plain, length
        self.words = Words(rng)
        self.stage = 0.0

    def _long(self) -> Dialogue | None:
        """The dialogue that a row begins with, if it is to be a long one."""
        ready = min(1.0, max(0.0, (self.stage - LONG_FROM) / (LONG_ALL - LONG_FROM)))
        if self.length < 2048 or self.rng.random() > LONG_ROWS * ready:
            return None
        most = self.length * 0.96
        n = int(most / 2 ** self.rng.triangular(0.0, 3.0, 0.0))
        return mixture.long(self.words, n, self.plain.lines)

    def next(self) -> Row:
        length, rng, encoder = self.length, self.rng, self.encoder
        self.words.novelty = NOVELTY - (NOVELTY - NOVELTY_LAST) * max(0.0, self.stage * 2 - 1)
        ids = np.full(length, encoder.pad, np.int16)
        weights = np.zeros(length, np.float16)
        owner = np.zeros(length // BLOCK, np.int16)
        at, number, misses = 0, 0, 0
        first = self._long()
        while misses < 3 and length - at >= 2 * BLOCK:
            d = first or mixture.short(self.words, self.stage)
            first = None
            some, w = encoder.dialogue(d)
            if at + len(some) > length:
                misses += 1
                continue
            n = at + len(some)
            ids[at:n], weights[at:n] = some, w
            end = -(-n // BLOCK) * BLOCK
            while end - n > 24 and rng.random() < 0.8:
                some, w = encoder.dialogue(mixture.small(self.words))
                if n + len(some) <= end:
                    ids[n : n + len(some)], weights[n : n + len(some)] = some, w
                    n += len(some)
            owner[at // BLOCK : end // BLOCK] = number
            at, number = end, number + 1
        left = self.plain.take(rng, length - at)
        ids[at : at + len(left)] = left
        weights[at : at + len(left)] = PLAIN
        owner[at // BLOCK :] = number
        return ids, weights, owner


def _work(queue: Any, seed: int, folder: Path | None, length: int, stage: Any) -> None:
    os.nice(5)
    encoder = Encoder()
    source = Rows(random.Random(seed), encoder, Plain(encoder, folder), length)
    while True:
        source.stage = stage.value
        queue.put(source.next())


class Feed:
    """Batches from many processes. `stage.value` 0..1 moves the mixture while they run."""

    def __init__(self, folder: Path | None, length: int, workers: int, seed: int) -> None:
        context = mp.get_context("fork")
        self.queue: Any = context.Queue(maxsize=workers * 4)
        self.stage = context.Value("d", 0.0)
        self.workers = [
            context.Process(
                target=_work, daemon=True,
                args=(self.queue, seed * 1000 + i, folder, length, self.stage),
            )
            for i in range(workers)
        ]  # fmt: skip
        for worker in self.workers:
            worker.start()

    def take(self, n_rows: int) -> Row:
        """ids [n_rows, length], weights [n_rows, length], owner [n_rows, length / 128]."""
        parts = [self.queue.get(timeout=120) for _ in range(n_rows)]
        ids, weights, owner = (np.stack(p) for p in zip(*parts, strict=True))
        return ids, weights, owner

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
