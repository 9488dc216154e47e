"""Cached rows: their bytes, and what is read out of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32, int64

from ds4d.gpu.jit import kernel
from ds4d.gpu.kernels import ptx, rope, rows
from ds4d.model import rows as model_rows
from ds4d.model import synth
from ds4d.model.layout import E4M3, FP4, HALF, RowFormat, index_format, kv_format
from tests.gpu.machines import check_code

FORMATS = {
    "flash": kv_format(synth.geometry("flash"), exact=False),
    "flash index": index_format(synth.geometry("flash"), exact=False),
    "tiny": kv_format(synth.geometry("tiny"), exact=False),
    "tiny index": index_format(synth.geometry("tiny"), exact=False),
    "mini": kv_format(synth.geometry("mini"), exact=False),
    "mini index": index_format(synth.geometry("mini"), exact=False),
    "wide index": RowFormat(FP4, 256, 256, 8, 128, 0, 8),
    "micro": kv_format(synth.geometry("micro"), exact=False),
    "micro index": index_format(synth.geometry("micro"), exact=False),
    "bytes of odd halves": RowFormat(HALF, 90, 0, 0, 180, 0, 0),
}


def _planes(form: RowFormat, x: Any) -> list[Any]:
    return list(rows.encode_ref(form.kind, form.coded, x))


def _same(block: Any, form: RowFormat, n_rows: int, x: Any, at: Any = None) -> None:
    at = np.arange(len(x)) if at is None else at
    for mine, wanted in zip(form.views(block, n_rows), _planes(form, x), strict=True):
        assert mine[at].tobytes() == wanted.tobytes()


# -- encoding ----------------------------------------------------------------------------------


@cache
def _encode(kind: int, dim: int, coded: int) -> Any:
    encode = rows.encoder(kind, dim, coded)

    @kernel("u1* out, i4 halves, i4 scales, f4* x", block=rows.BLOCK)
    def encode_rows(out, halves, scales, x):  # type: ignore[no-untyped-def]
        r, tid = int64(cuda.blockIdx.x), cuda.threadIdx.x
        row = cuda.shared.array(dim, float32)
        for k in range(tid, dim, rows.BLOCK):
            row[k] = x[r * dim + k]
        cuda.syncthreads()
        encode(out, 0, r, halves, scales, row, tid)

    return encode_rows


def _encoded(machine: Any, form: RowFormat, x: Any) -> Any:
    out = np.full(form.block_bytes(len(x)), 0xEE, np.uint8)
    halves, scales = rows.places(form, len(x))
    kernel_ = _encode(form.kind, form.dim, form.coded)
    machine.run(kernel_, len(x), rows.BLOCK, out, halves, scales, x)
    return out


def _hard(form: RowFormat) -> Any:
    """Rows of all sizes; zeros; midpoints between codes; the ends of a scale; tiny and huge."""
    r = np.random.default_rng(form.dim)
    x = r.standard_normal((8, form.dim)) * np.exp(r.uniform(-12, 12, (8, 1)))
    x[1] = 0
    x[2] = r.choice([-1, 1], form.dim) * r.integers(0, 900, form.dim) / 2.0
    if form.kind == E4M3:
        x[3, : form.coded] = r.choice(_midpoints(model_rows.E4M3_VALUES[:127]), form.coded)
        x[3, : form.coded : 64] = 448
        x[4, : form.coded : 64] = 2.0 ** r.integers(-20, 20) * 448.0000305
    x[5] *= 1e-30 / np.abs(x[5]).max()
    x[6] *= 60000 / np.abs(x[6]).max()
    x[7] = -0.0
    x = x.astype(np.float32)
    if form.kind == FP4:  # such that the transform gives back what was wanted
        x[3] = model_rows.hadamard(r.choice([-5, -2.5, 0.25, 0.75, 1.25, 3.5, 6], form.dim))
        x[4] = 1e36
    return x


def _midpoints(values: Any) -> Any:
    middle = (values[1:].astype(np.float64) + values[:-1]) / 2
    return np.concatenate([middle, -middle])


@pytest.mark.parametrize("name", FORMATS)
def test_rows_become_the_canonical_bytes(machine: Any, name: str) -> None:
    form = FORMATS[name]
    x = _hard(form)
    with np.errstate(over="ignore"):
        _same(_encoded(machine, form, x), form, len(x), x)


@pytest.mark.parametrize("name", ["tiny", "tiny index", "flash index"])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_a_block_without_a_number_has_the_last_scale(machine: Any, name: str, what: float) -> None:
    form = FORMATS[name]
    x = np.ones((2, form.dim), np.float32)
    x[0, 3] = what
    scales = form.views(_encoded(machine, form, x), 2)[2]
    assert scales[0, 0] == 255
    assert scales[1, 0] < 255


def test_the_floors_are_those_of_the_model() -> None:
    assert np.uint32(rows.E4M3_FLOOR).view(np.float32) == model_rows.E4M3_FLOOR
    assert np.uint32(rows.FP4_FLOOR).view(np.float32) == model_rows.FP4_FLOOR


# -- decoding ----------------------------------------------------------------------------------


@kernel("f4* out8, f4* out16, u1* codes, i4 exponent")
def _decode_e4m3(out8, out16, codes, exponent):  # type: ignore[no-untyped-def]
    i, by = cuda.threadIdx.x, rows.power(exponent)
    for k in range(2):
        a, b, c, d, e, f, g, h = rows.e4m3x8(codes, 16 * i + 8 * k, by)
        to = 16 * i + 8 * k
        out8[to], out8[to + 1], out8[to + 2], out8[to + 3] = a, b, c, d
        out8[to + 4], out8[to + 5], out8[to + 6], out8[to + 7] = e, f, g, h
    x = rows.e4m3x16(codes, 16 * i, by)
    to = 16 * i
    out16[to], out16[to + 1], out16[to + 2], out16[to + 3] = x[0], x[1], x[2], x[3]
    out16[to + 4], out16[to + 5], out16[to + 6], out16[to + 7] = x[4], x[5], x[6], x[7]
    out16[to + 8], out16[to + 9], out16[to + 10], out16[to + 11] = x[8], x[9], x[10], x[11]
    out16[to + 12], out16[to + 13], out16[to + 14], out16[to + 15] = x[12], x[13], x[14], x[15]


@pytest.mark.parametrize("exponent", [1, 105, 127, 245])
def test_every_e4m3_code_is_decoded(machine: Any, exponent: int) -> None:
    codes = np.arange(256, dtype=np.uint8)
    out8, out16 = np.empty((2, 256), np.float32)
    machine.run(_decode_e4m3, 1, 16, out8, out16, codes, exponent)
    scale = np.full(4, exponent, np.uint8)
    wanted = model_rows.decode_e4m3(codes, scale)
    number = ~np.isnan(wanted)
    for out in (out8, out16):
        assert (out == wanted)[number].all()
        assert np.isnan(out[~number]).all()


@kernel("f4* out4, f4* out8, u1* data")
def _decode_halves(out4, out8, data):  # type: ignore[no-untyped-def]
    to = 8 * cuda.threadIdx.x
    for k in range(2):
        a, b, c, d = rows.halves4(data, 2 * to + 8 * k)
        at = to + 4 * k
        out4[at], out4[at + 1], out4[at + 2], out4[at + 3] = a, b, c, d
    a, b, c, d, e, f, g, h = rows.halves8(data, 2 * to)
    out8[to], out8[to + 1], out8[to + 2], out8[to + 3] = a, b, c, d
    out8[to + 4], out8[to + 5], out8[to + 6], out8[to + 7] = e, f, g, h


def test_halves_are_decoded(machine: Any) -> None:
    x = np.random.default_rng(1).standard_normal(256).astype(np.float16)
    out4, out8 = np.empty((2, 256), np.float32)
    machine.run(_decode_halves, 1, 32, out4, out8, x.view(np.uint8))
    assert (out4 == x).all()
    assert (out8 == x).all()


@kernel("i1* out16, i1* out32, u1* codes")
def _decode_fp4(out16, out32, codes):  # type: ignore[no-untyped-def]
    i = cuda.threadIdx.x
    for k in range(2):
        a, b, c, d = rows.fp4x16(codes, 16 * i + 8 * k)
        ptx.store16(out16, 32 * i + 16 * k, a, b, c, d)
    a, b, c, d, e, f, g, h = rows.fp4x32(codes, 16 * i)
    ptx.store16(out32, 32 * i, a, b, c, d)
    ptx.store16(out32, 32 * i + 16, e, f, g, h)


def test_every_pair_of_fp4_codes_becomes_counts_of_halves(machine: Any) -> None:
    codes = np.arange(256, dtype=np.uint8)
    out16, out32 = np.zeros((2, 512), np.int8)
    machine.run(_decode_fp4, 1, 16, out16, out32, codes)
    wanted = 2 * model_rows.decode_fp4(codes, np.full(16, 127, np.uint8))
    assert (out16 == wanted).all()
    assert (out32 == wanted).all()


@kernel("i4* code, i4* count, f4* x, i4 n")
def _round_fp4(code, count, x, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < n:
        code[i] = rows.fp4_code(x[i])
        count[i] = rows.fp4_count(x[i])


def test_counts_are_what_codes_stand_for(machine: Any) -> None:
    at = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6], np.float32)
    x = np.concatenate([np.nextafter(at, np.float32(i)) for i in (-9, 9)] + [at, -at])
    code, count = np.empty((2, len(x)), np.int32)
    machine.run(_round_fp4, -(-len(x) // 32), 32, code, count, x, len(x))
    assert (2 * model_rows.FP4_VALUES[code] == count).all()
    assert np.abs(count / 2 - x).max() <= 1


# -- raw rows ----------------------------------------------------------------------------------


class Push:
    """A pass of rows, and the rings of two lanes and two layers."""

    def __init__(self, name: str, pos: Any, lane: Any, *, lanes: int = 2, seed: int = 0) -> None:
        g = synth.geometry(name)
        r = np.random.default_rng(seed)
        self.form, self.pairs, self.eps = kv_format(g, exact=False), g.rope_dim // 2, g.rms_eps
        self.pos, self.lane = np.array(pos, np.int32), np.array(lane, np.int32)
        self.capacity, d = 40, g.head_dim
        self.block = self.form.block_bytes(self.capacity)
        self.rings = r.integers(0, 256, (lanes, 2, self.block)).astype(np.uint8)
        self.kv = np.full((len(pos), d + 16), np.nan, np.float32)
        self.kv[:, :d] = r.standard_normal((len(pos), d))
        self.w = r.uniform(0.5, 2, d).astype(np.float32)
        tables = [np.array(f, np.float32) for f in g.frequencies]
        self.turns = rope.angles_ref(self.pos, *tables)
        self.rows = rows.rms_turn_ref(self.kv[:, :d], self.w, self.eps, self.turns[:, 1])

    def run(self, machine: Any, which: Any = slice(None)) -> Any:
        """The rings, after the rows `which`, into layer 1."""
        out, kv = self.rings.copy(), self.kv[which].copy()
        turns, pos, lane = (x[which].copy() for x in (self.turns, self.pos, self.lane))
        rows.kv_push(
            machine, out.reshape(-1)[self.block :], pos, lane, kv, self.w, turns, form=self.form,
            n_rows=len(pos), lane_stride=2 * self.block, capacity=self.capacity,
            stride=kv.shape[1], pairs=self.pairs, turn_set=1, eps=self.eps,
        )  # fmt: skip
        return out


@pytest.mark.parametrize("name", ["flash", "tiny", "mini", "micro"])
def test_rows_go_where_their_positions_say(machine: Any, name: str) -> None:
    """Only there, and rows that are idle go nowhere."""
    it = Push(name, [38, 39, 40, -1, 7, -1], [0, 0, 0, -1, 1, -1])
    before, after = it.rings.copy(), it.run(machine)
    live = it.pos >= 0
    for lane in range(2):
        mine = live & (it.lane == lane)
        at = it.pos[mine] % it.capacity
        _same(after[lane, 1], it.form, it.capacity, it.rows[mine], at)
        views = [it.form.views(x[lane, 1], it.capacity) for x in (before, after)]
        for old, new in zip(*views, strict=True):
            others = np.setdiff1d(np.arange(it.capacity), at)
            assert (old[others] == new[others]).all()
    assert (before[:, 0] == after[:, 0]).all()


def test_rows_are_normalised_and_turned() -> None:
    """The reference in the kernel's order against one in double precision."""
    it = Push("flash", [0, 9000, 77], [0, 1, 2], lanes=3)
    x = it.kv[:, : it.form.dim].astype(np.float64)
    wanted = x * it.w / np.sqrt((x * x).mean(1, keepdims=True) + it.eps)
    cos, sin = it.turns[:, 1, 0].astype(np.float64), it.turns[:, 1, 1]
    u, v = wanted[:, -64::2].copy(), wanted[:, -63::2].copy()
    wanted[:, -64::2], wanted[:, -63::2] = u * cos - v * sin, u * sin + v * cos
    np.testing.assert_allclose(it.rows, wanted, rtol=1e-5, atol=1e-6)


def test_a_row_alone_has_the_bytes_it_has_among_others(machine: Any) -> None:
    it = Push("tiny", [10, 11, 39, 40, 41, 3, -1, -1], [0, 0, 1, 1, 1, 2, -1, -1], lanes=3)
    together = it.run(machine)
    for each in range(6):
        alone = it.run(machine, slice(each, each + 1))
        views = [it.form.views(x[it.lane[each], 1], it.capacity) for x in (together, alone)]
        for a, b in zip(*views, strict=True):
            assert (a[it.pos[each] % it.capacity] == b[it.pos[each] % it.capacity]).all()


def test_its_code() -> None:
    check_code(
        [
            rows.kv_push_kernel(HALF, 32, 4),
            _encode(FP4, 128, 128),
        ],
        rows.BLOCK,
    )
    check_code([_decode_e4m3, _decode_fp4], 32)
