"""What a lane's past is: pages of compressed rows, rings of raw rows and of compressor inputs.

Their sizes are `ds4d.model.layout`'s; which page belongs to whom is the engine's to say.

A frontier as bytes (spec/model.md 5), planes again, all layers of a kind together:

    header   4 int64: layout version, n tokens, total bytes, 0
    raw      the last min(window, n) rows of every layer: codes, halves, scales
    ratio 4, attention then indexer
             values and gates [layers, 2, 4, d] of the last whole window, series A (none if n < 4)
             the same [layers, 2, n mod 4, d] of the window begun, series A, then series B
    ratio 128
             the same [layers, 2, n mod 128, d] of the window begun
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels.rows import FORMAT_WORDS
from ds4d.errors import CheckpointError
from ds4d.model.layout import HEADER_BYTES, PLANE, pad

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.model.layout import Layout, RowFormat

    U8 = npt.NDArray[np.uint8]
    Array = npt.NDArray[Any]

ABI = 1


def table(form: RowFormat, n_rows: int, *where: int) -> npt.NDArray[np.int64]:
    """A row format as kernels read it, for blocks of `n_rows`; `where`: the words of a ring or of
    pages (`kernels/rows.py`)."""
    words = zeros((FORMAT_WORDS,), np.int64)
    words[:4] = form.kind, form.dim, form.coded, form.n_scales
    words[4:8] = form.code_bytes, *form.offsets(n_rows), form.scale_bytes
    words[8 : 8 + len(where)] = where
    return words


class State:
    """Memory of `lanes` timelines and `pages` pages."""

    def __init__(self, layout: Layout, *, lanes: int, pages: int) -> None:
        g = layout.geometry
        self.layout = layout
        self.page_stride = pad(max(layout.page_bytes, 1), 64)
        self.pages = zeros((pages, self.page_stride), np.uint8)
        self.pages_per_lane = max(1, min(pages, -(-g.context // g.page_tokens)))
        self.page_table = zeros((lanes, self.pages_per_lane), np.int64)  # addresses
        self.rings = zeros((lanes, g.n_layers, layout.ring_bytes), np.uint8)
        self.inputs = [  # of compressors: [layers, lanes, values and gates, capacity, width] f32
            zeros((len(c.layers), lanes, 2, c.capacity, c.width), np.float32)
            for c in layout.compressors
        ]

    def page_address(self, page: int) -> int:
        return int(self.pages.ctypes.data) + page * self.page_stride

    def ring(self, layer: int) -> npt.NDArray[np.int64]:
        """Raw rows of a layer, as a table for kernels."""
        capacity, rings = self.layout.capacity, self.rings[0, layer]
        where = int(rings.ctypes.data), self.rings.strides[0], capacity
        return table(self.layout.kv, capacity, *where)

    def paged(self, layer: int, *, index: bool = False) -> npt.NDArray[np.int64]:
        """Compressed rows of a layer or, with `index`, its index rows, as a table for kernels."""
        layout = self.layout
        per_page = layout.geometry.page_tokens // layout.geometry.ratios[layer]
        form = layout.index if index else layout.kv
        offset = (layout.index_offset if index else layout.kv_offset)[layer]
        where = int(self.page_table.ctypes.data), self.pages_per_lane, offset, per_page
        return table(form, per_page, *where)

    # -- frontiers -----------------------------------------------------------------------------

    def parts(self, lane: int, n: int) -> list[tuple[Array, Array]]:
        """What a frontier at position n holds, in order: an array of the state whose second last
        axis is a ring, and the places in that ring."""
        layout, g = self.layout, self.layout.geometry
        window = np.arange(max(0, n - g.window), n) % layout.capacity
        parts: list[tuple[Array, Array]] = [
            (plane, window) for plane in layout.kv.views(self.rings[lane], layout.capacity)
        ]
        for c, inputs in zip(layout.compressors, self.inputs, strict=True):
            mine = inputs[:, lane].reshape(len(c.layers), 2, c.capacity, c.series, c.stored)
            mine = mine[..., : c.dim]
            begun = n - n % c.ratio
            if c.series == 2:
                before = np.arange(max(0, begun - c.ratio), begun) % c.capacity
                parts.append((mine[..., 0, :], before))
            here = np.arange(begun, n) % c.capacity
            parts += [(mine[..., s, :], here) for s in range(c.series)]
        return parts

    def read(self, lane: int, n: int, out: U8) -> int:
        """Write the frontier of `lane` at position `n` into `out`; its length."""
        at = HEADER_BYTES
        for array, places in self.parts(lane, n):
            values = array[..., places, :]
            raw = out[at : at + values.nbytes]
            raw.view(values.dtype).reshape(values.shape)[...] = values
            end = at + values.nbytes
            at = pad(end, PLANE)
            out[end:at] = 0
        out[:HEADER_BYTES].view(np.int64)[:] = ABI, n, at, 0
        return at

    def write(self, lane: int, data: U8) -> int:
        """Set `lane`'s rings from a frontier's bytes; its position."""
        n = self.position(data)
        at = HEADER_BYTES
        for array, places in self.parts(lane, n):
            shape = _taken(array, places)
            n_bytes = math.prod(shape) * array.itemsize
            array[..., places, :] = data[at : at + n_bytes].view(array.dtype).reshape(shape)
            at = pad(at + n_bytes, PLANE)
        return n

    def position(self, data: U8) -> int:
        """Check a frontier's header and length. Raises CheckpointError."""
        if len(data) < HEADER_BYTES:
            raise CheckpointError(f"a frontier of {len(data)} bytes has no header")
        abi, n, length, _ = (int(v) for v in data[:HEADER_BYTES].view(np.int64))
        if abi != ABI:
            raise CheckpointError(f"the frontier has layout {abi}, expected {ABI}")
        if not 0 <= n <= self.layout.geometry.context:
            raise CheckpointError(f"the frontier is at position {n}, outside the context")
        expected = HEADER_BYTES
        for array, places in self.parts(0, n):
            expected = pad(expected + math.prod(_taken(array, places)) * array.itemsize, PLANE)
        if not length == len(data) == expected:
            raise CheckpointError(
                f"the frontier at position {n} has {len(data)} bytes, expected {expected}"
            )
        return n


def _taken(array: Array, places: Array) -> tuple[int, ...]:
    """Shape of `array[..., places, :]`."""
    return (*array.shape[:-2], len(places), array.shape[-1])
