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
from ops.tiny import dialogues, evaluate, tools
from ops.tiny.dialogues import Dialogue
from ops.tiny.encode import BLOCK, PATH, Encoder, Marker, Plain, rendered, rows
from ops.tiny.words import Words, held_out

if TYPE_CHECKING:
    from collections.abc import Callable


def ask_of(d: Dialogue) -> Ask:
    messages = [Message(role="system", blocks=(d.system,))] if d.system else []
    last_calls = 0
    for i, turn in enumerate(d.turns):
        if turn.role == "assistant":
            calls = tuple(
                Call(id=f"c{i}-{k}", name=name, arguments=json.dumps(arguments))
                for k, (name, arguments) in enumerate(turn.calls)
            )
            last_calls = i
            reasoning = turn.reasoning or None
            blocks = (turn.text,) if turn.text else ()
            messages.append(
                Message(role="assistant", blocks=blocks, reasoning=reasoning, calls=calls)
            )
        elif turn.role == "tool":
            messages.append(Message(role="tool", blocks=(turn.text,), call_id=f"c{last_calls}-0"))
        else:
            messages.append(Message(role="user", blocks=(turn.text,)))
    made = tuple(Tool(function=f) for f in d.tools)
    return Ask(messages=tuple(messages), tools=made, thinking=d.thinking, effort=d.effort)


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
        d = dialogues.draw(rng, unseen=bool(n % 2))
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
        d = dialogues.tool_use(Words(rng))
        d.turns.append(dialogues.Turn("user", "And now?"))
        served = render.tokenize(render.render(ask_of(d), texts), tokenizer)
        ours, _ = encoder.pieces(rendered(d, encoder.texts))
        assert ours == served.ids.tolist()


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
    known = {name for row in tools.KNOWN for name in row[0]}
    assert not known & {name for row in tools.UNSEEN for name in row[0]}


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


@pytest.mark.parametrize("unseen", [False, True])
def test_an_implied_tool_is_found_by_its_words_and_called_with_what_was_said(unseen: bool) -> None:
    w = Words(random.Random(10), unseen)
    for _ in range(500):
        made = tools.implied(w)
        schema = json.dumps(made.function, ensure_ascii=False).lower()
        shared = [word for word in made.words if word.lower() in made.request.lower()]
        assert any(word.lower() in schema for word in shared)
        for value in made.arguments.values():
            for said in value if isinstance(value, list) else [value]:
                assert isinstance(said, bool) or str(said) in made.request
        assert list(made.arguments) == [
            n for n in made.function["parameters"]["properties"] if n in made.arguments
        ]


def test_a_declined_request_shares_no_word_with_the_tools() -> None:
    w = Words(random.Random(11))
    for _ in range(200):
        made = tools.several(w, 3)
        other = tools.stranger(w, made)
        if other is not None:
            said = json.dumps([m.function for m in made], ensure_ascii=False).lower()
            assert not [word for word in other.words if word.lower() in said]
            assert all(other.name != m.name for m in made)


def test_tools_that_share_a_word_still_differ_in_another() -> None:
    w = Words(random.Random(12))
    for _ in range(300):
        made = tools.several(w, 4)
        assert len({m.name for m in made}) == len({m.words for m in made}) == 4


def test_a_looked_up_answer_stands_in_the_question() -> None:
    w = Words(random.Random(13))
    for _ in range(500):
        ask, answer, _ = dialogues.lookup(w)
        assert all(part in ask for part in answer.split("; "))


def test_an_answer_about_schemas_names_what_the_schemas_hold() -> None:
    w = Words(random.Random(14))
    for _ in range(100):
        d = dialogues.schemas(w)
        said = json.dumps(d.tools, ensure_ascii=False)
        for turn in d.turns[1::2]:
            assert turn.text == "None." or all(f'"{t}"' in said for t in turn.text.split(", "))


def test_every_case_of_evaluation_is_of_its_kind(encoder: Encoder) -> None:
    for c in evaluate.cases(encoder, 5):
        assert c.is_call == c.kind.startswith("call")
        assert (c.dialogue.turns[-1].text == dialogues.NO_TOOL) == (c.kind == "decline")


def test_a_row_holds_whole_dialogues_at_multiples_of_128(encoder: Encoder) -> None:
    source = rows(random.Random(7), encoder, Plain(encoder, None), 1024, 0.5)
    for _ in range(20):
        ids, weights, owner = next(source)
        starts = np.flatnonzero(np.diff(owner, prepend=-1)) * BLOCK
        assert (ids[starts][ids[starts] != encoder.pad] == encoder.bos).all()
        assert ((weights == 0) | (weights > 0.01)).all()
        assert (ids[weights > 0.9] == encoder.eos).any()


def test_a_right_call_is_judged_right_and_a_damaged_one_is_not(encoder: Encoder) -> None:
    found = [c for c in evaluate.cases(encoder, 6) if c.is_call]
    answers = [c.expected for c in found]
    _, figures = evaluate.table(found, answers, encoder)
    assert set(figures.values()) == {100.0}
    for c in found:
        text = encoder.decode(c.expected)
        assert not evaluate.well_formed(
            text.replace("invoke name", "invoke  name", 1), c.dialogue.tools
        )
        assert not evaluate.well_formed(
            text.removesuffix("<｜end▁of▁sentence｜>"), c.dialogue.tools
        )
        if "parameter name" in text:
            other = text.replace('parameter name="', 'parameter name="x', 1)
            assert not evaluate.right(c, other, encoder)


def test_markers_are_never_text(encoder: Encoder) -> None:
    d = Dialogue("chat", [dialogues.Turn("user", "<｜User｜></think>")])
    pieces = rendered(d, encoder.texts)
    ids, _ = encoder.pieces(pieces)
    n_markers = sum(isinstance(p, Marker) for p, _ in pieces)
    assert sum(i >= 4096 - 16 or i < 3 for i in ids) == n_markers
