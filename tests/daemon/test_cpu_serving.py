"""The daemon's own engine, as `Waking` builds it, below the runner: on a random model with
every kind of layer, tokens do not depend on who else is served or on what was reused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from ds4d import config
from ds4d.cpu import engine as cpu
from ds4d.engine import Sampling
from ds4d.errors import ConfigError, MemoryRefusedError, ModelFileError
from ds4d.model import embedded, synth
from ds4d.sched.runner import Runner
from ds4d.sched.ticket import Claim, Failed, Started, Token
from ds4d.waking import Waking

if TYPE_CHECKING:
    from pathlib import Path

    from ds4d.config import Config

N_ASKS = 10


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a random model; kernels are cached beside all runs of pytest, since they take long."""
    home = tmp_path_factory.mktemp("home")
    model = home / "micro.gguf"
    synth.write_model(model, synth.geometry("micro"))
    cache = tmp_path_factory.getbasetemp().parent
    return config.load(
        sets=[f"model.path={model}", "model.context=1024", "lanes.max=3"],
        environ={"HOME": str(home), "XDG_CACHE_HOME": str(cache)},
    )


def unheard(what: str, share: float) -> None:
    pass


async def answer(runner: Runner, claim: Claim, leave_after: int | None) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were cached."""
    ticket = runner.submit(claim)
    tokens: list[int] = []
    n_cached = -1
    try:
        async for event in ticket:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Started):
                n_cached = event.n_cached
            if isinstance(event, Token):
                tokens.append(event.id)
                if len(tokens) == leave_after:
                    break
    finally:
        ticket.leave()
    return tokens, n_cached


async def test_alone_is_in_a_cohort_and_resumed_is_uninterrupted(settings: Config) -> None:
    rng, ids = random.Random(1), np.random.default_rng(1)
    base = ids.integers(0, 320, 600, dtype=np.int32)
    waking = Waking(settings)
    runner = Runner(waking.build)
    reused = 0

    def new_claim(i: int) -> Claim:
        head = base[: rng.choice([0, 200, 400, 600])]
        tail = ids.integers(0, 320, rng.randint(1, 150), dtype=np.int32)
        sampling = Sampling(temperature=0.0)
        if i % 2:
            sampling = Sampling(temperature=1.0, seed=i, seeded=True, top_p=0.9, presence=0.5)
        return Claim(
            ids=np.concatenate([head, tail]),
            starts=(0, 200, 400),
            sampling=sampling,
            max_tokens=rng.choice([1, 8, 30]),
            stop_ids=frozenset({1}),
        )

    async def ask(i: int) -> None:
        nonlocal reused
        leave_after = rng.choice([None, None, 5])
        await anyio.sleep(rng.random() / 2)
        first, n_cached = await answer(runner, asks[i], leave_after)
        more = np.array([*first, 1, 2, 77, 78], np.int32)
        follow_up = replace(asks[i], ids=np.concatenate([asks[i].ids, more]), max_tokens=10)
        second, n_cached_then = await answer(runner, follow_up, None)
        got[i] = (first, follow_up, second)
        reused += n_cached + n_cached_then

    async with anyio.create_task_group() as tasks:
        await tasks.start(runner.run)
        assert runner.n_ctx == waking.woken.model.context == 1024
        asks = [new_claim(i) for i in range(N_ASKS)]
        got: dict[int, tuple[list[int], Claim, list[int]]] = {}
        async with anyio.create_task_group() as clients:
            for i in range(N_ASKS):
                clients.start_soon(ask, i)
        assert reused > 1000
        for i, (first, follow_up, second) in got.items():
            alone, _ = await answer(runner, replace(asks[i], cache=False), None)
            assert first == alone[: len(first)]
            alone, n_cached = await answer(runner, replace(follow_up, cache=False), None)
            assert n_cached == 0
            assert second == alone
        tasks.cancel_scope.cancel()


def test_a_context_beyond_the_models_is_refused(settings: Config) -> None:
    wide = replace(settings, model=replace(settings.model, context=4096))
    with pytest.raises(ConfigError, match=r"model\.context: micro\.gguf was made for 2048 tokens"):
        Waking(wide).build(unheard)


def test_a_machine_that_is_too_small_is_told_so_before_anything_is_allocated(
    settings: Config,
) -> None:
    small = replace(settings, memory=replace(settings.memory, simulate_total_gib=0.001))
    with pytest.raises(MemoryRefusedError, match=r"1024 tokens needs .* and 0 MiB may be used"):
        Waking(small).build(unheard)


def test_prompt_texts_that_cannot_be_used_are_refused_before_anything_is_compiled(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CpuEngine", None)
    texts = tmp_path / "prompt.json"
    texts.write_text("{}")
    broken = replace(settings, model=replace(settings.model, constants=texts))
    with pytest.raises(ConfigError, match=r"prompt\.json"):
        Waking(broken).build(unheard)


def test_the_engine_leaves_one_of_the_processors_that_we_may_use_to_the_loop(
    settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: the machine has more."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    engine, _ = Waking(settings).build(unheard)
    engine.close()
    assert engine.threads == 1


def test_without_the_embedded_model_the_remedy_is_named(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_FILE", tmp_path / "none.gguf")
    bare = replace(settings, model=replace(settings.model, path=None))
    with pytest.raises(ModelFileError, match="name a model file with --model"):
        Waking(bare).build(unheard)


def test_what_a_release_lacks_is_a_reason_and_the_embedded_model_lacks_nothing(
    settings: Config,
) -> None:
    foreign, own = Waking(settings), Waking(replace(settings, model=config.Model()))
    for waking in (foreign, own):
        engine, _ = waking.build(unheard)
        engine.close()
    assert [reason.code for reason in foreign.woken.reasons] == ["prompt_texts"]
    assert foreign.woken.model.prompt_texts == "ds4-tiny"
    assert own.woken.reasons == ()
    assert own.woken.model.embedded
