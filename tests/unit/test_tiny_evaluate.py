"""What is right of ds4-tiny's answers to held-out prompts, what is not, and how it is counted."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ds4d.engine import Frontier, Prefill, Prefilled, Verified, VerifyWork
from ds4d.model import embedded
from ds4d.prompt import constants
from ds4d.prompt.tokenizer import Tokenizer
from ops.tiny import catalog
from ops.tiny.dialogue import Dialogue, Turn
from ops.tiny.encode import PATH, Encoder
from ops.tiny.evaluate import decoders, judges
from ops.tiny.evaluate.answers import Answers
from ops.tiny.evaluate.cases import (
    LENGTHS,
    NEEDLES,
    TASKS,
    Case,
    Trained,
    cases,
    dialogues,
    filler,
    needles,
    small,
)
from ops.tiny.evaluate.decoders import Lanes, Question, alike, bundles
from ops.tiny.evaluate.served import Said, Served
from ops.tiny.evaluate.table import Count, aggregates, interval, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EOS = "<｜end▁of▁sentence｜>"


def never(word: str) -> bool:
    return False


def always(word: str) -> bool:
    return True


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture(scope="module")
def file() -> Served:
    return Served.of_file(embedded.path())


@pytest.fixture(scope="module")
def trained() -> Served:
    made = json.loads(PATH.read_text("utf-8"))
    return Served(Tokenizer(made["tokens"], made["types"], made["merges"]), constants.load())


@pytest.fixture(scope="module")
def letters() -> Served:
    """Another vocabulary: every byte by itself."""
    made = json.loads(PATH.read_text("utf-8"))
    return Served(Tokenizer(made["tokens"], made["types"], []), constants.load())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain text as texts.py leaves it, of one passage in twenty that training never sees."""
    at = tmp_path_factory.mktemp("texts")
    r = random.Random(1)
    some = "and the of earth heaven light water day night upon made that it was good him".split()

    def passage() -> str:
        return " ".join(
            " ".join(r.choices(some, k=r.randint(5, 25))).capitalize() + "." for _ in range(9)
        )

    lines = [passage() for _ in range(1600)]
    (at / "kjv.txt").write_text("\n".join(lines) + "\n")
    (at / "chat.txt").write_text("Hello. Good day.\n")
    return at


@pytest.fixture(scope="module")
def text(folder: Path) -> tuple[str, ...]:
    return filler(folder)


# --- judges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASKS)
def test_the_right_answer_of_every_task_is_judged_right_in_any_vocabulary(
    kind: str, file: Served, letters: Served
) -> None:
    for served in (file, letters):
        for c in cases(kind, 4, served, ()):
            said = served.read(c.expected, c.dialogue)
            verdict = judges.judge(kind, c.dialogue, said, always)
            assert verdict.right and verdict.formed is not False
            assert (verdict.formed is None) == (
                not c.dialogue.turns[-1].calls and kind not in ("json", "json schema", "paragraph")
            )


def test_an_answer_that_was_cut_off_is_never_right(file: Served) -> None:
    for kind in TASKS:
        for c in cases(kind, 2, file, ()):
            said = file.read(c.expected[:-1], c.dialogue)
            verdict = judges.judge(kind, c.dialogue, said, always)
            assert not verdict.right and not verdict.formed


def test_both_files_are_asked_the_same(file: Served, letters: Served) -> None:
    for kind in ("call, 5-8 tools", "result", "json schema"):
        one, other = (cases(kind, 5, served, ()) for served in (file, letters))
        assert [c.dialogue for c in one] == [c.dialogue for c in other]
        assert all(len(a.prompt) < len(b.prompt) for a, b in zip(one, other, strict=True))


def test_a_prompt_of_evaluation_has_the_ids_of_training(trained: Served, encoder: Encoder) -> None:
    """The response schema and its place included."""
    ours = Trained(encoder)
    for kind in TASKS:
        for d in dialogues(kind, 5):
            assert trained.prompt(d).tolist() == ours.prompt(d)
            assert trained.answer(d).tolist() == ours.answer(d)


def test_a_schema_behind_tools_is_refused(trained: Served) -> None:
    d = Dialogue("x", [Turn("user", "Hi"), Turn("assistant", "{}")], "", [{"name": "a"}],
                 schema={"type": "object"})  # fmt: skip
    with pytest.raises(ValueError, match="tools"):
        trained.prompt(d)


TOOL = {
    "name": "book_pitch",
    "parameters": {
        "type": "object",
        "properties": {
            "site": {"type": "string"},
            "nights": {"type": "integer", "minimum": 1},
            "shelter": {"type": "string", "enum": ["tent", "van"]},
            "power": {"type": "boolean"},
            "campers": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                    "required": ["name", "age"],
                },
            },
        },
        "required": ["site", "nights"],
    },
}
ARGUMENTS = {"site": "Graz", "nights": 3, "shelter": "van", "power": True,
             "campers": [{"name": "Ada", "age": 7}]}  # fmt: skip


def call_of(served: Served, calls: list[tuple[str, dict[str, Any]]], **head: Any) -> Case:
    d = Dialogue("call", [Turn("user", "Go."), Turn("assistant", "", calls, "It fits.")], "",
                 [TOOL, {"name": "stop", "parameters": {"type": "object", "properties": {}}}],
                 **head)  # fmt: skip
    return Case("call", d, served.prompt(d), served.answer(d))


def answered(served: Served, c: Case, written: str) -> judges.Verdict:
    said = served.read(served.tokenizer.encode(written, trusted=True), c.dialogue)
    return judges.judge(c.kind, c.dialogue, said, always)


DAMAGES = [  # what is replaced, by what, still well-formed
    (">3<", ">4<", True), (">Graz<", ">Graz <", True), (">van<", ">tent<", True),
    (">true<", ">false<", True), ('"age": 7', '"age": 8', True),
    (">van<", ">boat<", False), (">3<", ">three<", False), (">3<", ">0<", False),
    (">3<", ">3.5<", False), (">true<", ">1<", False), ('"age": 7', '"age": "7"', False),
    (', "age": 7', "", False), ('invoke name="book', 'invoke name="cook', False),
    ('name="power"', 'name="powers"', False), ("</｜DSML｜invoke>\n", "", False),
    ("\n</｜DSML｜tool_calls>", "", False), (EOS, " Done." + EOS, False), (EOS, "", False),
    ("parameter name", "parameter  nam", False), ("｜DSML｜tool_calls>\n", "tool_calls>\n", False),
    ('name="site" string="true">Graz</', 'name="site" string="true">Graz<', False),
    ("\n\n<｜DSML｜tool_calls>", "Sure.\n\n<｜DSML｜tool_calls>", True),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "formed"), DAMAGES)
def test_a_damaged_call_is_not_right(file: Served, old: str, new: str, formed: bool) -> None:
    c = call_of(file, [("book_pitch", ARGUMENTS)])
    written = file.text(c.expected)
    assert old in written
    assert answered(file, c, written) == judges.Verdict(True, True)
    assert answered(file, c, written.replace(old, new, 1)) == judges.Verdict(formed, False)


def test_a_parameter_given_twice_is_not_well_formed(file: Served) -> None:
    c = call_of(file, [("book_pitch", ARGUMENTS)])
    site = '<｜DSML｜parameter name="site" string="true">Graz</｜DSML｜parameter>\n'
    written = file.text(c.expected).replace(site, site * 2)
    assert answered(file, c, written) == judges.Verdict(False, False)


def test_a_missing_argument_is_well_formed_only_where_it_may_be_missing(file: Served) -> None:
    c = call_of(file, [("book_pitch", ARGUMENTS)])
    for key, formed in (("power", True), ("site", False)):
        fewer = {k: v for k, v in ARGUMENTS.items() if k != key}
        written = file.text(call_of(file, [("book_pitch", fewer)]).expected)
        assert answered(file, c, written) == judges.Verdict(formed, False)


def test_parallel_calls_are_right_in_their_order_only(file: Served) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("stop", {}), ("book_pitch", ARGUMENTS)]
    c = call_of(file, calls)
    other = call_of(file, calls[::-1])
    assert answered(file, c, file.text(c.expected)) == judges.Verdict(True, True)
    assert answered(file, c, file.text(other.expected)) == judges.Verdict(True, False)


def test_reasoning_is_not_judged(file: Served) -> None:
    c = call_of(file, [("stop", {})], thinking=True)
    written = file.text(c.expected)
    assert written.startswith("It fits.</think>")
    assert answered(file, c, written.replace("It fits.", "Let me see.")).right
    assert not answered(file, c, written.replace("\n\n<", " <").replace("</think>", "")).formed


def test_a_call_where_words_are_right_is_wrong(file: Served) -> None:
    c = call_of(file, [("stop", {})])
    d = Dialogue("decline", [Turn("user", "Go."), Turn("assistant", "No.")], "", [TOOL])
    said = file.read(c.expected, d)
    assert judges.judge("decline", d, said, always) == judges.Verdict(None, False)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [(1, True, False), (2, 2.0, True), ("2", 2, False), ([1, 2], [2, 1], False),
     ({"a": 1, "b": [True]}, {"b": [True], "a": 1}, True), ({"a": 1}, {"a": 1, "b": 2}, False),
     (None, False, False), ({"a": 0}, {"a": False}, False)],
)  # fmt: skip
def test_values_are_compared_as_json(a: Any, b: Any, equal: bool) -> None:
    assert judges.same(a, b) is equal is judges.same(b, a)


def test_a_schema_with_an_unknown_keyword_is_refused_and_not_passed() -> None:
    with pytest.raises(ValueError, match="pattern"):
        judges.fault("x", {"type": "string", "pattern": "y"})


@pytest.mark.parametrize(
    ("value", "schema"),
    [(3, {"type": ["string", "null"]}), ([1, "2"], {"items": {"type": "integer"}}),
     ({"b": 1}, {"properties": {}, "additionalProperties": False}), ([], {"minItems": 1}),
     ("abc", {"maxLength": 2}), ([1, 1], {"uniqueItems": True}), ("a", {"const": "b"}),
     ({"x": 1}, {"additionalProperties": {"type": "string"}})],
)  # fmt: skip
def test_what_breaks_a_schema_is_found(value: Any, schema: dict[str, Any]) -> None:
    assert judges.fault(value, schema) is not None


def test_valid_json_with_a_wrong_value_is_formed_but_not_right() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    d = Dialogue("json schema", [Turn("user", "n is 5"), Turn("assistant", '{"n": 5}')],
                 schema=schema)  # fmt: skip
    for text, formed, right in (
        ('{"n":5}', True, True), ('{"n": 6}', True, False), ('{"n": "5"}', False, False),
        ('{"n": 5', False, False), ("{}", False, False), ('{"n": NaN}', False, False),
    ):  # fmt: skip
        said = Said(content=text, calls=(), whole=True)
        assert judges.judge("json schema", d, said, always) == judges.Verdict(formed, right)


def test_a_paragraph_needs_its_topic_three_sentences_and_no_repetition() -> None:
    d = Dialogue("paragraph", [
        Turn("user", "Write about a purple goat."),
        Turn("assistant", "Here is a purple goat. It eats. It sleeps."),
    ])  # fmt: skip

    def verdict(text: str, known: Any = always) -> tuple[bool | None, bool]:
        said = judges.judge("paragraph", d, Said(content=text, calls=(), whole=True), known)
        return said.formed, said.right

    assert verdict("A goat came. It was purple. It sang.") == (True, True)
    assert verdict("A goat came. It was old. It sang.") == (True, False)
    assert verdict("A purple goat came. It sang.") == (False, False)
    assert verdict("A purple goat. It sang. It sang.") == (False, False)
    assert verdict("A purple goat came. It sang. And then") == (False, False)
    common = set("came it was sang".split())
    assert verdict("The goat Ada came. It was purple. It sang.", common.__contains__)[1]
    assert not verdict("The goat came. It was purple. It zang.", common.__contains__)[1]
    assert judges.known_share(d, "A goat zang.", never) == pytest.approx(2 / 3)


# --- cases ---------------------------------------------------------------------------------------


def test_sixty_tools_are_held_out_and_none_has_a_name_of_training() -> None:
    held = {name for e in catalog.held_out() for name in e.names}
    assert len(catalog.held_out()) == 60
    assert not held & {name for e in catalog.training() for name in e.names}


def test_no_prompt_of_a_task_comes_twice() -> None:
    for kind in TASKS:
        found = list(dialogues(kind, 40))
        said = [json.dumps([d.system, d.tools, [t.text for t in d.turns[:-1]]]) for d in found]
        assert len(set(said)) == len(found) > 20


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_needle_stands_in_a_prompt_of_the_right_length(
    kind: str, file: Served, text: Sequence[str]
) -> None:
    least, most = LENGTHS[kind]
    for d in needles(kind, 8, file, text):
        n = len(file.prompt(d))
        assert least <= n <= most and n + len(file.answer(d)) <= 8_192
        assert "\n" not in d.turns[-1].text
    with pytest.raises(ValueError, match=kind):
        next(needles(kind, 1, file, text[:3]))


def test_needles_of_a_text_share_it_and_lie_anywhere(file: Served, text: Sequence[str]) -> None:
    found = list(needles("needle 1k", 40, file, text))
    for at in range(0, 40, NEEDLES):
        prompts = [file.prompt(d) for d in found[at : at + NEEDLES]]
        assert alike(prompts) == [sorted(range(NEEDLES), key=lambda i: prompts[i].tolist())]
    letters = [d.turns[-2].text.rpartition("\n")[2] for d in found]
    assert len(set(letters)) == len(found)


def test_needles_are_the_same_in_any_vocabulary_but_for_the_text_around(
    file: Served, letters: Served, text: Sequence[str]
) -> None:
    one, other = (list(needles("needle 1k", 8, s, text)) for s in (file, letters))
    for a, b in zip(one, other, strict=True):
        assert a.turns[-1] == b.turns[-1]
        assert a.turns[-2].text.rpartition("\n")[2] == b.turns[-2].text.rpartition("\n")[2]


def test_cases_for_training_end_and_fit(encoder: Encoder, folder: Path) -> None:
    found = small(encoder, 2, longest=1_200, folder=folder)
    assert {c.kind for c in found} == {*TASKS, "needle 1k"}
    for c in found:
        assert len(c.prompt) + len(c.expected) <= 1_200
        assert c.expected[-1] == encoder.eos and c.prompt[0] == encoder.bos
    assert {c.kind for c in small(encoder, 1)} <= set(TASKS)


# --- answers -------------------------------------------------------------------------------------


def test_an_evaluation_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    model, kept = tmp_path / "a.gguf", tmp_path / "kept"
    model.write_bytes(b"one")
    with Answers(kept, model) as store:
        store.put([1, 2, 3], 9, [4, 5])
        store.put([1, 2], 9, [6])
    store.path.write_bytes(store.path.read_bytes()[:-4])
    with Answers(kept, model) as again:
        assert again.get([1, 2, 3], 9) == [4, 5]
        assert again.get([1, 2], 9) is None and again.get([1, 2, 3], 8) is None
        again.put([1, 2], 9, [7])
    with Answers(kept, model) as third:
        assert third.get([1, 2], 9) == [7]
    model.write_bytes(b"two")
    with Answers(kept, model) as other:
        assert other.get([1, 2], 9) is None


# --- decoding ------------------------------------------------------------------------------------

PAGE, CONTEXT, STOP = 256, 2_048, 1


def says(ids: Sequence[int]) -> int:
    """What the fake engine draws behind a timeline: it hangs on every id."""
    return int(sum((i + 1) * int(x) for i, x in enumerate(ids)) % 23) or STOP


@dataclass
class FakeLane:
    pages: list[int] = field(default_factory=list)
    n: int = 0


class FakeEngine:
    """Keeps the ids of a timeline in its pages, as an engine keeps their rows."""

    def __init__(self, lanes: int) -> None:
        self.geometry = SimpleNamespace(page_tokens=PAGE, context=CONTEXT)
        self.pages = np.zeros((lanes * CONTEXT // PAGE, PAGE), np.int32)
        self.lanes: dict[int, FakeLane] = {}
        self.held: dict[int, int] = {}
        self.n_prefilled = 0

    def seat(self, lane: int) -> None:
        assert lane not in self.lanes
        self.lanes[lane] = FakeLane()

    def vacate(self, lane: int) -> None:
        del self.lanes[lane]

    def map_pages(self, lane: int, pages: Sequence[int]) -> None:
        self.lanes[lane].pages += pages

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target] = self.pages[source]

    def capture(self, lane: int) -> Frontier:
        self.held[lane] = self.lanes[lane].n
        return Frontier(lane, self.lanes[lane].n, 0)

    def restore(self, lane: int, frontier: Frontier) -> None:
        self.lanes[lane].n = self.held[frontier.key]

    def drop(self, frontier: Frontier) -> None:
        del self.held[frontier.key]

    def _write(self, lane: int, ids: Sequence[int]) -> None:
        mine = self.lanes[lane]
        shared = {p for other, o in self.lanes.items() if other != lane for p in o.pages}
        for i in ids:
            page = mine.pages[mine.n // PAGE]
            assert page not in shared, "a page that another lane reads"
            self.pages[page, mine.n % PAGE] = i
            mine.n += 1

    def prefill(self, work: Prefill, cancel: Any) -> Prefilled:
        assert len(work.ids)
        self.n_prefilled += len(work.ids)
        self._write(work.lane, work.ids.tolist())
        return Prefilled(lane=work.lane, n_tokens=self.lanes[work.lane].n, cancelled=False, ms=0.0)

    def verify(self, cohort: Sequence[VerifyWork]) -> list[Verified]:
        out = []
        for work in cohort:
            self._write(work.lane, [work.pending])
            mine = self.lanes[work.lane]
            ids = self.pages[mine.pages].ravel()[: mine.n]
            out.append(Verified(lane=work.lane, ids=(says(ids.tolist()),), n_accepted=0))
        return out


def straight(q: Question) -> list[int]:
    ids, out = q.prompt.tolist(), list[int]()
    while len(out) < q.most and STOP not in out:
        out.append(says([*ids, *out]))
    return out


def some_questions() -> list[Question]:
    r = np.random.default_rng(3)
    parts = []
    for n in (700, 1_024):  # within a page, and at its end
        common = r.integers(2, 99, n)
        parts += [np.concatenate([common, r.integers(100 + i, 102 + i, 2 + i)]) for i in range(5)]
    parts += [r.integers(2, 99, n) for n in (2, 3, 40, 300, 1_500)]
    return [Question(p.astype(np.int32), 12) for p in parts]


def test_lanes_answer_as_one_prompt_alone_would_be_answered() -> None:
    questions = some_questions()
    engine = FakeEngine(4)
    assert Lanes(engine, 3, STOP).answer(questions) == [straight(q) for q in questions]
    assert not engine.lanes and not engine.held


def test_what_prompts_have_in_common_is_prefilled_once() -> None:
    questions = some_questions()[:5]
    engine = FakeEngine(4)
    Lanes(engine, 3, STOP).answer(questions)
    assert engine.n_prefilled < 760


def test_bundles_hold_every_question_once_and_keep_what_is_alike_together() -> None:
    questions = some_questions()
    found = bundles(questions)
    assert sorted(i for part in found for i in part) == list(range(len(questions)))
    assert any(set(range(5)) <= set(part) for part in found)
    assert decoders.common_length(questions[0].prompt, questions[4].prompt) == 700


# --- the table -----------------------------------------------------------------------------------


def test_intervals_are_wilsons() -> None:
    assert interval(9, 10) == pytest.approx((0.59585, 0.98212), abs=1e-5)
    assert interval(0, 500) == pytest.approx((0.0, 0.00762), abs=1e-5)
    assert interval(500, 500)[1] == 1.0
    assert interval(0, 0) == (0.0, 1.0)


def test_rows_of_the_issue_sum_their_tasks() -> None:
    counts = {
        "call, 1 tool": Count(100, 90, 99), "call, thinking": Count(50, 40, 45),
        "parallel": Count(50, 30, 50), "extract": Count(10, 9), "copy": Count(30, 30),
        "json schema": Count(20, 10, 19),
    }  # fmt: skip
    rows = aggregates(counts)
    assert rows["well-formed calls"] == Count(200, 194)
    assert rows["right tool, every argument right"] == Count(150, 130)
    assert rows["parallel calls"] == Count(50, 30)
    assert rows["extraction and copy"] == Count(40, 39)
    assert rows["schema-valid JSON"] == Count(20, 19)
    assert "needle at 8k" not in rows


def test_the_table_has_a_column_group_for_every_file() -> None:
    both = {"a": {"copy": Count(10, 9)}, "b": {"copy": Count(10, 5), "parallel": Count(4, 1, 2)}}
    shown = table(both).splitlines()
    rows = {line.split(" | ")[0].lstrip("| "): line for line in shown}
    assert rows["copy"].startswith("| copy | 10 |  | 90.0 |")
    assert " | 10 |  | 50.0 | " in rows["copy"]
    assert rows["parallel"].startswith("| parallel |  |  |  |  | 4 | 50.0 | 25.0 |")
    for line in shown:
        assert line == "" or line.count("|") in (2 + 1 + 3 * 2 + 0, 2 + 4 * 2)


def test_verdicts_are_counted_with_and_without_a_form() -> None:
    said = [judges.Verdict(True, True), judges.Verdict(True, False), judges.Verdict(False, False)]
    assert Count.of(said) == Count(3, 1, 2)
    assert Count.of([judges.Verdict(None, True)]) == Count(1, 1, None)


# --- roundings -----------------------------------------------------------------------------------


def test_roundings_are_measured_on_the_tokens_of_answers(trained: Served) -> None:
    torch = pytest.importorskip("torch")
    from ops.tiny.evaluate.rounding import Loss, measure, table

    class Next:
        """Is nearly sure that every id is followed by its successor."""

        def logits(self, ids: Any, owner: Any, dense: Any) -> Any:
            assert ids.shape == (1, 128 * owner.shape[1]) and not dense
            return 9.0 * torch.nn.functional.one_hot((ids + 1) % 4_096, 4_096).float()

    d = Dialogue("sum", [])
    loss = measure(Next(), [Case("sum", d, [5, 6, 7], [8, 9, 1]), Case("sum", d, [3], [4])])
    assert loss.right.tolist() == [True, True, False, True]
    sure = np.log(np.exp(9.0) + 4_095) - 9.0
    assert loss.each == pytest.approx([sure, sure, sure + 9.0, sure], rel=1e-4)
    shown = table({"exact": loss, "other": Loss(loss.each + 0.25, loss.right)})
    assert "+0.25000 ± 0.00000 | 75.00" in shown and "4 answer tokens" in shown
