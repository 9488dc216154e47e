"""Named device buffers out of one arena, allocated once, within a promised number of bytes.

What a part of the engine needs is written once, as a function that adds its buffers. A dry run of
it says how many bytes to promise (spec/engine.md 5), and then the same function fills the arena:

    n = needed_bytes(lambda buffers: forward_buffers(buffers, geometry))
    buffers = Buffers(cuda.allocate, n)
    forward_buffers(buffers, geometry)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ds4d.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Array = npt.NDArray[Any]

ALIGNMENT = 256  # as cuMemAlloc's: whole sectors, and any wide access


class Memory(Protocol):
    """Device memory in one piece, zeroed when it was allocated."""

    @property
    def address(self) -> int: ...

    def write(self, offset: int, data: Array) -> None:
        """Copy from the host; done when it returns."""

    def read(self, offset: int, into: Array) -> None:
        """Copy to the host; done when it returns. Whatever writes there must have ended."""

    def free(self) -> None: ...


class Buffer(int):
    """A device address that knows what lies there: kernels take it as it is."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    _memory: Memory | None
    _offset: int

    def __new__(
        cls, memory: Memory | None, offset: int, name: str, shape: tuple[int, ...], dtype: Any
    ) -> Buffer:
        """`memory`: None in a dry run, where there is nothing to copy to."""
        made = super().__new__(cls, offset + (0 if memory is None else memory.address))
        made.name, made.shape, made.dtype = name, shape, np.dtype(dtype)
        made.nbytes = math.prod(shape) * made.dtype.itemsize
        made._memory, made._offset = memory, offset
        return made

    def __repr__(self) -> str:
        return f"<buffer {self.name} {list(self.shape)} {self.dtype} at {int(self):#x}>"

    def write(self, data: npt.ArrayLike) -> None:
        """From the host, the whole of it; for tests and what is small."""
        assert self._memory is not None, f"{self.name} is of a dry run"
        given = np.asarray(data)
        assert given.shape == self.shape and given.dtype == self.dtype, (self, given.dtype)
        self._memory.write(self._offset, np.ascontiguousarray(given))

    def read(self) -> Array:
        """A copy on the host."""
        assert self._memory is not None, f"{self.name} is of a dry run"
        out = np.empty(self.shape, self.dtype)
        self._memory.read(self._offset, out)
        return out


class Buffers:
    """Buffers by their names. `allocate` is called once, now, for `promised_bytes`; without it
    this is a dry run, in which addresses are offsets."""

    def __init__(
        self, allocate: Callable[[int], Memory] | None, promised_bytes: int | None = None
    ) -> None:
        assert allocate is None or promised_bytes is not None
        self.promised_bytes = promised_bytes
        self.used_bytes = 0  # with what aligns them
        self._named: dict[str, Buffer] = {}
        self._memory: Memory | None = None
        if allocate is not None and promised_bytes:
            self._memory = allocate(promised_bytes)
            assert self._memory.address % ALIGNMENT == 0, hex(self._memory.address)

    def add(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Buffer:
        """Zeroed. Raises OutOfMemory beyond what was promised."""
        assert name not in self._named, f"two buffers are called {name}"
        assert all(n >= 0 for n in shape), f"{name} {shape}"
        made = Buffer(self._memory, self.used_bytes, name, shape, dtype)
        end = self.used_bytes + -(-made.nbytes // ALIGNMENT) * ALIGNMENT
        if self.promised_bytes is not None and end > self.promised_bytes:
            raise OutOfMemory(
                f"buffer {name} takes {made.nbytes:,} bytes, and of {self.promised_bytes:,}"
                f" promised {self.promised_bytes - self.used_bytes:,} are left"
            )
        self.used_bytes = end
        self._named[name] = made
        return made

    def __getitem__(self, name: str) -> Buffer:
        return self._named[name]

    def __iter__(self) -> Iterator[Buffer]:
        """In the order in which they were added."""
        return iter(self._named.values())

    def __len__(self) -> int:
        return len(self._named)

    def close(self) -> None:
        """Give the memory back. Nothing may run that still uses it."""
        if self._memory is not None:
            memory, self._memory = self._memory, None
            self._named.clear()
            memory.free()


def needed_bytes(fill: Callable[[Buffers], object]) -> int:
    """What the buffers that `fill` adds will take, without allocating any."""
    counted = Buffers(None)
    fill(counted)
    return counted.used_bytes
