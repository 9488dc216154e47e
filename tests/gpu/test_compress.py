"""Compressors: pushes, and the rows that complete windows make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels import compress, rope, rows
from ds4d.model import rows as model_rows
from ds4d.model import synth
from ds4d.model.layout import E4M3, FP4, RowFormat, index_format, kv_format, pad

ROWS_MAX = 32
LEFT = 1e4
PAGE_TOKENS = 256
LANES, PAGES = 3, 5
TABLE = np.array([[3, 1], [0, -1], [4, 2]], np.int32)

GEOMETRIES = {name: synth.geometry(name) for name in ("flash", "tiny", "mini", "micro")}


class Part:
    """A compressor of one layer: its inputs in a lane's whole past, its weights and its rings."""

    def __init__(self, form: RowFormat, ratio: int, offset: int, n: int, seed: int) -> None:
        r = np.random.default_rng(seed)
        self.form, self.ratio, self.offset = form, ratio, offset
        self.stored, self.series = pad(form.dim), 2 if ratio == 4 else 1
        self.width = self.series * self.stored
        self.capacity = (2 * ratio if ratio == 4 else ratio) + ROWS_MAX
        shape = LANES, n, self.width
        self.u = r.standard_normal(shape).astype("f4")
        self.g = (2 * r.standard_normal(shape)).astype("f4")
        self.ape = r.standard_normal((ratio, self.width)).astype("f4")
        self.w = r.uniform(0.5, 2, form.dim).astype("f4")
        # What an earlier timeline left: no weight would be left beside such a gate.
        self.rings = np.full((LANES, 2, self.capacity, self.width), LEFT, "f4")

    @property
    def per_page(self) -> int:
        return PAGE_TOKENS // self.ratio

    def inputs(self, lane: Any, pos: Any) -> Any:
        """u and g of a pass, rows one behind the other; rubbish in idle rows."""
        return [np.ascontiguousarray(x[lane, np.maximum(pos, 0)]) for x in (self.u, self.g)]

    def gates(self, lane: int) -> Any:
        return self.g[lane] + self.ape[np.arange(self.g.shape[1]) % self.ratio]

    def pooled(self, lane: int, s: int, pool: Any) -> Any:
        """Row s before its norm, [dim]."""
        now, d, gates = s * self.ratio, self.form.dim, self.gates(lane)
        last = slice(now, now + self.ratio)
        if self.series == 1:
            return pool(self.u[lane, last, :d], gates[last, :d])
        b = slice(self.stored, self.stored + d)
        before = slice(max(0, now - self.ratio), now)
        u = np.concatenate([self.u[lane, before, :d], self.u[lane, last, b]])
        return pool(u, np.concatenate([gates[before, :d], gates[last, b]]))

    def row(self, lane: int, s: int, turns: Any, pool: Any) -> Any:
        x = np.asarray(self.pooled(lane, s, pool), np.float32)[None]
        return rows.rms_turn_ref(x, self.w, 1e-6, turns[None])

    def planes(self, pages: Any, lane: int, s: int) -> list[Any]:
        page = pages[TABLE[lane, s // self.per_page]]
        views = self.form.views(page[self.offset :], self.per_page)
        return [v[s % self.per_page][None].copy() for v in views]


class Past:
    """Lanes at a layer with compressed rows: passes go through it."""

    def __init__(self, name: str, ratio: int, *, n: int = 24, index: bool = True) -> None:
        g = GEOMETRIES[name]
        self.ratio, self.pairs = ratio, g.rope_dim // 2
        self.tables = [np.array(f, np.float32) for f in g.frequencies]
        form = kv_format(g, exact=False)
        self.parts = [Part(form, ratio, 64, n, 1)]
        end = 64 + form.block_bytes(PAGE_TOKENS // ratio)
        if ratio == 4 and index:
            form = index_format(g, exact=False)
            self.parts.append(Part(form, 4, end, n, 2))
            end += form.block_bytes(PAGE_TOKENS // 4)
        self.page_stride = pad(end, 64) + 64
        self.pages = np.full((PAGES, self.page_stride), 0xEE, np.uint8)

    def turns(self, pos: Any) -> Any:
        return rope.angles_ref(np.array(pos, np.int32), *self.tables)

    def run(self, machine: Any, lane: Any, pos: Any) -> None:
        lane, pos = np.array(lane, np.int32), np.array(pos, np.int32)
        pages = compress.Pages(self.pages, self.page_stride, TABLE, TABLE.shape[1], PAGE_TOKENS)
        compressors = [
            compress.Compressor(
                part.form, *part.inputs(lane, pos), part.ape, part.w, part.rings, part.capacity,
                part.offset,
            )
            for part in self.parts
        ]  # fmt: skip
        compress.compress(
            machine, pos, lane, self.turns(pos), pages, *compressors, n_rows=len(pos),
            ratio=self.ratio, stride=self.parts[0].width, index_stride=self.parts[-1].width,
            pairs=self.pairs, eps=1e-6,
        )  # fmt: skip

    def row(self, part: Part, lane: int, s: int, pool: Any) -> Any:
        turns = self.turns([(s + 1) * self.ratio - 1])[0, 2 if self.ratio == 4 else 3]
        return part.row(lane, s, turns, pool)

    def check(self, machine: Any, lane: int, s: int) -> None:
        for part in self.parts:
            found = part.planes(self.pages, lane, s)
            row, form = self.row(part, lane, s, compress.pool_ref), part.form
            if form.kind == FP4:
                wanted, values = model_rows.hadamard(row), model_rows.decode_fp4(found[0], found[2])
                bound = np.full_like(wanted, np.abs(wanted).max() / 3)
            elif form.kind == E4M3:
                halves = found[1].view(np.float16)
                scales = found[2][:, : form.n_scales]
                wanted = row
                values = model_rows.decode_row(model_rows.Planes(found[0], scales, halves))
                bound = np.abs(row) / 15 + np.abs(row).max() / 2**14
            else:
                wanted, values = row, found[0].view(np.float16).astype(np.float32)
                bound = np.abs(row) / 1000 + 1e-5
            assert (np.abs(values - wanted) <= bound).all()
            if machine.name == "lockstep":  # whose `exp` is NumPy's
                row = self.row(part, lane, s, compress.pool_in_order)
                for a, b in zip(found, rows.encode_ref(form.kind, form.coded, row), strict=True):
                    assert a.tobytes() == b.tobytes()

    def untouched(self, lane: int, s: int) -> bool:
        found = [x for part in self.parts for x in part.planes(self.pages, lane, s)]
        return all((x == 0xEE).all() for x in found)


@pytest.mark.parametrize("name", ["flash", "tiny", "mini", "micro"])
def test_windows_of_four_become_rows(machine: Any, name: str) -> None:
    """Two passes: windows lie in one, in both; the first has none before it; lanes take turns."""
    it = Past(name, 4)
    it.run(machine, [0, 0, 0, 2, 2, -1], [0, 1, 2, 0, 1, -1])
    assert it.untouched(0, 0)
    it.run(machine, [0] * 6 + [2, 2, -1], [3, 4, 5, 6, 7, 8, 2, 3, -1])
    for lane, s in ((0, 0), (0, 1), (2, 0)):
        it.check(machine, lane, s)
    assert it.untouched(0, 2)
    assert it.untouched(2, 1)


@pytest.mark.parametrize("name", ["tiny", "micro"])
def test_windows_of_128_become_rows(machine: Any, name: str) -> None:
    it = Past(name, 128, n=260)
    for part in it.parts:  # all of window 0 but its end lies in the rings already
        at = np.arange(120)
        part.rings[1, 0, at % part.capacity] = part.u[1, at]
        part.rings[1, 1, at % part.capacity] = part.gates(1)[at]
    it.run(machine, [1] * 5, [120, 121, 122, 123, 124])
    it.run(machine, [1] * 4, [125, 126, 127, 128])
    it.check(machine, 1, 0)
    assert it.untouched(1, 1)


def test_a_ring_wraps_around(machine: Any) -> None:
    """Window 1 of ratio 128 lies in slots 128 .. 159, then 0 .. 95."""
    it = Past("micro", 128, n=260)
    part = it.parts[0]
    at = np.arange(110, 250)
    part.rings[0, 0, at % part.capacity] = part.u[0, at]
    part.rings[0, 1, at % part.capacity] = part.gates(0)[at]
    it.run(machine, [0] * 6, np.arange(250, 256))
    it.check(machine, 0, 1)


def test_pushes_lie_where_their_positions_say(machine: Any) -> None:
    it = Past("tiny", 4)
    it.run(machine, [0, 0, 2, -1], [5, 6, 0, -1])
    for part in it.parts:
        assert (part.rings[1] == LEFT).all()
        for lane, pos in ((0, 5), (0, 6), (2, 0)):
            values, gates = part.rings[lane, :, pos % part.capacity]
            assert (values == part.u[lane, pos]).all()
            assert (gates == part.gates(lane)[pos]).all()
        assert (part.rings == LEFT).sum() == part.rings.size - 3 * 2 * part.width
    assert (it.pages == 0xEE).all()


def test_how_a_past_is_cut_into_passes_changes_no_byte(machine: Any) -> None:
    """Rows one by one, in passes with others, from a window's middle: pages and rings are equal."""
    cuts = [[1] * 13, [3, 1, 5, 4], [13]]
    found = []
    for cut in cuts:
        it, at = Past("tiny", 4), 0
        for n in cut:
            others = [0] * (2 if n > 3 else 0)
            pos = list(range(len(others))) + list(range(at, at + n))
            it.run(machine, others + [2] * n, pos)
            at += n
        it.check(machine, 2, 2)
        lane = [part.rings[2] for part in it.parts]
        found.append([x.tobytes() for x in (*lane, it.pages)])
    assert found[0] == found[1] == found[2]


def test_a_rolled_back_row_leaves_no_trace(machine: Any) -> None:
    """Positions are pushed again with other values, as after a rejected draft."""
    it, clean = Past("mini", 4), Past("mini", 4)
    kept = [(part.u.copy(), part.g.copy()) for part in it.parts]
    for part in it.parts:
        part.u[0, 4:] += 1
        part.g[0, 4:] -= 2
    it.run(machine, [0] * 8, range(8))
    for part, (u, g) in zip(it.parts, kept, strict=True):
        part.u[:], part.g[:] = u, g
    it.run(machine, [0] * 4, range(4, 8))
    clean.run(machine, [0] * 8, range(8))
    assert (it.pages == clean.pages).all()


def test_a_row_without_a_page_is_dropped(machine: Any) -> None:
    """Lane 1 has one page of 256 positions."""
    it = Past("micro", 4, n=272)
    for part in it.parts:
        at = np.arange(240, 264)
        part.rings[1, 0, at % part.capacity] = part.u[1, at]
        part.rings[1, 1, at % part.capacity] = part.gates(1)[at]
    it.run(machine, [1], [263])
    assert (it.pages == 0xEE).all()


def test_a_lane_without_numbers_shows_it(machine: Any) -> None:
    it = Past("tiny", 4)
    it.parts[0].u[0, 2, it.parts[0].stored + 5] = np.nan
    it.parts[1].g[0, 2, it.parts[1].stored + 5] = np.inf
    it.run(machine, [0] * 4 + [2] * 4, [*range(4), *range(4)])
    assert (it.parts[0].planes(it.pages, 0, 0)[2] == 255).all()
    assert (it.parts[1].planes(it.pages, 0, 0)[2] == 255).all()
    it.check(machine, 2, 0)
