"""The benchmark counts what a pass costs, drives the contract rightly, and fails loudly."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ds4d import bench, cli
from ds4d.cpu.floor import CpuCeilings
from ds4d.cpu.kernels import floor as kernels
from ds4d.errors import LaneError, UsageError
from ds4d.model import gguf, synth
from tests.fakes import FakeEngine, geometry

PLAN = bench.Plan(depths=(8, 40, 9999), lanes=(1, 3), chunks=(16, 64), steps=5, repeats=2)


def tensors(model_geometry, preset="q8") -> list[gguf.TensorInfo]:
    return [
        gguf.TensorInfo(name, quant, shape, 0, quant.n_bytes(shape))
        for name, quant, shape in synth.table(model_geometry, preset)
    ]


class Ceilings:
    """A machine of round numbers: 1 GB/s, 2 and 1 G products/s."""

    n_threads = 1

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def read_bytes_s(self, n_bytes: int) -> float:
        self.sizes.append(n_bytes)
        return 1e9

    def int8_macs_s(self) -> float:
        return 2e9

    def f32_macs_s(self) -> float:
        return 1e9


def measured(engine: FakeEngine, plan: bench.Plan = PLAN) -> tuple[bench.Case, ...]:
    return bench.Bench(engine, tensors(engine.geometry, "f32"), Ceilings(), plan).run().cases


def test_a_decoded_token_of_flash_costs_what_the_specification_says():
    """spec/model.md 7: bytes and parameters read per token of the 2-bit file."""
    flash = synth.geometry("flash")
    cost = bench.cost_of_pass(flash, tensors(flash, "2bit"), rows=1, depth=8192, lanes=1)
    assert cost.weight_bytes == 9_559_118_244
    attention = 8192 // 4 * 21 * 64 * 128 + 64 * 512 * 2 * (43 * 128 + 21 * 512 + 20 * 64)
    weights = cost.int8_macs + cost.f32_macs - attention
    assert weights == pytest.approx(13_270_101_591, rel=2e-4)  # norms and positions: no products
    rows = 21 * (8192 // 4 * 68 + 512 * 583) + 583 * (43 * 128 + 20 * 64)  # without padding
    assert cost.row_bytes == rows


def test_rows_of_a_pass_share_weights_and_touch_more_experts():
    flash = synth.geometry("flash")
    file = tensors(flash, "2bit")
    one, four = (
        bench.cost_of_pass(flash, file, rows=n, depth=8192, lanes=n).weight_bytes for n in (1, 4)
    )
    experts = sum(t.n_bytes for t in file if "_exps." in t.name) / 256
    assert four - one == pytest.approx(experts * (23.25 - 6), rel=1e-2)  # spec/model.md 7
    assert bench.cost_of_pass(flash, file, rows=4, depth=8192, lanes=4).int8_macs == pytest.approx(
        4 * bench.cost_of_pass(flash, file, rows=1, depth=8192, lanes=1).int8_macs
    )


def test_an_indexer_that_selects_nothing_and_a_head_that_nobody_reads_cost_nothing():
    flash = synth.geometry("flash")
    file = tensors(flash, "2bit")
    shallow = bench.cost_of_pass(flash, file, rows=1, depth=2048, lanes=1)
    deep = bench.cost_of_pass(flash, file, rows=1, depth=2052, lanes=1)
    idle = sum(t.n_bytes for t in file if ".indexer." in t.name)
    assert deep.weight_bytes - shallow.weight_bytes == idle
    headless = bench.cost_of_pass(flash, file, rows=1, depth=2048, lanes=1, head=False)
    head = sum(t.n_bytes for t in file if t.name.startswith("output"))
    assert shallow.weight_bytes - headless.weight_bytes == head


def test_every_combination_is_measured_at_exactly_its_depth():
    engine = FakeEngine(eos_every=0)
    cases = measured(engine)
    deepest = engine.geometry.context - bench.WARM_STEPS - PLAN.steps - 1
    assert [(c.kind, c.lanes, c.rows, c.depth) for c in cases] == [
        *(("decode", n, n, depth) for depth in (8, 40, deepest) for n in (1, 3)),
        ("prefill", 1, 16, 512),
        ("prefill", 1, 64, 512),
    ]
    steps = bench.WARM_STEPS + PLAN.steps
    assert (
        engine.cohorts == ([(0,)] * steps * PLAN.repeats + [(0, 1, 2)] * steps * PLAN.repeats) * 3
    )
    assert engine.n_frontiers == 0
    assert engine.lanes_seated == set()


def test_lanes_hold_different_prompts_and_a_seed_repeats_them():
    seen = []

    def watch(ids):
        seen.append(ids.tobytes())
        return False

    measured(FakeEngine(poison=watch))
    first = seen.copy()
    assert len(set(first)) >= (bench.WARM_STEPS + PLAN.steps) * 3
    seen.clear()
    measured(FakeEngine(poison=watch))
    assert seen == first


def test_times_are_those_of_the_steps_and_floors_those_of_the_machine():
    engine = FakeEngine(delay_step_s=0.002)
    plan = dataclasses.replace(PLAN, depths=(8,), chunks=(16,))
    one, three, prefill = measured(engine, plan)
    assert 2 <= one.pass_ms < 200
    assert one.tok_s == pytest.approx(1e3 / one.pass_ms)
    assert three.tok_s == pytest.approx(3e3 / three.pass_ms)
    assert prefill.tok_s == pytest.approx(16e3 / prefill.pass_ms)
    assert one.tok_s_least <= one.tok_s <= one.tok_s_most
    assert one.memory_ms == pytest.approx(1e3 * one.cost.n_bytes / 1e9)
    products_ms = 1e3 * (one.cost.int8_macs / 2e9 + one.cost.f32_macs / 1e9)
    assert one.instruction_ms == pytest.approx(products_ms)
    assert one.binds == ("memory" if one.memory_ms > products_ms else "instruction")
    assert one.share == max(one.memory_ms, products_ms) / one.pass_ms
    assert one.gb_s == pytest.approx(one.cost.n_bytes / one.pass_ms / 1e6)


def test_a_lane_that_fails_ends_the_benchmark():
    engine = FakeEngine(poison=lambda ids: len(ids) > 20)
    with pytest.raises(LaneError, match="lane 0 failed: a logit is not finite"):
        measured(engine)


def test_steps_that_the_context_cannot_hold_are_refused():
    plan = dataclasses.replace(PLAN, steps=300)
    with pytest.raises(UsageError, match="300 steps do not fit a context of 256 tokens"):
        plan.fitted(geometry(context=256))


def test_table_and_json_hold_every_case():
    cases = measured(FakeEngine())
    report = bench.Report(
        model="fake",
        engine="fake, 1 thread",
        plan=PLAN,
        machine={"cpu": "none"},
        load_average=(0.0, 0.0, 0.0),
        figures=bench.Figures(int8_gmacs_s=2.0, f32_gmacs_s=1.0, cases=cases),
    )
    lines = bench.table(report).splitlines()
    assert len(lines) == 3 + len(cases)
    assert {len(line.rsplit("  ", 1)[0]) for line in lines[2:]} == {
        len(lines[2].rsplit("  ", 1)[0])
    }
    tree = json.loads(report.json())
    assert [c["depth"] for c in tree["figures"]["cases"]] == [c.depth for c in cases]
    assert tree["figures"]["cases"][0]["share"] == cases[0].share
    assert tree["figures"]["cases"][0]["binds"] in ("memory", "instruction")


def test_the_kernels_behind_the_ceilings_do_the_work_they_are_credited_with():
    """Each thread reads its own share once a pass, and multiplies the whole small buffer."""
    ceilings = CpuCeilings(2)
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 4, 11 * 128).astype(np.float32)
    bytes_ = rng.integers(-128, 128, kernels.L1_BYTES).astype(np.int8)
    small = rng.integers(0, 4, kernels.L1_BYTES // 4).astype(np.float32)
    dot = (bytes_.view(np.uint8).reshape(-1, 64).astype(int) * bytes_[:64]).sum()
    for kernel, buffer, total in (
        (kernels.read, floats, 3 * floats.sum()),
        (kernels.dot, bytes_, 3 * 2 * dot),
        (kernels.fused, small, 3 * 2 * (small.reshape(-1, 16) * small[:16]).sum()),
    ):
        out = np.zeros((2, 16), np.float32)
        args = np.array([buffer.ctypes.data, 11, 3, out.ctypes.data], np.int64)
        assert ceilings._run(kernel, args) > 0
        assert out.sum(dtype=np.float64) == pytest.approx(total, rel=1e-6), kernel.name
        assert out.any(1).all(), "a thread did nothing"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lanes", "1,0"], "argument --lanes: '1,0' is not a list of counts such as 1,2,4"),
        (["--steps", "many"], "argument --steps: 'many' is not a count of at least 1"),
        (["--json", "/no/such/place/x.json"], "/no/such/place is not a folder"),
        (["--fast"], "unrecognized arguments: --fast; `ds4d bench --help`"),
    ],
)
def test_a_command_line_that_means_nothing_is_refused_in_one_sentence(argv, message):
    with pytest.raises(UsageError) as caught:
        cli._run(["bench", *argv])
    assert message in str(caught.value)


def _compare_llama():
    path = Path(__file__).parents[2] / "ops" / "scripts" / "compare-llama"
    loader = importlib.machinery.SourceFileLoader("compare_llama", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_a_comparison_names_where_two_engines_part_and_how_nearly_they_agreed():
    script = _compare_llama()
    ours = SimpleNamespace(logits=lambda ids: np.array([0.0, 3.0, 2.5]) + len(ids))
    llama = SimpleNamespace(logits=lambda i: np.array([0.0, 3.0, 3.1]))

    def answer(*ids):
        return {"ids": list(ids), "prefill_s": 0.5, "decode_s": 0.25}

    prompt = [7] * 101
    parted = script.row(0, prompt, answer(5, 1, 9, 9), answer(5, 2, 8, 8), ours, llama)
    assert (parted["first"], parted["ours_says"], parted["llama_says"]) == (1, 1, 2)
    assert parted["gap_ours"] == pytest.approx(0.5)
    assert parted["gap_llama"] == pytest.approx(0.1)
    assert parted["rms_of_logit_differences"] == pytest.approx(np.std([0, 0, -0.6]))
    same = script.row(1, prompt, answer(5, 6, 7, 8), answer(5, 6, 7, 8), None, None)
    assert same["first"] is None
    total = script.summary([parted, same], 4)
    assert (total["same"], total["of"], total["largest_gap"]) == (1, 2, pytest.approx(0.5))
    assert total["ours"]["prefill_tok_s"] == 200
    assert total["llama"]["decode_tok_s"] == 16
