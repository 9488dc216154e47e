"""The indexer: queries, scores, the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ds4d.gpu.kernels import rope
from ds4d.gpu.kernels.index import choose, query, score
from ds4d.model import rows, synth
from ds4d.model.layout import FP4, HALF, PLANE, pad
from tests.gpu.machines import check_code

if TYPE_CHECKING:
    from numpy.random import Generator
    from numpy.typing import NDArray

    Array = NDArray[Any]

PER_PAGE = 64


def _turns(r: Generator, n_rows: int, pairs: int) -> Array:
    angle = r.uniform(0, 7, (n_rows, 4, 1, pairs))
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=2).astype("f4")


# -- queries -----------------------------------------------------------------------------------


def _queries(
    machine: Any, q: Array, turns: Array, pos: Array, top_k: int, *, seed: int = 0
) -> tuple[Array, Array]:
    """codes [R, 8 tiles * dim] and scales [R, 8 tiles, dim / 32]."""
    n_rows, heads, dim = q.shape
    tiles = query.tiles_of(heads)
    padded = np.zeros((n_rows, heads * dim + 16), "f4")
    padded[:, : heads * dim] = q.reshape(n_rows, -1)
    codes = np.full((n_rows, 8 * tiles * dim), 77, np.int8)
    scales = np.full((n_rows, 8 * tiles, dim // 32), 77, np.float32)
    machine.run(
        query.fp4_kernel(dim), (tiles, n_rows), query.BLOCK, codes, scales, padded,
        padded.shape[1], turns, pos, heads, turns.shape[-1], top_k, seed=seed,
    )  # fmt: skip
    return codes, scales


def _uneven(r: Generator, *shape: int) -> Array:
    """Vectors some of which, in the Hadamard basis, have blocks of very different size."""
    x = r.standard_normal(shape).astype("f4")
    by = np.float32(2) ** r.integers(-9, 3, (*shape[:-1], shape[-1] // 32))
    by[r.random(by.shape[:-1]) < 0.6] = 1
    return rows.hadamard(x * np.repeat(by, 32, axis=-1).astype("f4"))


@pytest.mark.parametrize(("heads", "dim", "pairs"), [(16, 64, 16), (8, 128, 32), (12, 32, 8)])
def test_queries_are_turned_and_rounded_as_the_reference_does(
    machine: Any, heads: int, dim: int, pairs: int
) -> None:
    r = np.random.default_rng(dim)
    pos = np.array([100, -1, 43, 39], np.int32)  # the last two see 11 and 10 keys
    turns = _turns(r, 4, pairs)
    q = rope.turn_ref(_uneven(r, 4, heads, dim), turns[:, 1], back=True)
    q[0, 0], q[2, 1] = 0, np.inf
    codes, scales = _queries(machine, q, turns, pos, top_k=10)
    wanted, exponents = query.query_ref(np.where(np.isfinite(q), q, 0), turns)
    natural = np.zeros((4, 8 * query.tiles_of(heads), dim), np.int8)
    natural[:, :heads] = wanted
    order = query.order(heads, dim)
    assert sorted(order.ravel()) == list(range(order.size))
    powers = np.ldexp(np.float32(0.25), exponents.astype(int) - 127)
    for row in (0, 2):
        laid = natural[row].ravel()[order.ravel()]
        found, its = codes[row], scales[row, :heads]
        whole = np.isfinite(q[row]).all(-1)
        keep = np.isin(order.ravel() // dim, np.flatnonzero(~whole), invert=True)
        assert np.array_equal(found[keep], laid[keep])
        assert np.array_equal(its[whole], powers[row][whole])
        assert np.isnan(its[~whole]).all() and (~whole).sum() == (row == 2)
    assert (codes[[1, 3]] == 77).all() and (scales[[1, 3]] == 77).all()  # rows that do not select
    levels = (scales[0] == scales[0, :, :1]).all(-1)
    assert dim == 32 or 0 < levels[:heads].sum() < heads, "the test has both kinds of heads"
    # The value is the reference's to the bit.
    meant = rows.round_index_query(synth.geometry("flash"), _turned(q[0], turns[0]))
    assert np.array_equal(_value(natural[0, :heads], powers[0]), meant)


def _turned(q: Array, turns: Array) -> Array:
    out: Array = rope.turn_ref(q[None], turns[None, 1])[0]
    return out


def _value(codes: Array, powers: Array) -> Array:
    """[heads, dim] f32 of a query's codes and scales."""
    return codes.astype("f4") * np.repeat(2 * powers, 32, axis=-1)


def test_queries_that_meet_halves_are_only_turned(machine: Any) -> None:
    r = np.random.default_rng(5)
    pos, turns = np.array([80, -1, 81], np.int32), _turns(r, 3, 4)
    q = r.standard_normal((3, 5 * 16)).astype("f4")
    out = np.full((3, 5, 16), 77, np.float32)
    machine.run(query.index_query_f32, 3, query.BLOCK, out, q, 80, turns, pos, 5, 16, 4, 8)
    for row in (0, 2):
        assert np.array_equal(out[row], _turned(q[row].reshape(5, 16), turns[row]))
    assert (out[1] == 77).all()


# -- scores ------------------------------------------------------------------------------------


@dataclass
class Case:
    """Keys in pages, and rows of a pass that meet them."""

    dim: int
    keys: Array  # [lanes, n, dim] f32: what cached rows decode to
    pool: Array  # u8 [pages, page_bytes]
    table: Array  # i32 [lanes, pages_per_lane]
    offset: int
    exponents: int

    @classmethod
    def of(cls, r: Generator, x: Array, *, fp4: bool) -> Case:
        """`x` [lanes, n, dim] f32."""
        lanes, n, dim = x.shape
        n_pages = -(-n // PER_PAGE)
        code_bytes = dim // 2 if fp4 else 2 * dim
        exponents = pad(code_bytes * PER_PAGE, PLANE)
        offset = 48
        size = pad(offset + exponents + (dim // 32 * PER_PAGE if fp4 else 0), 64)
        pool = r.integers(0, 256, (lanes * n_pages + 2, size)).astype(np.uint8)
        table = (r.permutation(len(pool))[::-1])[: lanes * n_pages].reshape(lanes, n_pages)
        if fp4:
            codes, scales = rows.encode_fp4(x)
            keys = rows.decode_fp4(codes, scales)
        else:
            codes = x.astype(np.float16)
            keys = codes.astype(np.float32)
        for own in range(lanes):
            for s in range(n):
                page, at = pool[table[own, s // PER_PAGE]][offset:], s % PER_PAGE
                page[at * code_bytes : (at + 1) * code_bytes] = codes[own, s].view(np.uint8)
                if fp4:
                    to = exponents + at * dim // 32
                    page[to : to + dim // 32] = scales[own, s]
        return cls(dim, keys, pool, table.astype(np.int32), offset, exponents)

    def scores(
        self, machine: Any, q: tuple[Array, Array], w: Array, pos: Array, lane: Array, top_k: int,
        *, n_blocks: int = 3, seed: int = 0,
    ) -> Array:  # fmt: skip
        codes, scales = q
        heads = w.shape[1]
        out = np.full((len(pos), pad(self.keys.shape[1], 32)), 77, np.float32)
        machine.run(
            score.fp4_kernel(heads, self.dim), n_blocks, score.BLOCK, out, out.shape[1], codes,
            scales, w, heads, score.factor_of(heads, self.dim), self.pool.view(np.uint32),
            self.pool.shape[1] // 4, self.offset // 4, self.exponents // 4, self.table,
            self.table.shape[1], PER_PAGE, pos, lane, len(pos), top_k, query.tiles_of(heads),
            self.dim // 32, seed=seed,
        )  # fmt: skip
        return out


def _wanted(codes: Array, scales: Array, w: Array, keys: Array) -> tuple[Array, Array]:
    """Scores [s] of one row as `query` laid it out, and what bounds their error."""
    heads, dim = len(w), keys.shape[1]
    natural = np.empty(codes.size, np.int8)
    natural[query.order(heads, dim).ravel()] = codes
    q = _value(natural.reshape(-1, dim)[:heads], scales[:heads])
    by = w * np.float32(score.factor_of(heads, dim))
    wanted = score.score_ref(q, by, keys)
    return wanted, 2e-6 * score.score_ref(np.abs(q), np.abs(by), np.abs(keys)) + 1e-30


def _pass(
    r: Generator, heads: int, dim: int, pos: list[int], *, uneven: bool
) -> tuple[Array, tuple[Array, Array], Array]:
    """(positions, codes and scales, w) of rows, all of which are given queries."""
    q = _uneven(r, len(pos), heads, dim) if uneven else r.standard_normal((len(pos), heads, dim))
    q = q.astype("f4")
    laid = [query.query_ref(each[None], _none(1))[:2] for each in q]
    codes = np.zeros((len(pos), 8 * query.tiles_of(heads), dim), np.int8)
    codes[:, :heads] = [c[0] for c, _ in laid]
    order = query.order(heads, dim).ravel()
    scales = np.ones((*codes.shape[:2], dim // 32), np.float32)
    scales[:, :heads] = [np.ldexp(np.float32(0.25), e[0].astype(int) - 127) for _, e in laid]
    w = r.standard_normal((len(pos), heads)).astype("f4")
    laid_codes = codes.reshape(len(pos), -1)[:, order]
    return np.array(pos, np.int32), (np.ascontiguousarray(laid_codes), scales), w


def _none(n: int) -> Array:
    turns = np.zeros((n, 4, 2, 1), np.float32)
    turns[:, :, 0] = 1
    return turns


@pytest.mark.parametrize(
    ("heads", "dim", "n", "uneven"),
    [(16, 64, 110, False), (8, 128, 70, True), (12, 32, 290, True), (8, 128, 100, False)],
)
def test_scores_are_the_reference_s(
    machine: Any, heads: int, dim: int, n: int, uneven: bool
) -> None:
    """Rows of two lanes, one idle, one that sees too little, in pages of random order."""
    r = np.random.default_rng(heads + dim)
    x = r.standard_normal((2, n, dim)).astype("f4")
    if uneven:
        x[:, 30:] = rows.hadamard(_uneven(r, 2, n - 30, dim))
    case = Case.of(r, x, fp4=True)
    assert list(case.table.ravel()) != sorted(case.table.ravel())
    few = [50, 4 * n - 14, 4 * n - 1, -1, 170]
    pos, q, w = _pass(r, heads, dim, few, uneven=uneven)
    lane = np.array([1, 1, 1, -1, 0], np.int32)
    found = case.scores(machine, q, w, pos, lane, top_k=12)
    for row in (1, 2, 4):
        n_seen = (pos[row] + 1) // 4
        wanted, bound = _wanted(q[0][row], q[1][row], w[row], case.keys[lane[row], :n_seen])
        assert (np.abs(found[row, :n_seen] - wanted) <= bound).all()
        assert wanted.std() > 0.1
        assert (found[row, n_seen:] == 77).all()
    assert (found[[0, 3]] == 77).all()


def test_a_row_alone_scores_as_among_others_and_on_any_grid(machine: Any) -> None:
    r = np.random.default_rng(3)
    x = r.standard_normal((2, 40, 64)).astype("f4")
    x[0, 10:20] = rows.hadamard(_uneven(r, 10, 64))
    case = Case.of(r, x, fp4=True)
    pos, q, w = _pass(r, 8, 64, [150, 151, 152, 153, 159, 120], uneven=True)
    q = (np.concatenate([q[0][:5], q[0][4:5]]), np.concatenate([q[1][:5], q[1][4:5]]))
    lane = np.array([0, 0, 0, 0, 0, 1], np.int32)
    together = case.scores(machine, q, w, pos, lane, top_k=20)
    other_grid = case.scores(machine, q, w, pos, lane, top_k=20, n_blocks=1, seed=9)
    assert together.tobytes() == other_grid.tobytes()
    for row in (1, 4, 5):
        one = slice(row, row + 1)
        alone = case.scores(
            machine, (q[0][one], q[1][one]), w[one], pos[one], lane[one], top_k=20, n_blocks=2
        )
        assert alone[0].tobytes() == together[row].tobytes()


def test_a_key_that_is_not_level_changes_no_neighbour(machine: Any) -> None:
    r = np.random.default_rng(4)
    x = r.standard_normal((1, 64, 128)).astype("f4")
    pos, q, w = _pass(r, 8, 128, [255], uneven=False)
    assert (q[1] == q[1][..., :1]).all(), "the row is level"
    lane = np.zeros(1, np.int32)
    before = Case.of(np.random.default_rng(1), x, fp4=True).scores(machine, q, w, pos, lane, 8)
    x[0, 5, 32:64] *= 1000
    x[0, 40, 64:96] = 0
    x[0, 41, 64:96] *= 5  # still level, with shifts of 2 or 3
    case = Case.of(np.random.default_rng(1), x, fp4=True)
    after = case.scores(machine, q, w, pos, lane, 8)
    changed = np.flatnonzero(before[0].view("u4") != after[0].view("u4"))
    assert list(changed) == [5, 40, 41]
    wanted, bound = _wanted(q[0][0], q[1][0], w[0], case.keys[0])
    assert (np.abs(after[0] - wanted) <= bound).all()


def test_a_key_or_query_that_is_no_number_scores_none(machine: Any) -> None:
    r = np.random.default_rng(6)
    case = Case.of(r, r.standard_normal((1, 32, 64)).astype("f4"), fp4=True)
    page = case.pool[case.table[0, 0]][case.offset :]
    page[case.exponents + 2 * 7] = 255  # one block of key 7
    page[case.exponents + 2 * 9 : case.exponents + 2 * 9 + 2] = 255
    pos, (codes, scales), w = _pass(r, 16, 64, [127, 127], uneven=False)
    scales[1, 3, 1] = np.nan
    found = case.scores(machine, (codes, scales), w, pos, np.zeros(2, np.int32), top_k=8)
    assert list(np.flatnonzero(np.isnan(found[0]))) == [7, 9]
    assert np.isnan(found[1]).all()


def test_halves_score_as_the_reference(machine: Any) -> None:
    r = np.random.default_rng(8)
    case = Case.of(r, r.standard_normal((2, 70, 16)).astype("f4"), fp4=False)
    pos, lane = np.array([270, -1, 279, 20], np.int32), np.array([1, -1, 0, 0], np.int32)
    q, w = r.standard_normal((4, 3, 16)).astype("f4"), r.standard_normal((4, 3)).astype("f4")
    factor = score.factor_of(3, 16)
    first = None
    for n_blocks in (1, 2):
        found = np.full((4, 96), 77, np.float32)
        machine.run(
            score.index_score_f16, (n_blocks, 4), score.BLOCK, found, 96, q, w, 3, factor,
            case.pool.view(np.uint16), case.pool.shape[1] // 2, case.offset // 2, case.table,
            case.table.shape[1], PER_PAGE, pos, lane, 3, 16, 8,
        )  # fmt: skip
        first = found.tobytes() if first is None else first
        assert found.tobytes() == first
    for row in (0, 2):
        n = (pos[row] + 1) // 4
        wanted = score.score_ref(q[row], w[row] * np.float32(factor), case.keys[lane[row], :n])
        np.testing.assert_allclose(found[row, :n], wanted, rtol=1e-5, atol=1e-6)
        assert (found[row, n:] == 77).all()
    assert (found[[1, 3]] == 77).all()


# -- the choice --------------------------------------------------------------------------------


def _chosen(
    machine: Any,
    scores: Array,
    pos: Array,
    top_k: int,
    *,
    span: int = 256,
    block: int = 64,
    seed: int = 0,
) -> Array:
    n_rows, stride = scores.shape
    spans, places = choose.spans_of(stride, span), choose.room(stride, top_k, span)
    chosen = np.full((n_rows, top_k), 77, np.int32)
    kept = np.full((n_rows, spans * top_k), 77, np.uint32)
    kept_at, arrived = kept.astype(np.int32), np.zeros(n_rows, np.uint32)
    machine.run(
        choose.choose_kernel(block, span), (spans, n_rows), block, chosen, kept, kept_at, arrived,
        scores, stride, pos, places, choose.N_DIGITS, top_k, shared=4 * (places + top_k),
        seed=seed,
    )  # fmt: skip
    assert (arrived == 0).all()
    return chosen


def _hard(r: Generator, kind: str, n: int) -> Array:
    x = r.standard_normal(n).astype("f4")
    if kind == "equal":
        x = np.maximum(np.rint(x * 2), 0) * r.choice([-1, 1], n)  # many zeros of both signs
    elif kind == "zeros":
        x = np.zeros(n)
    elif kind == "negative":
        x = -np.abs(x) - np.float32(1)
    elif kind == "one value":
        x = np.full(n, 3.25)
    elif kind == "no numbers":
        x[r.random(n) < 0.1], x[r.random(n) < 0.1] = np.nan, np.inf
        x[r.random(n) < 0.1] = -np.inf
        x[r.random(n) < 0.1] = np.array([0xFFC00000], "u4").view("f4")[0]
    return x.astype(np.float32)


KINDS = ("any", "equal", "zeros", "negative", "one value", "no numbers")


@pytest.mark.parametrize(("top_k", "ns"), [(5, (6, 7, 250, 256, 40, 129)), (64, (65,) * 6)])
def test_one_span_chooses_the_greatest(machine: Any, top_k: int, ns: tuple[int, ...]) -> None:
    r = np.random.default_rng(top_k)
    scores = np.full((8, 256), np.nan, np.float32)
    pos = np.full(8, -1, np.int32)
    for row, (kind, n) in enumerate(zip(KINDS, ns, strict=True)):
        scores[row, :n], pos[row] = _hard(r, kind, n), 4 * n + row % 4 - 1
    pos[6] = 4 * top_k + 2  # as many keys as are wanted
    found = _chosen(machine, scores, pos, top_k)
    for row, n in enumerate(ns):
        assert np.array_equal(found[row], choose.choose_ref(scores[row, :n], top_k)), KINDS[row]
    assert (found[6:] == 77).all()


@pytest.mark.parametrize("kind", KINDS)
def test_several_spans_choose_the_same(machine: Any, kind: str) -> None:
    """Spans of 256 keys; the rows have 1, 2, 3 and 3 of them."""
    r = np.random.default_rng(len(kind))
    ns = (200, 257, 768, 540)
    scores = np.full((4, 768), np.nan, np.float32)
    for row, n in enumerate(ns):
        scores[row, :n] = _hard(r, kind, n)
    if kind == "any":
        scores[2, 300:700] += 9  # all of the chosen are one span's
    pos = np.array([4 * n - 1 for n in ns], np.int32)
    found = _chosen(machine, scores, pos, 30)
    for row, n in enumerate(ns):
        assert np.array_equal(found[row], choose.choose_ref(scores[row, :n], 30))


def test_who_chooses_with_it_and_in_which_order_blocks_run_changes_nothing(machine: Any) -> None:
    r = np.random.default_rng(1)
    scores = np.stack([_hard(r, "equal", 512) for _ in range(3)])
    pos = np.array([2047, 1500, 2040], np.int32)
    together = _chosen(machine, scores, pos, 20)
    assert np.array_equal(together, _chosen(machine, scores, pos, 20, seed=5))
    alone = _chosen(machine, scores[1:2], pos[1:2], 20, seed=2)
    assert np.array_equal(alone[0], together[1])
    wide = _chosen(machine, scores, pos, 20, span=512, block=128)
    assert np.array_equal(wide, together)


# -- code --------------------------------------------------------------------------------------


def test_formats_of_cached_rows_are_those_expected() -> None:
    """Planes of index rows: nibbles, then an exponent for each 32 channels."""
    from ds4d.model.layout import index_format

    for name, kind in (("flash", FP4), ("tiny", FP4), ("mini", FP4), ("micro", HALF)):
        form = index_format(synth.geometry(name), exact=False)
        assert form.kind == kind
        if kind == FP4:
            assert form.dim in query.DIMS
            assert (form.code_bytes, form.scale_bytes) == (form.dim // 2, form.dim // 32)


def test_the_code_for_halves() -> None:
    check_code([query.index_query_f32, score.index_score_f16], 256)
