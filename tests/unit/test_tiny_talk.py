"""What ds4-tiny learns to say of itself and of its user, and the paragraphs it learns from."""

from __future__ import annotations

import math
import random
import re
from typing import TYPE_CHECKING

import pytest

from ops.tiny.tasks import about, prose
from ops.tiny.tasks.about.stanzas import SIGNS, TableError, parse, read_named
from ops.tiny.tasks.alternatives import expanded
from ops.tiny.words import Words

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ops.tiny.dialogue import Dialogue, Step

SLOT = re.compile(r"\{(?:[aA]_)?(?:" + "|".join(map(re.escape, prose.Scene.makers)) + r")[234]?\}")
ARTICLE = re.compile(r"\b([Aa]n?) (\w+)")
LIKE_A_CONSONANT = {
    "ewe",
    "one",
    "once",
    "ones",
    "use",
    "used",
    "useless",
    "usury",
    "user",
    "unit",
}
SOUNDS_LIKE_A_VOWEL = {
    "SQL",
    "RNN",
    "LLM",
    "MIT",
    "HTTP",
    "http",
    "sql",
    "heir",
    "heirs",
    "honor",
    "honorable",
    "honour",
    "honourable",
    "honoured",
    "hour",
}


def alike(text: str) -> str:
    """What is left of a phrasing when case and marks do not count."""
    return re.sub(r"[^a-z0-9{}]", "", text.lower()) or text


def drawn(make: Callable[[Words], Step], n: int, seed: int = 1) -> list[Step]:
    return [
        make(w)
        for unseen in (False, True)
        for w in [Words(random.Random(seed), unseen)]
        for _ in range(n)
    ]


def wrong_articles(text: str) -> list[str]:
    out = []
    for article, word in ARTICLE.findall(text):
        vowel = (
            word[0].lower() in "aeiou8" and word not in LIKE_A_CONSONANT
        ) or word in SOUNDS_LIKE_A_VOWEL
        if (article.lower() == "an") is not vowel:
            out.append(f"{article} {word}")
    return out


# --- phrasings -----------------------------------------------------------------------------------

PHRASED = (
    [(t.answer, t.asks) for t in about.TOPICS]
    + [(f"said {t.key}", t.said) for t in about.TOLD]
    + [(f"asked {t.key}", t.asks) for t in about.TOLD]
    + [(f"role {t.key}", t.asks) for t in about.TRAITS.values()]
    + [("all", about.ALL_TOLD), ("who", about.WHO), ("by name", about.BY_NAME)]
    + [("correcting", about.CORRECTING), ("tools", about.COUNT_TOOLS)]
)


@pytest.mark.parametrize(("name", "asks"), PHRASED, ids=[name for name, _ in PHRASED])
def test_everything_has_two_dozen_phrasings_and_others_for_evaluation(
    name: str, asks: tuple[list[str], list[str]]
) -> None:
    seen, unseen = ({alike(x) for x in side} for side in asks)
    assert len(seen) >= 24
    assert 4 <= len(unseen) <= 20
    assert not seen & unseen


@pytest.mark.parametrize(
    ("asks", "n_seen", "n_unseen"),
    [
        (about.UNKNOWN_ASKS, 450, 30),
        (prose.ASKS["story"], 55, 10),
        (prose.ASKS["text"], 40, 9),
        (prose.ASKS["letter"], 8, 3),
        (prose.WITH_WORD, 7, 3),
        (prose.CONTINUE, 9, 3),
    ],
)
def test_requests_are_phrased_in_many_ways_some_kept_for_evaluation(
    asks: tuple[list[str], list[str]], n_seen: int, n_unseen: int
) -> None:
    seen, unseen = ({alike(x) for x in side} for side in asks)
    assert len(seen) >= n_seen and len(unseen) >= n_unseen
    assert not seen & unseen


def test_no_question_has_two_answers() -> None:
    owner: dict[str, str] = {}
    known = [(t.answer, t.asks) for t in about.TOPICS] + [(about.UNKNOWN, about.UNKNOWN_ASKS)]
    for answer, asks in known:
        for ask in asks[0] + asks[1]:
            assert owner.setdefault(alike(ask), answer) == answer, ask


def test_training_never_draws_a_phrasing_kept_for_evaluation() -> None:
    kept = {alike(x) for t in about.TOPICS for x in t.asks[1] if "{" not in x}
    w = Words(random.Random(2))
    asked = [about.small_talk(w)[0] for _ in range(20_000)]
    assert not kept & {alike(x) for x in asked}


def test_training_asks_nothing_unknown_in_a_way_kept_for_evaluation() -> None:
    kept = {alike(x) for x in about.UNKNOWN_ASKS[1]}
    w = Words(random.Random(2))
    for ask in about.UNKNOWN_ASKS[0]:
        assert all(alike(about.worn(w, ask)) not in kept for _ in range(20))


def test_alternatives_are_expanded_with_the_slots_in_them() -> None:
    assert expanded("{Hi|Hey} {name}") == ["Hi {name}", "Hey {name}"]
    assert expanded("{a {food}|b}{.|!}") == ["a {food}.", "a {food}!", "b.", "b!"]
    every = [x for t in about.TOPICS for side in t.asks for x in side]
    assert not any("|" in x for x in every + about.UNKNOWN_ASKS[0] + about.WHO[0])


def test_wear_keeps_slots_and_leaves_evaluation_alone() -> None:
    w = Words(random.Random(3))
    worn = [about.worn(w, "Tell me where {place} is.") for _ in range(2000)]
    assert all("{place}" in x and x == x.strip() for x in worn)
    assert len(set(worn)) > 300
    late = Words(random.Random(3), unseen=True)
    assert {about.worded(late, about.WHO) for _ in range(200)} == set(about.WHO[1])


def test_every_topic_is_drawn_and_answered_in_its_one_wording() -> None:
    plain = {t.answer for t in about.TOPICS if "{" not in t.answer}
    w = Words(random.Random(3))
    assert plain <= {about.small_talk(w)[1] for _ in range(20_000)}


# --- tables of phrasings -------------------------------------------------------------------------

GOOD = """# A comment.

fruit
  = I like {food}.
  ? Do {you|they} like {food}? / {food}?
  ! And {food}?
"""


def test_a_table_is_read_as_it_is_written() -> None:
    (fruit,) = parse(GOOD + "  ? /\n", "my.txt", {"food"})
    assert (fruit.name, fruit.one()) == ("fruit", "I like {food}.")
    asks = ["Do you like {food}?", "Do they like {food}?", "{food}?", "/"]
    assert fruit.phrasings() == (asks, ["And {food}?"])


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("fruit", "  fruit", "a stanza begins with its name at the left, then indented lines"),
        ("  = I", "= I", "indent it, or put a blank line before the next stanza"),
        ("  = I", "  * I", "begins with none of `=` (the answer), `?` (phrasings for training)"),
        ("  = I like {food}.", "  =", "nothing stands behind `=`, the answer"),
        ("  = I like {food}.\n", "", "expected one line `= ...`, found 0"),
        ("  ! And", "  = And", "expected one line `= ...`, found 2"),
        ("  ! And {food}?\n", "", "it has no line `! ...`"),
        ("And {food}?", "{food}?", "'{food}?' is held out (`!`), so no line `?` has it"),
        ("{you|they} like", "you | they like", "`|` stands in braces"),
        ("{you|they", "{you|they}}", "braces hold a slot {name} or alternatives {a|b}"),
        ("And {food}", "And {fod}", "no slot {fod} in this table"),
        ("{food}?\n", "{food}? /\n", "a phrasing stands on both sides of ` / `"),
        ("{food}? /", "{food}? /  /", "a phrasing stands on both sides of ` / `"),
        ("{food}? / ", "{food}? /  ", "one blank stands between words, none around them"),
        ("And", "{Also |}  and", "one blank stands between words, none around them"),
        ("And", "\u201cAnd\u201d", "expected ASCII only"),
        ("fruit\n", "fruit\n\n", "no blank line stands below a name"),
    ],
)
def test_a_table_that_breaks_the_format_is_refused_with_its_place(
    old: str, new: str, what: str
) -> None:
    with pytest.raises(TableError) as refused:
        for stanza in parse(GOOD.replace(old, new, 1), "my.txt", {"food"}):
            stanza.one()
            stanza.phrasings()
    assert str(refused.value).startswith("my.txt: fruit: ")
    assert what in str(refused.value)


def test_sentences_are_read_wording_by_wording() -> None:
    signs = {"-": "a sentence", "/": "another wording of it"}
    (plan,) = parse("plan\n  - He {ran|went}.\n  / He left.\n  - Why?", "my.txt", (), signs)
    assert plan.sentences() == [[["He ran.", "He went."], ["He left."]], [["Why?"]]]
    (plan,) = parse("plan\n  / He left.", "my.txt", (), signs)
    with pytest.raises(TableError, match=r"my\.txt: plan: 'He left\.': `-` begins a sentence"):
        plan.sentences()
    (plan,) = parse("plan\n  ? Who?", "my.txt", (), SIGNS)
    with pytest.raises(TableError, match=r"my\.txt: plan: it has no sentence"):
        plan.sentences()


def test_stanzas_that_are_doubled_missing_or_unread_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    path.write_text(f"{GOOD}\n{GOOD}")
    with pytest.raises(TableError, match=r"my\.txt: fruit: two stanzas have this name"):
        read_named(path, {"food"})
    path.write_text(GOOD)
    with pytest.raises(TableError, match=r"my\.txt: bread: this stanza is missing"):
        read_named(path, {"food"}, needed=["bread"])
    with pytest.raises(TableError, match=r"my\.txt: fruit: nothing reads this stanza; .* bread"):
        read_named(path, {"food"}, needed=["bread"], others=False)
    assert list(read_named(path, {"food"}, needed=["fruit"], others=False)) == ["fruit"]


# --- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [about.small_talk, about.unknown, prose.paragraph])
def test_all_slots_are_filled_and_no_blank_is_doubled(
    make: Callable[[Words], Step],
) -> None:
    for step in drawn(make, 4000):
        for text in step:
            assert text and text == text.strip() and text.isascii()
            assert "  " not in text and "{" not in text and "[" not in text


@pytest.mark.parametrize("make", [about.small_talk, about.unknown, prose.paragraph])
def test_answers_and_reasoning_end_as_sentences_do(
    make: Callable[[Words], Step],
) -> None:
    for _, answer, reasoning in drawn(make, 3000):
        assert answer[-1] in '.!?"' and reasoning[-1] == "."
        assert ".." not in answer and " ." not in answer and " ," not in answer


def test_chats_hold_no_open_slot() -> None:
    for unseen in (False, True):
        w = Words(random.Random(4), unseen)
        for _ in range(3000):
            d = about.chat(w)
            assert not SLOT.search(d.system)
            assert not any(SLOT.search(t.text + t.reasoning) for t in d.turns)
            assert d.turns[-1].role == "assistant" and d.turns[-1].text


def test_articles_are_right() -> None:
    w = Words(random.Random(5), novelty=0)
    for _ in range(4000):
        _, text, _ = prose.paragraph(w)
        assert not wrong_articles(text)
        for ask, answer, _ in (about.small_talk(w), about.unknown(w)):
            assert not wrong_articles(f"{ask} {answer}")
        (said, answer, _), later = about.statement(w, w.rng.choice(about.TOLD), about.Slots(w))
        assert not wrong_articles(f"{said} {answer} {later}")


@pytest.mark.parametrize(
    ("word", "with_article"),
    [
        ("engineer", "an engineer"), ("baker", "a baker"), ("hour", "an hour"),
        ("user", "a user"), ("old house", "an old house"), ("8k3", "an 8k3"), ("Ulwo", "an Ulwo"),
    ],
)  # fmt: skip
def test_an_article_follows_the_sound_of_the_next_word(word: str, with_article: str) -> None:
    assert about.an(word) == with_article


def test_the_same_seed_writes_the_same() -> None:
    for make in (about.chat, about.remembering, prose.paragraph):
        one, two = (make(Words(random.Random(6))) for _ in range(2))
        assert one == two


# --- remembering ---------------------------------------------------------------------------------


def reader(sentence: str) -> re.Pattern[str]:
    """Reads the values back from an answer."""
    parts = re.split(r"\{\w+\}", sentence)
    return re.compile("(.+)".join(map(re.escape, parts)))


READERS = [reader(t.sentence) for t in about.TOLD]


def values_of(answer: str) -> list[str]:
    for pattern in READERS:
        found = pattern.fullmatch(answer)
        if found:
            return [re.sub(r"^an? ", "", value) for value in found.groups()]
    raise AssertionError(answer)


def test_what_is_recalled_is_what_was_said_last() -> None:
    kinds = set()
    for unseen in (False, True):
        w = Words(random.Random(7), unseen)
        for _ in range(3000):
            *before, (_, answer, why) = about.remembering(w)
            said = [x for x, _, _ in before]
            confirmed = " ".join(x for _, x, _ in before)
            if answer == about.NOT_TOLD:
                kinds.add("not told")
            elif answer.startswith("Hello "):
                kinds.add("by name")
                assert any(answer[6:-1] in x for x in said)
            elif why.endswith(" said it before."):
                kinds.add("everything")
            else:
                kinds.add("one")
                assert all(any(v in x for x in said) for v in values_of(answer))
                assert answer in confirmed or answer.startswith("Your name is ")
    assert kinds == {"not told", "by name", "everything", "one"}


def test_a_correction_counts_and_what_it_corrects_does_not() -> None:
    w = Words(random.Random(8))
    n = 0
    for _ in range(4000):
        steps = about.remembering(w)
        corrected = [i for i, (_, a, _) in enumerate(steps) if a.startswith("All right. ")]
        corrected = [i for i in corrected if steps[i][1][11:].startswith(("You", "The "))]
        for i in corrected:
            now = steps[i][1][11:]
            later = [a for ask, a, why in steps[i + 1 :] if why.endswith(steps[i][0])]
            assert all(a == now or a.startswith("Hello ") for a in later)
            n += bool(later)
    assert n > 50


# --- roles, rules, tools -------------------------------------------------------------------------


def of_kind(kind: str, n: int, unseen: bool = False) -> list[Dialogue]:
    w, out = Words(random.Random(9), unseen), []
    while len(out) < n:
        d = about.chat(w)
        if d.kind == kind:
            out.append(d)
    return out


@pytest.mark.parametrize("unseen", [False, True])
def test_a_role_answers_with_what_the_system_prompt_gives(unseen: bool) -> None:
    starts = ("My name is ", "I live in ", "I work for ", "I like ", "My friend is ")
    n = 0
    for d in of_kind("role", 1500, unseen):
        for turn in d.turns[1::2]:
            start = next((s for s in starts if turn.text.startswith(s)), None)
            if start and turn.reasoning.startswith("The system prompt gives"):
                value = turn.text.removeprefix(start).split(".")[0]
                assert value in d.system
                n += 1
    assert n > 200


def test_a_rule_changes_every_answer_of_its_dialogue() -> None:
    n = 0
    for d in of_kind("role", 1500):
        if "I answer in capitals." in d.turns[1].reasoning:
            assert all(t.text == t.text.upper() for t in d.turns[1::2])
            n += 1
    assert n > 20


def test_tools_are_counted_as_they_are_declared() -> None:
    counts = set()
    for d in of_kind("chat", 4000):
        found = re.fullmatch(r"I have (\w+) tools?\.", d.turns[-1].text)
        if found:
            assert found[1] == str(len(d.tools) or "no")
            counts.add(len(d.tools))
    assert {0, 1, 2, 3} <= counts


# --- paragraphs ----------------------------------------------------------------------------------


def test_there_are_many_plans_with_many_wordings() -> None:
    assert len(prose.PLANS) >= 25
    for plan in prose.PLANS:
        assert 4 <= len(plan.sentences) <= 8 and len(plan.topics) >= 4
        assert all(4 <= len(wordings) <= 8 for wordings in plan.sentences)
        assert math.prod(len(wordings) for wordings in plan.sentences) > 10_000


def test_a_paragraph_has_the_length_of_one_and_says_nothing_twice() -> None:
    written = [text for _, text, _ in drawn(prose.paragraph, 4000)]
    assert len(set(written)) == len(written)
    for text in written:
        assert prose.LEAST <= len(text.split()) <= prose.MOST
        sentences = re.split(r"(?<=[.!?])\"? ", re.sub(r"\b([MD]rs?)\.", r"\1", text))
        assert len(sentences) == len(set(sentences))
        assert text[0].isupper() or text[0] == '"' or text[0].isalnum()


def test_what_a_request_names_stands_in_the_paragraph() -> None:
    w = Words(random.Random(11))
    n = 0
    for _ in range(4000):
        ask, text, _ = prose.paragraph(w)
        named = re.search(r"the word (\S+?)[ .]", ask + " ")
        if named and not ask.startswith("Once"):
            assert named[1] in text
            n += 1
        found = re.search(r"letter to (\w+)", ask)
        if found:
            assert text.startswith(f"Dear {found[1]}")
            n += 1
    assert n > 200


def test_a_pronoun_comes_after_the_name_it_stands_for() -> None:
    pronoun = re.compile(r"\b(?:he|she|him|his|her)\b|(?<=[.!?] )(?:He|She|His|Her)\b")
    for plan in prose.PLANS:
        w = Words(random.Random(12), novelty=0)
        for _ in range(400):
            scene = prose.Scene(w)
            text = " ".join(prose.written(w, scene, plan.sentences))
            first = pronoun.search(text)
            assert first is None or scene["who"] in text[: first.start()], (
                plan.name,
                text,
            )
            # One person, one gender.
            rest = {p.lower() for p in pronoun.findall(text)}
            assert not (rest & {"he", "him", "his"} and rest & {"she", "her"}), text


def test_quotation_marks_come_in_pairs() -> None:
    for _, text, _ in drawn(prose.paragraph, 2000):
        assert text.count('"') % 2 == 0
