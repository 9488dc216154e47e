"""A program: the kernels of a pass in order, with their arguments, as a table that threads replay.

Built once when an engine opens. What changes from step to step (how many rows, their lanes and
positions) lies in arrays that the arguments point at, so a step costs no Python between kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels.simd import WORDS_MAX
from ds4d.cpu.weights import Weight

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.cpu.jit import Kernel


class Program:
    """`add` operations, `barrier` where the next needs all threads to be done; then `assemble`."""

    def __init__(self) -> None:
        self.operations: list[tuple[Kernel, tuple[Any, ...]]] = []
        self.waits: list[bool] = []
        self.table: npt.NDArray[np.int64] = zeros((0, 4), np.int64)
        self._tables: list[npt.NDArray[np.int64]] = []

    def __len__(self) -> int:
        return len(self.operations)

    def add(self, kernel: Kernel, **args: Any) -> None:
        """`args` by the names of the kernel's parameters: arrays (their address), weights (their
        table's), ints, floats (the bits of a float32) or None (0)."""
        if set(args) != set(kernel.parameters):
            wrong = sorted(set(args) ^ set(kernel.parameters))
            raise TypeError(f"{kernel.name}: {', '.join(wrong)} missing or unknown")
        if len(args) > WORDS_MAX:
            raise TypeError(
                f"{kernel.name} has {len(args)} parameters, expected {WORDS_MAX} or less"
            )
        self.operations.append((kernel, tuple(args[name] for name in kernel.parameters)))
        self.waits.append(False)

    def barrier(self) -> None:
        """What follows reads what all threads wrote so far."""
        self.waits[-1] = True

    def kernels(self) -> list[Kernel]:
        """All that the program will call, once each."""
        used: dict[Kernel, None] = {}
        for kernel, args in self.operations:
            used[kernel] = None
            used.update((a.tile, None) for a in args if isinstance(a, Weight))
        return list(used)

    def assemble(self) -> None:
        """Fill in addresses; kernels must have been prepared."""
        self.table = zeros((len(self), 4), np.int64)
        for i, (kernel, args) in enumerate(self.operations):
            words = self._words([self._word(a) for a in args])
            self.table[i] = kernel.address, words, len(args), self.waits[i]

    def _words(self, values: list[int]) -> int:
        """Address of a table with these words, which lives as long as the program."""
        table = zeros((len(values),), np.int64)
        table[:] = values
        self._tables.append(table)
        return int(table.ctypes.data)

    def _word(self, value: Any) -> int:
        match value:
            case None:
                return 0
            case np.ndarray():
                return int(value.ctypes.data)
            case Weight():
                return self._words(value.words())
            case float() | np.floating():
                return int(np.float32(value).view(np.int32))
            case _:
                return int(value)
