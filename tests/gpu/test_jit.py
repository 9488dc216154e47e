"""From a declared kernel to machine code, and the folder that keeps it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32

from ds4d.gpu import jit
from ds4d.gpu.jit import GB10, H200, Kernel, device, kernel
from ds4d.gpu.kernels import norm, ptx
from tests import lockstep

if TYPE_CHECKING:
    from pathlib import Path


@cache
def scaled(factor: int) -> Kernel:
    @device
    def by(x):  # type: ignore[no-untyped-def]
        return x * float32(factor)

    @kernel("f4* out, f4* x, i4 n")
    def scale(out, x, n):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < n:
            out[i] = by(x[i]) + float32(1)

    return scale


def test_what_stands_in_the_closure_makes_another_kernel(machine: Any) -> None:
    for factor in (2, 3):
        x, out = np.arange(40, dtype="f4"), np.zeros(40, "f4")
        machine.run(scaled(factor), 2, 32, out, x, 40)
        np.testing.assert_array_equal(out, factor * x + 1)
    assert scaled(2).title == "scale[factor=2]"
    assert scaled(2).key(H200) != scaled(3).key(H200)
    assert scaled(2).key(H200) != scaled(2).key(GB10)


def test_nothing_is_contracted() -> None:
    text = scaled(3).ptx(H200)
    assert "mul.rn.f32" in text and "add.rn.f32" in text and "fma" not in text
    assert ".visible .entry scale(" in text
    assert "fma.rn.f32" in norm.rmsnorm_kernel.ptx(H200)  # where it is written


def test_a_folder_keeps_machine_code(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    both = [scaled(2), norm.rmsnorm_kernel]
    first = jit.build(both, H200, tmp_path / "kernels", lambda *a: told.append(a))
    assert told == [("scale", 0.5), ("rmsnorm_kernel", 1.0)]
    assert all(code[:4] == b"\x7fELF" for code in first.values())
    assert len(list((tmp_path / "kernels").iterdir())) == 2
    assert jit.build(both, H200, tmp_path / "kernels") == first
    assert not compiles(both[0], tmp_path / "kernels")


def compiles(one: Kernel, folder: Path) -> bool:
    """Whether `build` has to compile it."""
    asked = []

    class Watched(Kernel):
        def compile(self, chip: jit.Chip) -> jit.Cubin:
            asked.append(chip)
            return super().compile(chip)

    watched = object.__new__(Watched)
    watched.__dict__ |= one.__dict__
    jit.build([watched], H200, folder)
    return bool(asked)


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    jit.build([scaled(2)], H200, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for damage in (whole[:-1], whole[:100], b"", whole[:50] + b"?" + whole[51:]):
        file.write_bytes(damage)
        assert compiles(scaled(2), tmp_path)
        assert not compiles(scaled(2), tmp_path)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = jit.build([scaled(2)], H200, tmp_path / "file" / "kernels")
    assert made[scaled(2)][:4] == b"\x7fELF"


def test_a_changed_source_has_another_name() -> None:
    names = {text.partition("\n")[0] for text in jit.sources(norm.__name__)}
    assert any("RMS" in name for name in names)  # itself
    assert any("Instructions" in name for name in names)  # ptx
    assert any("What the 32 threads" in name for name in names)  # warp
    assert any("Kernels from source" in name for name in names)  # jit


@pytest.mark.parametrize(
    "wrong", ["f4* out, f4* x", "f4* out, f4* x, i4 m", "f4* out, f3* x, i4 n"]
)
def test_a_signature_that_does_not_fit_is_told_at_once(wrong: str) -> None:
    with pytest.raises(TypeError, match=r"kernel scale"):
        kernel(wrong)(scaled(2).function)


def test_lockstep_tells_what_a_gpu_would_not() -> None:
    @kernel("f4* x")
    def beyond(x):  # type: ignore[no-untyped-def]
        x[cuda.threadIdx.x] = float32(0)

    @kernel("f4* x")
    def apart(x):  # type: ignore[no-untyped-def]
        if cuda.threadIdx.x < 16:
            cuda.syncthreads()
        x[0] = float32(0)

    @kernel("f4* x")
    def askew(x):  # type: ignore[no-untyped-def]
        ptx.load16(x, 1)

    for wrong, why in ((beyond, "of 8"), (apart, "ended before"), (askew, "16 bytes at")):
        with pytest.raises(lockstep.Fault, match=why):
            lockstep.run(wrong, 1, 32, np.zeros(8, "f4"))


def test_a_missing_barrier_shows() -> None:
    @kernel("f4* out")
    def hasty(out):  # type: ignore[no-untyped-def]
        held = cuda.shared.array(64, float32)
        i = cuda.threadIdx.x
        held[i] = float32(i)
        out[i] = held[63 - i]

    out = np.zeros(64, "f4")
    lockstep.run(hasty, 1, 64, out)
    assert not np.array_equal(out, np.arange(63, -1, -1))
