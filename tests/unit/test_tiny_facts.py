"""ds4-tiny's questions about facts have one right answer in the text, or none.

The oracle reads the text again with the table alone: it finds which question was asked, and every
sentence of any wording that would answer it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import pytest

from ops.tiny.encode import Encoder
from ops.tiny.tasks import facts
from ops.tiny.tasks.facts import (
    BARE,
    BEFORE,
    KINDS,
    LIST,
    LISTED,
    ONE_WORD,
    QUOTE,
    UNSAID,
    Story,
    extraction,
    fact,
    needle,
    parse,
    reading,
)
from ops.tiny.words import Words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ops.tiny.dialogue import Dialogue, Step
    from ops.tiny.tasks.facts import Ask, Kind

FILLER = [
    f"And it came to pass in the days of old, that {who} went up with all that were there; and "
    f"they said, {word}, and there was none that heard. Then went they down again, every man to "
    f"his own house, and the {word} was upon them until the evening."
    for who, word in [("he", "peace"), ("David", "rain"), ("Esther", "bread"), ("they", "stone")]
]
_TAILS = (BARE, facts.BARE_UNSEEN, ONE_WORD, facts.ONE_WORD_UNSEEN, QUOTE, facts.QUOTE_UNSEEN)
TAILS = sorted({tail for tails in _TAILS for tail in tails}, key=len, reverse=True)
HEADS = sorted([*BEFORE, *facts.BEFORE_UNSEEN], key=len, reverse=True)


GAP = r"(?:(?!(?<!\bDr)(?<!\bMr)(?<!\bMrs)\. ).)+?"  # some words of one sentence


def words(seed: int, unseen: bool) -> Words:
    return Words(random.Random(seed), unseen)


# --- the oracle ----------------------------------------------------------------------------------


def pattern(form: str, known: dict[int, str]) -> str:
    """A form as a regular expression: known values as they are, a group for each other one."""
    out = ""
    for part in re.split(r"(\{\d\})", form):
        i = int(part[1]) if re.fullmatch(r"\{\d\}", part) else -1
        if i < 0:
            out += re.escape(part)
        elif i in known:
            out += re.escape(known[i])
        else:
            out += f"(?P<s{i}>{GAP})" if f"<s{i}>" not in out else f"(?P=s{i})"
    return out


@cache
def asks() -> list[tuple[Kind, Ask, bool, str, re.Pattern[str]]]:
    """Every question of the table, whether it is held out, and the longest of its own words."""
    out = []
    for kind in KINDS:
        for ask in kind.asks:
            for form in ask.seen + ask.unseen:
                rest = form[1:] if form[0] != "{" else form
                first = "" if form[0] == "{" else f"[{re.escape(form[0] + form[0].lower())}]"
                own = max(re.split(r"\{\d\}", rest[:-1]), key=len)
                exact = re.compile(first + pattern(rest[:-1], {}) + "[?.]?")
                out.append((kind, ask, form in ask.unseen, own, exact))
    return out


def stripped(text: str) -> str:
    """A question without what stands before and behind it."""
    for tail in TAILS:
        text = text.removesuffix(" " + tail)
    for head in HEADS:
        text = text.removeprefix(head)
    return text


@cache
def repeats() -> list[re.Pattern[str]]:
    forms = facts.ABOUT + facts.ABOUT_UNSEEN
    return [re.compile(".+?".join(map(re.escape, f.split("{}")))) for f in forms]


@cache
def meant(question: str) -> list[tuple[Kind, Ask, bool, dict[int, str]]]:
    """What a question may ask, by the table: kind, ask, held out or not, values it names."""
    if any(form.fullmatch(question) for form in repeats()):
        return []
    found = []
    for kind, ask, unseen, own, form in asks():
        if own in question and (m := form.fullmatch(question)):
            named = {int(k[1:]): v for k, v in m.groupdict().items()}
            found.append((kind, ask, unseen, named))
    return found


def sayings(text: str, kind: Kind, named: dict[int, str]) -> list[tuple[int, int]]:
    """Where the text says something of the kind about these values."""
    if not all(value in text for value in named.values()):
        return []
    slot = next(i for i, s in enumerate(kind.slots) if s.name == "v")
    pairs = [f"{kind.label}{sign}{{{slot}}}" for sign in (": ", " = ", " - ", " -> ")]
    spans = []
    for form in [*kind.statements, *pairs]:
        if not all(part in text for part in re.split(r"\{\d\}", form.removesuffix("."))):
            continue
        begins = "" if form[0] == "{" and int(form[1]) not in named else r"(?<![\w@/.-])(?<!\bof )"
        for m in re.finditer(begins + pattern(form.removesuffix("."), named) + r"(?!\w)", text):
            gaps = [(m.start(i), m.end(i)) for i in range(1, len(m.groups()) + 1)]
            # What stands before a sentence that begins with an unknown value is no part of it.
            start = next((end for begin, end in gaps if begin == m.start()), m.start())
            spans.append((start, m.end()))
    return spans


def answers(text: str, question: str) -> int:
    """How many places of the text answer a question, whatever it may mean."""
    spans = sorted(
        span for kind, _, _, named in meant(question) for span in sayings(text, kind, named)
    )
    n, last = 0, -1
    for start, end in spans:
        n += start >= last
        last = max(last, end)
    return n


def checked(answer: str) -> bool:
    """Whether it was asked for yes or no."""
    return answer == "Yes." or answer.startswith("No, ")


def without(text: str, question: str) -> str:
    """The first turn of a user without its question, which begins or ends it."""
    assert text.startswith(question) or text.endswith(question)
    return text.removesuffix(question) if text.endswith(question) else text[len(question) :]


def readings(unseen: bool, n: int, seed: int = 1) -> Iterator[tuple[str, list[Step]]]:
    w = words(seed, unseen)
    for _ in range(n):
        yield reading(w)


# --- the table -----------------------------------------------------------------------------------


def test_the_table_has_the_kinds_and_questions_that_were_promised() -> None:
    assert len(KINDS) >= 80
    assert sum(not k.one_value for k in KINDS) >= 15
    for kind in KINDS:
        assert 2 <= len(kind.statements) <= 4, kind.name
        assert len(kind.asks[0].seen) >= 4, kind.name
        assert len(kind.asks[0].unseen) >= 2 or len(kind.asks) > 1, kind.name
        for ask in kind.asks:
            assert len(ask.seen) >= 3 and ask.unseen, kind.name


def test_the_table_is_ascii() -> None:
    assert facts._TABLE.isascii()


def bare_form(form: str) -> str:
    return re.sub(r"\{\d\}", "{}", form).lower()


def test_no_held_out_wording_is_a_wording_of_training() -> None:
    seen = {bare_form(f) for k in KINDS for a in k.asks for f in [*a.seen, *a.checks]}
    unseen = {bare_form(f) for k in KINDS for a in k.asks for f in a.unseen}
    assert not seen & unseen
    for name in (
        "BEFORE",
        "BARE",
        "ONE_WORD",
        "QUOTE",
        "TRUE",
        "ABOUT",
        "EXTRACT",
        "LIST",
        "INTROS",
    ):
        assert not set(getattr(facts, name)) & set(getattr(facts, name + "_UNSEEN")), name


def test_a_question_of_two_kinds_is_kept_apart_by_their_values_or_a_family() -> None:
    """Where two kinds share a question, its values are of other types, or no text holds both with
    a value in common."""
    owners: dict[str, list[tuple[Kind, tuple[str, ...]]]] = {}
    for kind in KINDS:
        for ask in kind.asks:
            for form in {*ask.seen, *ask.unseen}:
                types = tuple(kind.slots[int(i)].type for i in re.findall(r"\{(\d)\}", form))
                owners.setdefault(bare_form(form), []).append((kind, types))
    for form, some in owners.items():
        for i, (kind, types) in enumerate(some):
            for other, other_types in some[:i]:
                apart = any(a != b for a, b in zip(types, other_types, strict=True))
                assert apart or set(kind.families) & set(other.families), form


@pytest.mark.parametrize(
    ("stanza", "complaint"),
    [
        ("Two words\n- a", "a kind begins with its name"),
        ("k\nA {v:word}", "begins with none of"),
        ("k\n- A {v:word}", "needs statements"),
        ("k\n- A {v:word} {name}\n- B {v}\n: x", "must hold every value once"),
        ("k\n- A {v:word} {name}\n? {name}?\n= {v}\n: x", "evaluation only"),
        (
            "k\n- A {v:word} {name}\n? {name}? / What?\n! Hm {name}?\n= {v}\n: x",
            "same other values",
        ),
        ("k\n- A {v:word} {name}\n? {name}?\n! Hm {name}?\n= Yes\n: x", "the answer for v"),
        ("k\n- A {v:word} {name}\n? {name}?\n! Hm {name}?\n= {v}\n~ {v}?\n: x", "yes or no"),
        ("k\n- A {v:word} {name}\n? {u}?\n! Hm {name}?\n= {v}\n: x", "no statement holds {u}"),
        ("k\n- A {v:word} {name}\n: x", "no question"),
        ("k\n- A {v:wrd}\n: x", "no values are of the kind wrd"),
        ("k\n- A {v:word}\n- B {v:place}\n: x", "both word and place"),
    ],
)
def test_a_broken_stanza_is_named_and_explained(stanza: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse(stanza)


def test_a_name_that_comes_twice_is_refused() -> None:
    stanza = "k\n- A {v:word} {name}\n? {name}?\n! Hm {name}?\n= {v}\n: x"
    with pytest.raises(ValueError, match="two kinds"):
        parse(f"{stanza}\n\n{stanza}")


# --- single facts and stories --------------------------------------------------------------------


@pytest.mark.parametrize("unseen", [False, True])
def test_a_fact_holds_its_answer(unseen: bool) -> None:
    w = words(2, unseen)
    for _ in range(3000):
        said, questions, whole, value = fact(w)
        assert value in said and value in whole
        assert len(questions) >= (1 if unseen else 3)
        assert said.isascii() and "{" not in said + whole
        assert not re.search(r" a [aeiou]\w* (of|named|called)", said), said


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_no_two_facts_of_a_story_answer_the_same_question(share: float) -> None:
    for seed in range(60):
        story = Story(words(seed, bool(seed % 2)))
        story.fill(40, KINDS if seed % 3 else random.Random(seed).sample(KINDS, 4), share)
        asked: Counter[str] = Counter()
        for f in story.facts:
            mine = {q.format(*f.values) for a in f.kind.asks for q in a.seen + a.unseen}
            asked.update(mine)
        assert [q for q, n in asked.items() if n > 1] == []


def test_names_of_a_family_differ_in_their_first_word() -> None:
    """A question about Ana must not be one about Ana Moko."""
    for seed in range(40):
        story = Story(words(seed, False))
        home = [k for k in KINDS if k.name == "home"]
        story.fill(30, home, 0.0)
        firsts = [f.values[0].split()[0] for f in story.facts]
        assert len(firsts) == len(set(firsts))


@pytest.fixture(autouse=True)
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without words that mean nothing: the table does not tell them from others."""
    monkeypatch.setattr(facts, "MARKED", 0.0)


# --- short texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("unseen", [False, True])
def test_a_plain_question_about_a_text_has_one_answer_there(unseen: bool) -> None:
    n = 0
    for text, steps in readings(unseen, 1200):
        for ask, answer, reasoning in steps:
            question = stripped(ask)
            said = reasoning.removeprefix("The text says: ")
            if said not in text or checked(answer) or not meant(question):
                continue
            n += 1
            assert answers(text, question) == 1, (text, ask)
            assert answers(said, question) == 1, (said, ask)
    assert n > 1000


@pytest.mark.parametrize("unseen", [False, True])
def test_what_the_text_does_not_say_is_not_there(unseen: bool) -> None:
    n = 0
    for text, steps in readings(unseen, 4000, seed=5):
        for ask, answer, _ in steps:
            if answer == UNSAID:
                n += 1
                assert meant(stripped(ask)), ask
                assert answers(text, stripped(ask)) == 0, (text, ask)
    assert n > 200


@pytest.mark.parametrize("unseen", [False, True])
def test_an_answer_is_a_function_of_the_text(unseen: bool) -> None:
    """Bare values stand in it, quotes are whole lines of it, no means another value."""
    kinds: Counter[str] = Counter()
    for text, steps in readings(unseen, 3000, seed=6):
        for ask, answer, reasoning in steps:
            said = reasoning.removeprefix("The text says: ")
            tail = next((t for t in TAILS if ask.endswith(" " + t)), "")
            if tail in QUOTE + facts.QUOTE_UNSEEN:
                kinds["quote"] += 1
                assert answer == said and answer in text
            elif tail:
                kinds["bare"] += 1
                assert answer in said and said in text
                if tail in ONE_WORD + facts.ONE_WORD_UNSEEN:
                    assert " " not in answer
            elif answer == "Yes.":
                kinds["yes"] += 1
                assert said in text
            elif answer.startswith("No, "):
                kinds["no"] += 1
                assert said in text
            elif not text:
                kinds["extract"] += 1
                assert answer in said and said in ask
    assert min(kinds[k] for k in ("quote", "bare", "yes", "no", "extract")) > 100, kinds


def test_yes_or_no_is_right() -> None:
    """Yes if the statement that the question makes is the one of the text."""
    n = 0
    checks = [
        (kind, ask, re.compile(pattern(form, {})))
        for kind in KINDS for ask in kind.asks for form in ask.checks
    ]  # fmt: skip
    for text, steps in readings(False, 3000, seed=8):
        for ask, answer, _ in steps:
            if not checked(answer):
                continue
            claims = []  # the kinds of facts of the text that the question may be about
            for kind, about, form in checks:
                if m := form.fullmatch(ask):
                    claimed = {int(k[1:]): v for k, v in m.groupdict().items()}
                    known = {i: v for i, v in claimed.items() if i != about.slot}
                    if sayings(text, kind, known):
                        claims.append(bool(sayings(text, kind, claimed)))
            if claims:
                n += 1
                assert any(claims) == (answer == "Yes."), (text, ask, answer)
    assert n > 100


@pytest.mark.parametrize("unseen", [False, True])
def test_a_list_holds_every_value_of_the_type_in_the_order_of_the_text(unseen: bool) -> None:
    n = 0
    forms = {
        f.format(many): type_
        for f in LIST + facts.LIST_UNSEEN
        for type_, ((_, many), _) in LISTED.items()
    }
    for text, steps in readings(unseen, 4000, seed=7):
        if (type_ := forms.get(steps[0][0])) is None:
            continue
        n += 1
        values = steps[0][1].split(", ")
        at = -1
        for value in values:
            place = text.find(value, at + 1)
            assert place > at, (text, values)
            at = place
        if type_ == "email":
            assert text.count("@") == len(values)
        if type_ == "url":
            assert text.count("://") == len(values)
    assert n > 100


@pytest.mark.parametrize("unseen", [False, True])
def test_only_evaluation_asks_in_the_words_of_evaluation(unseen: bool) -> None:
    n = 0
    for _, steps in readings(unseen, 2500, seed=9):
        for ask, answer, reasoning in steps:
            found = meant(stripped(ask))
            said = reasoning.removeprefix("The text says: ")
            if found and reasoning[:4] == "The " and said not in ask and not checked(answer):
                n += 1
                assert any(held == unseen for _, _, held, _ in found), ask
            for name in ("BEFORE", "BARE", "ONE_WORD", "QUOTE"):
                other = getattr(facts, name + ("" if unseen else "_UNSEEN"))
                assert not any(ask.startswith(f) or ask.endswith(" " + f) for f in other), ask
    assert n > 1500


def test_a_reading_has_one_to_four_different_questions() -> None:
    sizes = Counter(len(steps) for _, steps in readings(False, 2000))
    assert set(sizes) == {1, 2, 3, 4}
    for _, steps in readings(True, 1000):
        asked = [s[0] for s in steps]
        assert all(a and b and c for a, b, c in steps)
        assert len(asked) == len(set(asked))


def test_texts_come_in_many_layouts() -> None:
    text = "\n\n".join(t for t, _ in readings(False, 1500))
    for sign in (
        "\n- ",
        "\n* ",
        "\n1. ",
        "\n1) ",
        "\nFrom: ",
        "Note for ",
        "] ",
        "regards,",
        " = ",
    ):
        assert sign in text, sign


# --- dialogues -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


def length(encoder: Encoder, d: Dialogue) -> int:
    return len(encoder.dialogue(d)[0])


def test_an_extraction_holds_its_text_before_the_question_or_in_the_system_prompt() -> None:
    w, where = words(3, False), Counter[str]()
    for _ in range(800):
        d = extraction(w)
        assert d.kind == "extract" and [t.role for t in d.turns[:2]] == ["user", "assistant"]
        reasoning = d.turns[1].reasoning
        if reasoning.startswith("The text says: "):
            said = reasoning.removeprefix("The text says: ")
            where["system" if said in d.system else "user"] += said in d.system + d.turns[0].text
    assert where["system"] > 60 and where["user"] > 300


@pytest.mark.parametrize("unseen", [False, True])
def test_nothing_else_in_a_dialogue_answers_its_questions(unseen: bool) -> None:
    """The system prompt may say something about others, too."""
    n = 0
    for seed in range(500):
        text, steps = reading(words(seed, unseen))
        d = extraction(words(seed, unseen))  # begins with the same reading
        around = d.system + "\n\n" + without(d.turns[0].text, steps[0][0])
        assert text in around
        for ask, answer, reasoning in steps:
            said = reasoning.removeprefix("The text says: ")
            question = stripped(ask)
            own = said in ask or not reasoning.startswith("The text ")  # about another text, or all
            if not own and not checked(answer) and meant(question):
                n += 1
                assert answers(around, question) == (answer != UNSAID), (d, question)
    assert n > 500


@pytest.mark.parametrize("filler", [[], FILLER])
@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize(
    ("n_tokens", "n_facts", "steps", "draws"),
    [(128, 1, 1, 150), (150, 60, 40, 60), (300, 4, 6, 60), (1000, 12, 8, 25), (2000, 1, 1, 15),
     (4000, 60, 40, 6), (8000, 60, 40, 3)],
)  # fmt: skip
def test_a_needle_is_as_long_as_it_was_ordered(
    encoder: Encoder, filler: list[str], unseen: bool, n_tokens: int, n_facts: int, steps: int,
    draws: int,
) -> None:  # fmt: skip
    w = words(n_tokens, unseen)
    for _ in range(draws):
        d = needle(w, n_tokens, filler, n_facts, steps)
        n = length(encoder, d)
        assert 0.94 * n_tokens <= n <= 1.01 * n_tokens, (d.turns[0].text, d.system)
        assert 1 <= len(d.turns) // 2 <= steps


@pytest.mark.parametrize("unseen", [False, True])
def test_a_needle_has_one_answer_in_its_text(unseen: bool) -> None:
    n, placed = 0, Counter[str]()
    for seed in range(100):
        _, steps = facts._planted(words(seed, unseen), 700, 8, 6)
        d = needle(words(seed, unseen), 700, FILLER if seed % 2 else [], 8, 6)  # the same facts
        said_by = d.system + "\n" + without(d.turns[0].text, steps[0][0])
        placed["system" if len(d.system) > len(d.turns[0].text) else "user"] += 1
        assert len(d.turns) == 2 * len(steps)
        for ask, answer, reasoning in steps:
            said = reasoning.removeprefix("The text says: ")
            assert said_by.count(said) == 1, (said_by, said)
            question = stripped(ask)
            if meant(question):
                n += 1
                assert answers(said_by, question) == 1, (said_by, question)
            else:
                assert answer == said, ask
    assert n > 300 and placed["system"] > 15


def test_a_needle_is_not_put_behind_the_full_stop_of_a_title() -> None:
    piece = "It was late when Mr. Brown met Mrs. White. They left."
    for at, cut in ((0, "White."), (0.5, "White."), (1, "left.")):
        pieces, counts = [piece], [50]
        facts._insert(pieces, counts, at, "HERE", 5)
        assert f"{cut} HERE" in " ".join(pieces)
        assert sum(counts) == 55


def test_a_fact_lies_at_the_depth_that_was_ordered() -> None:
    w = words(12, True)
    for at in (0.0, 0.25, 0.5, 0.9, 1.0):
        for filler in ([], FILLER):
            for _ in range(6):
                d = needle(w, 3000, filler, at=at)
                text = max(d.system, d.turns[0].text, key=len)
                said = d.turns[1].reasoning.removeprefix("The text says: ")
                assert abs(text.index(said) / len(text) - at) < 0.06


def test_sixty_facts_and_forty_questions_fit_into_a_long_row() -> None:
    d = needle(words(13, False), 8000, FILLER, 60, 40)
    assert len(d.turns) == 80


@pytest.mark.parametrize(
    "order", [(127, 1, 1, None), (500, 0, 1, None), (500, 1, 0, None), (500, 1, 1, 1.5)]
)
def test_an_order_that_cannot_be_met_is_refused(order: tuple[int, int, int, float | None]) -> None:
    n_tokens, n_facts, steps, at = order
    with pytest.raises(ValueError, match="it takes 128 tokens or more"):
        needle(words(1, False), n_tokens, [], n_facts, steps, at)


@pytest.mark.parametrize("unseen", [False, True])
def test_a_seed_says_everything(unseen: bool) -> None:
    def some() -> list[object]:
        w = words(14, unseen)
        made: list[object] = [reading(w) for _ in range(200)]
        return [*made, *(extraction(w) for _ in range(50)), needle(w, 900, FILLER, 9, 5), fact(w)]

    assert some() == some()
