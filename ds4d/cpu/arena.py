"""Everything a pass writes but the state, for ROWS_MAX rows: made once, of known size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels import attention, index, product
from ds4d.errors import ModelFileError
from ds4d.model.layout import FP4, pad

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ds4d.model.geometry import Geometry
    from ds4d.model.layout import Layout

    F32 = npt.NDArray[np.float32]
    I64 = npt.NDArray[np.int64]
    Allocate = Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]

ROWS_MAX = product.ROWS_MAX
BLOCKS = (32, 256)


class Step:
    """What differs from pass to pass. Rows of one lane are at ascending positions."""

    def __init__(self, geometry: Geometry) -> None:
        self.words: I64 = zeros((16,), np.int64)
        self.token: I64 = zeros((ROWS_MAX,), np.int64)
        self.pos: I64 = zeros((ROWS_MAX,), np.int64)
        self.lane: I64 = zeros((ROWS_MAX,), np.int64)
        self.identity: I64 = zeros((ROWS_MAX,), np.int64)
        self.identity[:] = np.arange(ROWS_MAX)
        self._top_k = geometry.index_top_k if 4 in geometry.ratios else geometry.context

    def set(self, tokens: Any, positions: Any, lanes: Any) -> None:
        """The rows of the next pass, 1 to ROWS_MAX of them."""
        n = len(tokens)
        self.token[:n], self.pos[:n], self.lane[:n] = tokens, positions, lanes
        self.words[0] = n
        # While no row sees more compressed rows than the indexer may choose, it is skipped.
        self.words[index.SELECTING] = (int(self.pos[:n].max()) + 1) // 4 > self._top_k


class Activation:
    """Rows on their way into products: f32 [n_rows, width], and int8 forms once `want`ed."""

    def __init__(self, n_rows: int, n: int, allocate: Allocate) -> None:
        self.n_rows, self.width = n_rows, pad(n)
        self.x: F32 = allocate((n_rows, self.width), np.float32)
        self.table: I64 = zeros((product.ACT_WORDS,), np.int64)
        self.table[:2] = self.x.ctypes.data, self.width
        self.blocks: set[int] = set()
        self._allocate = allocate
        self._keep: list[npt.NDArray[Any]] = []

    def want(self, block: int) -> None:
        """A product will read int8 blocks of `block`; 0: it reads the floats."""
        if not block or block in self.blocks:
            return
        if self.width % block:
            raise ModelFileError(f"an input of {self.width} does not divide into blocks of {block}")
        self.blocks.add(block)
        n, n_blocks = self.n_rows, self.width // block
        forms = [((n, self.width), np.int8), ((n, n_blocks), np.float32), ((n, n_blocks), np.int32)]
        arrays = [self._allocate(shape, dtype) for shape, dtype in forms]
        at = 2 if block == 32 else 5
        self.table[at : at + 3] = [a.ctypes.data for a in arrays]
        self._keep += arrays

    def tables(self, groups: int, step_in: int) -> I64:
        """[groups, 8]: the activation as each group of a weight sees it, `step_in` inputs further
        from group to group. Only forms that are wanted already."""
        tables = zeros((groups, product.ACT_WORDS), np.int64)
        tables[:] = self.table
        at = np.arange(groups) * step_in
        tables[:, 0] += 4 * at
        for first, block in ((2, 32), (5, 256)):
            if block in self.blocks:
                tables[:, first] += at
                tables[:, first + 1] += at // block * 4
                tables[:, first + 2] += at // block * 4
        self._keep.append(tables)
        return tables


class Arena:
    """The buffers of `Forward`, named as in spec/model.md 4. Rows first in every shape."""

    def __init__(
        self,
        geometry: Geometry,
        layout: Layout,
        *,
        pages_per_lane: int,
        n_threads: int,
        allocate: Allocate = zeros,
    ) -> None:
        g, n = geometry, ROWS_MAX

        def floats(*shape: int) -> F32:
            return allocate(shape, np.float32)

        def ints(*shape: int) -> I64:
            return allocate(shape, np.int64)

        self.width, self.head_stored = pad(g.width), pad(g.head_dim)
        self.X = Activation(n, g.streams * self.width, allocate)
        self.h = Activation(n, g.width, allocate)
        self.qr = Activation(n, g.q_rank, allocate)
        self.o = Activation(n, g.n_heads * g.head_dim, allocate)
        self.low = Activation(n, g.out_groups * g.out_rank, allocate)
        self.mid = Activation(n * (g.n_experts_used + 1), g.expert_width, allocate)
        self.z = floats(n, pad(g.mix_dim))
        self.post, self.M = floats(n, g.streams), floats(n, g.streams**2)
        self.qa, self.kv = floats(n, pad(g.q_rank)), floats(n, self.head_stored)
        self.q = floats(n, g.n_heads * self.head_stored)
        self.y = floats(n, self.width)
        fours, indexer, longs = layout.compressors
        wide = max(fours.width, longs.width)
        self.u, self.g = floats(n, wide), floats(n, wide)
        self.iu, self.ig = floats(n, indexer.width), floats(n, indexer.width)

        self.iq = floats(n, g.index_heads * pad(g.index_dim))
        self.iw = floats(n, pad(g.index_heads))
        self.index_groups = pad(g.index_heads) // 16
        units = n * self.index_groups  # a query of sixteen heads each
        code = np.int8 if layout.index.kind == FP4 else np.float32
        self.query_codes = allocate((units, g.index_dim, 16), code)
        self.query_sums = allocate((units, max(layout.index.n_scales, 1), 16), np.int32)
        self.query_scales = floats(units, max(layout.index.n_scales, 1), 16)
        most = pages_per_lane * g.page_tokens // 4 if 4 in g.ratios else 0
        self.scores = floats(n, pad(most))
        self.chosen = ints(n, max(g.index_top_k, 1))
        self.counts = ints(n_threads, index.BINS)

        self.router = floats(n, pad(g.n_experts))
        self.expert, self.share = ints(n, g.n_experts_used), floats(n, g.n_experts_used)
        self.lists = ints(2 * g.n_experts + 5 + 2 * n * (g.n_experts_used + 1))
        self.tiles = floats(n_threads, attention.TILE * self.head_stored)
        self.turns = floats(n, 4, 2, g.rope_dim // 2)
        self.logits = floats(n, pad(g.n_vocab))


def arena_bytes(geometry: Geometry, layout: Layout, *, pages_per_lane: int, n_threads: int) -> int:
    """What an Arena will hold, at most, without making one."""
    total = 0

    def count(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nonlocal total
        total += math.prod(shape) * np.dtype(dtype).itemsize
        return np.broadcast_to(np.zeros((), dtype), shape)

    arena = Arena(
        geometry, layout, pages_per_lane=pages_per_lane, n_threads=n_threads, allocate=count
    )
    for a in (arena.X, arena.h, arena.qr, arena.o, arena.low, arena.mid):
        for block in BLOCKS:
            if a.width % block == 0:
                a.want(block)
    return total
