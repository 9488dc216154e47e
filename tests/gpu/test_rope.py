"""Angles of a pass, and pairs that are turned by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda

from ds4d.gpu.jit import kernel
from ds4d.gpu.kernels import rope
from ds4d.model import synth
from ds4d.model.reference.forward import rope as turned
from tests.gpu.machines import check_code

FAR = 1 << 20
POSITIONS = [0, 1, 3, 4, 127, 128, 130, 255, 65_535, 524_287, FAR - 1, FAR]


def _tables(name: str) -> list[Any]:
    return [np.array(f, np.float32) for f in synth.geometry(name).frequencies]


def _angles(machine: Any, pos: Any, plain: Any, yarn: Any) -> Any:
    turns = np.full((len(pos), 4, 2, len(plain)), 7, np.float32)
    pos = np.array(pos, np.int32)
    rope.angles(machine, turns, pos, plain, yarn, n_rows=len(pos), pairs=len(plain))
    return turns


def _steps(a: Any, b: Any) -> int:
    """Floats between a and b, at most."""
    apart = np.abs(a.astype(np.float64) - b) / np.spacing(np.abs(b))
    return int(apart.max())


@pytest.mark.parametrize("name", ["flash", "tiny", "micro"])
def test_cosines_and_sines_are_those_of_double_precision(machine: Any, name: str) -> None:
    plain, yarn = _tables(name)
    pos = np.array(POSITIONS, np.int32)
    turns = _angles(machine, pos, plain, yarn)
    wanted = rope.angles_ref(pos, plain, yarn)
    assert _steps(turns, wanted) <= 1
    assert (turns == wanted).mean() > 0.99


def test_every_quarter_turn_is_met(machine: Any) -> None:
    """Also where a cosine or a sine comes near zero, and the reduction has to be exact."""
    near = (np.arange(1, 49) * np.pi / 2).astype(np.float32)
    near = np.concatenate([near, np.float32(np.arange(600_000, 600_016) * np.pi / 2)])
    turns = _angles(machine, [1, 130], near, -np.ones_like(near))
    wanted = rope.angles_ref(np.array([1, 130]), near, -np.ones_like(near))
    assert _steps(turns[0, 0], wanted[0, 0]) <= 1
    assert np.abs(wanted[0, 0]).min() < 1e-7


def test_idle_rows_are_left_alone(machine: Any) -> None:
    plain, yarn = _tables("tiny")
    turns = _angles(machine, [5, -1, 9, -1], plain, yarn)
    assert (turns[[1, 3]] == 7).all()
    alone = _angles(machine, [9], plain, yarn)
    assert (turns[2] == alone[0]).all()


@kernel("f4* x, f4* back, f4* turns, i4 kind, i4 pairs")
def _turn_pairs(x, back, turns, kind, pairs):  # type: ignore[no-untyped-def]
    row, i = cuda.blockIdx.x, cuda.threadIdx.x
    at, place = rope.turn_of(row, kind, pairs) + i, 2 * (row * pairs + i)
    u, v = rope.turn(x[place], x[place + 1], turns[at], turns[at + pairs])
    x[place], x[place + 1] = u, v
    u, v = rope.turn_back(u, v, turns[at], turns[at + pairs])
    back[place], back[place + 1] = u, v


@pytest.mark.parametrize("kind", [0, 1])
def test_pairs_are_turned_as_in_the_reference(machine: Any, kind: int) -> None:
    pairs, pos = 16, np.array([0, 7, 4000], np.int32)
    frequencies = _tables("tiny")
    x = np.random.default_rng(kind).standard_normal((3, 2 * pairs)).astype("f4")
    out, back = x.copy(), np.empty_like(x)
    turns = rope.angles_ref(pos, *frequencies)
    machine.run(_turn_pairs, 3, pairs, out, back, turns, kind, pairs)
    assert (out == rope.turn_ref(x, turns[:, kind])).all()
    np.testing.assert_allclose(out, turned(x, pos, frequencies[kind]), rtol=1e-5, atol=1e-6)
    assert (back == rope.turn_ref(out, turns[:, kind], back=True)).all()
    np.testing.assert_allclose(back, x, atol=1e-6)


def test_windows_begin_where_their_ratio_says() -> None:
    plain, yarn = _tables("tiny")
    turns = rope.angles_ref(np.array([131, 255]), plain, yarn)
    at = rope.angles_ref(np.array([128, 252]), plain, yarn)
    assert (turns[:, 2] == at[:, 1]).all()
    assert (turns[:, 3] == at[0, 1]).all()


def test_its_code() -> None:
    check_code([_turn_pairs], 64)
