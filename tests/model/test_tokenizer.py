"""The tokenizer against the release's own `tokenizer.json`, read by the `tokenizers` library."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import Tokenizer as Pipeline

from ds4d.errors import ModelFileError
from ds4d.prompt import tokenizer as module
from ds4d.prompt.tokenizer import (
    ASSISTANT,
    BOS,
    CONTROL,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    THINK,
    USER,
    USER_DEFINED,
    Tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

MARKERS = [BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, LATEST_REMINDER]
# Neighbours in the release's table that overlap, differ in one character or are matched in another
# pass than the rest.
RARE = [
    "<｜image2｜>",
    "<｜/table>｜",
    "<｜td｜>",
    "<dsml:",
    "</dsml:",
    "<｜▁pad▁｜>",
    "<|EOT|>",
    "<｜tool▁sep｜>",
]
LOOKALIKES = [
    "<|User|>",
    "<｜user｜>",
    "<｜User|>",
    "< think>",
    "<Think>",
    "</ think>",
    "｜DSML",
    "DSML｜",
    "<｜",
    "｜>",
    "<｜end_of_sentence｜>",
]

PIECES = [
    *["the", " Quick", " brown", "fox", "naïve", "don't", "I'm", "x", "Straße", " ﬁne", "ǅ"],
    *["Привет", " мир", "γειά", "مرحبا", " שלום", "नमस्ते", "สวัสดี", "한국어", "ქართული", "Ꭰ"],
    *["中文", "漢字", "ひらがな", "カタカナ", "々", "\u9fa6", "𠀀", "、", "。", "：", "ー", "・"],
    *[
        "🙂",
        "👩‍👩‍👧",
        "🇩🇪",
        "✌🏽",
        "❤️",
        "e\u0301",
        "\u0301",
        "a\u0308\u0323",
        "\u200d",
        "\u200b",
        "\ufeff",
    ],
    *["0", "7", "42", "1234567", "٣٤٥", "Ⅷ", "½", "²", "１２３", "3.14", "1e-5", "0x1F"],
    *[
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        " \n",
        "\n ",
        "\t\t",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x0b",
        "\x85",
    ],
    *[
        "def f(x):\n    return x**2\n",
        "if (a&&b) {\r\n\t++i;\r\n}",
        '<div class="a">',
        "</div>",
        "#!/bin/sh",
        "a->b",
        "$HOME",
        "@x",
        "\\n",
        "//",
        "--",
        "=>",
        "::",
        "λ=>x",
    ],
    *[
        "!",
        "?!",
        "...",
        "…",
        "—",
        "“q”",
        "€",
        "™",
        "№",
        "\x00",
        "\x1b[0m",
        "\x7f",
        "\ue000",
        "\ufffd",
        "_a_",
        "`code`",
        "{}",
        "[]",
    ],
    *["<tool_result>", "</tool_result>", '<｜DSML｜invoke name="f">', "</｜DSML｜parameter>"],
]


def texts(n: int) -> list[str]:
    rng = random.Random(8)
    pools = [
        PIECES,
        PIECES + MARKERS + RARE + LOOKALIKES,
        [" ", "\n", "\r", "\t", "a", "1", "中", "!"],
    ]
    return ["".join(rng.choices(rng.choice(pools), k=rng.randint(1, 14))) for _ in range(n)]


CASES = ["", *PIECES, *MARKERS, *RARE, *LOOKALIKES, *texts(3000)]


@pytest.fixture(scope="module")
def release(v4_json: Path) -> Pipeline:
    return Pipeline.from_file(str(v4_json))


@pytest.fixture(scope="module")
def emptied(v4_json: Path) -> Pipeline:
    """The release's tokenizer with its table of added tokens emptied."""
    return Pipeline.from_str(
        json.dumps(json.loads(v4_json.read_text("utf-8")) | {"added_tokens": []})
    )


def test_trusted_mode_is_the_release(v4: Tokenizer, release: Pipeline):
    expected = [e.ids for e in release.encode_batch(CASES, add_special_tokens=False)]
    assert [v4.encode(text, trusted=True).tolist() for text in CASES] == expected
    n_special = sum(v4.is_special(i) for ids in expected for i in ids)
    assert n_special > 1000  # the comparison is about something


def test_plain_mode_is_the_release_without_added_tokens(v4: Tokenizer, emptied: Pipeline):
    expected = [e.ids for e in emptied.encode_batch(CASES, add_special_tokens=False)]
    assert [v4.encode(text).tolist() for text in CASES] == expected


def test_client_text_never_becomes_a_marker(v4: Tokenizer):
    for text in CASES:
        assert not any(map(v4.is_special, v4.encode(text).tolist())), text


def test_known_vectors(v4: Tokenizer):
    """spec/model.md 8 and spec/api.md 1.1."""
    for text, ids in {
        "Hello, world!": [19923, 14, 2058, 3],
        "  int x = 42;\n": [223, 688, 1527, 438, 223, 3180, 510],
        "中文 mixed 文字": [21134, 11168, 223, 10541],
        "1234567": [6895, 18009, 25],
        "\n\n<｜DSML｜tool_calls>\n": [271, 30, 128825, 72461, 4941, 12548, 1018],
        "</｜DSML｜parameter>\n": [1718, 128825, 41523, 1018],
    }.items():
        assert v4.encode(text, trusted=True).tolist() == ids
    assert v4.encode("").shape == (0,)
    assert v4.encode("a").dtype == np.int32


@pytest.mark.parametrize("trusted", [False, True])
def test_cutting_a_long_text_into_parts_changes_no_id(
    v4: Tokenizer, monkeypatch: pytest.MonkeyPatch, trusted: bool
):
    lines = [line for text in texts(800) for line in (text, "\nword", " \n\nWord", "!\r\n\nx")]
    text = "".join(lines)
    whole = v4.encode(text, trusted=trusted)
    monkeypatch.setattr(module, "_PART_CHARS", 40)
    assert len(module._parts(text)) > 300
    assert np.array_equal(v4.encode(text, trusted=trusted), whole)


def test_a_text_without_a_cut_stays_whole():
    assert module._parts("a" * 600_000) == ["a" * 600_000]


def test_the_bytes_of_the_ids_are_the_text(v4: Tokenizer):
    for text in CASES:
        for trusted in (False, True):
            ids = v4.encode(text, trusted=trusted).tolist()
            assert b"".join(map(v4.token_bytes, ids)) == text.encode()


def test_every_byte_has_a_token(v4: Tokenizer):
    single = {v4.token_bytes(i) for i in range(1000)}
    assert {bytes([b]) for b in range(256)} <= single


def test_half_a_surrogate_pair_becomes_a_replacement_character(v4: Tokenizer):
    assert v4.encode("a\ud800b").tolist() == v4.encode("a\ufffdb").tolist()
    assert v4.encode("\ud83d\ude42").tolist() == v4.encode("🙂").tolist()


def test_ids_are_found_by_text(v4: Tokenizer):
    assert v4.n_vocab == 129_280
    assert (v4.id("Hello"), v4.id("no such token")) == (19923, None)
    m = v4.markers
    assert (m.bos, m.eos, m.user, m.assistant) == (0, 1, 128803, 128804)
    assert (m.think, m.end_think, m.dsml, m.latest_reminder) == (128821, 128822, 128825, 128828)
    assert m.stops == {1, 128803, 128804}
    assert v4.is_special(128821)
    assert not v4.is_special(19923)


def small(tokens: list[str], special: list[str], merges: list[str]) -> Tokenizer:
    types = [1] * len(tokens) + [CONTROL if i % 2 else USER_DEFINED for i in range(len(special))]
    return Tokenizer(tokens + special, types, merges)


def test_special_ids_may_lie_anywhere():
    """ds4-tiny's vocabulary is another one; nothing here may know the release's numbers."""
    t = small(["a", "b", "ab", "Ġ"], MARKERS, ["a b"])
    assert t.encode("ab ba").tolist() == [2, 3, 1, 0]
    assert t.encode(f"ab{USER}b", trusted=True).tolist() == [2, t.markers.user, 1]


def test_a_missing_marker_is_named():
    t = small(["a", THINK], [m for m in MARKERS if m not in (THINK, EOS)], [])
    with pytest.raises(ModelFileError, match="no added token '<｜end▁of▁sentence｜>'"):
        _ = t.markers


def test_a_marker_that_is_an_ordinary_token_is_missing():
    t = small(["a", THINK], [m for m in MARKERS if m != THINK], [])
    with pytest.raises(ModelFileError, match="no added token '<think>'"):
        _ = t.markers


def test_defects_of_the_lists_are_named():
    with pytest.raises(ModelFileError, match=r"token_type has 1 entries, .* has 2"):
        Tokenizer(["a", "b"], [1], [])
    with pytest.raises(ModelFileError, match="ids 0 and 2 have the same text 'a'"):
        Tokenizer(["a", "b", "a"], [1, 1, 1], [])
    for merge in ("a c", "b a", "ab", "a  b", ""):
        with pytest.raises(ModelFileError, match="merges: entry 1 is"):
            Tokenizer(["a", "b", "ab"], [1, 1, 1], ["a b", merge])
