"""Mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels import moe, product

K, SCALE = 4, 1.5


# -- choosing ----------------------------------------------------------------------------------


@dataclass
class Choice:
    """What the kernel writes, for some rows."""

    z: Any
    k: int = K
    bias: Any = None
    table: Any = None
    token: Any = None
    idle: Any = ()
    expert: Any = field(init=False)
    weight: Any = field(init=False)
    items: Any = field(init=False)

    def run(self, machine: Any) -> Choice:
        z, k = self.z, self.k
        rows, n_experts = z.shape
        n_items = moe.items_most(rows, k, n_experts)
        self.expert = np.full((rows, k), -7, "i4")
        self.weight = np.full((rows, k), np.nan, "f4")
        lists = ((n_items,), (n_items, 8), (n_items, 8))
        self.items = [np.full(shape, -7, "i4") for shape in lists]
        pos = np.arange(rows, dtype="i4")
        pos[list(self.idle)] = -1
        token = np.zeros(rows, "i4") if self.token is None else self.token
        wide = np.full((rows, n_experts + 8), np.inf, "f4")  # padding is not looked at
        wide[:, :n_experts] = z
        moe.run_choose(
            machine, self.expert, self.weight, self.items, wide, token, pos, bias=self.bias,
            table=self.table, n_rows=rows, stride=n_experts + 8, n_experts=n_experts, k=k,
            scale=SCALE,
        )  # fmt: skip
        return self


def scores(rows: int, n_experts: int, seed: int = 0) -> Any:
    r = np.random.default_rng(seed)
    z = (8 * r.standard_normal((rows, n_experts))).astype("f4")
    z.flat[:: 7 * n_experts // 5] = 100.0  # softplus is its argument; exp would be infinite
    return z


@pytest.mark.parametrize(("n_experts", "k", "rows"), [(8, 4, 8), (40, 3, 16), (256, 6, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_greatest_are_chosen(
    machine: Any, n_experts: int, k: int, rows: int, biased: bool
) -> None:
    z = scores(rows, n_experts, n_experts)
    bias = np.random.default_rng(1).standard_normal(n_experts).astype("f4") if biased else None
    found = Choice(z, k, bias).run(machine)
    for row in range(rows):
        chosen, weight = moe.route_ref(z[row], 0 if bias is None else bias, k, SCALE)
        assert found.expert[row].tolist() == chosen.tolist()
        np.testing.assert_allclose(found.weight[row], weight, rtol=2e-6)


def test_ties_go_to_the_lowest_expert(machine: Any) -> None:
    z = np.zeros((8, 40), "f4")
    z[1, 30:] = 1
    z[2, [3, 39]] = 2
    expert = Choice(z, 3).run(machine).expert
    assert expert[:3].tolist() == [[0, 1, 2], [30, 31, 32], [0, 3, 39]]


def test_a_bias_chooses_but_does_not_weigh(machine: Any) -> None:
    z, bias = np.zeros((8, 8), "f4"), np.zeros(8, "f4")
    bias[[1, 3, 5, 7]] = 9
    bias[0] = -9  # negative sums are compared too
    found = Choice(z, 4, bias).run(machine)
    assert (found.expert == [1, 3, 5, 7]).all()
    np.testing.assert_allclose(found.weight, SCALE / 4, rtol=1e-6)


def test_a_hashed_layer_takes_the_row_of_the_id(machine: Any) -> None:
    z, table = scores(8, 8), np.array([[0, 1, 2, 3], [7, 5, 6, 0], [4, 3, 2, 1]], "i4")
    token = np.array([0, 1, 2, 2, 1, 0, 1, 1], "i4")
    found = Choice(z, table=table, token=token).run(machine)
    assert (found.expert == np.sort(table[token], 1)).all()
    s = np.sqrt(np.logaddexp(0, np.take_along_axis(z, found.expert, 1).astype("f8")))
    np.testing.assert_allclose(found.weight, SCALE * s / s.sum(1, keepdims=True), rtol=2e-6)


def test_scores_that_vanish_do_not_divide_by_nothing(machine: Any) -> None:
    found = Choice(np.full((8, 8), -200, "f4")).run(machine)
    assert (found.weight == 0).all() and (found.expert == range(4)).all()


def test_nan_is_never_chosen_but_where_nothing_is_left(machine: Any) -> None:
    z = scores(8, 8)
    z[0, :3] = np.nan
    z[1, :6] = np.nan
    z[2] = np.nan
    found = Choice(z).run(machine)
    assert found.expert[0].min() >= 3
    assert found.expert[1].tolist() == [0, 0, 6, 7]
    assert found.expert[2].tolist() == [0] * 4
    assert np.isnan(found.weight[1:3]).all() and not np.isnan(found.weight[3:]).any()
    check_items(found)


def test_idle_rows_choose_nothing(machine: Any) -> None:
    whole = Choice(scores(8, 40)).run(machine)
    some = Choice(scores(8, 40), idle=[0, 3, 7]).run(machine)
    assert (some.expert[[0, 3, 7]] == -1).all() and (some.weight[[0, 3, 7]] == 0).all()
    used = [1, 2, 4, 5, 6]
    assert (some.expert[used] == whole.expert[used]).all()
    assert (some.weight[used] == whole.weight[used]).all()
    check_items(some)
    assert not np.isin(some.items[1], [0, 3, 7]).any()
    none = Choice(scores(8, 40), idle=range(8)).run(machine)
    assert all((a == -1).all() for a in none.items)


def check_items(found: Choice) -> None:
    for a, wanted in zip(
        found.items, moe.items_ref(found.expert, len(found.items[0])), strict=True
    ):
        assert a.tolist() == wanted.tolist()


@pytest.mark.parametrize(("n_experts", "k", "rows"), [(256, 6, 8), (40, 3, 24), (8, 4, 32)])
def test_work_items_hold_each_choice_once(machine: Any, n_experts: int, k: int, rows: int) -> None:
    check_items(Choice(scores(rows, n_experts), k).run(machine))


def test_more_than_eight_rows_make_further_items(machine: Any) -> None:
    z = np.zeros((24, 8), "f4")
    z[:9, 4:] = 1
    found = Choice(z).run(machine)
    check_items(found)
    assert found.items[0][:12].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(("n_experts", "k"), [(8, 4), (5, 5), (256, 6), (2, 1)])
def test_there_are_items_enough(n_experts: int, k: int) -> None:
    r = np.random.default_rng(k)
    for rows in (8, 16, 24, 32):
        spread = -(-np.arange(rows * k).reshape(rows, k) % n_experts)  # every expert
        crowd = np.tile(np.arange(k), (rows, 1))
        chance = np.stack([r.permutation(n_experts)[:k] for _ in range(rows)])
        for expert in (-spread, crowd, chance):
            counts = np.bincount(expert.ravel())
            assert (-(-counts // 8)).sum() <= moe.items_most(rows, k, n_experts)


# -- experts -----------------------------------------------------------------------------------


@dataclass
class Matrices:
    """Q8_0 weights [experts, n_out, n_in] as the kernels want them."""

    codes: Any  # i1
    factors: Any  # f2 [experts, n_out, n_in / 32]

    @classmethod
    def drawn(cls, r: Any, experts: int, n_out: int, n_in: int) -> Matrices:
        codes = r.integers(-127, 128, (experts, n_out, n_in), dtype="i1")
        return cls(codes, (r.random((experts, n_out, n_in // 32)) * 4e-4).astype("f2"))

    @property
    def packed(self) -> tuple[Any, Any]:
        """Experts behind each other are one matrix: each has whole tiles."""
        e, n_out, n_in = self.codes.shape
        raw = np.empty((e * n_out, n_in // 32, 34), "u1")
        raw[:, :, :2] = self.factors.reshape(e * n_out, n_in // 32, 1).view("u1")
        raw[:, :, 2:] = self.codes.reshape(e * n_out, n_in // 32, 32).view("u1")
        return tuple(product.pack_q8_0(raw, e * n_out, n_in))  # type: ignore[return-value]

    def values(self, e: int) -> Any:
        return self.codes[e] * np.repeat(self.factors[e].astype("f8"), 32, 1)


def quantised(r: Any, rows: int, n: int) -> tuple[Any, Any, Any]:
    """q, d, and what they stand for, [rows, n]."""
    q = r.integers(-127, 128, (n // 32, rows, 32), dtype="i1")
    d = r.random((n // 32, rows)).astype("f4") / 100
    return q, d, (q * d[..., None].astype("f8")).transpose(1, 0, 2).reshape(rows, n)


@dataclass
class Pass:
    """Experts for some rows: weights, a choice and inputs drawn by `seed`."""

    rows: int
    n_in: int = 256
    width: int = 32
    n_out: int = 48
    n_experts: int = 5
    k: int = 3
    clamp: float = 2.0
    shared_clamp: float = 1.0
    idle: Any = ()
    routed: bool = True
    shared: bool = True
    expert: Any = None

    def __post_init__(self) -> None:
        r = np.random.default_rng(3)
        e, n = self.n_experts, self.rows
        self.gate, self.up = (Matrices.drawn(r, e, self.width, self.n_in) for _ in "gu")
        self.down = Matrices.drawn(r, e, self.n_out, self.n_in)
        self.shared_gate, self.shared_up = (
            Matrices.drawn(r, 1, self.width, self.n_in) for _ in "gu"
        )
        self.shared_down = Matrices.drawn(r, 1, self.n_out, self.n_in)
        if self.expert is None:
            self.expert = np.stack([np.sort(r.permutation(e)[: self.k]) for _ in range(n)])
        self.weight = r.random((n, self.k)).astype("f4")
        self.q, self.d, self.x = quantised(r, n, self.n_in)
        self.mid_q, self.mid_d, _ = quantised(r, n * (self.k + 1), self.n_in)
        self.pos = np.arange(n, dtype="i4")
        self.pos[list(self.idle)] = -1
        self.expert = self.expert.astype("i4")
        self.expert[list(self.idle)] = -1

    @property
    def items(self) -> Any:
        return moe.items_ref(self.expert, moe.items_most(self.rows, self.k, self.n_experts))

    def run_up(self, machine: Any) -> Any:
        mid = np.full((self.rows * (self.k + 1), self.width), np.nan, "f4")
        moe.run_up(
            machine, mid,
            (*self.gate.packed, *self.up.packed) if self.routed else None,
            (*self.shared_gate.packed, *self.shared_up.packed) if self.shared else None,
            self.q, self.d, self.items, self.weight, self.pos,
            n_rows=self.rows, n_experts=self.n_experts, k=self.k, n_in=self.n_in,
            n_out=self.width, stride=self.width, clamp=self.clamp,
            shared_clamp=self.shared_clamp,
        )  # fmt: skip
        return mid.reshape(self.rows, self.k + 1, self.width)

    def run_down(self, machine: Any) -> Any:
        parts = np.full((self.rows * (self.k + 1), self.n_out), np.nan, "f4")
        moe.run_down(
            machine, parts,
            self.down.packed if self.routed else None,
            self.shared_down.packed if self.shared else None,
            self.mid_q, self.mid_d, self.items, self.pos,
            n_rows=self.rows, n_experts=self.n_experts, k=self.k, n_in=self.n_in,
            n_out=self.n_out, stride=self.n_out,
        )  # fmt: skip
        return parts.reshape(self.rows, self.k + 1, self.n_out)

    def check(self, found: Any, wanted: Any, *, exact: bool = False) -> None:
        """`wanted(row, i)`, where anything was to be done; NaN stands where nothing was."""
        for row in range(self.rows):
            for i in range(self.k + 1):
                skipped = self.pos[row] < 0 or not (self.shared if i == self.k else self.routed)
                if skipped:
                    assert np.isnan(found[row, i]).all(), (row, i)
                else:
                    within = 0 if exact else 2e-5
                    np.testing.assert_allclose(
                        found[row, i], wanted(row, i).reshape(-1), rtol=within, atol=within,
                        err_msg=f"{row} {i}",
                    )  # fmt: skip

    def check_up(self, mid: Any) -> None:
        def wanted(row: int, i: int) -> Any:
            if i == self.k:
                g, u = self.shared_gate.values(0), self.shared_up.values(0)
                return moe.up_ref(self.x[row], g, u, 1.0, self.shared_clamp)
            e = self.expert[row, i]
            g, u = self.gate.values(e), self.up.values(e)
            return moe.up_ref(self.x[row], g, u, self.weight[row, i], self.clamp)

        self.check(mid, wanted)

    def check_down(self, parts: Any) -> None:
        """Down to the bit."""

        def wanted(row: int, i: int) -> Any:
            at = row * (self.k + 1) + i
            m, e = (self.shared_down, 0) if i == self.k else (self.down, self.expert[row, i])
            own = slice(at, at + 1)
            return moe.products_ref(
                m.codes[e], m.factors[e], self.mid_q[:, own], self.mid_d[:, own]
            )

        self.check(parts, wanted, exact=True)


PASSES = {
    "tiny": Pass(8, n_out=16, idle=[2, 7]),
    "many rows of an expert": Pass(24, width=16, n_out=16, n_experts=3, k=2, n_in=128),
    "three warps": Pass(8, n_in=384, width=16, n_out=16, shared=False),
    "shared only, as Flash": Pass(8, n_in=2048, width=16, n_out=16, routed=False, idle=[0]),
    "inputs that are padded": Pass(8, n_in=160, width=16, n_out=16, n_experts=3, k=1),
    "shared only, 32 rows": Pass(32, n_in=512, width=16, n_out=16, routed=False, idle=[5, 31]),
}


@pytest.mark.parametrize("name", PASSES)
def test_experts_give_their_products(machine: Any, name: str) -> None:
    PASSES[name].check_up(PASSES[name].run_up(machine))
    PASSES[name].check_down(PASSES[name].run_down(machine))


def test_clamps_hold(machine: Any) -> None:
    """Of the gate above only, of up on both sides; each expert kind has its own."""
    case = Pass(8, n_in=128, width=16, clamp=0.25, shared_clamp=0.125)
    gates = np.stack([case.gate.values(e) @ case.x[0] for e in range(5)])
    assert gates.min() < -0.25 < 0.25 < gates.max()  # or this test would test nothing
    case.check_up(case.run_up(machine))


def test_a_row_alone_is_a_row_among_others(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to the bit: with other rows idle, with the shared expert's weights read once for all
    rows, and on any grid."""
    whole = Pass(16, n_in=128, width=16, n_out=16)
    mid, parts = whole.run_up(machine), whole.run_down(machine)
    assert not np.isnan(mid).any() and not np.isnan(parts).any()
    alone = Pass(16, n_in=128, width=16, n_out=16, idle=[i for i in range(16) if i != 9])
    assert (alone.run_up(machine)[9] == mid[9]).all()
    assert (alone.run_down(machine)[9] == parts[9]).all()
    shared = Pass(16, n_in=128, width=16, n_out=16, routed=False)
    assert (shared.run_up(machine)[:, -1] == mid[:, -1]).all()
    assert (shared.run_down(machine)[:, -1] == parts[:, -1]).all()
    monkeypatch.setattr(moe, "GRID_MOST", 3)
    assert (whole.run_up(machine) == mid).all()
    assert (whole.run_down(machine) == parts).all()


def test_the_split_of_the_inputs_is_even() -> None:
    for n_in in range(128, 8193, 128):
        n = moe.warps(n_in)
        assert n_in // 128 % n == 0 and 1 <= n <= 8
    assert moe.warps(32) == moe.warps(128)  # whose inputs are padded
    assert [moe.warps(n) for n in (128, 256, 2048, 4096)] == [1, 1, 8, 8]


@pytest.mark.parametrize(("k", "width"), [(6, 1024), (4, 272)])
def test_experts_are_added_in_order(machine: Any, k: int, width: int) -> None:
    """Bit for bit: the sum in another order differs here."""
    r = np.random.default_rng(0)
    parts = r.standard_normal((8, k + 1, width)).astype("f4")
    parts[:, 0] *= 1e4
    y, pos = np.full((8, width), np.nan, "f4"), np.arange(8, dtype="i4")
    pos[3] = -1
    moe.run_combine(machine, y, parts, pos, n_rows=8, k=k, stride=width)
    wanted = moe.combine_ref(parts)
    assert (moe.combine_ref(parts[:, ::-1]) != wanted).any()
    assert np.isnan(y[3]).all()
    used = pos >= 0
    assert (y[used] == wanted[used]).all()
