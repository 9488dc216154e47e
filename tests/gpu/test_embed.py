"""Embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels import embed
from tests.gpu.machines import check_code


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("width", "streams"), [(64, 1), (256, 4), (1028, 2), (4096, 4)])
def test_every_stream_begins_as_the_tokens_row(
    machine: Any, width: int, streams: int, half: bool
) -> None:
    r = np.random.default_rng(width)
    table = r.standard_normal((40, width)).astype("f2" if half else "f4")
    token = np.array([39, -1, 0, 7, 7, -1, 39, 1], "i4")
    X = np.full((len(token), streams, width), 5, "f4")
    given = table.view("u2") if half else table
    grid = embed.embed_grid(len(token), width)
    kernel = embed.embed_kernel(half)
    machine.run(kernel, grid, embed.BLOCK, X, token, given, width, streams)
    idle = token < 0
    np.testing.assert_array_equal(X[~idle], embed.embed_ref(table, token, streams)[~idle])
    assert (X[idle] == 5).all(), "an idle row was written"


@pytest.mark.parametrize("half", [True, False])
def test_an_infinite_or_nan_embedding_is_kept(machine: Any, half: bool) -> None:
    table = np.ones((2, 8), "f2" if half else "f4")
    table[1, :3] = np.nan, np.inf, -np.inf
    X = np.zeros((1, 2, 8), "f4")
    given = table.view("u2") if half else table
    token = np.array([1], "i4")
    machine.run(embed.embed_kernel(half), (1, 1), embed.BLOCK, X, token, given, 8, 2)
    np.testing.assert_array_equal(X[0, 0], table[1].astype("f4"))
    np.testing.assert_array_equal(X[0, 1], table[1].astype("f4"))


def test_the_code_for_f32() -> None:
    check_code([embed.embed_kernel(False)], embed.BLOCK)
