"""How a ticket ended, in the words of the metrics; rates with time as an argument."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds4d.errors import DeviceError, Ds4Error, LaneError, Refused, RequestError
from ds4d.metrics import REGISTRY
from ds4d.sched.runner import execute
from ds4d.sched.tally import WINDOW_S, Ending, Rate, Tally, ending
from ds4d.sched.ticket import Done, Failed, Stats, Ticket
from tests.fakes import FakeEngine
from tests.unit.house import House, claim, prompt

STATS = Stats(n_prompt=30, n_generated=8)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"ds4d_{name}", labels) or 0.0


def ticket(end: Done | Failed | None = None, outcome: str = "left") -> Ticket:
    made = Ticket(1, claim(prompt(30)), on_leave=lambda *_: None, on_room=lambda _: None)
    if end is not None:
        made.put(end)
    made.leave(outcome=outcome)
    return made


def refused(code: str) -> Refused:
    return Refused("no", status=503, code=code, retry_after_s=1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (refused("slow_client"), Ending("cancelled", "slow_client")),
        (refused("timeout"), Ending("cancelled", "timeout")),
        (refused("queue_timeout"), Ending("cancelled", "timeout")),
        (refused("draining"), Ending("cancelled", "shutdown")),
        (RequestError("no", code="cancelled"), Ending("cancelled", "operator")),
        (LaneError("a logit"), Ending("failed")),
        (DeviceError("gone"), Ending("failed")),
    ],
)
def test_a_failure_that_somebody_wanted_is_a_cancel(error: Ds4Error, expected: Ending) -> None:
    assert ending(ticket(Failed(error, STATS)), 0) == expected


def test_an_answer_ends_as_its_reader_says_who_alone_knows_of_calls_and_stop_strings() -> None:
    done = Done("stop", 1, STATS)
    assert ending(ticket(done, "tool_calls"), 8) == Ending("tool_calls")
    assert ending(ticket(None, "function_call"), 5) == Ending("tool_calls")
    assert ending(ticket(None, "stop"), 5) == Ending("stop")
    assert ending(ticket(None, "slow_client"), 5) == Ending("cancelled", "slow_client")
    assert ending(ticket(None, "failed"), 5) == Ending("failed")


def test_an_answer_that_was_left_is_whole_only_if_the_client_has_all_of_it() -> None:
    done = Done("length", None, STATS)
    assert ending(ticket(done), 8) == Ending("length")
    assert ending(ticket(done), 7) == Ending("cancelled", "client")
    assert ending(ticket(), 8) == Ending("cancelled", "client")


def test_a_rate_is_the_mean_of_the_last_ten_seconds() -> None:
    rate = Rate()
    assert rate.per_s(1e6) == 0.0
    for second in range(100):
        rate.add(50, float(second))
    assert rate.per_s(99.0) == pytest.approx(50.0)
    assert rate.per_s(104.0) == pytest.approx(25.0)
    assert rate.per_s(99.0 + 2 * WINDOW_S) == 0.0


def test_a_rate_keeps_little_however_much_it_counts() -> None:
    rate = Rate()
    for i in range(10_000):
        rate.add(1, i / 1000)
    assert len(rate._buckets) <= 21
    assert rate.per_s(9.999) == pytest.approx(1000.0)


@pytest.mark.parametrize(("n_lanes", "r"), [(1, "1"), (4, "4"), (5, "8"), (9, "16")])
def test_the_size_of_a_cohort_is_counted_in_few_classes(n_lanes: int, r: str) -> None:
    labels = {"r": r, "executor": "target_only"}
    cycles = value("cohort_cycles_total", **labels)
    emitted = value("cohort_emitted_tokens_total", **labels)
    gaps = value("inter_token_latency_seconds_count", r=r)
    house, tally = House(FakeEngine(lanes=n_lanes, eos_every=0)), Tally()
    for i in range(n_lanes):
        house.submit(claim(prompt(1, seed=i), max_tokens=3))
    _run(house, tally)
    assert value("cohort_cycles_total", **labels) - cycles == 3
    assert value("cohort_emitted_tokens_total", **labels) - emitted == 3 * n_lanes
    assert value("inter_token_latency_seconds_count", r=r) - gaps == 2 * n_lanes
    assert tally.totals().generated == 3 * n_lanes


def test_a_lane_that_fails_is_no_measurement() -> None:
    gaps = value("inter_token_latency_seconds_count", r="1")
    engine = FakeEngine(lanes=1, eos_every=0, poison=lambda ids: len(ids) == 4)
    house, tally = House(engine), Tally()
    house.submit(claim(prompt(1), max_tokens=9))
    _run(house, tally)
    assert value("inter_token_latency_seconds_count", r="1") - gaps == 2
    assert tally.totals().generated == 3


def _run(house: House, tally: Tally) -> None:
    """As the runner does, for turns that only decode."""
    while not (plan := house.scheduler.plan(house.now)).idle:
        outcome = replace(execute(house.engine, plan, house.cancel), ms=10.0)
        house.now += 0.01
        step = plan.work
        turns = [house.scheduler.turns[turn] for turn in step.turns] if step else []
        house.scheduler.settle(outcome, house.now)
        if step:
            tally.step(step, turns, outcome, house.now)
