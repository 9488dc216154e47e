"""What a lane's past is: pages of compressed rows, rings of raw rows and of compressor inputs.

A page holds its positions of every layer with compressed rows, as planes (codes, halves, scales),
each 16-byte aligned: the same bytes as in a file. A ring is addressed by position and longer by
`rows_max` than its window, so rolling back that many positions changes no byte. Which page belongs
to whom is the engine's to say.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arrays import pad, zeros
from ds4d.cpu.kernels.rows import E4M3, FLOAT, FORMAT_WORDS, FP4, HALF
from ds4d.errors import CheckpointError
from ds4d.model.geometry import E4M3_BLOCK, FP4_BLOCK

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.model.geometry import Geometry

    U8 = npt.NDArray[np.uint8]
    Array = npt.NDArray[Any]

ABI = 1
PLANE = 16  # alignment of planes in pages and frontiers, bytes
HEADER_BYTES = 32


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a row is encoded, and how many bytes it has in each plane."""

    kind: int
    dim: int
    coded: int
    n_scales: int
    code_bytes: int  # the whole row where kind is HALF or FLOAT
    half_bytes: int
    scale_bytes: int  # padded to a power of two

    @property
    def planes(self) -> tuple[int, int, int]:
        """Bytes of a row in each plane, in the order in which they lie."""
        return self.code_bytes, self.half_bytes, self.scale_bytes

    def block_bytes(self, n_rows: int) -> int:
        return sum(pad(n * n_rows, PLANE) for n in self.planes)

    def table(self, n_rows: int, *where: int) -> npt.NDArray[np.int64]:
        """As kernels read it, for blocks of `n_rows`; `where`: the words of a ring or of pages
        (`kernels/rows.py`)."""
        halves = pad(self.code_bytes * n_rows, PLANE)
        scales = halves + pad(self.half_bytes * n_rows, PLANE)
        table = zeros((FORMAT_WORDS,), np.int64)
        table[:4] = self.kind, self.dim, self.coded, self.n_scales
        table[4:8] = self.code_bytes, halves, scales, self.scale_bytes
        table[8 : 8 + len(where)] = where
        return table

    def views(self, blocks: U8, n_rows: int) -> list[U8]:
        """Planes [..., n_rows, bytes of a row] of `blocks` [..., block_bytes]."""
        views, start = [], 0
        for n in self.planes:
            plane = blocks[..., start : start + n * n_rows]
            views.append(plane.reshape(*blocks.shape[:-1], n_rows, n))
            start += pad(n * n_rows, PLANE)
        return views


def kv_format(geometry: Geometry, exact: bool) -> RowFormat:
    d, coded = geometry.head_dim, geometry.nope_dim
    if exact:
        return RowFormat(FLOAT, d, 0, 0, 4 * d, 0, 0)
    if not geometry.rows_are_e4m3:
        return RowFormat(HALF, d, 0, 0, 2 * d, 0, 0)
    n = coded // E4M3_BLOCK
    return RowFormat(E4M3, d, coded, n, coded, 2 * geometry.rope_dim, _power(n))


def index_format(geometry: Geometry, exact: bool) -> RowFormat:
    d = geometry.index_dim
    if exact:
        return RowFormat(FLOAT, d, 0, 0, 4 * d, 0, 0)
    if not geometry.index_rows_are_fp4:
        return RowFormat(HALF, d, 0, 0, 2 * d, 0, 0)
    return RowFormat(FP4, d, d, d // FP4_BLOCK, d // 2, 0, _power(d // FP4_BLOCK))


def _power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Compressor:
    """The compressors of one kind: their layers, and the rings their inputs lie in."""

    layers: tuple[int, ...]
    ratio: int
    dim: int
    stored: int  # of one series, padded to 16
    series: int
    capacity: int

    @property
    def width(self) -> int:
        return self.series * self.stored

    @property
    def lane_floats(self) -> int:
        """Of one layer's ring: values and gates."""
        return 2 * self.capacity * self.width

    @property
    def frontier_max(self) -> int:
        floats = (self.series - 1) * self.ratio * self.dim
        floats += (self.ratio - 1) * self.series * self.dim
        return pad(8 * len(self.layers) * floats, PLANE) + PLANE


class Layout:
    """Sizes, before anything is allocated."""

    def __init__(self, geometry: Geometry, *, rows_max: int, exact: bool) -> None:
        g = self.geometry = geometry
        self.rows_max, self.exact = rows_max, exact
        self.kv, self.index = kv_format(g, exact), index_format(g, exact)
        self.capacity = g.window + rows_max
        self.ring_bytes = pad(self.kv.block_bytes(self.capacity), 64)
        fours = tuple(i for i, r in enumerate(g.ratios) if r == 4)
        longs = tuple(i for i, r in enumerate(g.ratios) if r == 128)
        d, n = g.head_dim, g.index_dim
        self.compressors = (  # ratio 4, its indexer, ratio 128
            Compressor(fours, 4, d, pad(d), 2, 8 + rows_max),
            Compressor(fours, 4, n, pad(n), 2, 8 + rows_max),
            Compressor(longs, 128, d, pad(d), 1, 128 + rows_max),
        )
        self.kv_offset: dict[int, int] = {}  # layer -> its rows' place in a page
        self.index_offset: dict[int, int] = {}
        at = 0
        for layer, ratio in enumerate(g.ratios):
            if ratio:
                self.kv_offset[layer] = at
                at += self.kv.block_bytes(g.page_tokens // ratio)
            if ratio == 4:
                self.index_offset[layer] = at
                at += self.index.block_bytes(g.page_tokens // ratio)
        self.page_bytes = at

    @property
    def lane_bytes(self) -> int:
        floats = sum(len(c.layers) * c.lane_floats for c in self.compressors)
        return self.geometry.n_layers * self.ring_bytes + 4 * floats

    @property
    def frontier_bytes_max(self) -> int:
        raw = sum(
            pad(self.geometry.n_layers * self.geometry.window * n, PLANE) for n in self.kv.planes
        )
        return HEADER_BYTES + raw + sum(c.frontier_max for c in self.compressors)


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
        return self.layout.kv.table(capacity, *where)

    def paged(self, layer: int, *, index: bool = False) -> npt.NDArray[np.int64]:
        """Compressed rows of a layer or, with `index`, its index rows, as a table for kernels."""
        layout = self.layout
        per_page = layout.geometry.page_tokens // layout.geometry.ratios[layer]
        form = layout.index if index else layout.kv
        offset = (layout.index_offset if index else layout.kv_offset)[layer]
        where = int(self.page_table.ctypes.data), self.pages_per_lane, offset, per_page
        return form.table(per_page, *where)

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
