"""The runner with a real loop and a real engine thread above a fake engine."""

from __future__ import annotations

import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from ds4d.engine import Sampling
from ds4d.errors import DeviceError, MemoryRefusedError, Refused, RequestError
from ds4d.sched.runner import Loading, Runner
from ds4d.sched.scheduler import Rules
from ds4d.sched.ticket import Claim, Done, Failed, Progress, Started, Ticket, Token
from tests.fakes import EOS, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
        assert runner.snapshot().state == "loading"
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
        runner.submit(claim(max_tokens=8000))  # nobody reads it, nobody leaves it
        await until(lambda: len(engine.cohorts) > 3)
        n_passes = len(engine.cohorts)
    assert len(engine.cohorts) <= n_passes + 1


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
        assert [view.phase for view in runner.snapshot().lanes] == ["paused"]
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
        assert all(ticket.ended for ticket in tickets)
        for ticket in tickets:
            assert await tokens_of(ticket) == engine.answer(ticket.claim.ids, GREEDY, 20)


async def test_what_a_drain_cannot_finish_in_time_ends_failed() -> None:
    engine = FakeEngine(lanes=1, eos_every=0, delay_step_s=0.002)
    async with running(engine) as runner:
        tickets = [runner.submit(claim(i, max_tokens=8000)) for i in range(2)]
        await runner.drain(0.02)
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


async def test_a_slow_engine_that_moves_is_not_given_up() -> None:
    engine = FakeEngine(delay_token_s=0.001)  # a chunk of 256: 8 groups of 32 ms
    async with running(engine, engine_stall_s=0.12) as runner:
        assert await tokens_of(runner.submit(claim()))


async def test_a_snapshot_shows_who_holds_what() -> None:
    engine = FakeEngine(lanes=2, eos_every=0, delay_step_s=0.001)
    async with running(engine) as runner:
        tickets = [runner.submit(claim(i, max_tokens=8000, label=f"r{i}")) for i in range(3)]
        await until(lambda: len(runner.snapshot().lanes) == 2)
        shot = runner.snapshot()
        assert [view.label for view in shot.lanes] == ["r0", "r1"]
        assert (shot.n_lanes, shot.n_queued) == (2, 1)
        assert shot.pages_promised == 2 * 32
        for ticket in tickets:
            ticket.leave()
        await until(lambda: not runner.snapshot().lanes)
        assert runner.snapshot().n_sessions > 0


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
