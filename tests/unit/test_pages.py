import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4d.kv.pages import Pool


def test_the_lowest_free_numbers_are_taken_first() -> None:
    pool = Pool(4)
    assert pool.take(2) == [0, 1]
    pool.give_back([0])
    assert pool.take(2) == [0, 2]


def test_a_shared_page_is_free_only_when_its_last_holder_gives_it_back() -> None:
    pool = Pool(2)
    (page,) = pool.take(1)
    pool.share([page])
    assert pool.give_back([page]) == []
    assert pool.n_free == 1
    assert pool.give_back([page]) == [page]
    assert pool.n_free == 2


@pytest.mark.parametrize("misuse", ["take", "share", "give_back"])
def test_what_nobody_holds_can_be_neither_shared_nor_given_back(misuse: str) -> None:
    pool = Pool(1)
    with pytest.raises(ValueError, match="free"):
        pool.take(2) if misuse == "take" else getattr(pool, misuse)([0])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 7))))
def test_the_counts_agree_with_a_list_of_holders(steps: list[tuple[str, int]]) -> None:
    """Model: one entry in `holders` per holder."""
    pool, holders = Pool(8), []
    for what, n in steps:
        if what == "take" and pool.can_take(n):
            holders += pool.take(n)
        elif what == "share" and n in holders:
            pool.share([n])
            holders.append(n)
        elif what == "give" and n in holders:
            holders.remove(n)
            assert pool.give_back([n]) == ([] if n in holders else [n])
        assert [pool.refs(i) for i in range(8)] == [holders.count(i) for i in range(8)]
        assert pool.n_free == 8 - len(set(holders))
