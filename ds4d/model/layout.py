"""Sizes of a lane's past: rows, pages, rings, frontiers. Both engines hold the same bytes.

A page holds its positions of every layer with compressed rows, as planes (codes, halves, scales),
each 16-byte aligned: the same bytes on a device and in a file. A ring is addressed by position and
longer by `rows_max` than its window, so rolling back that many positions changes no byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4d.model.geometry import E4M3_BLOCK, FP4_BLOCK

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ds4d.model.geometry import Geometry

    U8 = npt.NDArray[np.uint8]

# How a row is encoded (`rows.py`): e4m3 and halves; FP4; halves alone; f32, in exact mode alone.
E4M3, FP4, HALF, FLOAT = range(4)
PLANE = 16  # alignment of planes in pages and frontiers, bytes
HEADER_BYTES = 32  # of a frontier


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

    def offsets(self, n_rows: int) -> tuple[int, int]:
        """Of the planes of halves and of scales in a block of `n_rows`."""
        halves = pad(self.code_bytes * n_rows, PLANE)
        return halves, halves + pad(self.half_bytes * n_rows, PLANE)

    def block_bytes(self, n_rows: int) -> int:
        return sum(pad(n * n_rows, PLANE) for n in self.planes)

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


def pad(n: int, multiple: int = 16) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple
