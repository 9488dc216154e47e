"""ds4-tiny's training data is laid out as serving lays prompts out; its words are kept apart."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ds4d.prompt import constants, render
from ds4d.prompt.ask import Ask, Call, Message, Tool
from ds4d.prompt.tokenizer import Tokenizer
from ops.tiny import catalog, mixture, tools
from ops.tiny.catalog import CatalogError, parse, parse_kind
from ops.tiny.dialogue import Dialogue, Turn
from ops.tiny.encode import BLOCK, PATH, Encoder, Plain, Rows, rendered
from ops.tiny.tasks import calls
from ops.tiny.tools.known import from_entry
from ops.tiny.words import Words, held_out

if TYPE_CHECKING:
    from collections.abc import Callable


def ask_of(d: Dialogue) -> Ask:
    messages = [Message(role="system", blocks=(d.system,))] if d.system else []
    n_calls = n_results = 0
    for turn in d.turns:
        if turn.role == "assistant":
            n_results = n_calls
            made = []
            for name, arguments in turn.calls:
                made.append(Call(id=f"c{n_calls}", name=name, arguments=json.dumps(arguments)))
                n_calls += 1
            blocks = (turn.text,) if turn.text else ()
            why = turn.reasoning or None
            messages.append(
                Message(role="assistant", blocks=blocks, reasoning=why, calls=tuple(made))
            )
        elif turn.role == "tool":
            messages.append(Message(role="tool", blocks=(turn.text,), call_id=f"c{n_results}"))
            n_results += 1
        else:
            messages.append(Message(role="user", blocks=(turn.text,)))
    declared = tuple(Tool(function=f) for f in d.tools)
    return Ask(messages=tuple(messages), tools=declared, thinking=d.thinking, effort=d.effort)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = json.loads(PATH.read_text("utf-8"))
    return Tokenizer(made["tokens"], made["types"], made["merges"])


def test_a_training_prompt_has_the_ids_of_the_served_prompt(
    encoder: Encoder, tokenizer: Tokenizer
) -> None:
    texts = constants.load()
    rng = random.Random(3)
    for n in range(300):
        d = mixture.draw(rng, unseen=bool(n % 2))
        if d.schema is not None:
            continue  # the renderer does not put response schemas into prompts yet
        for end in range(1, len(d.turns) + 1):
            if d.turns[end - 1].role == "assistant":
                continue
            opened = Dialogue(d.kind, d.turns[:end], d.system, d.tools, d.thinking, d.effort)
            served = render.tokenize(render.render(ask_of(opened), texts), tokenizer)
            ours, _ = encoder.pieces(rendered(opened, encoder.texts))
            assert ours == served.ids.tolist()


def test_an_answer_of_training_is_what_the_renderer_replays(
    encoder: Encoder, tokenizer: Tokenizer
) -> None:
    """The last turn too: a follow-up question behind it makes it history."""
    texts = constants.load()
    rng = random.Random(4)
    for _ in range(100):
        d = calls.tool_use(Words(rng))
        d.turns.append(Turn("user", "And now?"))
        served = render.tokenize(render.render(ask_of(d), texts), tokenizer)
        ours, _ = encoder.pieces(rendered(d, encoder.texts))
        assert ours == served.ids.tolist()


def test_a_response_schema_ends_the_head(encoder: Encoder) -> None:
    """spec/api.md 1.9."""
    d = Dialogue("json", [Turn("user", "Hi")], "Be brief.", schema={"type": "object"})
    ids, _ = encoder.dialogue(d)
    head = "Be brief.\n\n" + encoder.texts["response_format_head"] + '{"type": "object"}'
    assert head in encoder.decode(ids).partition("<｜User｜>")[0]


def test_a_run_of_letters_has_the_same_tokens_wherever_it_stands(encoder: Encoder) -> None:
    rng = random.Random(5)
    for _ in range(300):
        word = Words(rng).pseudo()
        alone = encoder.text(word)
        assert encoder.text(f"_{word}")[-len(alone) :] == alone
        assert encoder.text(f'"{word}')[-len(alone) :] == alone


def test_the_vocabulary_has_every_marker_and_no_merged_digits() -> None:
    made = json.loads(PATH.read_text("utf-8"))
    assert len(made["tokens"]) == len(set(made["tokens"])) == len(made["types"]) == 4096
    assert {"｜DSML｜", "<think>", "</think>", "<｜User｜>", "<｜Assistant｜>"} <= set(
        made["tokens"]
    )
    assert "<｜place▁holder▁no▁799｜>" in made["tokens"]
    assert not [t for t in made["tokens"] if re.search(r"\d\D*\d", t) and "｜" not in t]


def test_evaluation_uses_words_and_tools_that_training_never_draws() -> None:
    rng = random.Random(6)
    seen = {Words(rng).draw("word") for _ in range(3000)}
    unseen = {Words(rng, unseen=True).draw("word") for _ in range(3000)}
    assert seen and unseen and not seen & unseen
    assert all(map(held_out, unseen))
    known = {name for e in catalog.training() for name in e.names}
    assert not known & {name for e in catalog.held_out() for name in e.names}
    asked = {q.pieces for e in catalog.training() for q in e.requests}
    assert not asked & {q.pieces for e in catalog.held_out() for q in e.requests}


@pytest.mark.parametrize("make", [Words.novel, Words.scrambled, Words.pseudo])
def test_made_up_words_of_training_and_evaluation_never_meet(make: Callable[[Words], str]) -> None:
    rng = random.Random(8)
    assert not any(held_out(make(Words(rng))) for _ in range(2000))
    assert all(held_out(make(Words(rng, unseen=True))) for _ in range(500))


def test_half_of_what_training_draws_was_never_drawn_before() -> None:
    w = Words(random.Random(9))
    earlier = {w.any_word() for _ in range(20000)}
    new = sum(w.any_word() not in earlier for _ in range(2000))
    assert 700 < new < 1300


# --- the catalogue -------------------------------------------------------------------------------

STANZA = """
rent_car hire_car
  Rent a car / Car hire
  city|place: place -- The city
  ?size|class: small,very_large
  ?driver|who: {name: name, age: int}
  ?goods|load: [{count: small, item: thing}] as {count} {item}
  ?insured|safe: bool
  > A {size} car in {city}.
  > A car in {city} for {driver.name}, {driver.age}, insured. & insured=true
  > In {city} I have to carry {goods}.
  = status: [done,pending], code: code
"""


def test_a_stanza_of_the_catalogue_becomes_a_tool_with_a_right_call() -> None:
    (entry,) = parse(STANZA)
    assert entry.names == ("rent_car", "hire_car") and len(entry.params) == 5
    w = Words(random.Random(1))
    for _ in range(300):
        made = from_entry(w, entry)
        properties = made.function["parameters"]["properties"]
        assert set(made.arguments) <= set(properties)
        assert set(made.function["parameters"]["required"]) <= set(made.arguments)
        for v in made.arguments.values():
            said = v if isinstance(v, str) else ""
            plain = made.request.replace("_", " ").lower()
            assert said.replace("_", " ").lower() in plain


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("{size} car in {city}.", "{size} car.", "lacks the required city"),
        ("{size} car", "{weight} car", "no parameter 'weight'"),
        ("{driver.name}, {driver.age},", "{driver.name},", "needs all of"),
        ("& insured=true", "& insured=yes", "is no JSON"),
        ("& insured=true", '& insured="true"', "is no bool"),
        ("city|place: place", "city|place: planet", "is no kind"),
        ("as {count} {item}", "as {count}", "a pattern with all of"),
        ("{goods}", "{goods.item}", "others whole"),
    ],
)
def test_a_wrong_stanza_is_refused_with_what_is_wrong(right: str, wrong: str, says: str) -> None:
    assert right in STANZA
    with pytest.raises(CatalogError, match=re.escape(says)) as refused:
        parse(STANZA.replace(right, wrong), "a.txt")
    assert str(refused.value).startswith("a.txt: rent_car")


def test_a_value_that_begins_a_request_keeps_its_letters() -> None:
    text = "use_tool\n  Use it\n  code|id|ref: code\n  > {code} has to be used.\n  > Use {code}.\n"
    (entry,) = parse(text)
    w = Words(random.Random(2))
    for _ in range(300):
        made = from_entry(w, entry)
        (value,) = made.arguments.values()
        assert value in made.request and value in made.inside()


def test_kinds_nest() -> None:
    kind = parse_kind("{kind: a,b, many: [int]}")
    assert [(k, m.sort) for k, m in kind.members] == [("kind", "enum"), ("many", "list")]


# --- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unseen", [False, True])
def test_an_implied_tool_is_found_by_its_words_and_called_with_what_was_said(unseen: bool) -> None:
    w = Words(random.Random(10), unseen)
    for _ in range(500):
        made = tools.implied(w)
        shared = [word for word in made.words if word.lower() in made.request.lower()]
        assert any(word.lower() in made.text for word in shared)
        for value in made.arguments.values():
            for said in value if isinstance(value, list) else [value]:
                shown = str(said).replace("_", " ")
                assert isinstance(said, bool) or shown in made.request.replace("_", " ")
        properties = made.function["parameters"]["properties"]
        assert list(made.arguments) == [n for n in properties if n in made.arguments]


def test_a_declined_request_shares_no_own_word_with_the_tools() -> None:
    w = Words(random.Random(11))
    n = 0
    for _ in range(300):
        made = tools.several(w, 3)
        other = tools.stranger(w, made)
        if other is not None:
            n += 1
            said = " ".join(m.text for m in made)
            assert not [word for word in other.topics if word.lower() in said]
            assert all(other.name != m.name for m in made)
    assert n > 20


def test_tools_of_a_prompt_can_be_told_apart() -> None:
    w = Words(random.Random(12))
    for _ in range(200):
        made = tools.several(w, 5)
        assert len({m.name for m in made}) == 5
        for a in made:
            for b in made:
                assert a is b or a.origin is None or a.origin is not b.origin


def test_calls_of_an_answer_name_declared_tools_and_give_what_is_required() -> None:
    w = Words(random.Random(13))
    for make in (calls.parallel, calls.later_call, calls.tool_use):
        for _ in range(200):
            d = make(w)
            declared = {t["name"]: t["parameters"] for t in d.tools}
            for turn in d.turns:
                for name, arguments in turn.calls:
                    assert set(declared[name].get("required", ())) <= set(arguments)
                    assert set(arguments) <= set(declared[name]["properties"])


def test_parallel_calls_differ_and_stand_in_one_turn() -> None:
    w = Words(random.Random(14))
    for _ in range(200):
        made = calls.parallel(w).turns[-1].calls
        assert len(made) >= 2
        assert all(a != b for i, a in enumerate(made) for b in made[:i])


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "stage"), [(1024, 0.5), (8192, 0.0), (8192, 0.9)])
def test_a_row_holds_whole_dialogues_at_multiples_of_128(
    encoder: Encoder, length: int, stage: float
) -> None:
    source = Rows(random.Random(7), encoder, Plain(encoder, None), length)
    source.stage = stage
    for _ in range(8):
        ids, weights, owner = source.next()
        starts = np.flatnonzero(np.diff(owner, prepend=-1)) * BLOCK
        assert (ids[starts][ids[starts] != encoder.pad] == encoder.bos).all()
        assert ((weights == 0) | (weights > 0.01)).all()
        assert (ids[weights > 0.9] == encoder.eos).any()
