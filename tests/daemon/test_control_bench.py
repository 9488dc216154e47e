"""The load on the live daemon: a real runner above a fake engine, asked over the socket."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import numpy as np
import pytest

from ds4d import wire
from ds4d.control.bench import Timeline
from ds4d.engine import Sampling
from ds4d.sched.runner import Runner
from ds4d.sched.ticket import Claim
from tests.daemon.control_house import FakeAsks, control_house, until
from tests.fakes import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.daemon.control_house import Client, ControlHouse


@asynccontextmanager
async def bench_house(path: Path, engine: FakeEngine) -> AsyncIterator[tuple[ControlHouse, Client]]:
    runner = Runner(lambda report: (engine, engine.capacity))
    async with anyio.create_task_group() as tasks:
        await tasks.start(runner.run)
        async with control_house(path, FakeAsks(runner=runner)) as house, house.client() as client:
            yield house, client
        tasks.cancel_scope.cancel()


async def rows_of(client: Client, **params: Any) -> list[wire.BenchRow]:
    op = (await client.call("bench", **params))["op"]
    ended = await client.call("op.wait", op=op)
    assert ended["error"] is None
    return msgspec.convert(ended["result"], list[wire.BenchRow])


@pytest.mark.parametrize(("concurrency", "depth"), [(1, 0), (4, 0), (2, 700), (6, 0)])
async def test_each_run_is_a_row_with_what_was_asked(tmp_path, concurrency, depth) -> None:
    engine = FakeEngine(delay_token_s=1e-5, delay_step_s=0.001)
    async with bench_house(tmp_path, engine) as (house, client):
        rows = await rows_of(
            client,
            prompt_tokens=600,
            answer_tokens=24,
            depth=depth,
            concurrency=concurrency,
            runs=2,
        )
        assert [row.run for row in rows] == [1, 2]
        for row in rows:
            assert (row.concurrency, row.depth) == (concurrency, depth)
            assert (row.prompt_tokens, row.answer_tokens) == (600, 24)
            assert row.prefill_tokens_per_s > 0
            assert row.decode_tokens_per_s > 0
            assert 0 < row.first_token_ms < 1e3 * row.total_s
        assert engine.n_prefilled == 2 * concurrency * (depth + 600 - 1)
        assert house.asks.runner.n_open() == (0, 0)


async def test_the_longest_that_fits_the_context_is_taken_and_no_more(tmp_path) -> None:
    async with bench_house(tmp_path, FakeEngine(context=1024)) as (_, client):
        sizes = {"prompt_tokens": 500, "answer_tokens": 24, "runs": 1}
        await rows_of(client, depth=500, **sizes)
        error = await client.error("bench", depth=501, **sizes)
        assert error.code == wire.BAD_PARAMS
        assert "make 1025, expected at most 1024, the context" in error.message


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens: expected 1 to 8191, got 0"),
        ({"prompt_tokens": 8192}, "prompt_tokens: expected 1 to 8191, got 8192"),
        ({"answer_tokens": 0}, "answer_tokens: expected 1 to 8191, got 0"),
        ({"depth": -1}, "depth: expected 0 to 8190, got -1"),
        ({"runs": 0}, "runs: expected 1 to 100, got 0"),
        ({"concurrency": 37}, "concurrency: expected 1 to 36 (4 lanes, and 32 that may wait"),
        ({"concurrency": 0}, "concurrency: expected 1 to 36"),
    ],
)
async def test_a_size_out_of_range_is_refused_with_the_range(tmp_path, params, text) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        error = await client.error("bench", **params)
        assert error.code == wire.BAD_PARAMS
        assert text in error.message


@pytest.mark.parametrize("state", ["loading", "draining", "stopping"])
async def test_a_daemon_that_takes_no_work_has_no_load_either(tmp_path, state) -> None:
    async with control_house(tmp_path, FakeAsks(state_=state)) as house:
        async with house.client() as client:
            error = await client.error("bench")
            assert error.code == wire.WRONG_STATE
            assert state in error.message


async def test_a_busy_engine_is_left_alone_unless_the_caller_wants_to_share(tmp_path) -> None:
    engine = FakeEngine(eos_every=0, delay_step_s=0.002)
    async with bench_house(tmp_path, engine) as (house, client):
        ids = np.arange(16, 80, dtype=np.int32)
        greedy = Sampling(temperature=0.0)
        claim = Claim(ids=ids, sampling=greedy, max_tokens=4000, stop_ids=frozenset())
        ticket = house.asks.runner.submit(claim)
        error = await client.error("bench")
        assert error.code == wire.BUSY
        assert "exclusive=false" in error.message
        sizes = {"prompt_tokens": 32, "answer_tokens": 4, "runs": 1}
        (row,) = await rows_of(client, exclusive=False, **sizes)
        assert row.decode_tokens_per_s > 0
        ticket.leave()


async def test_one_load_at_a_time(tmp_path) -> None:
    engine = FakeEngine(delay_step_s=0.01)
    async with bench_house(tmp_path, engine) as (_, client):
        op = (await client.call("bench", answer_tokens=4000))["op"]
        error = await client.error("bench", exclusive=False)
        assert error.code == wire.BUSY
        assert op in error.message


async def test_a_load_that_is_cancelled_leaves_every_lane(tmp_path) -> None:
    engine = FakeEngine(delay_step_s=0.005)
    async with bench_house(tmp_path, engine) as (house, client):
        op = (await client.call("bench", answer_tokens=4000, concurrency=8))["op"]
        runner = house.asks.runner
        await until(lambda: len(engine.lanes_seated) == 4 and sum(runner.n_open()) == 8)
        await client.call("op.cancel", op=op)
        ended = await client.call("op.wait", op=op)
        assert ended["error"]["code"] == wire.CANCELLED
        await until(lambda: runner.n_open() == (0, 0) and not engine.lanes_seated)


async def test_a_load_ends_with_the_last_of_those_who_wait_for_it(tmp_path) -> None:
    """Nobody would see its figures, and a terminal that was lost cannot cancel it."""
    engine = FakeEngine(delay_step_s=0.005)
    async with bench_house(tmp_path, engine) as (house, other):
        runner = house.asks.runner
        async with house.client() as client:
            op = (await client.call("bench", answer_tokens=4000))["op"]
            await until(lambda: runner.n_open() == (1, 0))
            waits = await other.ask("op.wait", op=op)
            await other.note("op.progress")
        await other.call("ping")
        assert runner.n_open() == (1, 0)  # another one still waits
        async with house.client() as client:
            await client.call("op.cancel", op=op)
        assert (await other.result(waits))["error"]["code"] == wire.CANCELLED
        await until(lambda: runner.n_open() == (0, 0))
        async with house.client() as client:
            await client.call("bench", answer_tokens=4000)
        await until(lambda: runner.n_open() == (0, 0) and not engine.lanes_seated)


async def test_progress_tells_which_run_it_is(tmp_path) -> None:
    async with bench_house(tmp_path, FakeEngine(delay_step_s=0.002)) as (_, client):
        op = (await client.call("bench", runs=3, answer_tokens=16))["op"]
        await client.call("op.wait", op=op)
        texts = [note["params"]["text"] for note in client.notes]
        assert "run 2 of 3" in texts
        assert "run 3 of 3" in texts


async def test_a_lane_that_fails_ends_the_load_with_its_reason(tmp_path) -> None:
    engine = FakeEngine(poison=lambda ids: len(ids) > 520)
    async with bench_house(tmp_path, engine) as (house, client):
        op = (await client.call("bench", concurrency=2))["op"]
        ended = await client.call("op.wait", op=op)
        assert "not finite" in ended["error"]["message"]
        await until(lambda: house.asks.runner.n_open() == (0, 0))


# The arithmetic


def test_a_chunk_takes_the_time_since_what_came_before_it() -> None:
    line = Timeline(depth=0)
    line.mark(10.0)
    line.chunk(10.5, 0, 100)
    line.chunk(11.0, 0, 100)  # of another lane
    line.drawn(11.1, 1, 1)
    line.chunk(11.6, 100, 200)
    assert line.prefill_tokens_per_s == pytest.approx(300 / 1.5)


def test_a_chunk_across_the_depth_counts_by_its_share() -> None:
    line = Timeline(depth=150)
    line.mark(0.0)
    line.chunk(1.0, 0, 100)
    line.chunk(2.0, 100, 200)
    line.chunk(4.0, 200, 300)
    assert line.prefill_tokens_per_s == pytest.approx(150 / 2.5)


def test_lanes_heard_together_are_one_pass_and_the_widest_passes_are_measured() -> None:
    line = Timeline(depth=0)
    line.mark(0.0)
    line.drawn(1.0, 1, 1)  # alone: its neighbour still has a prompt
    line.drawn(1.5, 1, 2)
    line.drawn(1.5, 2, 1)
    line.drawn(2.0, 2, 3)
    line.drawn(2.0, 1, 1)
    line.drawn(9.0, 1, 1)  # alone again
    assert line.decode_tokens_per_s == pytest.approx(7 / 1.0)


def test_a_single_token_has_no_prefill_rate() -> None:
    line = Timeline(depth=0)
    line.mark(0.0)
    line.drawn(1.0, 1, 1)
    assert line.prefill_tokens_per_s == 0.0
    assert line.decode_tokens_per_s == 1.0
