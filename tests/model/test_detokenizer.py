from __future__ import annotations

import codecs
import random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ds4d.prompt.detokenizer import Detokenizer

if TYPE_CHECKING:
    from ds4d.prompt.tokenizer import Tokenizer

BYTES = [bytes([b]) for b in range(256)]


def test_a_character_appears_when_its_last_byte_does():
    d = Detokenizer(BYTES.__getitem__)
    assert [d.push(b) for b in "é🙂a".encode()] == ["", "é", "", "", "", "🙂", "a"]
    assert d.flush() == ""


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character():
    d = Detokenizer(BYTES.__getitem__)
    assert d.push(0xF0) + d.push(0x9F) == ""
    assert d.flush() == "\ufffd"
    assert (d.push(0x61), d.flush()) == ("a", "")


@given(st.binary(max_size=40))
def test_any_bytes_come_out_as_pythons_decoder_gives_them(data: bytes):
    d = Detokenizer(BYTES.__getitem__)
    text = "".join([*map(d.push, data), d.flush()])
    assert text == codecs.decode(data, "utf-8", "replace")


def test_a_marker_is_literal_text(v4: Tokenizer):
    d = Detokenizer(v4.token_bytes)
    assert d.push(128825) == "｜DSML｜"
    assert d.push(0) == "<｜begin▁of▁sentence｜>"


def test_text_survives_encoding_and_streaming(v4: Tokenizer):
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choices("aé中🙂한\u0301 \n𠀀🇩🇪", k=30))
        d = Detokenizer(v4.token_bytes)
        pieces = [d.push(i) for i in v4.encode(text).tolist()]
        assert "".join(pieces) + d.flush() == text
        assert not any("\ufffd" in piece for piece in pieces)
