"""Text to token ids: byte-level BPE from the plain lists of a model file (spec/model.md 8).

One merge table, two modes. *Plain* knows no markers, so that client text can never open a turn or a
tool call; *trusted* turns the text of an added token into its id, for our own frame and for tests
against the release's tokenizer. This module knows no files, messages or prompts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Chain

from ds4d.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

CONTROL = 3  # token_type of the GGUF: matched before all else ("special" in tokenizer.json)
USER_DEFINED = 4  # matched in the text between control tokens

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"

_TEXT_OF = {
    "bos": BOS,
    "eos": EOS,
    "user": USER,
    "assistant": ASSISTANT,
    "think": THINK,
    "end_think": END_THINK,
    "dsml": DSML,
    "latest_reminder": LATEST_REMINDER,
}

MARKER_TEXTS = tuple(_TEXT_OF.values())

# Three successive splits: digits by three, runs of CJK and kana, then words, symbols and blanks.
_ASCII_SYMBOLS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[{_ASCII_SYMBOLS}][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)

# `tokenizers` keeps some 50 bytes per byte of text while it works. A long text is therefore encoded
# in parts, cut where the splits above always cut: no piece goes on from a line feed to a letter.
_PART_CHARS = 1 << 18
_CUT = re.compile(r"\n(?=[A-Za-z])")


def _byte_of_char() -> dict[int, int]:
    """The GPT-2 byte map, backwards: code point in a token's text to the byte it stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {b: b for b in printable} | {256 + n: b for n, b in enumerate(rest)}


_BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Ids of the tokens that frame a prompt, found by their text, never by a number."""

    bos: int
    eos: int
    user: int
    assistant: int
    think: int
    end_think: int
    dsml: int
    latest_reminder: int

    @property
    def by_text(self) -> dict[str, int]:
        return {text: getattr(self, name) for name, text in _TEXT_OF.items()}

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end an assistant turn. A model that opens a turn by itself has ended its own."""
        return frozenset((self.eos, self.user, self.assistant))


class Tokenizer:
    """Built from `tokenizer.ggml.tokens`, `.token_type` and `.merges` as plain lists.

    Safe to call from several threads; the interpreter lock is released while text is encoded.

    Raises:
        ModelFileError: lists of different length, a text that two ids share, a merge that is not
            two known tokens.
    """

    def __init__(self, tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> None:
        if len(tokens) != len(types):
            raise ModelFileError(
                f"tokenizer.ggml.token_type has {len(types)} entries,"
                f" tokenizer.ggml.tokens has {len(tokens)}"
            )
        vocabulary = {text: i for i, text in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            twice = next(i for i, text in enumerate(tokens) if vocabulary[text] != i)
            raise ModelFileError(
                f"tokenizer.ggml.tokens: ids {twice} and {vocabulary[tokens[twice]]}"
                f" have the same text {tokens[twice]!r}"
            )
        self._tokens = tuple(tokens)
        self._types = np.asarray(types, dtype=np.int32)  # [n_vocab]
        bpe = _merge_table(vocabulary, merges)
        self._plain = _pipeline(bpe)
        self._trusted = _pipeline(bpe)
        self._trusted.add_tokens([_added(tokens[i], types[i]) for i in self._special_ids()])

    @property
    def n_vocab(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, *, trusted: bool = False) -> npt.NDArray[np.int32]:
        """`text` as ids [n]. Nothing is added: no BOS, no EOS. Lone surrogates become U+FFFD."""
        pipeline = self._trusted if trusted else self._plain
        parts = []
        for part in _parts(_whole(text)):
            (encoding,) = pipeline.encode_batch_fast([part], add_special_tokens=False)
            parts.append(np.array(encoding.ids, dtype=np.int32))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def id(self, text: str) -> int | None:
        """The id of the token with exactly this text in the vocabulary, or None."""
        return self._plain.token_to_id(text)

    def is_special(self, token: int) -> bool:
        """Whether `token` is an added token, which only trusted text can become."""
        return bool(self._types[token] in (CONTROL, USER_DEFINED))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; of an added token, its text in UTF-8."""
        text = self._tokens[token]
        if not self.is_special(token):
            try:
                return bytes(_BYTE_OF_CHAR[ord(char)] for char in text)
            except KeyError:
                pass  # holds a character outside the byte map, a full-width bar say: literal text
        return text.encode()

    @cached_property
    def longest(self) -> int:
        """Bytes, and so at most characters, of the longest token that text can become."""
        plain = (i for i in range(self.n_vocab) if not self.is_special(i))
        return max(len(self.token_bytes(i)) for i in plain)

    def _special_ids(self) -> list[int]:
        added = (self._types == CONTROL) | (self._types == USER_DEFINED)
        return [int(i) for i in np.flatnonzero(added)]

    @cached_property
    def markers(self) -> Markers:
        """Raises ModelFileError when the vocabulary lacks a token that the prompt format needs."""
        found: dict[str, int] = {}
        for name, text in _TEXT_OF.items():
            token = self.id(text)
            if token is None or not self.is_special(token):
                raise ModelFileError(
                    f"tokenizer.ggml.tokens: no added token {text!r}, which the prompt format needs"
                )
            found[name] = token
        return Markers(**found)


def _added(text: str, kind: int) -> AddedToken:
    control = kind == CONTROL
    return AddedToken(text, special=control, normalized=not control)


def _merge_table(vocabulary: dict[str, int], merges: Sequence[str]) -> BPE:
    pairs = []
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelFileError(
                f"tokenizer.ggml.merges: entry {rank} is {merge!r},"
                " expected two tokens of the vocabulary that join to a third"
            )
        pairs.append((left, right))
    return BPE(vocab=vocabulary, merges=pairs)


def _pipeline(bpe: BPE) -> Pipeline:
    pipeline = Pipeline(bpe)  # shares the table, it is not copied
    pipeline.pre_tokenizer = Chain(
        [
            *(Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return pipeline


def _whole(text: str) -> str:
    """`text` without halves of surrogate pairs, which JSON can carry and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parts(text: str) -> list[str]:
    parts, start = [], 0
    while len(text) - start > _PART_CHARS:
        cut = _CUT.search(text, start + _PART_CHARS)
        if cut is None:
            break
        parts.append(text[start : cut.end()])
        start = cut.end()
    parts.append(text[start:])
    return parts
