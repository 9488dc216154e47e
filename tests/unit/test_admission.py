import pytest

from ds4d.sched.admission import (
    FIRST_GUESS_S,
    LONGEST_RETRY_S,
    Admit,
    Refuse,
    ServiceTime,
    Wait,
    at_the_door,
    at_the_lane,
)
from ds4d.sched.memory import Ledger


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    def verdict(n_queued: int, lanes_free: int = 0) -> Admit | Refuse:
        return at_the_door(n_queued=n_queued, n_queue_max=2, lanes_free=lanes_free, wait_s=7.2)

    assert verdict(1) == Admit()
    assert verdict(2) == Refuse(retry_after_s=8)
    assert verdict(2, lanes_free=1) == Admit(), "one of the two is as good as seated"


@pytest.mark.parametrize(("wait_s", "said"), [(0.0, 1), (1e9, LONGEST_RETRY_S)])
def test_the_wait_that_is_named_is_one_that_clients_can_use(wait_s: float, said: int) -> None:
    verdict = at_the_door(n_queued=2, n_queue_max=2, lanes_free=0, wait_s=wait_s)
    assert verdict == Refuse(said)


def test_a_turn_waits_for_a_lane_then_for_memory() -> None:
    ledger = Ledger(pages=4, frontiers=8)
    assert at_the_lane(lanes_free=0, ledger=ledger, n_pages=4) == Wait("lane")
    assert at_the_lane(lanes_free=1, ledger=ledger, n_pages=5) == Wait("memory")
    assert at_the_lane(lanes_free=1, ledger=ledger, n_pages=4) == Admit()


def test_the_predicted_wait_follows_what_turns_took() -> None:
    service = ServiceTime()
    assert service.wait_s(0, 1) == FIRST_GUESS_S
    for _ in range(50):
        service.saw(4.0)
    assert service.wait_s(0, 1) == pytest.approx(4.0)
    assert service.wait_s(7, 4) == pytest.approx(8.0)
