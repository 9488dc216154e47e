"""Two machines that run a kernel on NumPy arrays, and what its machine code may take."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.gpu.jit import GB10, H200, Chip, Kernel
from tests import lockstep

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARED_MOST = 99 * 1024  # bytes a block may have, on the GB10; the H200 has 227 KiB
REGISTERS = 65_536  # of an SM, both


class Lockstep:
    """`seed` draws the order in which blocks and threads run."""

    name = "lockstep"

    def run(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        *arguments: Any,
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        lockstep.run(kernel, grid, block, *arguments, shared=shared, seed=seed)


class Real:
    """The first GPU. Arrays go there and come back."""

    name = "gpu"

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream = device.create_stream()
        capability = device.compute_capability
        self.chip = Chip(capability.major, capability.minor)
        self._loaded: set[Kernel] = set()

    @classmethod
    @cache
    def open(cls) -> Real | None:
        from cuda.core import Device

        try:
            device = Device(0)
            device.set_current()
        except Exception:  # no driver raises whatever its bindings raise
            return None
        return cls(device)

    def run(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        *arguments: Any,
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        from cuda.bindings import driver

        def do(result: tuple[Any, ...]) -> Any:
            assert int(result[0]) == 0, result
            return result[1] if len(result) > 1 else None

        if kernel not in self._loaded:
            kernel.load(self.device.device_id, kernel.compile(self.chip).code)
            self._loaded.add(kernel)
        there: dict[int, Any] = {}
        given = []
        for a in arguments:
            if isinstance(a, np.ndarray):
                if id(a) not in there:
                    there[id(a)] = int(do(driver.cuMemAlloc(max(a.nbytes, 16))))
                    do(driver.cuMemcpyHtoD(there[id(a)], a.ctypes.data, a.nbytes))
                given.append(there[id(a)])
            else:
                given.append(a)
        kernel.launch(self.stream, grid, block, *given, shared=shared)
        self.stream.sync()
        for a in arguments:
            if isinstance(a, np.ndarray) and id(a) in there:
                do(driver.cuMemcpyDtoH(a.ctypes.data, there[id(a)], a.nbytes))
                do(driver.cuMemFree(there.pop(id(a))))


def check_code(
    kernels: Iterable[Kernel], block: int, *, shared: int = 0, doubles: bool = False
) -> None:
    """Each compiles for both chips, keeps its values in registers, fits, and does no arithmetic in
    double precision by accident."""
    for kernel in kernels:
        for chip in (H200, GB10):
            made = kernel.compile(chip)
            who = f"{kernel.title} for {chip.arch}"
            assert made.spill_bytes == 0, f"{who} spills {made.spill_bytes} bytes"
            assert made.stack_bytes == 0, f"{who} keeps {made.stack_bytes} bytes in local memory"
            assert made.shared_bytes + shared <= SHARED_MOST, (
                f"{who}: {made.shared_bytes} + {shared}"
            )
            assert made.registers * block <= REGISTERS, f"{who}: {made.registers} registers"
        if not doubles:
            found = [line.strip() for line in kernel.ptx(H200).splitlines() if ".f64" in line]
            assert not found, f"{kernel.title} computes in double precision: {found[:3]}"
