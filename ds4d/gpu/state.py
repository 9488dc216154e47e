"""What a lane's past is, on the device: the same bytes as on the CPU, in buffers.

    rings    [lanes, layers, ring_bytes]            u8   raw rows
    inputs   [layers, lanes, 2, capacity, width]    f32  of each kind of compressor: values, gates
    pool     [pages, page_stride]                   u8
    table    [lanes, pages_per_lane]                i32  numbers of pages; -1: none

Sizes are `ds4d.model.layout`'s; which page belongs to whom is the engine's to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ds4d.model.layout import pad

if TYPE_CHECKING:
    from ds4d.gpu.buffers import Buffers
    from ds4d.model.layout import Layout


class State:
    def __init__(self, layout: Layout, buffers: Buffers, *, lanes: int, pages: int) -> None:
        g = layout.geometry
        self.layout, self.lanes, self.pages = layout, lanes, pages
        self.page_stride = pad(max(layout.page_bytes, 1), 256)
        self.pages_per_lane = max(1, min(pages, -(-g.context // g.page_tokens)))
        self.lane_bytes = g.n_layers * layout.ring_bytes
        self.rings = buffers.add("rings", (lanes, g.n_layers, layout.ring_bytes), np.uint8)
        self.inputs = [
            buffers.add(f"inputs {i}", (len(c.layers), lanes, 2, c.capacity, c.width), np.float32)
            for i, c in enumerate(layout.compressors)
        ]
        self.pool = buffers.add("pages", (pages, self.page_stride), np.uint8)
        self.table = buffers.add("page table", (lanes, self.pages_per_lane), np.int32)

    def ring(self, layer: int) -> int:
        """Address of the layer's ring of lane 0."""
        return int(self.rings) + layer * self.layout.ring_bytes

    def input(self, kind: int, layer: int) -> int:
        """Address of the layer's compressor inputs of lane 0."""
        c = self.layout.compressors[kind]
        return int(self.inputs[kind]) + 4 * c.layers.index(layer) * self.lanes * c.lane_floats
