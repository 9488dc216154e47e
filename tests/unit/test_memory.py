from dataclasses import replace

import pytest

from ds4d.engine import Need
from ds4d.errors import MemoryRefusedError
from ds4d.sched.memory import Ledger, Wish, plan_capacity

MIB = 1 << 20
WISH = Wish(context=8192, page_tokens=256, lanes=4, chunk=256, idle_contexts=8, frontiers=64)


def need(*, lanes: int, pages: int, frontiers: int, chunk: int) -> Need:
    return Need(
        {
            "weights": 16 * MIB,
            "lanes": 4 * MIB * lanes,
            "pages": MIB * pages,
            "frontiers": MIB * frontiers,
        }
    )


def test_with_room_for_everything_the_wish_is_granted() -> None:
    capacity, parts = plan_capacity(need, WISH, 10_000 * MIB)
    assert (capacity.lanes, capacity.pages, capacity.frontiers) == (4, 32 * (4 + 8), 64)
    assert parts.total == (16 + 16 + 384 + 64) * MIB


@pytest.mark.parametrize(
    ("budget_mib", "lanes", "pages", "frontiers"),
    [
        (479, 4, 352, 64),  # one idle context less than the whole wish, which needs 480
        (224, 4, 128, 64),
        (223, 4, 128, 16),
        (175, 4, 128, 8),
        (167, 3, 96, 12),
        (54, 1, 32, 2),
    ],
)
def test_idle_contexts_go_first_then_frontiers_then_lanes(
    budget_mib: int, lanes: int, pages: int, frontiers: int
) -> None:
    capacity, parts = plan_capacity(need, WISH, budget_mib * MIB)
    assert (capacity.lanes, capacity.pages, capacity.frontiers) == (lanes, pages, frontiers)
    assert parts.total <= budget_mib * MIB


def test_less_than_one_lane_is_refused_in_one_sentence_that_names_the_lever() -> None:
    with pytest.raises(MemoryRefusedError) as refused:
        plan_capacity(need, WISH, 53 * MIB)
    assert str(refused.value) == (
        "one lane of 8192 tokens needs 54 MiB and 53 MiB may be used; the largest part is pages "
        "with 32 MiB: lower model.context or prefill.chunk, or free memory"
    )
    assert refused.value.exit_code == 71


def test_of_lanes_that_do_not_fit_nothing_more_is_asked() -> None:
    asked = []

    def counted(**sizes: int) -> Need:
        asked.append(sizes["lanes"])
        return need(**sizes)

    capacity, _ = plan_capacity(counted, replace(WISH, lanes=64, idle_contexts=128), 100 * MIB)
    assert capacity.lanes == 2
    assert len(asked) < 64 + 2 * 131


def test_the_ledger_promises_no_more_pages_than_there_are() -> None:
    ledger = Ledger(pages=10, frontiers=64)
    ledger.promise(1, 6)
    assert ledger.can_promise(4)
    assert not ledger.can_promise(5)
    with pytest.raises(ValueError, match="5 pages cannot be promised"):
        ledger.promise(2, 5)
    ledger.release(1)
    ledger.promise(2, 10)
    assert ledger.pages_promised == 10


def test_the_ledger_promises_two_frontiers_to_each_turn() -> None:
    ledger = Ledger(pages=10, frontiers=5)
    ledger.promise(1, 1)
    ledger.promise(2, 1)
    assert not ledger.can_promise(1)


def test_a_turn_is_promised_memory_once() -> None:
    ledger = Ledger(pages=10, frontiers=8)
    ledger.promise(1, 1)
    with pytest.raises(ValueError, match="turn 1"):
        ledger.promise(1, 1)
