"""RMS normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels import norm


@pytest.mark.parametrize("dim", [64, 256, 1000, 4096])
def test_rows_are_normalised(machine: Any, dim: int) -> None:
    r = np.random.default_rng(dim)
    x, w = r.standard_normal((3, dim + 4)).astype("f4"), r.standard_normal(dim).astype("f4")
    out = np.full((3, dim), np.nan, "f4")
    norm.rmsnorm(machine, out, x, w, n_rows=3, dim=dim, stride=dim + 4, eps=1e-6)
    truth = norm.rmsnorm_ref(x[:, :dim], w, 1e-6)
    np.testing.assert_allclose(out, truth, rtol=2e-6, atol=1e-7)
