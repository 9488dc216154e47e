"""Activations as int8 blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4d.cpu.kernels import activation as cpu
from ds4d.gpu.kernels import activation

SHAPES = [(8, 32), (8, 96), (16, 256), (3, 1024)]  # rows, inputs


def empty(rows: int, n: int, block: int) -> tuple[Any, Any]:
    return np.full((n // 32, rows, 32), 99, "i1"), np.full((n // block, rows), 99, "f4")


def values(rows: int, n: int) -> Any:
    r = np.random.default_rng(rows * n)
    return (r.standard_normal((rows, n)) * 10.0 ** r.integers(-6, 6, (rows, 1))).astype("f4")


def equal(found: Any, wanted: Any) -> None:
    """Bit for bit, but for which NaN a NaN is."""
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(f, w)
        assert f.dtype == w.dtype
        np.testing.assert_array_equal(np.signbit(f), np.signbit(w))


def quantised(machine: Any, x: Any, block: int, **where: Any) -> tuple[Any, Any]:
    rows, n = len(x), where.pop("n", x.shape[1])
    q, d = empty(rows, n, block)
    activation.quantise(machine, q, d, x, n_rows=rows, n=n, block=block, **where)
    return q, d


@pytest.mark.parametrize(
    ("rows", "n", "block"),
    [(r, n, b) for r, n in SHAPES for b in (32, 256) if n % b == 0],
)
def test_blocks_are_those_of_the_reference(machine: Any, rows: int, n: int, block: int) -> None:
    x = values(rows, n)
    equal(quantised(machine, x, block), activation.quantise_ref(x, block))


@pytest.mark.parametrize("block", [32, 256])
def test_the_reference_is_the_cpu_engine_s(block: int) -> None:
    """Which has rows first."""
    x = values(5, 1024)
    x[2, :block] = 0
    q, d = activation.quantise_ref(x, block)
    other_q, other_d = cpu.quantise_ref(x, block)
    np.testing.assert_array_equal(q.swapaxes(0, 1).reshape(x.shape), other_q)
    np.testing.assert_array_equal(d.T, other_d)


def test_both_forms_come_of_one_reading(machine: Any) -> None:
    x = values(8, 768)
    small, large = empty(8, 768, 32), empty(8, 768, 256)
    activation.quantise_both(machine, *small, *large, x, n_rows=8, n=768)
    equal(small, activation.quantise_ref(x, 32))
    equal(large, activation.quantise_ref(x, 256))


@pytest.mark.parametrize("block", [32, 256])
def test_a_part_of_longer_rows_is_as_good_as_rows_of_its_own(machine: Any, block: int) -> None:
    x = values(8, 768)
    own = np.ascontiguousarray(x[:, 256:512])
    found = quantised(machine, x, block, n=256, stride=768, first=256)
    equal(found, activation.quantise_ref(own, block))


@pytest.mark.parametrize("block", [32, 256])
def test_ties_go_to_even(machine: Any, block: int) -> None:
    """127 makes d one, so values are their own quotients."""
    x = np.tile(np.array([0.5, -0.5, 1.5, 2.5, -2.5, 126.5, -126.5, 127], "f4"), (8, 32))
    q, d = quantised(machine, x, block)
    assert (d == 1).all()
    np.testing.assert_array_equal(q[0, 0, :8], [0, 0, 2, 2, -2, 126, -126, 127])
    equal((q, d), activation.quantise_ref(x, block))


@pytest.mark.parametrize("block", [32, 256])
def test_blocks_of_zeros_have_no_scale(machine: Any, block: int) -> None:
    x = values(8, 512)
    x[1], x[2, :256], x[3] = 0, -0.0, 1e-45  # 1e-45 / 127 is 0 as well
    q, d = quantised(machine, x, block)
    assert not d[:, 1].any() and not q[:, 1].any() and not q[:, 3].any()
    assert not np.signbit(d).any()
    equal((q, d), activation.quantise_ref(x, block))


@pytest.mark.parametrize("block", [32, 256])
def test_extremes_keep_their_scale(machine: Any, block: int) -> None:
    x = values(8, 256)
    x[0, 3], x[1, 200], x[2] = 3e38, -3e38, 2e-38  # the last has a subnormal scale
    q, d = quantised(machine, x, block)
    assert d[0, 2] > 0 and q[0, 0, 3] == 127
    equal((q, d), activation.quantise_ref(x, block))


@pytest.mark.parametrize("lane", [0, 17, 31])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_in_the_scale(machine: Any, bad: float, lane: int) -> None:
    """Wherever it stands: comparisons would lose a NaN in some lanes."""
    x = values(2, 256)
    x[1, 32 + lane] = bad
    if lane == 17:
        x[1, 40] = np.inf  # a NaN beside an infinity stays one
    for block in (32, 256):
        q, d = quantised(machine, x, block)
        here = 1 if block == 32 else 0
        assert np.isnan(d[here, 1]) if np.isnan(bad) else np.isinf(d[here, 1])
        equal((q, d), activation.quantise_ref(x, block))
        assert not q[1, 1].any() and np.isfinite(d[:, 0]).all()
