"""Two machines that run a kernel on NumPy arrays, and what its machine code may take."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.gpu.jit import GB10, H200, Chip, DeviceStream, Kernel, Loaded, assemble
from tests import lockstep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int,
        dependent: bool,
    ) -> None:
        """As a stream: for launchers."""
        self.run(kernel, grid, block, *as_declared(kernel, arguments), shared=shared)


class LockstepMemory:
    """`ds4d.gpu.buffers.Memory`, at an address of which no bit is another's."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.address = address
        self.data = np.zeros(n_bytes, np.uint8)

    def write(self, offset: int, data: np.ndarray[Any, Any]) -> None:
        raw = data.reshape(-1).view(np.uint8)
        self.data[offset : offset + raw.size] = raw

    def read(self, offset: int, into: np.ndarray[Any, Any]) -> None:
        raw = into.reshape(-1).view(np.uint8)
        raw[:] = self.data[offset : offset + raw.size]

    def free(self) -> None:
        self.data = self.data[:0]


class LockstepGpu:
    """Memory and a stream: what launchers enqueue runs at once, on addresses."""

    def __init__(self) -> None:
        self._memories: list[LockstepMemory] = []
        self.launches: list[str] = []

    def allocate(self, n_bytes: int) -> LockstepMemory:
        end = max((m.address + m.data.size for m in self._memories), default=1 << 40)
        self._memories.append(LockstepMemory(-(-end // 4096 + 1) * 4096, n_bytes))
        return self._memories[-1]

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int,
        dependent: bool,
    ) -> None:
        self.launches.append(kernel.name)
        kinds = (letters for _, letters in kernel.parameters)
        given = [
            self._at(a, letters.rstrip("*")) if letters.endswith("*") else a
            for a, letters in zip(arguments, kinds, strict=True)
        ]
        lockstep.run(kernel, grid, block, *given, shared=shared, seed=len(self.launches))

    def _at(self, address: int, letters: str) -> np.ndarray[Any, Any]:
        """What lies from an address on, to the end of its memory."""
        for m in self._memories:
            if m.address <= address < m.address + m.data.size:
                there = m.data[address - m.address :]
                size = np.dtype(letters).itemsize
                return there[: there.size // size * size].view(letters)
        raise lockstep.Fault(f"no memory at {address:#x}")


class Real:
    """The first GPU. Arrays go there and come back."""

    name = "gpu"

    def __init__(self, device: Any) -> None:
        self.device, self.stream = device, device.create_stream()
        capability = device.compute_capability
        self.chip = Chip(capability.major, capability.minor)
        self._loaded = Loaded(device.device_id)
        self._added: set[Kernel] = set()

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
        dependent: bool = False,
    ) -> None:
        from cuda.bindings import driver

        def do(result: tuple[Any, ...]) -> Any:
            assert int(result[0]) == 0, result
            return result[1] if len(result) > 1 else None

        if kernel not in self._added:
            self._loaded.add(kernel, kernel.compile(self.chip).code)
            self._added.add(kernel)
        there: dict[int, Any] = {}  # by the address here: two views of an array are one there
        given = []
        for a in arguments:
            if isinstance(a, np.ndarray):
                at = a.ctypes.data
                if at not in there:
                    there[at] = int(do(driver.cuMemAlloc(max(a.nbytes, 16)))), a.nbytes
                    do(driver.cuMemcpyHtoD(there[at][0], at, a.nbytes))
                assert there[at][1] == a.nbytes, f"{kernel}: views of two sizes"
                given.append(there[at][0])
            else:
                given.append(a)
        stream = DeviceStream(self._loaded, self.stream)
        stream.launch(kernel, grid, block, given, shared=shared, dependent=dependent)
        self.stream.sync()
        for at, (address, n) in there.items():
            do(driver.cuMemcpyDtoH(at, address, n))
            do(driver.cuMemFree(address))

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int,
        dependent: bool,
    ) -> None:
        """As a stream: for launchers."""
        given = as_declared(kernel, arguments)
        self.run(kernel, grid, block, *given, shared=shared, dependent=dependent)


def as_declared(kernel: Kernel, arguments: Sequence[Any]) -> list[Any]:
    """Arrays seen as the types of the kernel's pointers: on a device both are addresses."""
    kinds = (letters for _, letters in kernel.parameters)
    return [
        a.view(letters.rstrip("*")) if letters.endswith("*") else a
        for a, letters in zip(arguments, kinds, strict=True)
    ]


def check_code(
    kernels: Iterable[Kernel], block: int, *, shared: int = 0, doubles: bool = False
) -> None:
    """Each compiles for both chips, keeps its values in registers, fits, and does no arithmetic in
    double precision by accident."""
    for kernel in kernels:
        for chip in (H200, GB10):
            text = kernel.ptx(chip)
            made = assemble(text, chip)
            who = f"{kernel.title} for {chip.arch}"
            assert made.spill_bytes == 0, f"{who} spills {made.spill_bytes} bytes"
            assert made.stack_bytes == 0, f"{who} keeps {made.stack_bytes} bytes in local memory"
            total = made.shared_bytes + shared
            assert total <= SHARED_MOST, f"{who} takes {total} bytes of shared memory"
            assert made.registers * block <= REGISTERS, f"{who}: {made.registers} registers"
            found = [line.strip() for line in text.splitlines() if ".f64" in line]
            assert doubles or not found, f"{who} computes in double precision: {found[:3]}"
