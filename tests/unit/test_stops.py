from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4d.prompt.stops import StopText


def run(stops: list[str], *chunks: str) -> tuple[list[str], str | None]:
    s = StopText(stops)
    shown = [s.push(chunk) for chunk in chunks]
    return [*shown, s.flush()], s.matched


def test_a_stop_string_is_found_across_chunks_and_not_shown():
    assert run(["END"], "text E", "N", "D more", "END") == (["text ", "", "", "", ""], "END")


def test_only_what_may_still_become_a_stop_string_is_held():
    assert run(["END"], "aE", "xEN", "N") == (["a", "Ex", "ENN", ""], None)
    assert run(["\n\n"], "a\n", "b\n") == (["a", "\nb", "\n"], None)
    assert run(["aab"], "aaa", "b") == (["a", "", ""], "aab")


def test_the_string_that_is_complete_first_wins():
    assert run(["abcd", "bc"], "abcd") == (["a", ""], "bc")
    assert run(["bc", "abc"], "xabc") == (["x", ""], "abc")
    assert run(["b", "a"], "xab") == (["x", ""], "a")


def test_empty_stop_strings_never_match():
    assert run(["", "x"], "ab") == (["ab", ""], None)
    assert run([], "ab") == (["ab", ""], None)


@given(
    st.lists(st.text("ab", max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_chunks_change_nothing(stops: list[str], chunks: list[str]):
    shown, matched = run(stops, *chunks)
    one_by_one = run(stops, *"".join(chunks))
    assert ("".join(shown), matched) == ("".join(one_by_one[0]), one_by_one[1])
