from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ds4d.kv.prefix import best_match, common_prefix, spread


@dataclass
class Timeline:
    ids: np.ndarray
    frontiers: tuple[int, ...]
    idle: bool = True
    used: float = 0.0


def ids(*parts: int | range) -> np.ndarray:
    flat = [i for part in parts for i in ([part] if isinstance(part, int) else part)]
    return np.array(flat, np.int32)


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_a_common_prefix_ends_at_the_first_id_that_differs(n: int, m: int, at: int) -> None:
    a, b = np.arange(n, dtype=np.int32), np.arange(m, dtype=np.int32)
    b[at:] += 1
    assert common_prefix(a, b) == min(n, m, at)


def test_what_counts_is_the_frontier_below_the_fork_not_the_fork() -> None:
    long = Timeline(ids(range(900)), (128, 896))
    useful = Timeline(ids(range(700), range(5000, 5300)), (128, 640))
    match = best_match(ids(range(890), 7, 7, 7), [long, useful])
    assert match is not None
    assert (match.known, match.usable, match.common) == (useful, 640, 700)


def test_the_last_id_of_a_prompt_is_always_run() -> None:
    """Nothing is stored that could say what follows it."""
    known = Timeline(ids(range(300)), (128, 299, 300))
    match = best_match(ids(range(300)), [known])
    assert match is not None
    assert match.usable == 299


def test_a_stranger_is_no_match() -> None:
    assert best_match(ids(range(300)), [Timeline(ids(range(1, 300)), (128, 256))]) is None
    assert best_match(ids(5), [Timeline(ids(5), (1,))]) is None
    assert best_match(ids(range(300)), [Timeline(ids(range(300)), ())]) is None


def test_among_equals_the_session_that_can_go_on_in_place_wins() -> None:
    tail = Timeline(ids(range(256), range(9000, 9100)), (256, 356), used=9.0)
    end = Timeline(ids(range(256)), (256,), used=1.0)
    busy = Timeline(ids(range(256)), (256,), idle=False, used=8.0)
    match = best_match(ids(range(400)), [tail, busy, end])
    assert match is not None
    assert match.known is end
    assert match.extends


def test_among_forks_the_one_used_last_wins() -> None:
    old = Timeline(ids(range(256), 1), (256, 257), used=1.0)
    new = Timeline(ids(range(256), 2), (256, 257), used=2.0)
    match = best_match(ids(range(400)), [new, old])
    assert match is not None
    assert match.known is new
    assert not match.extends


def test_frontiers_thin_out_with_the_distance_from_the_prompts_end() -> None:
    assert spread(range(128, 8192, 128), 8000, 8) == {
        128,
        7936,  # 64 before the end, then at least twice as far each time
        7808,
        7552,
        7040,
        6016,
        3968,
        8064,  # behind the end: an answer's
    }


def test_the_lowest_and_the_nearest_frontiers_stay_when_few_may() -> None:
    starts = [128, 1024, 4096, 6144, 7680, 7936]
    assert spread(starts, 8000, 6) == set(starts)
    assert spread(starts, 8000, 5) == set(starts) - {1024}
    assert spread(starts, 8000, 3) == {128, 7680, 7936}
    assert spread(starts, 8000, 1) == {7936}
    assert spread(starts, 8000, 0) == set()
    assert spread([], 8000, 4) == set()


@given(
    st.lists(st.integers(1, 9000), max_size=60),
    st.integers(0, 9000),
    st.integers(0, 10),
)
def test_no_more_frontiers_are_kept_than_may_be(positions: list[int], end: int, n_max: int) -> None:
    kept = spread(positions, end, n_max)
    assert len(kept) <= n_max
    assert kept <= set(positions)
    if positions and n_max:
        assert max(positions) in kept


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=60))
def test_a_position_is_given_up_only_where_a_nearer_one_is_at_least_half_as_far(
    positions: list[int],
) -> None:
    """So a rewrite of the last d tokens costs a replay of about 2 d at most."""
    end = max(positions)
    kept = spread(positions, end, 15)
    for position in set(positions) - kept:
        assert end - position <= 2 * (end - min(p for p in kept if p > position))
