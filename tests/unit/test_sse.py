"""Pure parts of the API: events, bodies, and an answer while it is written."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4d.api import body, sse
from ds4d.api.answer import Answer, join
from ds4d.errors import RequestError
from ds4d.prompt.ask import Tool
from ds4d.prompt.toolcalls import CallArguments, CallStart, Content, Reader, Reasoning
from ds4d.sched.ticket import Done, Stats
from tests.daemon.script_runner import TOKENIZER, block_text, call_text, ids_of

TOOLS = (Tool(function={"name": "f"}),)
STATS = Stats(n_prompt=1)


def answer(*, thinking: bool = False, **kw) -> Answer:
    return Answer(Reader(TOKENIZER, thinking=thinking, tools=TOOLS), **kw)


def write(one: Answer, text: str, reason: str = "stop") -> list:
    deltas = []
    for token in ids_of(text):
        deltas += one.push(token)
        if one.finish is not None:
            return deltas
    stop_id = TOKENIZER.markers.eos if reason == "stop" else None
    return deltas + one.done(Done(reason, stop_id, STATS))


def test_an_event_is_one_line_of_utf8_whatever_it_holds():
    raw = sse.event({"a": 'é🙂\n\r\u2028"'})
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    assert b"\r" not in raw
    assert "é🙂".encode() in raw
    assert json.loads(raw[6:]) == {"a": 'é🙂\n\r\u2028"'}


@given(st.text(alphabet="abEND <\n", max_size=40), st.sampled_from([("END",), ("D", "EN"), ()]))
def test_content_with_stops_is_the_text_up_to_the_first_of_them(text, stops):
    one = answer(stop=stops)
    shown = "".join(d.text for d in write(one, text))
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        end = min(ends)
        matched = next(s for s in stops if text[:end].endswith(s))
        assert (shown, one.finish, one.stop_reason) == (text[: end - len(matched)], "stop", matched)
        assert end <= one.n_tokens <= len(text)  # the reader may have held the last ones
    else:
        assert (shown, one.finish) == (text, "stop")


_text = st.text(alphabet='ab"\\\n<>&é🙂', max_size=12)


@settings(max_examples=60)
@given(_text, st.dictionaries(st.sampled_from("xyz"), _text | st.integers(), max_size=3), _text)
def test_deltas_join_to_the_same_answer_however_they_are_cut(reasoning, parameters, content):
    text = f"{reasoning}</think>{content}" + block_text(call_text("f", **parameters))
    one, other = answer(thinking=True), answer(thinking=True)
    deltas, again = write(one, text), join(write(other, text))
    for kind, of in ((Reasoning, "text"), (Content, "text"), (CallArguments, "fragment")):
        whole = "".join(getattr(d, of) for d in deltas if isinstance(d, kind))
        assert whole == "".join(getattr(d, of) for d in again if isinstance(d, kind))
    assert one.finish == other.finish == "tool_calls"
    arguments = "".join(d.fragment for d in deltas if isinstance(d, CallArguments))
    assert json.loads(arguments) == parameters
    assert len(again) <= 4
    assert all(type(a) is not type(b) for a, b in pairwise(again))


def test_held_content_is_shown_before_a_call_begins():
    one = answer(stop=["END"])
    kinds = join(write(one, "x E" + block_text(call_text("f"))))
    assert kinds == [Content("x E"), CallStart(0, "f"), CallArguments(0, "{}")]


def test_the_limit_closes_nothing_on_the_models_behalf():
    one = answer()
    text = block_text(call_text("f", a="long text"))
    deltas = write(one, text[: text.index("text")], "length")
    assert (one.finish, one.n_calls) == ("length", 0)
    assert "".join(d.fragment for d in deltas if isinstance(d, CallArguments)) == '{"a": "long '


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=20))
def test_a_body_comes_out_as_it_went_in(value):
    for ascii_only in (True, False):
        try:
            raw = json.dumps({"v": value}, ensure_ascii=ascii_only).encode()
        except UnicodeEncodeError:
            continue
        assert body.parse(raw) == {"v": value}


def test_numbers_keep_their_kind_and_keys_their_order():
    parsed = body.parse(b'{"b": 1, "a": 1.0, "b": 2, "c": -0.0}')
    assert list(parsed.items()) == [("b", 2), ("a", 1.0), ("c", -0.0)]
    assert type(parsed["a"]) is float


def test_nesting_up_to_the_limit_is_fine():
    ok = b'{"a": ' + b"[" * 198 + b"]" * 198 + b"}"
    assert body.parse(ok)["a"]
    with pytest.raises(RequestError, match="200 levels"):
        body.parse(b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}")
