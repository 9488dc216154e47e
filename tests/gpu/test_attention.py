"""Attention over windows, compressed rows and sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels import attention
from ds4d.gpu.kernels.attention import BLOCK, MERGE, Form
from ds4d.model import layout, rows, synth

EPS = 1e-6
PER_PAGE = {0: 1, 4: 8, 128: 2}
SMALL = {"tile": 8, "span": 16, "near": 32, "far": 48}
TOP_K = 20


def _form(geometry: Any, **cut: int) -> Form:
    return replace(Form.of(geometry), **SMALL | cut)


def _cut(name: str, heads: int = 4) -> Any:
    return replace(synth.geometry(name), n_heads=heads, window=20)


@dataclass
class Past:
    """Rings and pages of three lanes, full of rows, and what they decode to."""

    geometry: Any
    ratio: int
    n_compressed: int
    seed: int = 0

    def __post_init__(self) -> None:
        g, r = self.geometry, np.random.default_rng(self.seed)
        form = layout.kv_format(g, exact=False)
        self.lanes, self.capacity = 3, g.window + 32
        self.lane_bytes = layout.pad(form.block_bytes(self.capacity), 64) + 64  # as between layers
        self.ring = r.integers(0, 256, (self.lanes, self.lane_bytes), np.uint8)
        self.raw = self._fill(r, form, self.ring, self.capacity)
        self.per_page, self.page_offset = PER_PAGE[self.ratio], 48
        n = self.pages_per_lane = -(-self.n_compressed // self.per_page) or 1
        size = self.page_offset + form.block_bytes(self.per_page)
        self.page_bytes = layout.pad(size, 64)
        self.pool = r.integers(0, 256, (self.lanes * n + 2, self.page_bytes), np.uint8)
        pages = self._fill(r, form, self.pool[:, self.page_offset :], self.per_page)
        self.table = r.permutation(len(self.pool))[: self.lanes * n].astype(np.int32)
        self.table = self.table.reshape(self.lanes, n)
        self.compressed = pages[self.table].reshape(self.lanes, -1, g.head_dim)

    def _fill(self, r: Any, form: Any, blocks: Any, n_rows: int) -> Any:
        """Encode random rows into `blocks`; the decoded ones [blocks, n_rows, head_dim]."""
        x = r.standard_normal((len(blocks), n_rows, self.geometry.head_dim)).astype(np.float32)
        x *= 2.0 ** r.integers(-3, 4, (len(blocks), n_rows, 1))
        planes = rows.encode_row(self.geometry, x)
        codes, halves, scales = form.views(blocks[:, : form.block_bytes(n_rows)], n_rows)
        if form.kind == layout.HALF:
            codes[...] = planes.halves.view(np.uint8)
        else:
            codes[...], halves[...] = planes.codes, planes.halves.view(np.uint8)
            scales[..., : form.n_scales] = planes.scales
        return rows.decode_row(planes)


@dataclass
class Pass:
    """Rows of a pass at (lane, position); None is an idle one."""

    past: Past
    places: list[tuple[int, int] | None]
    seed: int = 1
    top_k: int = TOP_K
    turn_set: int = 1

    def __post_init__(self) -> None:
        g, n = self.past.geometry, len(self.places)
        # What a row holds depends on its place alone, so that it can stand anywhere.
        self.lane, self.pos = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        self.q = np.full((n, g.n_heads, g.head_dim), np.nan, np.float32)
        self.turns = np.full((n, 4, 2, g.rope_dim // 2), np.nan, np.float32)
        self.chosen = np.full((n, self.top_k), -(1 << 30), np.int32)
        self.sinks = np.random.default_rng(self.seed).standard_normal(g.n_heads).astype("f4")
        self.seen: list[Any] = []
        for i, place in enumerate(self.places):
            if place is None:
                self.seen.append(np.zeros((0, g.head_dim)))
                continue
            lane, p = place
            r = np.random.default_rng([self.seed, lane, p])
            self.lane[i], self.pos[i] = place
            self.q[i] = r.standard_normal(self.q.shape[1:]) * 3
            angle = r.random(g.rope_dim // 2) * 6
            self.turns[i, self.turn_set] = np.cos(angle), np.sin(angle)
            visible = (p + 1) // self.past.ratio if self.past.ratio else 0
            taken = np.arange(visible)
            if 0 < self.top_k < visible and self.past.ratio == 4:
                taken = np.sort(r.choice(visible, self.top_k, replace=False))
                self.chosen[i] = taken
            positions = np.arange(max(0, p + 1 - g.window), p + 1)
            raw = self.past.raw[lane, positions % self.past.capacity]
            self.seen.append(np.concatenate([raw, self.past.compressed[lane, taken]]))

    @property
    def idle(self) -> Any:
        return self.pos < 0

    def ref(self) -> Any:
        q, turns = np.nan_to_num(self.q), np.nan_to_num(self.turns[:, self.turn_set])
        return attention.attention_ref(q, turns, self.seen, self.sinks, EPS)

    def run(self, machine: Any, form: Form, *, spread: int = 16, seed: int = 0) -> Any:
        past, g, n = self.past, self.past.geometry, len(self.places)
        top_k = self.top_k if past.ratio == 4 else 0
        slots = form.slots(g.window, min(past.n_compressed, top_k or past.n_compressed))
        partial = np.full(form.partial_floats(n, slots), np.nan, np.float32)
        stats = np.full(form.stat_floats(n, slots), np.nan, np.float32)
        o = np.full(self.q.shape, 7, np.float32)
        groups = -(-g.n_heads // form.group)
        machine.run(
            attention.attend(form), (min(spread, slots), groups, n), BLOCK, partial, stats, self.q,
            self.pos, self.lane, self.turns, self.turn_set, past.ring, past.lane_bytes,
            past.capacity, g.window, past.pool, past.page_bytes, past.table, past.pages_per_lane,
            past.page_offset, past.per_page, past.ratio, self.chosen, top_k, slots, EPS,
            g.head_dim**-0.5, shared=form.shared_bytes, seed=seed,
        )  # fmt: skip
        machine.run(
            attention.merge(form), (g.n_heads, n), MERGE, o, partial, stats, self.sinks, self.pos,
            self.turns, self.turn_set, g.window, past.ratio, top_k, slots, seed=seed,
        )  # fmt: skip
        assert (o[self.idle] == 7).all(), "an idle row is written"
        return o


def _close(a: Any, b: Any) -> None:
    assert np.isfinite(a).all()
    error = np.abs(a - b).max((1, 2)) / np.abs(b).max((1, 2))
    assert error.max() < 3e-6, error


# Behind the window's first wrap, at borders of spans (16), of pages (32 positions), of top_k.
PLACES = [(0, 0), (0, 2), (2, 19), None, (2, 20), (1, 63), (1, 79), (0, 130)]


@pytest.mark.parametrize(("name", "places"), [("tiny", PLACES[5:]), ("micro", PLACES)])
def test_rows_attend_to_windows_and_chosen_rows(machine: Any, name: str, places: Any) -> None:
    each = Pass(Past(_cut(name), 4, 33), places)
    o = each.run(machine, _form(_cut(name)))
    _close(o[~each.idle], each.ref()[~each.idle])


def test_sliding_layers_see_the_ring_alone(machine: Any) -> None:
    g = _cut("mini")
    each = Pass(Past(g, 0, 0), [(0, 3), (1, 15), (1, 16), (2, 51), (2, 52)], turn_set=0)
    _close(each.run(machine, _form(g)), each.ref())


def test_rows_of_ratio_128_see_all_of_a_long_past(machine: Any) -> None:
    """More than `near` and a far span, in pages of two rows; none at all a position earlier."""
    g = _cut("micro")
    each = Pass(Past(g, 128, 83), [(2, 126), (2, 127), (0, 128 * 33 - 1), (1, 128 * 83)])
    _close(each.run(machine, _form(g)), each.ref())


def test_flash_s_widths(machine: Any) -> None:
    """A block of its sixteen heads, tiles of sixteen; window and heads cut."""
    g = replace(synth.geometry("flash"), n_heads=16, window=12)
    form = Form.of(g)
    assert (form.group, form.tile, form.span, form.dim) == (16, 16, 64, 512)
    each = Pass(Past(g, 4, 6), [(1, 27)])
    _close(each.run(machine, form), each.ref())


def test_a_row_alone_is_the_row_among_others(machine: Any) -> None:
    g = _cut("tiny")
    past, form = Past(g, 4, 33), _form(g)
    together: list[Any] = [(2, 20), (1, 30), (0, 130)]
    among = Pass(past, together).run(machine, form)
    for i in (0, 2):
        places = [None, together[i], None]
        alone = Pass(past, places).run(machine, form, seed=i)
        assert np.array_equal(alone[1], among[i])


def test_neither_the_grid_nor_the_group_changes_a_bit(machine: Any) -> None:
    """Six heads: the second group of four has two of none."""
    g = _cut("micro", heads=6)
    each = Pass(Past(g, 4, 33, seed=3), [(0, 130), (2, 40)])
    wanted = each.run(machine, _form(g, group=4))
    _close(wanted, each.ref())
    for spread, group in ((1, 8), (3, 16)):
        o = each.run(machine, _form(g, group=group), spread=spread, seed=spread)
        assert np.array_equal(o, wanted), (spread, group)


@pytest.mark.parametrize("tile", [16, 32])
def test_a_tile_of_other_size_is_as_near(machine: Any, tile: int) -> None:
    g = _cut("micro")
    each = Pass(Past(g, 4, 33), [(0, 130)])
    form = _form(g, tile=tile, span=32, near=32, far=64)
    _close(each.run(machine, form), each.ref())


def test_places_of_a_long_span_are_looked_up_in_parts(machine: Any) -> None:
    g = _cut("micro")
    n = 32 + attention.LOOKED + 40
    each = Pass(Past(g, 128, n), [(2, 128 * n)])
    form = _form(g, tile=32, span=32, near=32, far=attention.LOOKED + 64)
    _close(each.run(machine, form), each.ref())


def test_sinks_take_their_share(machine: Any) -> None:
    """A great one leaves next to nothing, one of -inf takes nothing, and neither is scaled."""
    g = _cut("micro")
    each = Pass(Past(g, 4, 33), [(1, 70)])
    each.sinks[:] = 60, -np.inf, -200, 3
    o, ref = each.run(machine, _form(g)), each.ref()
    assert np.abs(o[0, 0]).max() < 1e-12
    for h in range(4):
        _close(o[:, h : h + 1], ref[:, h : h + 1])


def test_great_logits_do_not_overflow(machine: Any) -> None:
    """One row a hundred times the others: its maximum comes late and shrinks all before it."""
    g = _cut("micro")
    past = Past(g, 4, 33)
    form = layout.kv_format(g, exact=False)
    page, at = past.table[1, 2], 3
    great = (np.random.default_rng(9).standard_normal(g.head_dim) * 200).astype(np.float16)
    block = past.pool[page, past.page_offset :][: form.block_bytes(past.per_page)]
    form.views(block, past.per_page)[0][at] = great.view(np.uint8)
    past.compressed[1, 19] = great
    each = Pass(past, [(1, 79)])
    assert np.abs(each.seen[0]).max() > 100
    _close(each.run(machine, _form(g)), each.ref())


def test_a_row_that_is_no_number_spoils_its_own_lane_alone(machine: Any) -> None:
    """Scale byte 255 in a page of lane 2."""
    g = _cut("tiny")
    past, places = Past(g, 4, 33), [(2, 20), (1, 30)]
    form = _form(g)
    before = Pass(past, places).run(machine, form)
    form_ = layout.kv_format(g, exact=False)
    block = past.pool[past.table[2, 0], past.page_offset :][: form_.block_bytes(past.per_page)]
    form_.views(block, past.per_page)[2][1] = 255
    after = Pass(past, places).run(machine, form)
    assert not np.isfinite(after[0]).all(-1).any(), "every head has met it"
    assert np.array_equal(after[1], before[1])


def test_spans_of_flash() -> None:
    form = Form.of(synth.geometry("flash"))
    assert form.slots(128, 0) == 3
    assert form.slots(128, 512) == 11
    assert form.slots(128, 8192) == 26
    assert form.shared_bytes <= 80 * 1024
