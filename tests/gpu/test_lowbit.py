"""Routed experts with weights of two to four bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels.lowbit import experts, iq2_xxs
from ds4d.gpu.kernels.lowbit.experts import FORMATS
from ds4d.model.quants import Quant, Tensor, dequantize
from tests.gpu.machines import check_code

HALVES_AT = {Quant.IQ2_XXS: (0,), Quant.Q2_K: (80, 82), Quant.Q4_K: (0, 2)}
QUANTS = pytest.mark.parametrize("quant", FORMATS, ids=lambda q: q.name)


def weights(quant: Quant, n_out: int, n_in: int, seed: int = 0) -> Any:
    """The file's bytes [n_out, n_in / 256, bytes]: any bits, and scales that are no NaN."""
    r = np.random.default_rng([quant, n_out, n_in, seed])
    raw = r.integers(0, 256, (n_out, n_in // 256, FORMATS[quant].BLOCK_BYTES), dtype=np.uint8)
    for at in HALVES_AT[quant]:
        d = r.uniform(-0.01, 0.01, raw.shape[:2]).astype("<f2")
        raw[..., at : at + 2] = d[..., None].view(np.uint8)
    return raw


def activations(n_rows: int, n_in: int, seed: int = 0) -> tuple[Any, Any]:
    r = np.random.default_rng([n_rows, n_in, seed])
    q = r.integers(-127, 128, (n_in // 32, n_rows, 32)).astype("i1")
    return q, r.uniform(0.001, 0.01, (n_in // 256, n_rows)).astype("f4")


def items(*each: tuple[int, dict[int, int]]) -> tuple[Any, Any, Any]:
    """expert, rows, to of (expert, row: to) pairs."""
    expert = np.array([e for e, _ in each], "i4")
    rows, to = np.full((len(each), 8), -1, "i4"), np.full((len(each), 8), -1, "i4")
    for i, (_, pairs) in enumerate(each):
        rows[i, : len(pairs)], to[i, : len(pairs)] = list(pairs), list(pairs.values())
    return expert, rows, to


def down(machine: Any, quant: Quant, raw: Any, q: Any, d: Any, lists: Any, n_to: int) -> Any:
    """y [n_to, n_out], NaN where nothing was written, of raw [experts, n_out, blocks, bytes]."""
    n_in, n_out, n_rows = 256 * raw.shape[2], raw.shape[1], q.shape[1]
    y = np.full((n_to, n_out), np.nan, "f4")
    packed = FORMATS[quant].pack(raw.reshape(-1, *raw.shape[2:]))
    tiles = n_out // 16
    machine.run(
        experts.down(quant, n_in), (-(-tiles // 2), len(lists[0])), 32 * experts.warps(n_in),
        y, packed, q, d, *lists, n_rows, n_out, tiles,
    )  # fmt: skip
    return y


def up(
    machine: Any, quant: Quant, gate: Any, up: Any, q: Any, d: Any, lists: Any, weight: Any,
    clamp: float,
) -> Any:  # fmt: skip
    n_in, width, n_rows = 256 * gate.shape[2], gate.shape[1], q.shape[1]
    mid = np.full((n_rows * (weight.shape[1] + 1), width), np.nan, "f4")
    pack = FORMATS[quant].pack
    machine.run(
        experts.up(quant, n_in), (width // 16, len(lists[0])), 32 * experts.warps(n_in),
        mid, pack(gate.reshape(-1, *gate.shape[2:])), pack(up.reshape(-1, *up.shape[2:])),
        q, d, *lists, weight, n_rows, width, clamp,
    )  # fmt: skip
    return mid


# -- layouts -----------------------------------------------------------------------------------


@QUANTS
def test_records_hold_the_files_bytes(quant: Quant) -> None:
    of = FORMATS[quant]
    raw = weights(quant, 48, 768)
    packed = of.pack(raw)
    assert packed.shape == (3, 3, of.RECORD) and packed.nbytes == raw.nbytes
    np.testing.assert_array_equal(of.unpack(packed), raw)


@QUANTS
def test_the_device_repacks_alike(machine: Any, quant: Quant) -> None:
    of = FORMATS[quant]
    raw = weights(quant, 32, 512)
    out = np.zeros((2, 2, of.RECORD), np.uint8)
    letters = dict(of.repack.parameters)["raw"].rstrip("*")
    machine.run(of.repack, (2, 2), 32, out, raw.view(letters), 2)
    np.testing.assert_array_equal(out, of.pack(raw))


@QUANTS
def test_the_references_weights_are_the_formats(quant: Quant) -> None:
    raw = weights(quant, 5, 512)
    w, m, d, least = FORMATS[quant].weights_ref(raw)
    values = w.reshape(5, 2, 256) * d.astype("f8")[..., None]
    if m is not None:
        values -= m.reshape(5, 2, 256) * least.astype("f8")[..., None]
    expected = dequantize(Tensor("w", quant, (5, 512), raw.reshape(-1)), np.float64)
    np.testing.assert_allclose(values.reshape(5, 512), expected, rtol=1e-12, atol=1e-15)


# -- products ----------------------------------------------------------------------------------


@QUANTS
@pytest.mark.parametrize(("n_out", "n_in"), [(32, 256), (48, 768), (16, 4096)])
def test_down_multiplies_the_rows_of_each_item(
    machine: Any, quant: Quant, n_out: int, n_in: int
) -> None:
    raw = weights(quant, 2 * n_out, n_in).reshape(2, n_out, n_in // 256, -1)
    q, d = activations(16, n_in)
    lists = items((1, {3: 0, 15: 4, 0: 2}), (0, {3: 1}))
    y = down(machine, quant, raw, q, d, lists, 6)
    first, second = (experts.product_ref(quant, raw[e], q, d) for e in range(2))
    np.testing.assert_array_equal(y[[0, 4, 2]], second[[3, 15, 0]])
    np.testing.assert_array_equal(y[1], first[3])
    assert np.isnan(y[[3, 5]]).all()  # nobody's

    x = q.astype("f8") * np.repeat(d, 8, axis=0)[..., None]
    x = x.swapaxes(0, 1).reshape(16, n_in)
    exact = dequantize(Tensor("w", quant, (n_out, n_in), raw[1].reshape(-1)), np.float64)
    scale = np.abs(x[[3, 15, 0]]) @ np.abs(exact).T
    assert (np.abs(y[[0, 4, 2]] - x[[3, 15, 0]] @ exact.T) <= 2e-6 * scale).all()


@QUANTS
def test_up_gates_and_weighs(machine: Any, quant: Quant) -> None:
    gate, up_ = (weights(quant, 64, 512, s).reshape(2, 32, 2, -1) for s in range(2))
    q, d = activations(8, 512)
    weight = np.random.default_rng(3).uniform(0, 2, (8, 2)).astype("f4")
    # Row r's i-th expert goes to 3 r + i.
    lists = items((0, {2: 6, 5: 15}), (-1, {}), (1, {2: 7, 7: 22}))
    mid = up(machine, quant, gate, up_, q, d, lists, weight, 2.5)
    for e, pairs in ((0, {2: 6, 5: 15}), (1, {2: 7, 7: 22})):
        rows, to = list(pairs), list(pairs.values())
        by = np.array([weight[r, t - 3 * r] for r, t in pairs.items()])
        expected = experts.up_ref(quant, gate[e], up_[e], q[:, rows], d[:, rows], by, 2.5)
        np.testing.assert_allclose(mid[to], expected, rtol=1e-6, atol=1e-7)
    assert np.isnan(np.delete(mid, [6, 15, 7, 22], axis=0)).all()


@QUANTS
def test_a_row_alone_is_the_row_among_others_in_any_column(machine: Any, quant: Quant) -> None:
    raw = weights(quant, 32, 512).reshape(1, 32, 2, -1)
    q, d = activations(8, 512)
    d[:, 6] = np.nan  # a neighbour that has failed
    alone = down(machine, quant, raw, q, d, items((0, {3: 0})), 1)
    among = items((0, {7: 7, 6: 6, 5: 5, 4: 4, 3: 3, 2: 2, 1: 1, 0: 0}))
    together = down(machine, quant, raw, q, d, among, 8)
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(together[3], alone[0])
    assert np.isnan(together[6]).all() and np.isfinite(np.delete(together, 6, axis=0)).all()
    wide, wide_d = np.zeros((16, 24, 32), "i1"), np.zeros((2, 24), "f4")
    wide[:, 17], wide_d[:, 17] = q[:, 3], d[:, 3]
    np.testing.assert_array_equal(
        down(machine, quant, raw, wide, wide_d, items((0, {17: 0})), 1), alone
    )


def test_no_item_no_work(machine: Any) -> None:
    raw = weights(Quant.Q2_K, 16, 256).reshape(1, 16, 1, -1)
    q, d = activations(8, 256)
    y = down(machine, Quant.Q2_K, raw, q, d, items((-1, {}), (-1, {})), 2)
    assert np.isnan(y).all()


@QUANTS
@pytest.mark.parametrize("sign", [1, -1])
def test_the_greatest_sums_fit(machine: Any, quant: Quant, sign: int) -> None:
    """Every code, scale and minimum at its most."""
    raw = np.full((1, 16, 1, FORMATS[quant].BLOCK_BYTES), 255, np.uint8)
    if quant is Quant.IQ2_XXS:  # the last grid entry; no minus but for the scale's 15
        raw[..., 2:] = [255, 255, 255, 255, 0, 0, 0, 240] * 8
    for at in HALVES_AT[quant]:
        raw[..., at : at + 2] = np.array([1], "<f2").view(np.uint8)
    q, d = np.full((8, 8, 32), 127 * sign, "i1"), np.ones((1, 8), "f4")
    y = down(machine, quant, raw, q, d, items((0, {0: 0})), 1)
    values = dequantize(Tensor("w", quant, (16, 256), raw.reshape(-1)), np.float64)
    expected = (values.sum(1) * 127 * sign).astype("f4")
    np.testing.assert_allclose(y[0], expected, rtol=1e-6)


def test_every_grid_entry_with_every_sign(machine: Any) -> None:
    """One weight at a time: eight blocks of IQ2_XXS have 256 runs an output."""
    n = 2048
    raw = np.zeros((1, 16, 8, 66), np.uint8)
    raw[..., :2] = np.array([8], "<f2").view(np.uint8)
    groups = raw[..., 2:].reshape(16, 8, 8, 8)
    run = np.arange(256).reshape(8, 8, 4)
    for o in range(16):
        groups[o, ..., :4] = (run + 16 * o) % 256
        signs = ((run * 37 + o * 101) % 128).astype("<u4") << np.arange(0, 28, 7, dtype="<u4")
        control = np.bitwise_or.reduce(signs, -1) | np.uint32(o) << np.uint32(28)
        groups[o, ..., 4:] = control.astype("<u4")[..., None].view(np.uint8)
    raw[0, ..., 2:] = groups.reshape(16, 8, 64)
    q = np.random.default_rng(5).integers(-127, 128, (n // 32, 8, 32)).astype("i1")
    d = np.ones((8, 8), "f4")
    y = down(machine, Quant.IQ2_XXS, raw, q, d, items((0, {r: r for r in range(8)})), 8)
    values = dequantize(Tensor("w", Quant.IQ2_XXS, (16, n), raw.reshape(-1)), np.float64)
    x = q.astype("f8").swapaxes(0, 1).reshape(8, n)
    np.testing.assert_array_equal(y, (x @ values.T).astype("f4"))  # whole numbers: exact


def test_a_nan_stays_through_the_clamps(machine: Any) -> None:
    gate, up_ = (weights(Quant.Q2_K, 16, 256, s).reshape(1, 16, 1, -1) for s in range(2))
    q, d = activations(8, 256)
    d[0, 1] = np.nan
    lists, weight = items((0, {0: 0, 1: 2})), np.ones((8, 1), "f4")
    mid = up(machine, Quant.Q2_K, gate, up_, q, d, lists, weight, 1e-3)
    assert np.isnan(mid[2]).all() and (np.abs(mid[0]) <= 1e-3).all()


# -- code --------------------------------------------------------------------------------------

OTHERS = [
    *((family, quant, 256) for family in (experts.up, experts.down) for quant in FORMATS),
    (experts.down, Quant.IQ2_XXS, 2048), (experts.up, Quant.Q2_K, 4096),
]  # fmt: skip


@pytest.mark.slow  # those of Flash are in test_code.py
@pytest.mark.parametrize(("family", "quant", "n_in"), OTHERS)
def test_its_code(family: Any, quant: Quant, n_in: int) -> None:
    check_code([family(quant, n_in)], 32 * experts.warps(n_in))


def test_repackings_code() -> None:
    check_code([of.repack for of in FORMATS.values()], 32)


def test_the_tables_bytes_are_the_grids_values() -> None:
    for shift, mask, words in (
        (1, 1, (iq2_xxs.LOW, iq2_xxs.LOW_REST)),
        (0, 4, (iq2_xxs.HIGH, iq2_xxs.HIGH_REST)),
    ):
        chosen = np.array(words, "<u4").view("i1")
        assert [chosen[m << shift] for m in range(3)] == [8, 25, 43]
        assert [chosen[m << shift | mask] for m in range(3)] == [-8, -25, -43]
