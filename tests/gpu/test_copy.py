"""Frontiers and pages, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds4d.cpu.state import ABI, State
from ds4d.gpu.kernels import copy
from ds4d.model import synth
from ds4d.model.layout import E4M3, HALF, Layout
from tests.gpu.machines import check_code

LANES = 3


def _layout(name: str) -> Layout:
    """Formats of a geometry with few layers and a short window."""
    g = synth.geometry(name)
    ratios = (0, 4, 128) if name == "flash" else (4, 128, 4, 0)
    g = replace(
        g, n_layers=len(ratios), ratios=ratios, window=16,
        expert_clamp=g.expert_clamp[:1] * len(ratios),
        shared_clamp=g.shared_clamp[:1] * len(ratios),
    )  # fmt: skip
    return Layout(g, rows_max=8, exact=False)


def _state(layout: Layout, seed: int) -> State:
    r = np.random.default_rng(seed)
    state = State(layout, lanes=LANES, pages=1)
    state.rings[...] = r.integers(0, 256, state.rings.shape)
    for inputs in state.inputs:
        inputs[...] = r.standard_normal(inputs.shape)
    return state


def _arrays(state: State) -> tuple[Any, Any]:
    """Copies of the rings and of each kind of inputs, as bytes."""
    rings = state.rings.copy().reshape(-1)
    return rings, [x.copy().reshape(-1).view(np.uint8) for x in state.inputs]


def _where(layout: Layout, lane: int, n: int) -> dict[str, Any]:
    return {"layout": layout, "lanes": LANES, "lane": lane, "n": n}


CASES = [
    ("flash", 3), ("flash", 23), ("tiny", 0), ("tiny", 1), ("tiny", 41), ("tiny", 128),
    ("mini", 15), ("mini", 139), ("micro", 7), ("micro", 258),
]  # fmt: skip


@pytest.mark.parametrize(("name", "n"), CASES)
def test_a_frontier_is_that_of_the_cpu_engine(machine: Any, name: str, n: int) -> None:
    layout = _layout(name)
    state = _state(layout, n)
    wanted = np.full(layout.frontier_bytes_max, 0xEE, np.uint8)
    n_bytes = state.read(1, n, wanted)
    found = np.full_like(wanted, 0xEE)
    where = _where(layout, 1, n)
    assert copy.gather_frontier(machine, found, *_arrays(state), **where, version=ABI) == n_bytes
    assert (found == wanted).all()


@pytest.mark.parametrize(("name", "n"), CASES)
def test_a_lane_takes_a_frontier_as_on_the_cpu(machine: Any, name: str, n: int) -> None:
    """And nothing else of it or of other lanes changes."""
    layout = _layout(name)
    data = np.zeros(layout.frontier_bytes_max, np.uint8)
    n_bytes = _state(layout, n).read(0, n, data)
    state = _state(layout, n + 1)
    arrays = _arrays(state)
    state.write(2, data[:n_bytes])
    copy.scatter_frontier(machine, data, *arrays, **_where(layout, 2, n))
    rings, inputs = _arrays(state)
    assert (arrays[0] == rings).all()
    for mine, wanted in zip(arrays[1], inputs, strict=True):
        assert (mine == wanted).all()


def test_its_reference_says_the_same() -> None:
    layout = _layout("mini")
    state = _state(layout, 5)
    wanted = np.zeros(layout.frontier_bytes_max, np.uint8)
    state.read(1, 139, wanted)
    found = np.full_like(wanted, 0xEE)
    rings, inputs = _arrays(state)
    parts, end = copy.frontier_parts(layout, lanes=LANES, lane=1, n=139)
    for part in parts:
        copy.gather_ref(found, rings if part.source < 0 else inputs[part.source], part)
    assert (found[32:end] == wanted[32:end]).all()


def test_formats_are_what_they_should_be_here() -> None:
    """Rows of one byte and of eight, halves alone, ends that need filling."""
    assert _layout("flash").kv.scale_bytes == 8
    assert (_layout("mini").kv.kind, _layout("mini").kv.scale_bytes) == (E4M3, 1)
    assert _layout("micro").kv.kind == HALF
    parts, _ = copy.frontier_parts(_layout("mini"), lanes=1, lane=0, n=15)
    assert any(part.n_bytes % 16 for part in parts)


@pytest.mark.parametrize("n_bytes", [16, 4096, 16_384, 16_400, 32_768 - 16])
def test_a_page_becomes_another(machine: Any, n_bytes: int) -> None:
    stride = n_bytes + 48
    pool = np.random.default_rng(n_bytes).integers(0, 256, (4, stride)).astype(np.uint8)
    wanted = pool.copy()
    wanted[1, :n_bytes] = pool[3, :n_bytes]
    flat = pool.reshape(-1)
    copy.copy_page(machine, flat, source=3, target=1, page_stride=stride, n_bytes=n_bytes)
    assert (pool == wanted).all()


def test_its_code() -> None:
    for name in ("flash", "tiny"):
        check_code(copy.kernels(_layout(name)), copy.BLOCK)
