"""The reader of what the model writes: spec/api.md 1.10, 2.3 (arguments) and 4.7."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4d.prompt import constants
from ds4d.prompt.arguments import as_parameters, dumps, parameter_kinds
from ds4d.prompt.ask import Ask, Call, Message, Tool
from ds4d.prompt.render import render
from ds4d.prompt.toolcalls import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    End,
    Event,
    Phase,
    Reader,
    Reasoning,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ds4d.prompt.tokenizer import Tokenizer

    Read = Callable[..., "Said"]

EOS = "<｜end▁of▁sentence｜>"
MARKER = re.compile(r"<｜[^｜]*｜>|</?think>|｜DSML｜")

F = Tool(
    function={
        "name": "f",
        "parameters": {
            "type": "object",
            "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
            "properties": {
                "s": {"type": "string"},
                "i": {"type": "integer"},
                "x": {"type": "number"},
                "b": {"type": "boolean"},
                "a": {"type": "array"},
                "o": {"type": "object"},
                "sn": {"type": ["string", "null"]},
                "in": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "e": {"enum": ["one", "two"]},
                "c": {"const": 5},
                "r": {"$ref": "#/$defs/count"},
                "l": {"$ref": "#/$defs/loop"},
                "n": {"type": "integer", "nullable": True},
                "all": {"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]},
                "both": {"allOf": [{"type": "number"}, {"type": "integer"}]},
                "any": {},
            },
        },
    }
)
G = Tool(function={"name": "g"})


class Said:
    """The events of one turn, put together as a client does."""

    def __init__(self, events: list[Event]) -> None:
        self.reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        self.content = "".join(e.text for e in events if isinstance(e, Content))
        self.names = [e.name for e in events if isinstance(e, CallStart)]
        self.arguments = ["" for _ in self.names]
        for e in events:
            if isinstance(e, CallArguments):
                self.arguments[e.index] += e.fragment
        self.n_whole = sum(isinstance(e, CallEnd) for e in events)
        ends = [e for e in events if isinstance(e, End)]
        assert len(ends) <= 1
        assert not ends or events[-1] is ends[0]
        self.end = ends[0] if ends else None
        check_order(events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Said) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))

    __hash__ = None  # type: ignore[assignment]


def check_order(events: list[Event]) -> None:
    """reasoning* content* (start arguments* end)* End, with indices 0, 1, 2 …"""
    letter = dict(
        zip((Reasoning, Content, CallStart, CallArguments, CallEnd, End), "rcsae.", strict=True)
    )
    order = "".join(letter[type(e)] for e in events)
    assert re.fullmatch(r"r*c*(sa+e)*(sa*)?\.?", order), order
    index = -1
    for e in events:
        match e:
            case CallStart():
                index += 1
                assert e.index == index
            case CallArguments() | CallEnd():
                assert e.index == index
            case Reasoning() | Content():
                assert e.text
    assert all(e.fragment for e in events if isinstance(e, CallArguments))


def ids_of(v4: Tokenizer, text: str, split: random.Random | None = None) -> list[int]:
    """Ids for `text` with its markers as ids; with `split`, in odd tokens of any bytes."""
    if split is None:
        return v4.encode(text, trusted=True).tolist()
    byte = {v4.token_bytes(i): i for i in range(3, 400)}
    ids: list[int] = []
    at = 0
    for marker in [*MARKER.finditer(text), None]:
        data = text[at : marker.start() if marker else len(text)].encode()
        while data:
            part, data = data[: (n := split.randint(1, 9))], data[n:]
            try:
                ids += v4.encode(part.decode()).tolist()
            except UnicodeDecodeError:
                ids += [byte[part[i : i + 1]] for i in range(len(part))]
        if marker:
            token = v4.id(marker.group())
            assert token is not None
            ids.append(token)
            at = marker.end()
    return ids


@pytest.fixture
def read(v4: Tokenizer) -> Callable[..., Said]:
    """Read a text in which markers are ids, in several divisions into tokens that must agree."""

    def read(text: str, *, thinking: bool = False, cut: bool = False, **rest: Any) -> Said:
        rest = {"tools": (F, G)} | rest
        results = []
        for split in (None, random.Random(1), random.Random(2)):
            reader = Reader(v4, thinking=thinking, **rest)
            events = [e for i in ids_of(v4, text, split) for e in reader.push(i)]
            results.append(Said(events + reader.finish(cut=cut)))
            assert reader.phase is Phase.END
        assert results[0] == results[1] == results[2]
        return results[0]

    return read


def param(key: str, string: str | None, value: str) -> str:
    flag = f' string="{string}"' if string else ""
    return f'<｜DSML｜parameter name="{key}"{flag}>{value}</｜DSML｜parameter>\n'


def invoke(name: str, *params: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "".join(params) + "</｜DSML｜invoke>\n"


def block(*invokes: str) -> str:
    return "\n\n<｜DSML｜tool_calls>\n" + "".join(invokes) + "</｜DSML｜tool_calls>"


OPEN_STRING = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="true">'
)
STOP, CALLS, LENGTH = End(finish="stop"), End(finish="tool_calls"), End(finish="length")
FAILED = End(finish="stop", tool_parse_failed=True)


# --- reasoning and content ------------------------------------------------------------------------


def test_a_plain_answer_is_content(read: Read):
    said = read("Hello.\n\nBye \n" + EOS)
    assert (said.content, said.reasoning, said.end) == ("Hello.\n\nBye \n", "", STOP)


def test_reasoning_ends_at_its_marker_and_both_are_verbatim(read: Read):
    said = read("\n r1\n\n</think>\n\nc \n" + EOS, thinking=True)
    assert (said.reasoning, said.content, said.end) == ("\n r1\n\n", "\n\nc \n", STOP)


def test_an_end_inside_reasoning_is_a_stop_without_content(read: Read):
    said = read("only thoughts \n" + EOS, thinking=True)
    assert (said.reasoning, said.content, said.end) == ("only thoughts \n", "", STOP)


def test_further_think_markers_are_never_shown(read: Read):
    said = read("<think>a<think>b</think>c<think>d</think>\n\n" + EOS, thinking=True)
    assert (said.reasoning, said.content) == ("ab", "cd\n\n")


@pytest.mark.parametrize("marker", ["<｜User｜>", "<｜Assistant｜>", EOS])
def test_a_turn_marker_ends_the_turn(read: Read, marker: str):
    said = read(f"done{marker}more")
    assert (said.content, said.end) == ("done", STOP)


def test_nothing_comes_after_the_end(v4: Tokenizer):
    reader = Reader(v4, thinking=False)
    assert reader.push(v4.markers.eos) == [STOP]
    assert reader.push(19923) == []
    assert reader.finish() == []


def test_a_held_tail_is_flushed_at_the_end(read: Read):
    for tail in ("2 <", "x\n\n<", "a\n\n\n", "<tool_calls", "<tool_calls>\n<invoke", "</", "<|DSM"):
        assert read(tail + EOS).content == tail
        assert read(tail, cut=True).content == tail
        assert read(tail, thinking=True, cut=True).reasoning == tail


def test_only_a_possible_start_of_a_block_is_held(v4: Tokenizer):
    reader = Reader(v4, thinking=False, tools=(F,))
    shown = [reader.push(i) for text in ("a", " b", "\n\n", "<", " c") for i in v4.encode(text)]
    assert shown == [[Content("a")], [Content(" b")], [], [], [Content("\n\n< c")]]


def test_the_token_limit_is_a_length_stop(read: Read):
    assert read("abc", cut=True).end == LENGTH
    assert read("abc", cut=True, thinking=True).end == LENGTH


def test_characters_split_over_tokens_come_out_whole(read: Read):
    text = "é🙂한中" * 5
    said = read(
        f"{text}</think>{text}{block(invoke('f', param('s', 'true', text)))}", thinking=True
    )
    assert (said.reasoning, said.content) == (text, text)
    assert said.arguments == ['{"s": "' + text + '"}']


def test_half_a_character_becomes_a_replacement_at_each_border(v4: Tokenizer):
    half = v4.id("ð")
    assert half is not None
    assert v4.token_bytes(half) == b"\xf0"
    reader = Reader(v4, thinking=True)
    ids = [half, v4.markers.end_think, half, v4.markers.dsml, half]
    events = [e for i in ids for e in reader.push(i)] + reader.finish()
    assert (Said(events).reasoning, Said(events).content) == ("\ufffd", "\ufffd｜DSML｜\ufffd")


def test_reasoning_tokens_are_counted_with_their_closing_marker(v4: Tokenizer):
    reader = Reader(v4, thinking=True)
    for i in v4.encode("one two</think>three", trusted=True):
        reader.push(int(i))
    assert reader.n_reasoning_tokens == 3


# --- calls ----------------------------------------------------------------------------------------


def test_a_call_after_text(read: Read):
    said = read("Let me see. \n" + block(invoke("f", param("s", "true", "Rome"))) + EOS)
    assert (said.content, said.names, said.arguments) == ("Let me see.", ["f"], ['{"s": "Rome"}'])
    assert (said.n_whole, said.end) == (1, CALLS)


def test_several_calls_have_their_own_indices(read: Read):
    said = read(block(*[invoke("f", param("i", "false", str(n))) for n in range(3)]))
    assert said.arguments == ['{"i": 0}', '{"i": 1}', '{"i": 2}']
    assert said.n_whole == 3


def test_the_turn_is_over_after_the_block_without_an_eos(v4: Tokenizer):
    reader = Reader(v4, thinking=False, tools=(F,))
    events = [e for i in ids_of(v4, block(invoke("f")) + "more") for e in reader.push(i)]
    assert events[-1] == CALLS
    assert Said(events).content == ""


def test_a_call_without_parameters_with_and_without_its_empty_line(read: Read):
    for inside in ("\n", "\n\n", ""):
        said = read(block(f'<｜DSML｜invoke name="now">{inside}</｜DSML｜invoke>\n'))
        assert (said.names, said.arguments, said.end) == (["now"], ["{}"], CALLS)


def test_the_opener_needs_no_empty_line_in_content(read: Read):
    for before in ("", "text", "text\n", "text <"):
        said = read(before + block(invoke("g")).lstrip())
        assert (said.content, said.end) == (before.rstrip(), CALLS)


def test_blanks_between_tags_are_free(read: Read):
    said = read(
        block(invoke("f", param("i", "false", "1"), param("s", "true", " x\n"))).replace("\n", "")
    )
    assert said.arguments == ['{"i": 1, "s": " x"}']
    said = read(block(invoke("f", param("i", "false", "1"))).replace(">\n", ">\n \n\n"))
    assert (said.arguments, said.end) == (['{"i": 1}'], CALLS)


def test_a_string_argument_is_exact(read: Read):
    value = 'a && b < c > "d"\n\\u0041 &lt; </parameter> </ <｜ ]]> \t\x00 ¶ '
    said = read(block(invoke("f", param("s", "true", value))))
    assert json.loads(said.arguments[0]) == {"s": value}


def test_the_escaped_closing_tag_comes_back(read: Read):
    said = read(
        block(invoke("f", param("s", "true", "x&lt;/｜DSML｜parameter>y&lt;/｜DSML｜p&lt;")))
    )
    assert json.loads(said.arguments[0]) == {"s": "x</｜DSML｜parameter>y&lt;/｜DSML｜p&lt;"}


def test_a_marker_inside_a_value_is_text(read: Read):
    said = read(block(invoke("f", param("s", "true", "</think>｜DSML｜<｜DSML｜invoke>"))))
    assert json.loads(said.arguments[0]) == {"s": "</think>｜DSML｜<｜DSML｜invoke>"}


def test_a_quoted_closing_tag_in_ordinary_tokens_closes_nothing(v4: Tokenizer):
    reader = Reader(v4, thinking=False, tools=(F,))
    start = ids_of(
        v4,
        OPEN_STRING,
    )
    quoted = v4.encode("</｜DSML｜parameter>").tolist()
    end = ids_of(v4, "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>")
    said = Said([e for i in start + quoted + end for e in reader.push(i)])
    assert json.loads(said.arguments[0]) == {"s": "</｜DSML｜parameter>"}


def test_strings_stream_and_other_values_wait_for_their_end(v4: Tokenizer):
    reader = Reader(v4, thinking=False, tools=(F,))
    text = OPEN_STRING
    for i in ids_of(v4, text):
        reader.push(i)
    shown = [reader.push(i) for i in v4.encode("one two three").tolist()]
    assert shown == [[CallArguments(0, part)] for part in ("one", " two", " three")]
    for i in ids_of(v4, '</｜DSML｜parameter>\n<｜DSML｜parameter name="a" string="false">'):
        reader.push(i)
    assert not any(reader.push(i) for i in v4.encode("[1, 2").tolist())
    events = [e for i in ids_of(v4, ", 3]</｜DSML｜parameter>") for e in reader.push(i)]
    assert events == [CallArguments(0, "[1, 2, 3]")]


def test_json_is_kept_as_the_model_wrote_it(read: Read):
    said = read(block(invoke("f", param("o", "false", '{"a" :[1,2.50],\n"é":"\\u00e9"}'))))
    assert said.arguments == ['{"o": {"a" :[1,2.50],\n"é":"\\u00e9"}}']


CONVERSIONS = [
    # key, flag, text, JSON
    ("i", "true", "5", "5"),
    ("i", "true", "five", '"five"'),
    ("i", "true", "5.0", "5.0"),
    ("i", "true", "5.5", '"5.5"'),
    ("x", "true", "5", "5"),
    ("b", "true", "true", "true"),
    ("b", "true", "True", '"True"'),
    ("b", "true", "1", '"1"'),
    ("i", "true", "true", '"true"'),
    ("a", "true", "[1, 2]", "[1, 2]"),
    ("o", "true", '{"k": "v"}', '{"k": "v"}'),
    ("o", "true", "[]", '"[]"'),
    ("in", "true", "null", "null"),
    ("c", "true", "5", "5"),
    ("r", "true", "5", "5"),
    ("n", "true", "null", "null"),
    ("all", "true", "7", "7"),
    ("both", "true", "7", "7"),
    ("s", "true", "5", '"5"'),
    ("sn", "true", "null", '"null"'),
    ("e", "true", "one", '"one"'),
    ("any", "true", "5", '"5"'),
    ("l", "true", "5", '"5"'),
    ("unknown", "true", "5", '"5"'),
    ("s", "false", "hello", '"hello"'),
    ("s", "false", "5", '"5"'),
    ("s", "false", '"quoted"', '"quoted"'),
    ("s", "false", "null", '"null"'),
    ("sn", "false", "null", "null"),
    ("e", "false", "two", '"two"'),
    ("i", "false", '"5"', '"5"'),
    ("i", "false", "[1", '"[1"'),
    ("any", "false", "NaN", '"NaN"'),
    ("any", "false", "1e999", '"1e999"'),
    ("any", "false", "[" * 5000, '"' + "[" * 5000 + '"'),
    ("any", "false", " 5 ", " 5 "),
    ("any", "false", "", '""'),
    ("s", None, "5", '"5"'),
    ("i", None, "5", "5"),
    ("any", None, "[5]", "[5]"),
    ("any", None, "word", '"word"'),
]


@pytest.mark.parametrize(("key", "flag", "text", "expected"), CONVERSIONS)
def test_the_schema_decides_when_the_flag_contradicts_it(
    read: Read, key: str, flag: str | None, text: str, expected: str
):
    said = read(block(invoke("f", param(key, flag, text))))
    assert said.arguments == [f'{{"{key}": {expected}}}']
    json.loads(said.arguments[0])


def test_the_last_of_a_repeated_parameter_counts(read: Read):
    said = read(
        block(
            invoke("f", param("s", "true", "a"), param("i", "false", "1"), param("s", "true", "b"))
        )
    )
    assert json.loads(said.arguments[0]) == {"s": "b", "i": 1}
    assert said.end == End(finish="tool_calls", n_duplicates=1)


def test_an_unknown_tool_is_the_clients_business(read: Read):
    said = read(block(invoke("mcp__no.such-tool", param("k", "true", "v"))))
    assert (said.names, said.arguments) == (["mcp__no.such-tool"], ['{"k": "v"}'])


@pytest.mark.parametrize("key", ["$filter", "first name", "größe"])
def test_a_parameter_may_have_any_name_that_its_tag_can_hold(read: Read, key: str):
    said = read(block(invoke("f", param(key, "true", "v"))))
    assert said.arguments == [json.dumps({key: "v"}, ensure_ascii=False)]


def test_a_schema_whose_references_branch_without_end_is_read_at_once():
    """Every path of such a graph once would hold up everybody for hours."""

    def twelve(name: str) -> dict[str, object]:
        return {"anyOf": [{"$ref": f"#/$defs/{name}"} for _ in range(12)]}

    loop = {"properties": {"k": twelve("a")}, "$defs": {"a": twelve("a")}}
    assert parameter_kinds(loop, "k") is None
    steps = {f"s{n}": twelve(f"s{n + 1}") for n in range(6)} | {"s6": {"type": "string"}}
    assert parameter_kinds({"properties": {"k": twelve("s0")}, "$defs": steps}, "k") == {"string"}


# --- DSML in reasoning ----------------------------------------------------------------------------


def test_the_very_opener_in_reasoning_closes_it(read: Read):
    for before in ("Need it.\n", "Need it. \n\n", "\n", ""):
        said = read(before + block(invoke("g")).lstrip(), thinking=True)
        assert (said.reasoning, said.content, said.names) == (before.rstrip(), "", ["g"])
        assert said.end == CALLS


@pytest.mark.parametrize(
    "quoted",
    [
        "the tag <｜DSML｜tool_calls>\n opens",
        "x<｜DSML｜tool_calls>\n",
        "x\n<｜DSML｜tool_calls> y",
        "x\n <｜DSML｜tool_calls>\n",
        'x\n<｜DSML｜invoke name="g">\n',
        "a lone ｜DSML｜ and <｜DSML｜",
        "<tool_calls>\n<invoke name='g'>\n",
    ],
)
def test_other_dsml_in_reasoning_stays_text(read: Read, quoted: str):
    said = read(f"{quoted}</think>ok", thinking=True)
    assert (said.reasoning, said.content, said.names, said.end) == (quoted, "ok", [], STOP)


@pytest.mark.parametrize("rest", [{"tools": ()}, {"tool_choice": "none"}])
def test_without_permission_an_opener_in_reasoning_is_text(read: Read, rest: dict[str, Any]):
    text = "x" + block(invoke("g"))
    said = read(text, thinking=True, **rest)
    assert (said.reasoning, said.names, said.end) == (text, [], STOP)


# --- blocks that should not be, or are not whole --------------------------------------------------


@pytest.mark.parametrize("rest", [{"tools": ()}, {"tool_choice": "none"}])
def test_without_permission_a_block_ends_the_answer_unread(read: Read, rest: dict[str, Any]):
    said = read("text" + block(invoke("g")), **rest)
    assert (said.content, said.names, said.end) == ("text", [], FAILED)


def test_without_permission_loose_tags_are_text(read: Read):
    text = '<tool_calls>\n<invoke name="g">\n</invoke>\n</tool_calls>'
    assert read(text, tools=()).content == text


@pytest.mark.parametrize("spelling", ["DSML｜", "｜DSML", "|DSML|", ""])
def test_loose_spellings_are_read_when_tools_are_declared(read: Read, spelling: str):
    text = block(
        invoke("f", param("s", "true", "a </｜DSML｜parameter> b"), param("i", "false", "1")),
        invoke("g"),
    )
    loose = text.replace("｜DSML｜", spelling).replace(
        f"a </{spelling}parameter>", "a </｜DSML｜parameter>"
    )
    said = read("Sure." + loose)
    assert (said.content, said.names, said.end) == ("Sure.", ["f", "g"], CALLS)
    assert [json.loads(a) for a in said.arguments] == [
        {"s": "a </｜DSML｜parameter> b", "i": 1},
        {},
    ]


def test_somebodys_xml_is_content(read: Read):
    for text in (
        "<tool_calls>\n<item/>",
        "a <tool_calls> b",
        "<tool_calls>\n<invoked>",
        "x <invoke ",
    ):
        assert read(text + EOS).content == text


def test_a_quotation_in_ordinary_tokens_is_content(v4: Tokenizer):
    """A file that shows the markup was read as plain text; repeating it must not run it."""
    reader = Reader(v4, thinking=False, tools=(F, G))
    text = "see:" + block(invoke("g"))
    events = [e for i in v4.encode(text).tolist() for e in reader.push(i)] + reader.finish()
    assert (Said(events).content, events[-1]) == (text, STOP)


@pytest.mark.parametrize(
    ("tail", "arguments"),
    [
        ('<｜DSML｜parameter name="s" string="true">half', '{"s": "half"}'),
        ('<｜DSML｜parameter name="s" string="true">half</｜DSML｜para', '{"s": "half"}'),
        ('<｜DSML｜parameter name="s" string="true">half </', '{"s": "half </"}'),
        ('<｜DSML｜parameter name="s" string="true">half &lt;/｜DSML', '{"s": "half &lt;/｜DSML"}'),
        ('<｜DSML｜parameter name="i" string="false">5', '{"i": 5}'),
        ('<｜DSML｜parameter name="i" string="false">5</｜DSML｜parameter>', '{"i": 5}'),
        ("", "{}"),
        ("</", "{}"),
        ("</｜DSML｜invoke>\n", "{}"),
        ("</｜DSML｜invoke>\n</｜DSML｜tool", "{}"),
    ],
)
def test_missing_closing_tags_are_supplied_at_the_models_end(read: Read, tail: str, arguments: str):
    said = read('x\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n' + tail + EOS)
    assert (said.content, said.arguments, said.n_whole, said.end) == ("x", [arguments], 1, CALLS)


def test_a_cut_call_is_never_made_whole(read: Read):
    text = block(invoke("f", param("s", "true", "whole file")), invoke("g"))
    start = text.index("file")
    said = read(text[:start], cut=True)
    assert (said.arguments, said.n_whole, said.end) == (['{"s": "whole '], 0, LENGTH)
    said = read(text.removesuffix("</｜DSML｜invoke>\n</｜DSML｜tool_calls>"), cut=True)
    assert (said.names, said.n_whole, said.end) == (["f", "g"], 1, LENGTH)


@pytest.mark.parametrize(
    "broken",
    [
        "<｜DSML｜",
        "<｜DSML｜tool_ca",
        "<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>',
        "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls>\nfree text",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke>",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="">',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="a b">',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="g',
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke " + "x" * 600,
        '<｜DSML｜tool_calls>\n<invoke name="g">\n',
    ],
)
def test_a_block_that_cannot_be_read_is_dropped_and_never_shown(read: Read, broken: str):
    said = read("before \n\n" + broken + EOS)
    assert (said.content, said.names, said.end) == ("before", [], FAILED)


def test_a_tag_without_an_end_fails_at_once(v4: Tokenizer):
    """Not at the token limit: everything up to there would be lost time."""
    reader = Reader(v4, thinking=False, tools=(F,))
    text = "<｜DSML｜tool_calls>\n<｜DSML｜invoke " + "x " * 600
    assert FAILED in [e for i in ids_of(v4, text) for e in reader.push(i)]


@pytest.mark.parametrize(
    "broken",
    [
        "free text",
        '<｜DSML｜parameter name="x<y" string="true">',
        '<｜DSML｜parameter name="x" string="maybe">',
        "</｜DSML｜tool_calls>",
        "</parameter>",
    ],
)
def test_an_error_inside_a_call_leaves_it_open_and_keeps_those_before(read: Read, broken: str):
    said = read(block(invoke("g"), f'<｜DSML｜invoke name="f">\n{broken}') + EOS)
    assert (said.names, said.n_whole) == (["g", "f"], 1)
    assert said.end == End(finish="tool_calls", tool_parse_failed=True)


# --- round trip -----------------------------------------------------------------------------------

TINY = constants.load()
NAMES = st.from_regex(r"[A-Za-z0-9_.:/-]{1,20}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20) | st.text(
    '<>&;/ltDSML｜\n"\\ ', max_size=12
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3), TEXTS, st.randoms())
@example(
    [("f", {"a": "x</｜DSML｜parameter>y", "b": ["</｜DSML｜parameter>"]})], "", random.Random(0)
)
def test_rendered_calls_are_read_back(
    v4: Tokenizer, calls: list[tuple[str, dict[str, Any]]], content: str, split: random.Random
):
    """calls → prompt → tokens of any shape → the same calls; and JSON as non-stream answers it."""
    history = Message(
        role="assistant",
        blocks=(content,),
        calls=tuple(
            Call(id=str(n), name=name, arguments=json.dumps(a)) for n, (name, a) in enumerate(calls)
        ),
    )
    user = Message(role="user", blocks=("q",))
    pieces = render(Ask(messages=(user, history, user)), TINY).pieces
    starts = [i for i, piece in enumerate(pieces) if piece.text == "<｜Assistant｜>"]
    ids: list[int] = []
    for piece in pieces[starts[0] + 2 : starts[1]]:  # behind </think>
        if piece.kind == "marker":
            token = v4.id(piece.text)
            assert token is not None
            ids.append(token)
        else:
            ids += ids_of_plain(v4, piece.text, split)
    reader = Reader(v4, thinking=False, tools=(G,))
    said = Said([e for i in ids for e in reader.push(i)])
    assert said.content == content.rstrip()
    assert said.names == [name for name, _ in calls]
    assert [json.loads(text) for text in said.arguments] == [a for _, a in calls]
    assert said.arguments == [as_written(a) for _, a in calls]
    assert said.end == CALLS


def as_written(arguments: dict[str, Any]) -> str:
    parts = (
        f"{dumps(p.key)}: {dumps(arguments[p.key]) if p.is_string else p.text}"
        for p in as_parameters(json.dumps(arguments))
    )
    return "{" + ", ".join(parts) + "}"


def ids_of_plain(v4: Tokenizer, text: str, split: random.Random) -> list[int]:
    cuts = sorted(split.randint(0, len(text)) for _ in range(3))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [i for part in parts for i in v4.encode(part).tolist()]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *(
                    "<",
                    ">",
                    "\n",
                    " ",
                    "｜DSML｜",
                    "</think>",
                    "<think>",
                    "tool_calls>",
                    "invoke",
                    "/",
                ),
                *(
                    ' name="f"',
                    ' name="s" string="true"',
                    "parameter",
                    "x",
                    "5",
                    "&lt;",
                    "|DSML|",
                    EOS,
                ),
                *(
                    "\n\n<｜DSML｜tool_calls>\n",
                    '<｜DSML｜invoke name="f">\n',
                    "</｜DSML｜invoke>\n",
                ),
                *('<｜DSML｜parameter name="i" string="false">', "</｜DSML｜parameter>\n"),
            ]
        ),
        max_size=25,
    ),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_any_token_salad_reads_the_same_in_any_division(
    v4: Tokenizer, parts: list[str], thinking: bool, cut: bool, split: random.Random
):
    text = "".join(parts)
    results = []
    for ids in (ids_of(v4, text), ids_of(v4, text, split)):
        reader = Reader(v4, thinking=thinking, tools=(F,))
        results.append(Said([e for i in ids for e in reader.push(i)] + reader.finish(cut=cut)))
    assert results[0] == results[1]
    said = results[0]
    assert said.end is not None
    for arguments in said.arguments[: said.n_whole]:
        assert isinstance(json.loads(arguments), dict)
    assert "<｜DSML｜" not in said.content
