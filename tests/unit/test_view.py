"""What a snapshot says of a scheduler in a known state."""

from __future__ import annotations

import pytest

from ds4d.sched import snapshot, view
from ds4d.sched.snapshot import SESSIONS_MAX, Snapshot
from ds4d.sched.tally import Tally
from tests.fakes import FakeEngine
from tests.unit.house import House, claim, prompt


def look(house: House) -> Snapshot:
    return view.take(house.scheduler, Tally(), house.now, heartbeat_age_s=None)


def only(shot: Snapshot) -> snapshot.Session:
    (session,) = shot.sessions
    return session


def test_an_empty_house_has_room_for_everybody() -> None:
    shot = look(House(FakeEngine(lanes=3, pages=40, frontiers=20)))
    assert shot.sessions == ()
    assert shot.n_sessions == 0
    assert shot.lanes == snapshot.Lanes(n=3, n_max=3, n_busy=0)
    assert shot.queue == snapshot.Queue(n=0, n_max=32, n_lane=0, n_memory=0, oldest_s=0, wait_s=0)
    assert shot.pages == snapshot.Pages(
        n=40, n_free=40, n_promised=0, tokens=256, frontiers=20, frontiers_free=20
    )


def test_a_prompt_shows_how_far_it_is_how_fast_and_how_long_it_will_take() -> None:
    house = House(FakeEngine(eos_every=0))
    house.submit(claim(prompt(1025), max_tokens=50, label="req_a"))
    first = look(house)
    assert only(first).phase == "queued"
    house.step()
    house.step()
    one = only(look(house))
    assert (one.id, one.request, one.phase, one.lane) == (1, "req_a", "prefill", 0)
    assert (one.n_tokens, one.n_prompt, one.n_pages, one.n_answer_max) == (512, 1025, 2, 50)
    assert one.remaining_s == pytest.approx(0.512), "1 ms a token"
    assert one.tokens_per_s == pytest.approx(512 / 0.03), "from its first plan"
    assert one.age_s == pytest.approx(0.04)
    assert one.idle_s == 0


def test_an_answer_shows_its_tokens_and_their_rate() -> None:
    house = House(FakeEngine(eos_every=0))
    turn = house.submit(claim(prompt(10), max_tokens=50))
    while len(house.heard[turn].tokens) < 7:
        house.step()
    one = only(look(house))
    assert (one.phase, one.n_generated, one.remaining_s) == ("decode", 7, None)
    assert one.tokens_per_s == pytest.approx(50.0), "two ticks of 10 ms a step"
    house.now += 1.0
    assert only(look(house)).tokens_per_s == pytest.approx(1.0), "it stands still"
    house.scheduler.on_pause(turn, 3, house.now)
    one = only(look(house))
    assert (one.phase, one.tokens_per_s) == ("paused", None)


def test_an_idle_session_shows_the_numbers_of_its_last_turn() -> None:
    house = House(FakeEngine(eos_every=0))
    ids = prompt(700)
    house.ask(claim(ids, max_tokens=9))
    house.ask(claim(ids, max_tokens=5, label="req_b"))
    house.now += 30.0
    one, before = look(house).sessions
    assert (before.id, before.n_generated) == (1, 9), "from which the other was forked"
    assert (one.id, one.request, one.phase, one.lane) == (2, "req_b", "idle", None)
    assert (one.n_prompt, one.n_cached, one.n_generated) == (700, 699, 5)
    assert (one.n_tokens, one.n_answer_max, one.tokens_per_s) == (704, 5, None)
    assert one.idle_s == pytest.approx(30.0, abs=0.05)
    assert one.age_s > one.idle_s


def test_those_at_work_come_first_then_the_queue_then_the_idle_the_last_used_first() -> None:
    house = House(FakeEngine(lanes=1, eos_every=0))
    for i in range(3):
        house.ask(claim(prompt(300, seed=i), label=f"idle_{i}"))
    for label, priority in (("first", 0), ("second", 0), ("urgent", 1)):
        house.submit(claim(prompt(900, seed=9), label=label, priority=priority, max_tokens=99))
        house.step()
    shot = look(house)
    labels = [one.request for one in shot.sessions]
    assert labels == ["first", "urgent", "second", "idle_2", "idle_1", "idle_0"]
    assert shot.n_sessions == 6
    waits = [one.remaining_s for one in shot.sessions if one.phase == "queued"]
    assert waits == sorted(waits)
    assert {one.waits_for for one in shot.sessions} == {"lane", None}
    assert (shot.queue.n, shot.queue.n_lane, shot.queue.n_memory) == (2, 2, 0)
    assert shot.queue.oldest_s == pytest.approx(0.04)
    assert shot.queue.wait_s > max(waits)


def test_behind_one_that_lacks_memory_a_free_lane_helps_nobody() -> None:
    house = House(FakeEngine(lanes=3, pages=8, context=2048, eos_every=0))
    house.submit(claim(prompt(1000), max_tokens=600))  # 7 pages at most
    for i in range(3):
        house.submit(claim(prompt(100, seed=i), max_tokens=600))  # 3 each, and two lanes
    house.step()
    shot = look(house)
    assert [one.waits_for for one in shot.sessions] == [None, "memory", "memory", "lane"]
    assert (shot.queue.n, shot.queue.n_lane, shot.queue.n_memory) == (3, 1, 2)
    assert shot.pages.n_promised == 7


def test_a_turn_that_has_a_lane_but_no_session_yet_is_there_too() -> None:
    house = House(FakeEngine(eos_every=0))
    house.ask(claim(prompt(300, seed=2)))  # its speed is known from now on
    house.submit(claim(prompt(2000), label="long"))
    house.submit(claim(prompt(1000, seed=1), label="short"))
    house.step()
    long, short, _ = look(house).sessions
    assert (short.id, short.phase, short.lane) == (2, "prefill", 1)
    assert (long.id, long.phase, long.lane, long.n_tokens) == (None, "prefill", 0, 0)
    assert long.remaining_s is not None
    assert short.remaining_s is not None
    assert long.remaining_s > short.remaining_s


def test_the_lanes_that_may_be_used_are_shown_beside_those_there_are() -> None:
    house = House(FakeEngine(lanes=4, eos_every=0))
    for i in range(3):
        house.submit(claim(prompt(10, seed=i), max_tokens=50))
    house.step()
    house.scheduler.lanes_max = 2
    assert look(house).lanes == snapshot.Lanes(n=4, n_max=2, n_busy=3)


def test_of_very_many_sessions_the_oldest_are_only_counted() -> None:
    n = SESSIONS_MAX + 5
    house = House(FakeEngine(lanes=1, pages=n + 40, frontiers=2 * n))
    for i in range(n):
        house.ask(claim(prompt(20, seed=i), max_tokens=1, label=str(i)))
    shot = look(house)
    assert shot.n_sessions == n
    assert len(shot.sessions) == SESSIONS_MAX
    assert shot.sessions[0].request == str(n - 1)
