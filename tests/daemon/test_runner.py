"""The runner with a real loop and a real engine thread above a fake engine."""

from __future__ import annotations

import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from ds4d import wire
from ds4d.engine import Sampling
from ds4d.errors import Declined, DeviceError, MemoryRefusedError, Refused, RequestError
from ds4d.metrics import REGISTRY
from ds4d.sched.runner import Loading, Runner
from ds4d.sched.scheduler import Rules
from ds4d.sched.ticket import Claim, Done, Failed, Progress, Started, Ticket, Token
from tests.fakes import EOS, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ds4d.sched.snapshot import Session

GREEDY = Sampling(temperature=0.0)


def claim(seed: int = 0, n: int = 300, **more: object) -> Claim:
    ids = np.random.default_rng(seed).integers(16, 500, n, dtype=np.int32)
    fields = {"sampling": GREEDY, "stop_ids": frozenset({EOS}), "max_tokens": 20} | more
    return Claim(ids=ids, **fields)


@asynccontextmanager
async def running(engine: FakeEngine, **settings: object) -> AsyncIterator[Runner]:
    runner = Runner(lambda report: (engine, engine.capacity), **settings)
    async with anyio.create_task_group() as tasks:
        await tasks.start(runner.run)
        yield runner
        tasks.cancel_scope.cancel()
    assert engine.closed


async def tokens_of(ticket: Ticket) -> list[int]:
    tokens: list[int] = []
    async for event in ticket:
        if isinstance(event, Token):
            tokens.append(event.id)
        elif isinstance(event, Failed):
            raise event.error
    return tokens


def at_work(runner: Runner) -> list[Session]:
    return [one for one in runner.snapshot().sessions if one.lane is not None]


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"ds4d_{name}", labels) or 0.0


class Counted:
    """By how much series have grown since it was made."""

    def __init__(self, *series: tuple[str, dict[str, str]]) -> None:
        self._before = {name: (labels, value(name, **labels)) for name, labels in series}

    def __call__(self) -> dict[str, float]:
        return {
            name: round(value(name, **labels) - before, 6)
            for name, (labels, before) in self._before.items()
        }


async def until(condition: object) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.001)


async def test_a_ticket_tells_its_story_in_order_and_then_ends() -> None:
    engine = FakeEngine()
    async with running(engine) as runner:
        ticket = runner.submit(claim())
        events = [event async for event in ticket]
        kinds = [type(event) for event in events]
        assert kinds[0] is Started
        assert kinds[-1] is Done
        assert kinds.index(Token) > max(i for i, kind in enumerate(kinds) if kind is Progress)
        assert ticket.stats == events[-1].stats
        assert [event async for event in ticket] == []


async def test_many_clients_at_once_get_what_each_gets_alone() -> None:
    engine = FakeEngine(eos_every=30)
    asks = [claim(i, 100 + 57 * i, sampling=_sampling(i)) for i in range(12)]
    answers: dict[int, list[int]] = {}

    async def ask(i: int) -> None:
        answers[i] = await tokens_of(runner.submit(asks[i]))

    async with running(engine) as runner, anyio.create_task_group() as tasks:
        for i in range(12):
            tasks.start_soon(ask, i)
    assert max(len(cohort) for cohort in engine.cohorts) > 1
    for i, one in enumerate(asks):
        assert answers[i] == engine.answer(one.ids, one.sampling, 20)


def _sampling(i: int) -> Sampling:
    return Sampling(temperature=1.0, seed=i, seeded=True) if i % 2 else GREEDY


async def test_while_the_engine_is_built_the_door_says_how_far_it_is() -> None:
    go_on = threading.Event()
    engine = FakeEngine()

    def build(report: object) -> tuple[FakeEngine, object]:
        report("kernels", 0.41)
        go_on.wait(10)
        return engine, engine.capacity

    runner = Runner(build)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await until(lambda: runner.loading == Loading("kernels", 0.41))
        with pytest.raises(Refused, match="41 % done") as refused:
            runner.submit(claim())
        assert (refused.value.status, refused.value.code) == (503, "model_loading")
        assert not runner.would_admit()
        assert runner.snapshot() is None
        assert runner.n_open() == (0, 0)
        with pytest.raises(Declined, match="the daemon is loading") as declined:
            runner.set_lanes(1)
        assert declined.value.code == wire.WRONG_STATE
        go_on.set()
        await until(lambda: runner.state == "ready")
        assert runner.would_admit()
        assert await tokens_of(runner.submit(claim()))
        tasks.cancel_scope.cancel()


async def test_an_engine_that_cannot_be_built_ends_the_runner_with_its_own_error() -> None:
    def build(report: object) -> tuple[FakeEngine, object]:
        raise MemoryRefusedError("too little")

    runner = Runner(build)
    with pytest.raises(MemoryRefusedError, match="too little"):
        await runner.run()
    assert runner.state == "failed"


async def test_stopping_does_not_wait_for_an_engine_that_is_being_built() -> None:
    never = threading.Event()
    runner = Runner(lambda report: never.wait(60))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        await anyio.sleep(0.01)
        with anyio.fail_after(5):
            tasks.cancel_scope.cancel()
            await anyio.lowlevel.checkpoint()
    never.set()


async def test_the_loop_keeps_turning_while_the_engine_works() -> None:
    engine = FakeEngine(delay_step_s=0.05)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=4))
        turns = 0
        while not ticket.ended:
            await anyio.sleep(0.001)
            turns += 1
        assert turns > len(engine.cohorts)


async def test_a_runner_that_is_cancelled_ends_though_a_lane_has_work() -> None:
    engine = FakeEngine(eos_every=0)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=8000))  # nobody reads it, nobody leaves it
        await until(lambda: len(engine.cohorts) > 3)
        n_passes = len(engine.cohorts)
    assert len(engine.cohorts) <= n_passes + 1
    with pytest.raises(Refused, match="had to end this request"):
        await tokens_of(ticket)
    with pytest.raises(Refused, match="takes no new requests"):
        runner.submit(claim())


async def test_leaving_stops_a_chunk_on_its_way() -> None:
    engine = FakeEngine(delay_token_s=0.01)  # a chunk of 256: 2.6 s in 8 groups
    async with running(engine) as runner:
        ticket = runner.submit(claim())
        await until(lambda: engine.heartbeat >= 1)
        ticket.leave()
        await until(lambda: not engine.lanes_seated)
        assert engine.n_prefilled == 0
        assert [event async for event in ticket] == []


async def test_leaving_an_answer_frees_its_lane_within_a_step() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.005)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=4000))
        async for event in ticket:
            if isinstance(event, Token) and event.index == 5:
                n_passes = len(engine.cohorts)
                ticket.leave()
                ticket.leave()
        await until(lambda: not engine.lanes_seated)
        assert len(engine.cohorts) <= n_passes + 1
        assert ticket.stats is not None
        assert ticket.stats.n_generated >= 6


async def test_a_handler_that_is_cancelled_leaves_in_its_finally() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)

    async def handle(runner: Runner) -> None:
        ticket = runner.submit(claim(max_tokens=4000))
        try:
            async for _ in ticket:
                pass
        finally:
            ticket.leave()

    async with running(engine) as runner:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(handle, runner)
            await until(lambda: len(engine.cohorts) > 3)
            tasks.cancel_scope.cancel()
        await until(lambda: not engine.lanes_seated)


async def test_a_slow_reader_pauses_its_own_lane_and_no_other() -> None:
    engine = FakeEngine(eos_every=0)
    async with running(engine, buffer_events=8) as runner:
        slow = runner.submit(claim(max_tokens=100))
        fast = runner.submit(claim(1, max_tokens=100))
        assert len(await tokens_of(fast)) == 100
        assert [one.phase for one in at_work(runner)] == ["paused"]
        assert await tokens_of(slow) == engine.answer(slow.claim.ids, GREEDY, 100)


async def test_a_reader_that_stalls_is_cancelled_and_told_so() -> None:
    engine = FakeEngine(eos_every=0)
    async with running(engine, buffer_events=8, rules=Rules(send_stall_s=0.05)) as runner:
        ticket = runner.submit(claim(max_tokens=100))
        await until(lambda: ticket.ended)
        with pytest.raises(Refused, match="read nothing"):
            await tokens_of(ticket)
        await until(lambda: not engine.lanes_seated)


async def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    async with running(FakeEngine()) as runner:
        with pytest.raises(RequestError, match="8192 tokens, expected 1 to 8191"):
            runner.submit(claim(n=8192))
        with pytest.raises(RequestError, match="0 tokens"):
            runner.submit(claim(n=0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": np.array([5, 512], np.int32)},
        {"ids": np.array([-1, 5], np.int32)},
        {"stop_ids": frozenset({512})},
        {"sampling": Sampling(bias=((512, 1.0),))},
        {"banned_after": (3, (512,))},
    ],
)
async def test_an_id_that_no_model_has_is_refused_before_the_engine_meets_it(wrong: object) -> None:
    async with running(FakeEngine()) as runner:
        with pytest.raises(RequestError, match="not a token id of this model, expected 0 to 511"):
            runner.submit(replace(claim(), **wrong))
        assert await tokens_of(runner.submit(claim()))


async def test_a_draining_runner_takes_nothing_new_and_finishes_the_rest() -> None:
    engine = FakeEngine(lanes=1, delay_step_s=0.001)
    async with running(engine) as runner:
        tickets = [runner.submit(claim(i)) for i in range(3)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.drain, 30.0)
            await until(lambda: runner.state == "draining")
            with pytest.raises(Refused) as refused:
                runner.submit(claim())
            assert (refused.value.status, refused.value.code) == (503, "draining")
            for ticket in tickets:
                assert await tokens_of(ticket) == engine.answer(ticket.claim.ids, GREEDY, 20)
                ticket.leave()
        assert runner.state == "drained"
        assert await runner.drain(30.0) == "drained"


async def test_a_drain_waits_for_those_who_read_an_answer_that_has_ended() -> None:
    """The daemon may stop behind it: who has not read all by then is cut."""
    engine = FakeEngine()
    ends: list[str] = []

    async def drain(runner: Runner, within_s: float) -> None:
        ends.append(await runner.drain(within_s))

    async with running(engine) as runner, anyio.create_task_group() as tasks:
        ticket = runner.submit(claim())
        await until(lambda: ticket.ended)
        assert runner.n_open() == (1, 0)
        tasks.start_soon(drain, runner, 3600.0)
        await until(lambda: runner.state == "draining")
        await anyio.sleep(0.02)
        assert ends == []
        assert await tokens_of(ticket) == engine.answer(ticket.claim.ids, GREEDY, 20)
        ticket.leave()
        await until(lambda: ends == ["drained"])
        runner.undrain()
        unread = runner.submit(claim())
        await until(lambda: unread.ended)
        assert await runner.drain(0.01) == "drained"  # in time or not, nothing was cut
        assert runner.state == "drained"
        assert await tokens_of(unread)


async def test_what_a_drain_cannot_finish_in_time_ends_failed() -> None:
    engine = FakeEngine(lanes=1, eos_every=0, delay_step_s=0.002)
    async with running(engine) as runner:
        tickets = [runner.submit(claim(i, max_tokens=8000)) for i in range(2)]
        assert await runner.drain(0.02) == "deadline"
        assert runner.state == "drained"
        for ticket in tickets:
            with pytest.raises(Refused) as refused:
                await tokens_of(ticket)
            assert refused.value.code == "draining"
            assert ticket.stats is not None
        await until(lambda: not engine.lanes_seated)


async def test_a_drain_that_is_cut_short_ends_everything_at_once() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.002)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=8000))
        with anyio.move_on_after(0.02):
            await runner.drain(3600.0)
        assert ticket.ended


async def test_a_drain_that_may_be_given_up_ends_nobody_when_it_is() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.002)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=100))
        with anyio.move_on_after(0.02):
            await runner.drain(3600.0, hard=False)
        assert runner.state == "draining"
        runner.undrain()
        assert len(await tokens_of(ticket)) == 100


async def test_a_drain_is_taken_back_and_whoever_waits_for_it_is_told() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)
    ends: list[str] = []

    async def drain(runner: Runner) -> None:
        ends.append(await runner.drain(3600.0))

    async with running(engine) as runner:
        with pytest.raises(Declined, match="the daemon is ready, not draining") as declined:
            runner.undrain()
        assert declined.value.code == wire.WRONG_STATE
        ticket = runner.submit(claim(max_tokens=50))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain, runner)
            tasks.start_soon(drain, runner)
            await until(lambda: runner.state == "draining")
            runner.undrain()
        assert ends == ["undrained"] * 2
        assert runner.would_admit()
        assert len(await tokens_of(ticket)) == 50
        ticket.leave()
        assert await runner.drain(30.0) == "drained"
        runner.undrain()
        assert await tokens_of(runner.submit(claim()))


async def test_a_drain_that_was_taken_back_has_no_part_in_the_next() -> None:
    """All in one turn of the loop, so that the first has not woken when the next begins."""
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)
    ends: list[str] = []

    async def drain(runner: Runner, within_s: float) -> None:
        ends.append(await runner.drain(within_s))

    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=50))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain, runner, 0.01)
            await until(lambda: runner.state == "draining")
            runner.undrain()
            tasks.start_soon(drain, runner, 3600.0)
            await until(lambda: ends == ["undrained"])
            assert len(await tokens_of(ticket)) == 50
            ticket.leave()
        assert ends == ["undrained", "drained"]


async def test_a_drain_of_an_engine_that_fails_does_not_say_that_all_went_well() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)
    runner = Runner(lambda report: (engine, engine.capacity))
    ends: list[str] = []

    async def drain() -> None:
        with anyio.CancelScope(shield=True):
            ends.append(await runner.drain(3600.0, hard=False))

    with pytest.raises(ExceptionGroup):
        async with anyio.create_task_group() as tasks:
            await tasks.start(runner.run)
            runner.submit(claim(max_tokens=8000))
            tasks.start_soon(drain)
            await until(lambda: len(engine.cohorts) > 3)
            engine.fail_next = RuntimeError("the bus is gone")
    assert ends == ["failed"]
    assert await runner.drain(1.0) == "failed"


async def test_of_two_drains_the_earlier_deadline_ends_both() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.002)
    ends: list[str] = []

    async def drain(runner: Runner, within_s: float) -> None:
        ends.append(await runner.drain(within_s))

    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=8000))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain, runner, 3600.0)
            tasks.start_soon(drain, runner, 0.02)
        assert ends == ["deadline"] * 2
        assert ticket.ended


async def test_while_loading_there_is_nothing_to_drain_and_the_model_opens_drained() -> None:
    go_on = threading.Event()
    engine = FakeEngine()

    def build(report: object) -> tuple[FakeEngine, object]:
        go_on.wait(10)
        return engine, engine.capacity

    runner = Runner(build)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        assert await runner.drain(5.0) == "drained"
        go_on.set()
        await until(lambda: runner.loading is None)
        assert not runner.would_admit()
        runner.undrain()
        assert await tokens_of(runner.submit(claim()))
        tasks.cancel_scope.cancel()


async def test_an_operator_cancels_whatever_has_the_label() -> None:
    engine = FakeEngine(lanes=1, eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        twins = [runner.submit(claim(i, max_tokens=8000, label="req_x")) for i in range(2)]
        other = runner.submit(claim(2, max_tokens=20, label="req_y"))
        await until(lambda: len(engine.cohorts) > 3)
        with pytest.raises(Declined, match="no request req_z is queued or running") as declined:
            runner.cancel("req_z")
        assert declined.value.code == wire.NOT_FOUND
        runner.cancel("req_x")
        for ticket in twins:
            with pytest.raises(RequestError, match="an operator has cancelled") as cancelled:
                await tokens_of(ticket)
            assert cancelled.value.code == "cancelled"
        assert await tokens_of(other) == engine.answer(other.claim.ids, GREEDY, 20)


async def test_cancelling_stops_a_chunk_on_its_way() -> None:
    engine = FakeEngine(delay_token_s=0.01)  # a chunk of 256: 2.6 s in 8 groups
    async with running(engine) as runner:
        runner.submit(claim(label="req_x"))
        await until(lambda: engine.heartbeat >= 1)
        runner.cancel("req_x")
        await until(lambda: not engine.lanes_seated)
        assert engine.n_prefilled == 0


async def test_an_operator_closes_sessions_those_at_work_only_with_force() -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        await tokens_of(runner.submit(claim()))
        ticket = runner.submit(claim(1, max_tokens=8000, label="req_x"))
        await until(lambda: len(engine.cohorts) > 30)
        with pytest.raises(Declined, match="no session 7") as declined:
            runner.close_session(7)
        assert declined.value.code == wire.NOT_FOUND
        with pytest.raises(Declined, match="req_x is at work in session 2") as declined:
            runner.close_session(2)
        assert declined.value.code == wire.BUSY
        runner.close_session(1)
        await until(lambda: runner.snapshot().n_sessions == 1)
        runner.close_session(2, force=True)
        with pytest.raises(RequestError, match="cancelled"):
            await tokens_of(ticket)
        await until(lambda: engine.n_frontiers == 0)
        assert runner.snapshot().n_sessions == 0


async def test_fewer_lanes_and_more_while_it_runs() -> None:
    engine = FakeEngine(lanes=4, eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        runner.set_lanes(1)
        tickets = [runner.submit(claim(i, max_tokens=60)) for i in range(3)]
        await until(lambda: engine.cohorts)
        assert runner.n_open() == (1, 2)
        runner.set_lanes(4)
        await until(lambda: runner.n_open() == (3, 0))
        for n in (0, 5):
            with pytest.raises(Declined, match=r"expected 1 to 4") as declined:
                runner.set_lanes(n)
            assert declined.value.code == wire.BAD_PARAMS
        for ticket in tickets:
            assert len(await tokens_of(ticket)) == 60


async def test_smaller_chunks_while_it_runs_but_none_beyond_what_was_allocated() -> None:
    async with running(FakeEngine(chunk=512)) as runner:
        runner.set_chunk(128)
        ticket = runner.submit(claim(n=1000))
        done = [event.n_done async for event in ticket if isinstance(event, Progress)]
        assert done[-1] == 999
        for n in (0, 130, 640):
            with pytest.raises(Declined, match="a multiple of 128 up to 512") as declined:
                runner.set_chunk(n)
            assert declined.value.code == wire.BAD_PARAMS


async def test_a_loop_that_sleeps_wakes_when_somebodys_time_is_up() -> None:
    engine = FakeEngine(lanes=1, eos_every=0)
    rules = Rules(request_max_s=1.0)
    async with running(engine, buffer_events=8, rules=rules) as runner:
        slow = runner.submit(claim(max_tokens=100))
        await until(lambda: [one.phase for one in at_work(runner)] == ["paused"])
        runner.rules = replace(rules, queue_deadline_s=0.03, request_max_s=3600.0)
        waiting = runner.submit(claim(1))
        with anyio.fail_after(5), pytest.raises(Refused, match="no lane became free") as refused:
            await tokens_of(waiting)
        assert refused.value.code == "queue_timeout"
        await until(lambda: slow.ended)
        with pytest.raises(Refused, match="took longer") as refused:
            await tokens_of(slow)
        assert refused.value.code == "timeout"
        await until(lambda: not engine.lanes_seated)


# What is counted


async def test_every_request_is_counted_once_when_its_reader_leaves() -> None:
    chat = {"api": "chat"}
    counted = Counted(
        ("requests_total", chat | {"outcome": "tool_calls"}),
        ("request_seconds_count", chat),
        ("time_to_first_token_seconds_count", {"cache": "cold"}),
        ("request_queue_seconds_count", {}),
        ("request_prefill_seconds_count", {}),
        ("request_decode_seconds_count", {}),
        ("request_prompt_tokens_sum", {}),
        ("request_output_tokens_sum", {}),
        ("prompt_tokens_total", {"source": "computed"}),
        ("generation_tokens_total", {}),
        ("prefill_chunks_total", {"kind": "cold"}),
        ("prefix_query_tokens_total", {}),
        ("prefix_lookups_total", {"result": "miss"}),
        ("inter_token_latency_seconds_count", {"r": "1"}),
    )
    engine = FakeEngine(eos_every=0)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=9))
        assert len(await tokens_of(ticket)) == 9
        assert runner.snapshot().totals.requests == 0
        ticket.leave(9, outcome="tool_calls")
        ticket.leave()
        totals = runner.snapshot().totals
    assert (totals.requests, totals.prompt, totals.cached, totals.generated) == (1, 300, 0, 9)
    assert counted() == {
        "requests_total": 1,
        "request_seconds_count": 1,
        "time_to_first_token_seconds_count": 1,
        "request_queue_seconds_count": 1,
        "request_prefill_seconds_count": 1,
        "request_decode_seconds_count": 1,
        "request_prompt_tokens_sum": 300,
        "request_output_tokens_sum": 9,
        "prompt_tokens_total": 300,
        "generation_tokens_total": 9,
        "prefill_chunks_total": 2,
        "prefix_query_tokens_total": 300,
        "prefix_lookups_total": 1,
        "inter_token_latency_seconds_count": 8,
    }


async def test_reused_tokens_are_counted_as_such() -> None:
    counted = Counted(
        ("time_to_first_token_seconds_count", {"cache": "warm"}),
        ("prompt_tokens_total", {"source": "memory"}),
        ("prefix_hit_tokens_total", {"tier": "memory"}),
        ("prefix_lookups_total", {"result": "full"}),
    )
    async with running(FakeEngine()) as runner:
        await tokens_of(runner.submit(claim()))
        await tokens_of(runner.submit(claim()))
        await tokens_of(runner.submit(claim(cache=False)))
        totals = runner.snapshot().totals
    assert (totals.prompt, totals.cached) == (900, 299)
    assert counted() == {
        "time_to_first_token_seconds_count": 1,
        "prompt_tokens_total": 299,
        "prefix_hit_tokens_total": 299,
        "prefix_lookups_total": 1,
    }


async def test_a_client_that_goes_is_counted_with_the_time_until_its_lane_is_free() -> None:
    decode = {"phase": "decode"}
    counted = Counted(
        ("requests_total", {"api": "chat", "outcome": "cancelled"}),
        ("requests_cancelled_total", decode | {"cause": "client"}),
        ("disconnect_to_release_seconds_count", decode),
    )
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        ticket = runner.submit(claim(max_tokens=4000))
        await until(lambda: len(engine.cohorts) > 3)
        ticket.leave()
        await until(lambda: set(counted().values()) == {1})
        assert not engine.lanes_seated


async def test_one_that_goes_while_it_waits_frees_no_lane() -> None:
    counted = Counted(
        ("requests_cancelled_total", {"cause": "client", "phase": "queued"}),
        ("disconnect_to_release_seconds_count", {"phase": "queued"}),
    )
    engine = FakeEngine(lanes=1, eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        runner.submit(claim(max_tokens=4000))
        await until(lambda: engine.cohorts)
        runner.submit(claim(1)).leave()
        await anyio.sleep(0.02)
    assert list(counted().values()) == [1, 0]


async def test_decoding_lanes_that_wait_for_a_chunk_are_counted_as_stalled() -> None:
    stalls = Counted(("decode_stall_seconds_count", {"cause": "prefill"}))
    engine = FakeEngine(eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        runner.submit(claim(max_tokens=4000))
        await until(lambda: len(engine.cohorts) > 3)
        assert stalls() == {"decode_stall_seconds_count": 0}
        await tokens_of(runner.submit(claim(1, n=600)))
    assert stalls() == {"decode_stall_seconds_count": 3}


async def test_the_log_tells_what_a_request_went_through(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(lanes=1, eos_every=0, delay_step_s=0.001)
    with caplog.at_level("DEBUG", "ds4d"):
        async with running(engine) as runner:
            first = runner.submit(claim(max_tokens=30, label="r1"))
            second = runner.submit(claim(1, label="r2"))
            await tokens_of(first)
            first.leave()
            await tokens_of(second)
            second.leave()
            runner.close_session(1)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("ds4d")]
    moves = [line for line in lines if line.startswith("request.state req=r1")]
    assert [line.split(" ", 2)[2] for line in moves] == [
        "from=received to=queued",
        "from=queued to=prefill",
        "from=prefill to=decode",
    ]
    waits = [line for line in lines if line.startswith("admission.decision")]
    assert waits == ["admission.decision action=wait req=r2 reason=lane queued=1 pages_promised=2"]
    (done,) = (line for line in lines if line.startswith("request.done req=r1"))
    assert "outcome=length prompt_tokens=300 cached_tokens=0 generated_tokens=30" in done
    assert any(line.startswith("session.state sess=1 from=idle to=closed") for line in lines)


async def test_a_broken_device_ends_every_ticket_and_the_runner() -> None:
    engine = FakeEngine(lanes=1, eos_every=0, delay_step_s=0.001)
    runner = Runner(lambda report: (engine, engine.capacity))
    with pytest.raises(ExceptionGroup) as ended:
        async with anyio.create_task_group() as tasks:
            await tasks.start(runner.run)
            tickets = [runner.submit(claim(i, max_tokens=8000)) for i in range(3)]
            await until(lambda: len(engine.cohorts) > 3)
            engine.fail_next = RuntimeError("the bus is gone")
    assert ended.group_contains(DeviceError, match="the bus is gone")
    assert runner.state == "failed"
    for ticket in tickets:
        with pytest.raises(DeviceError):
            await tokens_of(ticket)
    with pytest.raises(Refused):
        runner.submit(claim())


async def test_an_engine_that_stands_still_is_given_up() -> None:
    engine = FakeEngine(eos_every=0)
    runner = Runner(lambda report: (engine, engine.capacity), engine_stall_s=0.1)
    with pytest.raises(ExceptionGroup) as ended:
        async with anyio.create_task_group() as tasks:
            await tasks.start(runner.run)
            ticket = runner.submit(claim(max_tokens=8000))
            await until(lambda: len(engine.cohorts) > 3)
            engine.hang.set()
    assert ended.group_contains(DeviceError, match="has not moved")
    assert ticket.ended
    engine.hang.clear()


async def test_the_age_of_the_heartbeat_is_known_while_the_engine_works() -> None:
    engine = FakeEngine(eos_every=0)
    async with running(engine, engine_stall_s=40.0) as runner:
        assert runner.heartbeat_age_s() is None
        engine.hang.set()
        ticket = runner.submit(claim(max_tokens=3))
        await until(lambda: (runner.heartbeat_age_s() or 0.0) > 0.0)
        assert runner.snapshot().heartbeat_age_s == runner.heartbeat_age_s()
        engine.hang.clear()
        await tokens_of(ticket)
        await until(lambda: runner.heartbeat_age_s() is None)


async def test_patience_with_the_engine_changes_even_while_it_stands_still() -> None:
    engine = FakeEngine(eos_every=0)
    runner = Runner(lambda report: (engine, engine.capacity), engine_stall_s=3600.0)
    with anyio.fail_after(10), pytest.raises(ExceptionGroup) as ended:
        async with anyio.create_task_group() as tasks:
            await tasks.start(runner.run)
            runner.submit(claim(max_tokens=8000))
            await until(lambda: len(engine.cohorts) > 3)
            engine.hang.set()
            await until(lambda: (runner.heartbeat_age_s() or 0.0) >= 1.0)
            runner.engine_stall_s = 0.5
    assert ended.group_contains(DeviceError, match="has not moved")
    engine.hang.clear()


async def test_a_slow_engine_that_moves_is_not_given_up() -> None:
    engine = FakeEngine(delay_token_s=0.001)  # a chunk of 256: 8 groups of 32 ms
    async with running(engine, engine_stall_s=0.12) as runner:
        assert await tokens_of(runner.submit(claim()))


async def test_a_snapshot_shows_who_holds_what() -> None:
    engine = FakeEngine(lanes=2, eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        tickets = [runner.submit(claim(i, max_tokens=8000, label=f"r{i}")) for i in range(3)]
        await until(lambda: [one.phase for one in at_work(runner)] == ["decode"] * 2)
        shot = runner.snapshot()
        assert [one.request for one in shot.sessions] == ["r0", "r1", "r2"]
        assert (shot.lanes.n_busy, shot.queue.n) == runner.n_open() == (2, 1)
        assert shot.pages.n_promised == 2 * 32
        await until(lambda: runner.snapshot().rates.decode_tokens_per_s > 0)
        assert runner.snapshot().rates.prefill_tokens_per_s == pytest.approx(2 * 299 / 10)
        for ticket in tickets:
            ticket.leave()
        await until(lambda: runner.n_open() == (0, 0))
        await until(lambda: {one.phase for one in runner.snapshot().sessions} == {"idle"})


async def test_what_was_allocated_is_known_once_it_was() -> None:
    engine = FakeEngine(lanes=2)
    async with running(engine) as runner:
        assert runner.capacity == engine.capacity
        assert runner.engine_need is not None
        assert runner.engine_need.parts["lanes"] == 2 * 4096


async def test_the_engine_lives_in_one_thread_that_is_not_the_loops() -> None:
    """The fake refuses calls from a second thread; here it must not have been the loop's."""
    engine = FakeEngine()
    async with running(engine) as runner:
        await tokens_of(runner.submit(claim()))
        assert engine.thread not in (None, threading.get_ident())


async def test_a_call_that_blocks_the_loop_fails_the_test_that_made_it() -> None:
    """The guard of this folder works."""

    def blocking_clock() -> float:
        time.sleep(0.001)
        return time.monotonic()

    engine = FakeEngine()
    runner = Runner(lambda report: (engine, engine.capacity), clock=blocking_clock)
    with pytest.raises(DeviceError, match="BlockingError"):
        await runner.run()
