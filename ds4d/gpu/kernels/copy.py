"""Frontiers and pages on the device: bytes from here to there (spec/engine.md 2, 3).

    frontier   gather: rows of a lane's rings, by position, one behind the other; scatter: back
    page       one page to another

A frontier has the bytes that `State` of the CPU engine writes, its header of 32 bytes included:

    header   4 int64: layout version, n tokens, total bytes, 0
    raw      the last min(window, n) rows of every layer: codes, halves, scales
    ratio 4, attention then indexer
             values and gates [layers, 2, 4, d] of the last whole window, series A (none if n < 4)
             the same [layers, 2, n mod 4, d] of the window begun, series A, then series B
    ratio 128
             the same [layers, 2, n mod 128, d] of the window begun

Every part begins at a multiple of 16; gaps are zeroed. Where parts lie depends on n alone, which
the host knows: `frontier_parts` lists them, and each is a launch. The arrays:

    rings     [lanes, layers, ring_bytes]               u8   `Layout.ring_bytes`
    inputs    [layers, lanes, 2, capacity, width]       f32  one array per `Layout.compressors`
    frontier  [Layout.frontier_bytes_max]               u8   begins at a multiple of 16
    pool      [pages, page_stride]                      u8   page_stride a multiple of 16

grid: a part's units of 16, 8 or 1 bytes by BLOCK, `blockIdx.y` the layer (of values, of gates);
a page's 16-byte vectors by BLOCK * VECTORS   block 256   no shared memory
Every byte is read and written once. Nothing is summed.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import int64

from ds4d.gpu.jit import kernel
from ds4d.gpu.kernels import ptx
from ds4d.model.layout import HEADER_BYTES, PLANE, pad

BLOCK = 256
VECTORS = 4  # of a page, in flight per thread


class FrontierPart(NamedTuple):
    """Rows [n_outer, n_rows, row_bytes] of a frontier, and where they lie in a lane. Outer index i
    is layer i // inner, and values (0) or gates (1) i % inner."""

    source: int  # -1: the rings of raw rows, else which array of inputs
    frontier_at: int
    source_at: int  # bytes, of outer index 0 and slot 0
    n_outer: int
    inner: int
    outer_stride: int
    inner_stride: int
    first: int  # slot of the first row
    n_rows: int
    capacity: int
    row_stride: int
    row_bytes: int

    @property
    def n_bytes(self):
        return self.n_outer * self.n_rows * self.row_bytes

    @property
    def unit(self):
        """Bytes that one thread moves: what all sizes and places are multiples of."""
        sizes = (
            self.source_at, self.outer_stride, self.inner_stride, self.row_stride, self.row_bytes
        )  # fmt: skip
        return next(u for u in (16, 8, 1) if all(n % u == 0 for n in sizes))


def frontier_parts(layout, *, lanes, lane, n):
    """(parts, total bytes) of the frontier of `lane` at position n."""
    parts = []
    end = HEADER_BYTES

    def add(**part):
        nonlocal end
        made = FrontierPart(frontier_at=end, **part)
        if made.n_bytes:
            parts.append(made)
            end = pad(end + made.n_bytes, PLANE)

    layers, start = layout.geometry.n_layers, max(0, n - layout.geometry.window)
    at = lane * layers * layout.ring_bytes
    for n_bytes in layout.kv.planes:
        add(
            source=-1, source_at=at, n_outer=layers, inner=1, outer_stride=layout.ring_bytes,
            inner_stride=0, first=start % layout.capacity, n_rows=n - start,
            capacity=layout.capacity, row_stride=n_bytes, row_bytes=n_bytes,
        )  # fmt: skip
        at += pad(n_bytes * layout.capacity, PLANE)
    for which, c in enumerate(layout.compressors):
        inner_stride = 4 * c.capacity * c.width
        outer_stride = 2 * lanes * inner_stride
        begun = n - n % c.ratio

        def inputs(series, first, last, c=c, which=which, outer=outer_stride, inner=inner_stride):
            add(
                source=which, source_at=2 * lane * inner + 4 * series * c.stored,
                n_outer=2 * len(c.layers), inner=2, outer_stride=outer, inner_stride=inner,
                first=first % c.capacity, n_rows=last - first, capacity=c.capacity,
                row_stride=4 * c.width, row_bytes=4 * c.dim,
            )  # fmt: skip

        if c.series == 2:
            inputs(0, max(0, begun - c.ratio), begun)
        for series in range(c.series):
            inputs(series, begun, n)
    return parts, end


def gather_ref(frontier, source, part):
    """`frontier` with the bytes of one part of `source`, both u8."""
    for outer in range(part.n_outer):
        for i in range(part.n_rows):
            at = part.source_at + outer // part.inner * part.outer_stride
            at += outer % part.inner * part.inner_stride
            at += (part.first + i) % part.capacity * part.row_stride
            to = part.frontier_at + (outer * part.n_rows + i) * part.row_bytes
            frontier[to : to + part.row_bytes] = source[at : at + part.row_bytes]
    end = part.frontier_at + part.n_bytes
    frontier[end : pad(end, PLANE)] = 0


# -- frontiers ---------------------------------------------------------------------------------


@cache
def rows_kernel(unit, gather):
    """Move a part, out of the rings or back into them."""

    @kernel(
        "u1* frontier, u1* source, i8 frontier_at, i8 source_at, i4 inner, i8 outer_stride,"
        "i8 inner_stride, i4 first, i4 n_rows, i4 capacity, i8 row_stride, i4 row_bytes",
        block=BLOCK,
    )
    def move_rows(
        frontier, source, frontier_at, source_at, inner, outer_stride, inner_stride, first, n_rows,
        capacity, row_stride, row_bytes,
    ):  # fmt: skip
        i, outer, per_row = int64(cuda.grid(1)), int64(cuda.blockIdx.y), row_bytes // unit
        packed = int64(n_rows) * row_bytes
        if i < int64(n_rows) * per_row:
            slot = (first + i // per_row) % capacity
            far = source_at + outer // inner * outer_stride + outer % inner * inner_stride
            far += slot * row_stride + i % per_row * unit
            near = frontier_at + outer * packed + i * unit
            if gather:
                if unit == 16:
                    a, b, c, d = ptx.load16(source, far)
                    ptx.store16(frontier, near, a, b, c, d)
                elif unit == 8:
                    a, b = ptx.load8(source, far)
                    ptx.store8(frontier, near, a, b)
                else:
                    frontier[near] = source[far]
            elif unit == 16:
                a, b, c, d = ptx.load16(frontier, near)
                ptx.store16(source, far, a, b, c, d)
            elif unit == 8:
                a, b = ptx.load8(frontier, near)
                ptx.store8(source, far, a, b)
            else:
                source[far] = frontier[near]
        if gather and outer == cuda.gridDim.y - 1:
            end = frontier_at + (outer + 1) * packed
            if i < -end % 16:
                frontier[end + i] = 0

    return move_rows


@kernel("i8* frontier, i8 version, i8 n_tokens, i8 n_bytes", block=32)
def header_kernel(frontier, version, n_tokens, n_bytes):
    if cuda.threadIdx.x == 0:
        frontier[0] = version
        frontier[1] = n_tokens
        frontier[2] = n_bytes
        frontier[3] = 0


def _move(stream, frontier, rings, inputs, parts, gather):
    for part in parts:
        per_row = part.row_bytes // part.unit
        grid = (-(-part.n_rows * per_row // BLOCK), part.n_outer)
        source = rings if part.source < 0 else inputs[part.source]
        rows_kernel(part.unit, gather).launch(
            stream, grid, BLOCK, frontier, source, part.frontier_at, part.source_at, part.inner,
            part.outer_stride, part.inner_stride, part.first, part.n_rows, part.capacity,
            part.row_stride, part.row_bytes,
        )  # fmt: skip


def gather_frontier(stream, frontier, rings, inputs, *, layout, lanes, lane, n, version):
    """Enqueue on `stream`: the frontier of `lane` at position n; returns its length in bytes."""
    parts, n_bytes = frontier_parts(layout, lanes=lanes, lane=lane, n=n)
    header_kernel.launch(stream, 1, 32, frontier, version, n, n_bytes)
    _move(stream, frontier, rings, inputs, parts, True)
    return n_bytes


def scatter_frontier(stream, frontier, rings, inputs, *, layout, lanes, lane, n):
    """Enqueue on `stream`: `lane`'s rings from a frontier whose header says n, which the caller
    has checked."""
    parts, _ = frontier_parts(layout, lanes=lanes, lane=lane, n=n)
    _move(stream, frontier, rings, inputs, parts, False)


def kernels(layout):
    """All that a layout's frontiers and pages need, to build before the first launch."""
    units = {
        part.unit
        for lane in range(2)
        for part in frontier_parts(layout, lanes=2, lane=lane, n=layout.geometry.window + 127)[0]
    }
    moves = [rows_kernel(unit, gather) for unit in sorted(units) for gather in (True, False)]
    return [header_kernel, copy_page_kernel, *moves]


# -- pages -------------------------------------------------------------------------------------


@kernel("u1* pool, i8 to, i8 source, i8 n_bytes", block=BLOCK)
def copy_page_kernel(pool, to, source, n_bytes):
    base = int64(cuda.blockIdx.x) * (16 * BLOCK * VECTORS) + 16 * cuda.threadIdx.x
    a, b, c, d = base, base + 16 * BLOCK, base + 32 * BLOCK, base + 48 * BLOCK
    if d < n_bytes:  # then all four lie inside: loads go before stores
        a0, a1, a2, a3 = ptx.load16(pool, source + a)
        b0, b1, b2, b3 = ptx.load16(pool, source + b)
        c0, c1, c2, c3 = ptx.load16(pool, source + c)
        d0, d1, d2, d3 = ptx.load16(pool, source + d)
        ptx.store16(pool, to + a, a0, a1, a2, a3)
        ptx.store16(pool, to + b, b0, b1, b2, b3)
        ptx.store16(pool, to + c, c0, c1, c2, c3)
        ptx.store16(pool, to + d, d0, d1, d2, d3)
        return
    for at in range(a, n_bytes, 16 * BLOCK):
        a0, a1, a2, a3 = ptx.load16(pool, source + at)
        ptx.store16(pool, to + at, a0, a1, a2, a3)


def copy_page(stream, pool, *, source, target, page_stride, n_bytes):
    """Enqueue on `stream`: page `target` becomes page `source`. n_bytes: a multiple of 16."""
    assert page_stride % 16 == n_bytes % 16 == 0, (page_stride, n_bytes)
    grid = -(-n_bytes // (16 * BLOCK * VECTORS))
    copy_page_kernel.launch(
        stream, grid, BLOCK, pool, target * page_stride, source * page_stride, n_bytes
    )
