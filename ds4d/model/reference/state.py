"""What a token leaves behind (spec/model.md 5): raw rows, compressed rows, partial windows.

Knows nothing of weights. The hyper-connection streams carry nothing across tokens.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.model import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from ds4d.model.geometry import Geometry

    Array = npt.NDArray[Any]


class Rows:
    """Cached rows by index. In rounded mode a row is encoded once, here, and read as what its
    bytes decode to; in exact mode it stays as it was pushed."""

    def __init__(
        self,
        dim: int,
        dtype: npt.DTypeLike,
        encode: Callable[[Array], rows.Planes] | None,
        decode: Callable[[rows.Planes], Array],
    ) -> None:
        self.values: Array = np.zeros((8, dim), dtype)  # [capacity, dim]; grows by doubling
        self._encode, self._decode = encode, decode
        self._planes: dict[int, rows.Planes] = {}

    def push(self, index: int, row: Array) -> None:
        """Write `row` [dim] at `index`, over whatever lay there."""
        if self._encode is not None:
            self._planes[index] = self._encode(row)
            row = self._decode(self._planes[index])
        while index >= len(self.values):
            self.values = np.concatenate([self.values, np.zeros_like(self.values)])
        self.values[index] = row

    def planes(self, indices: Sequence[int]) -> rows.Planes:
        """The encoded bytes of the rows at `indices`, stacked in that order (rounded mode)."""
        each = [self._planes[i] for i in indices]
        return rows.Planes(*(np.stack(plane) for plane in zip(*each, strict=True)))


class Partial:
    """Inputs of a compressor's windows that are not complete: values and gates [2r, 2d] -> the
    last 2r tokens at ratio 4 (previous window first), [r, d] -> the last r at ratio 128."""

    def __init__(self, ratio: int, width: int, dtype: npt.DTypeLike) -> None:
        n = 2 * ratio if ratio == 4 else ratio
        self.values: Array = np.zeros((n, width), dtype)
        self.gates: Array = np.full((n, width), -np.inf, dtype)


class LayerState:
    """One layer's part. Attributes that the layer's ratio does not need are there and stay
    empty."""

    def __init__(self, geometry: Geometry, layer: int, dtype: npt.DTypeLike, exact: bool) -> None:
        g, ratio = geometry, geometry.ratios[layer]

        def encode_row(x: Array) -> rows.Planes:
            return rows.encode_row(g, x)

        def encode_index_row(x: Array) -> rows.Planes:
            return rows.encode_index_row(g, x)

        def kv_rows() -> Rows:
            return Rows(g.head_dim, dtype, None if exact else encode_row, rows.decode_row)

        self.ring = kv_rows()  # position p at p mod window
        self.compressed = kv_rows()  # row w covers the window of positions w*ratio ...
        self.index = Rows(
            g.index_dim, dtype, None if exact else encode_index_row, rows.decode_index_row
        )
        self.partial = Partial(ratio, g.compressor_width(layer), dtype)
        self.index_partial = Partial(ratio, g.compressor_width(layer, g.index_dim), dtype)


class State:
    """One token timeline, `n_tokens` long."""

    def __init__(self, geometry: Geometry, dtype: npt.DTypeLike, exact: bool) -> None:
        self.n_tokens = 0
        self.layers = [LayerState(geometry, i, dtype, exact) for i in range(geometry.n_layers)]

    def copy(self) -> State:
        """An independent timeline with the same past."""
        return copy.deepcopy(self)
