"""The scheduler above a fake engine, step by step, with time as an argument."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4d.engine import Sampling
from ds4d.errors import LaneError, Refused
from ds4d.kv.prefix import best_match
from ds4d.sched.plan import Chunk, Seat, Step
from ds4d.sched.scheduler import Rules
from ds4d.sched.ticket import Claim, Done, Failed, Progress, Token
from tests.fakes import EOS, FakeEngine
from tests.unit.house import GREEDY, House, claim, prompt

# One turn


def test_a_prompt_is_prefilled_but_for_its_last_id_and_then_answered() -> None:
    house = House()
    ids = prompt(1000)
    heard = house.ask(claim(ids))
    assert house.engine.n_prefilled == 999
    assert heard.tokens == house.engine.answer(ids, GREEDY, 8)
    assert isinstance(heard.end, Done)
    assert heard.end.stats.n_prompt == 1000
    assert heard.end.stats.n_cached == 0
    assert heard.end.stats.n_generated == len(heard.tokens)


def test_chunks_are_256_long_and_end_at_multiples_of_128_or_where_a_frontier_is_wanted() -> None:
    house = House()
    house.ask(claim(prompt(1000), starts=(0, 400, 990)))
    chunks = [len(p.work.work.ids) for p in house.plans if isinstance(p.work, Chunk)]
    assert chunks == [256, 128, 256, 256, 103]  # to 256, 384 = 400 rounded down, 640, 896, 999
    (session,) = house.scheduler.sessions.values()
    assert {384, 896, 999} < set(session.frontiers)


def test_progress_counts_the_reused_tokens_too() -> None:
    house = House()
    ids = prompt(600)
    house.ask(claim(ids))
    heard = house.ask(claim(np.concatenate([ids, prompt(300, seed=5)])))
    done = [e.n_done for e in heard.events if isinstance(e, Progress)]
    assert done == [768, 899]
    assert {e.n_total for e in heard.events if isinstance(e, Progress)} == {900}


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    house = House()
    heard = house.ask(claim(prompt(1)))
    assert house.engine.calls[0] == "verify"
    assert heard.tokens == house.engine.answer(prompt(1), GREEDY, 8)


def test_a_stop_id_ends_the_answer_and_is_not_emitted() -> None:
    house = House()
    ids = prompt(40)
    house.engine.say(ids, [100, 101, 7])
    heard = house.ask(claim(ids, stop_ids=frozenset({EOS, 7})))
    assert heard.tokens == [100, 101]
    assert isinstance(heard.end, Done)
    assert (heard.end.reason, heard.end.stop_id) == ("stop", 7)


def test_max_tokens_ends_the_answer() -> None:
    house = House(FakeEngine(eos_every=0))
    heard = house.ask(claim(prompt(40), max_tokens=5))
    assert len(heard.tokens) == 5
    assert isinstance(heard.end, Done)
    assert (heard.end.reason, heard.end.stop_id) == ("length", None)


def test_the_end_of_the_context_ends_the_answer() -> None:
    house = House(FakeEngine(eos_every=0, context=1024, pages=16))
    heard = house.ask(claim(prompt(1000), max_tokens=500))
    assert len(heard.tokens) == 24
    assert isinstance(heard.end, Done)
    assert heard.end.reason == "length"


def test_stop_ids_are_masked_until_min_tokens_were_emitted() -> None:
    house = House()
    ids = prompt(40)
    house.engine.say(ids, [EOS])
    heard = house.ask(claim(ids, min_tokens=3))
    assert len(heard.tokens) >= 3
    assert EOS not in heard.tokens


def test_an_id_that_is_banned_first_may_come_second() -> None:
    house = House(FakeEngine(eos_every=0))
    ids = prompt(40)
    house.engine.say(ids, [99])
    banned = (int(ids[-1]), (99,))  # behind the prompt's last id, and so first
    first = house.ask(claim(ids, banned_after=banned)).tokens[0]
    assert first != 99
    house.engine.say(np.append(ids, first), [99])
    assert house.ask(claim(ids, banned_after=banned)).tokens[:2] == [first, 99]


def test_ids_that_may_not_follow_another_are_masked_right_behind_it_only() -> None:
    house = House(FakeEngine(eos_every=0))
    ids = prompt(40)
    house.engine.say(ids, [77, EOS])
    tokens = house.ask(claim(ids, banned_after=(77, (EOS, 90)))).tokens
    assert tokens[0] == 77
    assert tokens[1] not in (EOS, 90)
    house.engine.say(np.append(ids, tokens[:2]), [90, EOS])
    assert house.ask(claim(ids, banned_after=(77, (EOS, 90)))).tokens == [*tokens[:2], 90]


def test_log_probabilities_come_with_their_tokens() -> None:
    heard = House().ask(claim(prompt(40), sampling=Sampling(temperature=0.0, top_logprobs=2)))
    for event in heard.events:
        if isinstance(event, Token):
            assert event.logprobs is not None
            assert event.logprobs.top[0][0] == event.id


def test_penalties_see_the_prompt_and_what_was_drawn() -> None:
    house = House()
    ids = prompt(40)
    house.engine.say(ids, [300, 301, 300, EOS])
    house.ask(claim(ids, sampling=Sampling(temperature=0.0, presence=0.5)))
    last = [p.work for p in house.plans if isinstance(p.work, Step)][-1]
    history = last.cohort[0].history
    assert history is not None
    counts = dict(zip(history.ids.tolist(), history.generated.tolist(), strict=True))
    assert counts == dict.fromkeys(ids.tolist(), 0) | {300: 2, 301: 1}


# Reuse


def test_a_follow_up_goes_on_in_place_behind_the_answer() -> None:
    """The re-rendered prompt has the sampled ids, then the stop id, then the new message."""
    house = House()
    ids = prompt(700)
    house.engine.say(ids, [100, 101, 102, EOS])
    house.ask(claim(ids))
    follow_up = np.concatenate([ids, [100, 101, 102, EOS], prompt(50, seed=2)]).astype(np.int32)
    before = house.engine.n_prefilled
    heard = house.ask(claim(follow_up))
    assert heard.started.n_cached == 703
    assert house.engine.n_prefilled - before == len(follow_up) - 1 - 703
    assert heard.tokens == house.engine.answer(follow_up, GREEDY, 8)
    assert len(house.scheduler.sessions) == 1


def test_an_answer_cut_by_max_tokens_is_reused_but_for_its_last_token() -> None:
    """That one was drawn and never run."""
    house = House(FakeEngine(eos_every=0))
    ids = prompt(700)
    answer = house.ask(claim(ids, max_tokens=6)).tokens
    heard = house.ask(claim(np.concatenate([ids, answer, [50, 51]]).astype(np.int32)))
    assert heard.started.n_cached == 705


def test_the_same_prompt_again_computes_one_token() -> None:
    house = House()
    ids = prompt(700)
    first = house.ask(claim(ids))
    before = house.engine.n_prefilled
    again = house.ask(claim(ids))
    assert again.started.n_cached == 699
    assert house.engine.n_prefilled == before
    assert again.tokens == first.tokens


def test_a_conversation_that_branches_resumes_at_the_message_before() -> None:
    """The common part ends at 930; the message starts below it are 400 and 900."""
    house = House()
    ids = prompt(1200)
    house.ask(claim(ids, starts=(0, 400, 900, 1100)))
    branch = np.concatenate([ids[:930], prompt(100, seed=3)])
    heard = house.ask(claim(branch, starts=(0, 400, 900)))
    assert heard.started.n_cached == 896
    assert heard.tokens == house.engine.answer(branch, GREEDY, 8)


def test_a_fork_leaves_the_session_that_it_came_from_as_it_was() -> None:
    house = House()
    ids = prompt(1200)
    old = house.ask(claim(ids, starts=(0, 900)))
    house.ask(claim(np.concatenate([ids[:930], prompt(400, seed=3)]), starts=(0, 900)))
    follow_up = np.concatenate([ids, old.tokens, [EOS, 60]]).astype(np.int32)
    heard = house.ask(claim(follow_up))
    assert heard.started.n_cached == 1200 + len(old.tokens) - 1  # the last was never run
    assert heard.tokens == house.engine.answer(follow_up, GREEDY, 8)


def test_agents_that_come_together_compute_their_system_prompt_once() -> None:
    house = House()
    system = prompt(1000)
    asks = [prompt(1100, seed=i, head=system) for i in range(4)]
    turns = [house.submit(claim(ids, starts=(0, 1000))) for ids in asks]
    house.run()
    cached = [house.heard[turn].started.n_cached for turn in turns]
    assert cached == [0, 896, 896, 896]
    assert len({p for s in house.scheduler.sessions.values() for p in s.pages[:3]}) == 3
    for turn, ids in zip(turns, asks, strict=True):
        assert house.heard[turn].tokens == house.engine.answer(ids, GREEDY, 8)


def test_a_claim_without_cache_neither_reads_nor_leaves_state() -> None:
    house = House()
    ids = prompt(700)
    house.ask(claim(ids))
    n_sessions, n_frontiers = len(house.scheduler.sessions), house.engine.n_frontiers
    heard = house.ask(claim(ids, cache=False))
    assert heard.started.n_cached == 0
    assert heard.tokens == house.engine.answer(ids, GREEDY, 8)
    assert (len(house.scheduler.sessions), house.engine.n_frontiers) == (n_sessions, n_frontiers)


def test_idle_sessions_give_up_their_pages_the_oldest_first() -> None:
    house = House(FakeEngine(lanes=1, pages=8, context=2048))
    for i in range(3):  # 3 pages each, of 8
        house.ask(claim(prompt(700, seed=i)))
    assert house.ask(claim(prompt(700, seed=2))).started.n_cached == 699
    assert house.ask(claim(prompt(700, seed=0))).started.n_cached == 0


def test_a_session_that_others_fork_from_counts_as_used() -> None:
    house = House(FakeEngine(lanes=1, pages=8, context=1024))
    first, second = prompt(700), prompt(700, seed=1)
    house.ask(claim(first, starts=(0, 256)))
    house.ask(claim(second))
    house.ask(claim(prompt(400, seed=2, head=first[:256])))  # shares a page, takes the last
    house.ask(claim(prompt(300, seed=3)))  # somebody has to go
    assert house.ask(claim(second)).started.n_cached == 0
    assert house.ask(claim(first)).started.n_cached > 0


def test_a_fork_takes_its_source_over_when_there_is_no_page_to_copy_into() -> None:
    """`first` holds 8 of 9 pages and `second`, which decodes, maps three of them and has the
    ninth. `third` resumes at 640 in a page of both: it gets what `first` had, and a copy."""
    house = House(FakeEngine(lanes=2, pages=9, context=2048, eos_every=0))
    ids = prompt(1800)
    house.ask(claim(ids, starts=(0, 640, 896)))
    branch = np.concatenate([ids[:930], prompt(70, seed=1)])
    second = house.submit(claim(branch, max_tokens=24))
    while len(house.heard[second].tokens) < 5:
        house.step()
    other = np.concatenate([ids[:700], prompt(20, seed=2)])
    third = house.submit(claim(other, max_tokens=48))
    house.step()
    (seat,) = (move for move in house.plans[-1].moves if isinstance(move, Seat))
    assert seat.copy is not None
    assert not any(s.idle for s in house.scheduler.sessions.values())
    house.run()
    assert house.heard[second].tokens == house.engine.answer(branch, GREEDY, 24)
    assert house.heard[third].started.n_cached == 640
    assert house.heard[third].tokens == house.engine.answer(other, GREEDY, 48)
    assert house.ask(claim(ids)).tokens == house.engine.answer(ids, GREEDY, 8)


def test_with_few_frontiers_old_sessions_lose_theirs_and_new_ones_get_them() -> None:
    house = House(FakeEngine(lanes=1, frontiers=3))
    for i in range(4):
        house.ask(claim(prompt(700, seed=i), starts=(0, 300, 600)))
    heard = house.ask(claim(prompt(700, seed=3)))
    assert heard.started.n_cached == 699


def test_a_living_turn_keeps_the_end_of_its_prompt_when_frontiers_are_short() -> None:
    house = House(FakeEngine(lanes=3, frontiers=6, eos_every=0))
    ids = prompt(700)
    house.submit(claim(ids, max_tokens=3000))
    while not house.engine.cohorts:
        house.step()
    house.submit(claim(prompt(3000, seed=1), starts=tuple(range(0, 3000, 128)), max_tokens=3000))
    while len(house.engine.calls) < 200:
        house.step()
    assert house.engine.n_frontiers == 6
    again = house.submit(claim(ids))
    while not house.heard[again].tokens:
        house.step()
    assert house.heard[again].started.n_cached == 699


# Several lanes


def test_lanes_that_decode_step_together_and_draw_what_they_draw_alone() -> None:
    house = House(FakeEngine(eos_every=0))
    asks = [prompt(300 + i, seed=i) for i in range(4)]
    turns = [house.submit(claim(ids, max_tokens=100)) for ids in asks]
    house.run()
    assert {0, 1, 2, 3} in [set(cohort) for cohort in house.engine.cohorts]
    for turn, ids in zip(turns, asks, strict=True):
        assert house.heard[turn].tokens == house.engine.answer(ids, GREEDY, 100)


def test_more_lanes_than_rows_take_turns() -> None:
    house = House(FakeEngine(lanes=5, rows_max=2, eos_every=0))
    for i in range(5):
        house.submit(claim(prompt(1, seed=i), max_tokens=20))
    house.run()
    taken = Counter(lane for cohort in house.engine.cohorts[:25] for lane in cohort)
    assert set(taken.values()) == {10}, "2 of 5 lanes a pass: each in 10 of 25"


def test_lanes_that_decode_are_served_between_the_chunks_of_a_long_prompt() -> None:
    """A chunk of 256 takes 256 ms and a pass 10: 7 passes give the prompt 80 % of the time."""
    house = House(FakeEngine(eos_every=0))
    house.submit(claim(prompt(10), max_tokens=400))
    for _ in range(5):
        house.step()
    house.submit(claim(prompt(3000, seed=1)))
    house.run()
    calls = "".join(call[0] for call in house.engine.calls)
    assert "p" + "v" * 7 + "p" + "v" * 7 + "p" in calls
    assert "pp" not in calls[calls.index("v") :]


def test_chunks_shrink_while_others_decode_so_that_none_stalls_them_too_long() -> None:
    house = House(FakeEngine(eos_every=0, chunk=2048))
    house.submit(claim(prompt(10), max_tokens=400))
    for _ in range(3):
        house.step()
    house.scheduler.rules = Rules(stall_target_s=0.6)
    house.submit(claim(prompt(6000, seed=1)))
    house.run()
    chunks = [len(p.work.work.ids) for p in house.plans if isinstance(p.work, Chunk)]
    assert chunks[0] == 9
    assert set(chunks[1:-1]) == {512}, "at 1 ms a token"


def test_the_shorter_prompt_goes_first_unless_the_longer_has_waited_as_long_as_it_takes() -> None:
    house = House(tick=0.001)
    house.ask(claim(prompt(300)))  # 1 ms a token is known now
    long = house.submit(claim(prompt(2000, seed=1)))
    house.step()
    short = house.submit(claim(prompt(300, seed=2)))
    house.run()
    order = [p.work.turn for p in house.plans if isinstance(p.work, Chunk)][2:]
    assert order[:3] == [long, short, short]
    assert order[3:] == [long] * 7

    house.now += 100.0
    long = house.submit(claim(prompt(2000, seed=3)))
    house.now += 3.0
    house.submit(claim(prompt(300, seed=4)))
    n = len(house.plans)
    house.run()
    assert [p.work.turn for p in house.plans[n:] if isinstance(p.work, Chunk)][:8] == [long] * 8


def test_the_queue_is_first_come_first_served_within_a_priority() -> None:
    house = House(FakeEngine(lanes=1))
    turns = [house.submit(claim(prompt(10, seed=i), priority=p)) for i, p in enumerate([0, 0, 5])]
    house.run()
    waits = {turn: house.heard[turn].started.wait_ms for turn in turns}
    assert sorted(turns, key=waits.__getitem__) == [turns[2], turns[0], turns[1]]


def test_the_prompt_with_the_higher_priority_is_computed_first() -> None:
    house = House()
    house.submit(claim(prompt(600)))
    urgent = house.submit(claim(prompt(600, seed=1), priority=1))
    house.run()
    order = [p.work.turn for p in house.plans if isinstance(p.work, Chunk)]
    assert order[:3] == [urgent] * 3


def test_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    house = House(FakeEngine(lanes=1), rules=Rules(queue_total=2))
    for i in range(3):
        house.submit(claim(prompt(10, seed=i)))
    with pytest.raises(Refused) as refused:
        house.submit(claim(prompt(10)))
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert refused.value.retry_after_s >= 1
    house.run()
    assert all(heard.end for heard in house.heard.values())


def test_a_turn_whose_memory_is_not_there_yet_waits_for_it() -> None:
    house = House(FakeEngine(lanes=2, pages=8, context=2048, eos_every=0))
    first = house.submit(claim(prompt(1000), max_tokens=600))  # 7 pages at most
    second = house.submit(claim(prompt(100, seed=1), max_tokens=600))  # 3
    house.step()
    assert [t.id for t in house.scheduler.queue] == [second]
    house.run()
    assert len(house.heard[first].tokens) == len(house.heard[second].tokens) == 600


# Ends


def test_leaving_the_queue_frees_the_place_at_once() -> None:
    house = House(FakeEngine(lanes=1), rules=Rules(queue_total=1))
    house.submit(claim(prompt(10)))
    house.step()
    waiting = house.submit(claim(prompt(10, seed=1)))
    house.leave(waiting)
    house.submit(claim(prompt(10, seed=2)))
    house.run()
    assert house.heard[waiting].events == []


def test_a_prompt_that_is_left_keeps_its_whole_chunks() -> None:
    house = House()
    ids = prompt(1000)
    turn = house.submit(claim(ids))
    house.step()
    house.step()
    house.cancel.set()
    house.leave(turn)
    house.run()
    assert house.engine.lanes_seated == set()
    heard = house.ask(claim(ids))
    assert heard.started.n_cached == 512
    assert heard.tokens == house.engine.answer(ids, GREEDY, 8)


def test_a_chunk_cancelled_on_its_way_leaves_the_lane_as_it_was() -> None:
    house = House()
    ids = prompt(600)
    turn = house.submit(claim(ids, starts=(0, 256, 512)))
    house.step()
    house.cancel.set()
    house.step()  # would have captured at 512
    (session,) = house.scheduler.sessions.values()
    assert session.frontiers == [256]
    house.run()
    assert house.heard[turn].tokens == house.engine.answer(ids, GREEDY, 8)


def test_an_answer_that_is_left_frees_its_lane_in_the_next_plan() -> None:
    house = House(FakeEngine(eos_every=0))
    turn = house.submit(claim(prompt(100), max_tokens=400))
    while len(house.heard[turn].tokens) < 5:
        house.step()
    n_passes = len(house.engine.cohorts)
    house.leave(turn)
    house.run()
    assert len(house.engine.cohorts) == n_passes
    assert house.engine.lanes_seated == set()


def test_a_client_that_leaves_while_a_step_is_under_way_hears_no_more_of_it() -> None:
    house = House(FakeEngine(eos_every=0))
    turn = house.submit(claim(prompt(100), max_tokens=400))
    while len(house.heard[turn].tokens) < 5:
        house.step()
    house.meanwhile.append(turn)
    house.run()
    assert len(house.heard[turn].tokens) == 5
    (session,) = house.scheduler.sessions.values()
    assert session.n_tokens == 105


def test_tokens_behind_a_stop_string_are_no_part_of_what_is_kept() -> None:
    house = House(FakeEngine(eos_every=0))
    ids = prompt(100)
    turn = house.submit(claim(ids, max_tokens=400))
    while len(house.heard[turn].tokens) < 12:
        house.step()
    answer = house.heard[turn].tokens
    house.leave(turn, 7)
    house.run()
    (session,) = house.scheduler.sessions.values()
    assert session.n_tokens == 107
    follow_up = np.concatenate([ids, answer[:7], [EOS, 60, 61]]).astype(np.int32)
    heard = house.ask(claim(follow_up))
    assert heard.started.n_cached == 107
    assert heard.tokens == house.engine.answer(follow_up, GREEDY, 8)


def test_beyond_the_roll_back_window_the_session_falls_back_to_the_prompts_end() -> None:
    house = House(FakeEngine(eos_every=0))
    turn = house.submit(claim(prompt(100), max_tokens=400))
    while len(house.heard[turn].tokens) < 60:
        house.step()
    house.leave(turn, 7)
    house.run()
    (session,) = house.scheduler.sessions.values()
    assert session.n_tokens == 99


def test_a_client_that_leaves_after_the_end_with_less_than_all_keeps_less() -> None:
    house = House()
    ids = prompt(100)
    house.engine.say(ids, [100, 101, 102, EOS])
    turn = house.submit(claim(ids))
    house.run()
    house.leave(turn, 3)
    house.run()
    (session,) = house.scheduler.sessions.values()
    assert session.n_tokens == 103
    house.leave(turn, 2)
    house.run()
    assert session.n_tokens == 99


def test_a_paused_lane_is_left_out_until_its_client_reads_on() -> None:
    house = House(FakeEngine(eos_every=0))
    slow = house.submit(claim(prompt(10), max_tokens=30))
    fast = house.submit(claim(prompt(10, seed=1), max_tokens=30))
    for _ in range(4):
        house.step()
    n_told = len(house.heard[slow].tokens)
    house.scheduler.on_pause(slow, n_told, house.now)
    house.run()
    assert len(house.heard[fast].tokens) == 30
    assert len(house.heard[slow].tokens) == n_told
    assert house.scheduler.due() is not None
    house.scheduler.on_resume(slow)
    house.run()
    assert house.heard[slow].tokens == house.engine.answer(prompt(10), GREEDY, 30)


def test_a_client_that_reads_nothing_for_too_long_is_cancelled() -> None:
    house = House(FakeEngine(eos_every=0), rules=Rules(send_stall_s=60.0))
    turn = house.submit(claim(prompt(10), max_tokens=30))
    for _ in range(4):
        house.step()
    house.scheduler.on_pause(turn, 1, house.now)
    house.now += 59.0
    house.run()
    assert house.heard[turn].end is None
    house.now += 1.0
    house.run()
    end = house.heard[turn].end
    assert isinstance(end, Failed)
    assert isinstance(end.error, Refused)
    assert end.error.code == "slow_client"
    assert house.engine.lanes_seated == set()
    (session,) = house.scheduler.sessions.values()
    assert session.n_tokens == 11, "the prompt and the one token that it had read"


def test_a_lane_that_fails_alone_takes_only_its_own_state_with_it() -> None:
    bad = prompt(300, seed=1)
    engine = FakeEngine(poison=lambda ids: bool((ids[:300] == bad[: len(ids)]).all()))
    house = House(engine)
    good = house.submit(claim(prompt(300)))
    failed = house.submit(claim(bad))
    house.run()
    assert isinstance(house.heard[good].end, Done)
    end = house.heard[failed].end
    assert isinstance(end, Failed)
    assert isinstance(end.error, LaneError)
    assert best_match(bad, house.scheduler.sessions.values()) is None


def test_nothing_is_planned_while_a_plan_is_under_way() -> None:
    house = House()
    house.submit(claim(prompt(10)))
    assert isinstance(house.scheduler.plan(1.0).moves[0], Seat)
    with pytest.raises(ValueError, match="has not been settled"):
        house.scheduler.plan(2.0)


# Time


def test_a_turn_that_waits_too_long_for_a_lane_fails_and_is_told_when_to_come_back() -> None:
    house = House(FakeEngine(lanes=1, eos_every=0), rules=Rules(queue_deadline_s=30.0))
    house.submit(claim(prompt(10), max_tokens=4000))
    waiting = house.submit(claim(prompt(10, seed=1)))
    house.step()
    house.now = 29.0
    house.step()
    assert house.heard[waiting].end is None
    house.now = 30.0
    house.step()
    end = house.heard[waiting].end
    assert isinstance(end, Failed)
    assert isinstance(end.error, Refused)
    assert (end.error.status, end.error.code) == (503, "queue_timeout")
    assert end.error.retry_after_s >= 1
    assert (end.stats.phase, end.stats.total_ms) == ("queued", pytest.approx(30e3, abs=50))
    assert not house.scheduler.queue


@pytest.mark.parametrize("n_steps", [2, 12])  # in its prompt, in its answer
def test_a_turn_that_takes_too_long_fails_and_what_is_complete_is_kept(n_steps: int) -> None:
    house = House(FakeEngine(eos_every=0), rules=Rules(request_max_s=10.0, queue_deadline_s=5.0))
    ids = prompt(1000)
    turn = house.submit(claim(ids, max_tokens=4000))
    for _ in range(n_steps):
        house.step()
    house.now = 9.0
    house.step()
    assert house.heard[turn].end is None, "only the queue's deadline is over"
    house.now = 10.0
    house.run()
    end = house.heard[turn].end
    assert isinstance(end, Failed)
    assert isinstance(end.error, Refused)
    assert (end.error.status, end.error.code) == (503, "timeout")
    assert house.engine.lanes_seated == set()
    n_known = len(house.heard[turn].tokens)
    assert end.stats.n_generated == n_known
    follow_up = np.concatenate([ids, house.heard[turn].tokens, [EOS, 60]]).astype(np.int32)
    heard = house.ask(claim(follow_up))
    assert heard.started.n_cached == (768 if n_steps == 2 else 1000 + n_known - 1)


def test_an_idle_plan_knows_when_the_next_patience_ends() -> None:
    rules = Rules(send_stall_s=60.0, request_max_s=50.0, queue_deadline_s=20.0)
    house = House(FakeEngine(lanes=1, eos_every=0), rules=rules)
    assert house.scheduler.due() is None
    slow = house.submit(claim(prompt(10), max_tokens=30))
    for _ in range(4):
        house.step()
    house.scheduler.on_pause(slow, 1, house.now)
    house.now = 5.0
    waiting = house.submit(claim(prompt(10)))
    assert house.step().idle
    assert house.scheduler.due() == 25.0
    house.now = 25.0
    house.step()
    assert isinstance(house.heard[waiting].end, Failed)
    assert house.scheduler.due() == 50.0
    house.now = 51.0
    house.run()
    assert _code(house.heard[slow].end) == "timeout"


def test_a_turn_may_take_what_the_rules_said_when_it_was_submitted() -> None:
    """A reload cuts nobody short, nor does it let anybody wait longer."""
    house = House(FakeEngine(lanes=1, eos_every=0), rules=Rules(queue_deadline_s=20.0))
    running = house.submit(claim(prompt(10), max_tokens=4000))
    patient = house.submit(claim(prompt(10)))
    house.step()
    house.scheduler.rules = Rules(queue_deadline_s=5.0, request_max_s=6.0)
    newcomer = house.submit(claim(prompt(10)))
    house.now += 10.0
    house.step()
    assert _code(house.heard[newcomer].end) == "queue_timeout"
    assert house.heard[patient].end is None and house.heard[running].end is None
    house.now += 11.0
    house.step()
    assert _code(house.heard[patient].end) == "queue_timeout"
    assert house.heard[running].end is None


def _code(end: object) -> str | None:
    assert isinstance(end, Failed)
    assert isinstance(end.error, Refused)
    return end.error.code


# What an operator may change while it runs


def test_with_fewer_lanes_those_at_work_finish_and_nobody_takes_their_place() -> None:
    house = House(FakeEngine(lanes=4, eos_every=0))
    turns = [house.submit(claim(prompt(10, seed=i), max_tokens=30)) for i in range(6)]
    for _ in range(8):
        house.step()
    house.scheduler.lanes_max = 1
    busy = []
    while not all(house.heard[turn].end for turn in turns):
        house.step()
        busy.append(house.scheduler.lanes.n - house.scheduler.lanes.n_free)
    assert busy[0] == 4
    assert set(busy[busy.index(1) :]) == {0, 1}
    assert {len(cohort) for cohort in house.engine.cohorts[-30:]} == {1}
    for i, turn in enumerate(turns):
        assert house.heard[turn].tokens == house.engine.answer(prompt(10, seed=i), GREEDY, 30)


def test_more_lanes_are_taken_in_the_next_plan() -> None:
    house = House(FakeEngine(lanes=4, eos_every=0))
    house.scheduler.lanes_max = 1
    for i in range(4):
        house.submit(claim(prompt(10, seed=i), max_tokens=30))
    house.step()
    assert (len(house.scheduler.queue), house.scheduler.lanes_free) == (3, 0)
    house.scheduler.lanes_max = 3
    house.step()
    assert (len(house.scheduler.queue), house.scheduler.lanes_free) == (1, 0)


def test_a_lane_that_may_not_be_used_is_no_room_at_the_door() -> None:
    house = House(FakeEngine(lanes=4), rules=Rules(queue_total=1))
    house.scheduler.lanes_max = 1
    house.submit(claim(prompt(10)))
    house.submit(claim(prompt(10)))
    assert not house.scheduler.would_admit()
    house.scheduler.rules = Rules(queue_total=2)
    assert house.scheduler.would_admit()


def test_chunks_follow_their_size_as_it_is_now() -> None:
    house = House(FakeEngine(chunk=512))
    house.submit(claim(prompt(2000)))
    house.step()
    house.scheduler.chunk = 128
    house.step()
    house.scheduler.chunk = 512
    house.run()
    chunks = [len(p.work.work.ids) for p in house.plans if isinstance(p.work, Chunk)]
    assert chunks == [512, 128, 512, 512, 335]


def test_closing_an_idle_session_gives_back_all_that_it_held() -> None:
    house = House()
    ids = prompt(700)
    house.ask(claim(ids, starts=(0, 256)))
    house.ask(claim(prompt(700, seed=1)))
    first, second = house.scheduler.sessions
    house.scheduler.on_close(first)
    house.run()
    assert list(house.scheduler.sessions) == [second]
    assert house.engine.n_frontiers == len(house.scheduler.sessions[second].held)
    assert house.ask(claim(ids)).started.n_cached == 0


def test_closing_a_session_takes_nothing_from_those_that_share_its_pages() -> None:
    house = House(FakeEngine(eos_every=0))
    system = prompt(700)
    house.ask(claim(system, starts=(0, 512)))
    other = prompt(900, seed=1, head=system)
    turn = house.submit(claim(other, starts=(0, 512), max_tokens=40))
    while not house.heard[turn].tokens:
        house.step()
    house.close(1)
    house.run()
    assert 1 not in house.scheduler.sessions
    assert house.heard[turn].tokens == house.engine.answer(other, GREEDY, 40)


def test_closing_a_session_at_work_waits_for_its_turn_and_keeps_nothing() -> None:
    house = House(FakeEngine(eos_every=0))
    turn = house.submit(claim(prompt(700), max_tokens=20))
    while not house.heard[turn].tokens:
        house.step()
    house.scheduler.on_close(1)
    house.step()
    assert list(house.scheduler.sessions) == [1]
    house.run()
    assert len(house.heard[turn].tokens) == 20
    assert not house.scheduler.sessions
    assert house.engine.n_frontiers == 0
    assert house.scheduler.pages.n_free == house.scheduler.pages.n


def test_a_session_is_closed_though_its_last_frontier_is_on_its_way() -> None:
    house = House()
    house.submit(claim(prompt(100)))
    while house.scheduler.turns:
        house.step()
    assert house.scheduler._moves, "the end of its answer is captured in the next plan"
    house.scheduler.on_close(1)
    house.run()
    assert not house.scheduler.sessions
    assert house.engine.n_frontiers == 0


def test_closing_a_session_that_is_not_there_does_nothing() -> None:
    house = House()
    house.ask(claim(prompt(100)))
    house.scheduler.on_close(77)
    house.run()
    assert list(house.scheduler.sessions) == [1]


# What it says of itself


def test_the_first_in_the_queue_waits_for_a_lane_or_for_memory() -> None:
    house = House(FakeEngine(lanes=2, pages=8, context=2048, eos_every=0))
    first = house.submit(claim(prompt(1000), max_tokens=600))  # 7 pages at most
    second = house.submit(claim(prompt(100, seed=1), max_tokens=600))  # 3
    house.step()
    assert house.scheduler.waits == (second, "memory")
    assert house.scheduler.wait_s(0) > 0, "a free lane is no use to it"
    house.scheduler.lanes_max = 1
    house.step()
    assert house.scheduler.waits == (second, "lane")
    house.leave(first)
    house.step()
    house.step()
    assert house.scheduler.waits is None


def test_the_rest_of_a_prompt_is_predicted_from_measured_speed_and_share() -> None:
    """1 ms a token; beside a lane that decodes 7 passes of 10 ms follow each chunk of 256."""
    house = House(FakeEngine(eos_every=0), tick=0.0)
    assert house.scheduler.rest_s(0.0) == {}
    house.ask(claim(prompt(300), max_tokens=1))
    first = house.submit(claim(prompt(1281, seed=1)))
    second = house.submit(claim(prompt(2561, seed=2)))
    house.step()
    rest = house.scheduler.rest_s(house.now)
    assert rest == pytest.approx({first: 1.024, second: 1.024 + 2.56})
    house.leave(first)
    house.leave(second)
    house.submit(claim(prompt(10), max_tokens=400))
    for _ in range(5):
        house.step()
    third = house.submit(claim(prompt(2561, seed=2), cache=False))
    house.step()
    rest = house.scheduler.rest_s(house.now)
    assert rest == pytest.approx({third: 2.56 * (256 + 70) / 256}, rel=0.2)


def test_the_wait_of_a_queued_turn_grows_with_those_before_it() -> None:
    house = House(FakeEngine(lanes=2))
    assert house.scheduler.wait_s(1) == 0.0
    for i in range(4):
        house.submit(claim(prompt(10, seed=i)))
    house.step()
    waits = [house.scheduler.wait_s(n) for n in range(3)]
    assert 0 < waits[0] < waits[1] < waits[2]


def test_a_pause_of_the_client_is_no_slowness_of_the_lane() -> None:
    house = House(FakeEngine(eos_every=0), tick=0.01)
    turn_id = house.submit(claim(prompt(10), max_tokens=30))
    while len(house.heard[turn_id].tokens) < 5:
        house.step()
    turn = house.scheduler.turns[turn_id]
    assert turn.gap_s == pytest.approx(0.02)
    assert turn.tokens_per_s(house.now) == pytest.approx(50.0)
    house.scheduler.on_pause(turn_id, 1, house.now)
    assert turn.tokens_per_s(house.now) is None
    house.now += 50.0
    house.scheduler.on_resume(turn_id)
    house.step()
    assert turn.gap_s is None
    house.step()
    assert turn.gap_s == pytest.approx(0.02)


def test_a_chunk_knows_whether_it_is_computed_again_and_whether_others_wait_for_it() -> None:
    house = House(FakeEngine(eos_every=0))
    ids = prompt(1200)
    house.ask(claim(ids, starts=(0, 400)))
    talker = house.submit(claim(prompt(5, seed=9), max_tokens=200))
    while not house.heard[talker].tokens:
        house.step()
    n = len(house.plans)
    house.ask(claim(prompt(1200, seed=1, head=ids[:700]), starts=(0, 400)))  # resumes at 384
    chunks = [plan.work for plan in house.plans[n:] if isinstance(plan.work, Chunk)]
    assert [chunk.replay for chunk in chunks] == [True, True, False, False]
    assert all(chunk.stalls for chunk in chunks)
    assert not any(p.work.stalls for p in house.plans[:4] if isinstance(p.work, Chunk))


# Everything at once


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_tokens_are_those_of_the_prefix_and_every_ticket_ends_once(
    seed: int,
) -> None:
    """Joins, follow-ups, branches, leaves, pauses, cancelled chunks, failing lanes, little memory,
    turns whose time is up, and an operator who closes sessions and changes the rules.

    `House.check` looks at the books after every step, the fake engine at every move.
    """
    rng = random.Random(seed)
    context = rng.choice([1024, 2048])
    lanes = rng.randint(1, 4)
    engine = FakeEngine(
        lanes=lanes,
        pages=rng.randint(context // 256, lanes * context // 256 + 8),
        frontiers=rng.randint(2 * lanes, 24),
        context=context,
        rows_max=rng.choice([2, 8, 32]),
        eos_every=rng.choice([0, 8, 40]),
        poison=lambda ids: int(ids.sum()) % 997 == 0,
    )
    house = House(
        engine, rules=Rules(queue_total=6, frontiers_per_session=rng.randint(3, 8), send_stall_s=3)
    )
    impatient = rng.random() < 0.5  # turns run out of time
    history: list[list[int]] = [[]]
    claims: dict[int, Claim] = {}
    paused: set[int] = set()

    def new_claim() -> Claim:
        base = rng.choice(history)
        keep = len(base) if rng.random() < 0.5 else rng.randint(0, len(base))
        n = min(keep + rng.randint(1, 400), context - 1)
        ids = prompt(n, seed=rng.randrange(1 << 30), head=base[: min(keep, n - 1)])
        starts = tuple(sorted({0, *(rng.randrange(n) for _ in range(rng.randint(0, 6)))}))
        seeded = rng.random() < 0.3
        return claim(
            ids,
            starts=starts,
            max_tokens=rng.choice([1, 5, 40, 10_000]) if context == 1024 else rng.randint(1, 60),
            cache=rng.random() < 0.9,
            priority=rng.randint(0, 1),
            sampling=Sampling(temperature=1.0, seed=seed, seeded=True) if seeded else GREEDY,
        )

    for _ in range(rng.randint(20, 120)):
        gone = house.left.union(house.meanwhile)
        alive = [t for t in house.heard if not house.heard[t].end and t not in gone]
        action = rng.random()
        if action < 0.3:
            made = new_claim()
            try:
                claims[house.submit(made)] = made
            except Refused as refused:
                assert refused.status == 429
        elif action < 0.4 and alive:
            turn = rng.choice(alive)
            n_told = len(house.heard[turn].tokens)
            if rng.random() < 0.5:
                house.leave(turn, rng.randint(0, n_told))
            else:
                house.meanwhile.append(turn)
        elif action < 0.45 and house.heard:
            turn = rng.choice(list(house.heard))
            if house.heard[turn].end:
                house.leave(turn, rng.randint(0, len(house.heard[turn].tokens)))
        elif action < 0.5 and alive:
            turn = rng.choice(alive)
            paused.add(turn)
            house.scheduler.on_pause(turn, len(house.heard[turn].tokens), house.now)
        elif action < 0.55 and paused:
            house.scheduler.on_resume(paused.pop())
        elif action < 0.6 and house.scheduler.sessions:
            session = rng.choice(list(house.scheduler.sessions))
            house.close(session) if rng.random() < 0.5 else house.scheduler.on_close(session)
        elif action < 0.65:
            house.scheduler.lanes_max = rng.randint(1, lanes)
        elif action < 0.7:
            house.scheduler.chunk = rng.choice([128, 256])
            house.scheduler.rules = replace(
                house.scheduler.rules,
                queue_total=rng.randint(1, 6),
                stall_target_s=rng.choice([0.0, 0.1, 2.0]),
                prefill_share=rng.choice([0.1, 0.8, 1.0]),
                queue_deadline_s=rng.choice([1.0, 10.0, 1e9]) if impatient else 1e9,
                request_max_s=rng.choice([2.0, 20.0, 1e9]) if impatient else 1e9,
            )
        elif action < 0.75 and impatient:
            house.now += rng.choice([0.5, 5.0])
        for _ in range(rng.randint(0, 12)):
            if rng.random() < 0.05:
                house.cancel.set()
            house.step()
        for turn in list(claims):
            end = house.heard[turn].end
            if isinstance(end, Done) and rng.random() < 0.2:
                history.append([*claims[turn].ids.tolist(), *house.heard[turn].tokens])
    for turn in paused:
        house.scheduler.on_resume(turn)
    house.run()

    closed = rng.sample(list(house.scheduler.sessions), len(house.scheduler.sessions) // 2)
    for session in closed:
        house.scheduler.on_close(session)
    house.run()
    assert house.scheduler.sessions.keys().isdisjoint(closed)

    assert engine.lanes_seated == set()
    assert not house.scheduler.turns
    for turn, made in claims.items():
        heard = house.heard[turn]
        limit = min(made.max_tokens, context - len(made.ids))
        whole = engine.answer(made.ids, made.sampling, limit)
        assert heard.tokens == whole[: len(heard.tokens)]
        if isinstance(heard.end, Done):
            assert heard.tokens == whole
        if isinstance(heard.end, Failed) and isinstance(heard.end.error, Refused):
            assert heard.end.error.code in ("slow_client", "queue_timeout", "timeout")
        assert heard.end is not None or turn in house.left
