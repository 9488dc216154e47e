"""Where kernels run in these tests: `machine` is the GPU of `tests/lockstep.py` and, where there is
one, a real one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

if find_spec("numba_cuda") is None:  # the `cuda` extra; test_extra.py says so
    collect_ignore_glob = ["test_[!e]*", "test_e[!x]*"]


@pytest.fixture(params=["lockstep", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.gpu.machines import Lockstep, Real

    if request.param == "lockstep":
        yield Lockstep()
        return
    real = Real.open()
    if real is None:
        pytest.skip("no NVIDIA GPU here")
    yield real
