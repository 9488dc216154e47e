"""A pass of Flash and of ds4-tiny, planned: its bytes, and the machine code of all it launches."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from ds4d.gpu.buffers import Buffers
from ds4d.gpu.forward import Forward
from ds4d.gpu.jit import Launched, Listing
from ds4d.gpu.kernels import rope
from ds4d.gpu.state import State
from ds4d.model import synth
from ds4d.model.layout import Layout
from ds4d.model.quants import Tensor
from tests.gpu.machines import check_code

MODELS = (("flash", "2bit"), ("flash", "4bit"), ("tiny", "q8"))
ROWS = (8, 16, 24, 32)


@cache
def planned(name: str, kinds: str) -> tuple[int, int, dict[int, list[Launched]]]:
    """Bytes of the weights in the file and on the device; launches of a pass by its rows."""
    geometry, none = synth.geometry(name), np.empty(0, np.uint8)
    tensors = {n: Tensor(n, q, shape, none) for n, q, shape in synth.table(geometry, kinds)}
    buffers = Buffers(None)
    pages = 2 * geometry.context // geometry.page_tokens
    state = State(Layout(geometry, rows_max=32, exact=False), buffers, lanes=2, pages=pages)
    forward = Forward(geometry, tensors, state, buffers, n_sms=132)
    held = sum(b.nbytes for b in buffers if b.name.removesuffix(" w").removesuffix(" s") in tensors)
    in_file = sum(t.quant.n_bytes(t.shape) for t in tensors.values())
    launches = {}
    for n in ROWS:
        listing = Listing()
        forward.enqueue(listing, n)
        launches[n] = listing.launched
    return in_file, held, launches


def all_launched() -> list[Launched]:
    """Every kernel once, with the most shared memory that a launch asks for."""
    found: dict[str, Launched] = {}
    for model in MODELS:
        for launches in planned(*model)[2].values():
            for one in launches:
                before = found.get(one.kernel.title)
                if before is None or before.shared < one.shared:
                    found[one.kernel.title] = one
    return list(found.values())


@pytest.mark.parametrize("launched", all_launched(), ids=lambda one: one.kernel.name)
def test_a_kernel_fits_both_chips(launched: Launched) -> None:
    doubles = launched.kernel is rope.angles_kernel
    check_code([launched.kernel], launched.block, shared=launched.shared, doubles=doubles)


@pytest.mark.parametrize("kinds", ["2bit", "4bit"])
def test_a_model_of_full_size_is_planned_without_memory(kinds: str) -> None:
    """Weights take what the file takes, but for vectors widened to f32, under 4 MiB; and a pass of
    any size has as many launches."""
    in_file, held, launches = planned("flash", kinds)
    assert 0 <= held - in_file < 4 << 20
    assert len({len(each) for each in launches.values()}) == 1
