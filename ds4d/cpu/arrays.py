"""Arrays whose addresses kernels hold: aligned, zeroed, never moved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

ALIGNMENT = 64  # a cache line, and the widest register


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As `np.zeros`, beginning on a cache line, with a cache line to spare behind: kernels may
    read whole vectors."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(n_bytes + 2 * ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + n_bytes].view(dtype).reshape(shape)
