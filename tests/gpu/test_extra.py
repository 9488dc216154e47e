"""Whether there is anything to test."""

import pytest


def test_the_extra_is_installed() -> None:
    pytest.importorskip("numba_cuda", reason="no numba-cuda: pip install .[cuda]")
