"""The terms of memory that an operator sees, and a look at it that fails."""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from ds4d import config
from ds4d.engine import Need
from ds4d.sched.host import Sample
from ds4d.sched.memory import MIB
from ds4d.service.memory import MemoryWatch
from ds4d.service.settings import Settings
from ds4d.waking import Woken

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GIB = 1 << 30
NEED = Need({"weights": 10 * GIB, "pages": 6 * GIB})
SAMPLE = Sample(
    available=50 * GIB,
    cgroup=None,
    simulated=None,
    resident=11 * GIB,
    swap=0,
    psi_some=0.0,
    oom_kills=0,
)


def woken() -> Woken:
    """1 GiB for the program itself."""

    def nothing(_: object) -> None:
        raise AssertionError

    return Woken(
        served=None,  # type: ignore[arg-type]
        text_side=nothing,  # type: ignore[arg-type]
        model_as=nothing,  # type: ignore[arg-type]
        reasons=(),
        budget_bytes=40 * GIB,
        next_lane_bytes=None,
        base_bytes=GIB,
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(config.read(environ={"HOME": str(tmp_path)}))


async def watched(settings: Settings, look: Callable[[int | None], Sample]) -> MemoryWatch:
    """After its first look."""
    watch = MemoryWatch(settings, look)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        with anyio.fail_after(5):
            while watch.terms(woken(), NEED) is None:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    return watch


async def test_what_was_promised_and_is_not_touched_yet_cannot_be_promised_again(
    settings: Settings,
) -> None:
    terms = (await watched(settings, lambda _: SAMPLE)).terms(woken(), NEED)
    assert terms is not None
    assert terms.uncommitted == 6 * GIB  # the weights are resident, none of the pages is
    assert terms.free_to_promise == 44 * GIB
    assert terms.reserve == 512 * MIB

    half = replace(SAMPLE, resident=14 * GIB, available=47 * GIB)
    terms = (await watched(settings, lambda _: half)).terms(woken(), NEED)
    assert terms is not None
    assert (terms.uncommitted, terms.free_to_promise) == (3 * GIB, 44 * GIB)

    whole = replace(SAMPLE, resident=18 * GIB)  # and more, for which nobody asked
    terms = (await watched(settings, lambda _: whole)).terms(woken(), NEED)
    assert terms is not None
    assert terms.uncommitted == 0


@pytest.mark.parametrize("limit", ["cgroup", "simulated"])
async def test_the_tightest_limit_decides_what_may_be_promised(
    settings: Settings, limit: str
) -> None:
    tight = replace(SAMPLE, **{limit: 4 * GIB})
    terms = (await watched(settings, lambda _: tight)).terms(woken(), NEED)
    assert terms is not None
    assert terms.available == 50 * GIB
    assert terms.free_to_promise == -2 * GIB  # 6 are promised, and only 4 are there


async def test_a_look_that_fails_is_told_and_the_next_one_is_tried(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4d.service.memory.SAMPLE_S", 0.001)
    n = 0

    def look(_: int | None) -> Sample:
        nonlocal n
        n += 1
        if n < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return SAMPLE

    with caplog.at_level(logging.WARNING, "ds4d"):
        assert (await watched(settings, look)).terms(woken(), NEED) is not None
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == 'memory.sample reason="[Errno 24] Too many open files"'


async def test_pressure_and_swap_are_reasons(settings: Settings) -> None:
    watch = await watched(settings, lambda _: replace(SAMPLE, psi_some=12.4, swap=5 * MIB + 1))
    pressure, swap = watch.reasons()
    assert pressure.code == "memory_pressure"
    assert pressure.text == (
        "processes wait for memory 12 % of the time (memory.psi_some_max is 10)"
    )
    assert swap.text == "6 MiB of this process are swapped out"
    assert MemoryWatch(settings).reasons() == []
