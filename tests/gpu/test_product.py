"""Products with Q8_0 weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4d.gpu.kernels import activation, product
from ds4d.model.quants import Quant, Tensor, dequantize, quantize
from tests.gpu.machines import check_code

FLASH = [(1024, 32768), (4096, 8192), (8192, 4096), (4096, 1536), (4096, 129280), (4096, 4096),
         (2048, 4096)]  # fmt: skip
TINY = [(256, 128), (256, 96), (128, 768), (384, 128), (128, 256), (256, 4096)]
SMALL = [(64, 32), (32, 96), (320, 64), (7168, 1536), (1536, 65536)]  # micro, mini, Pro


def weight(n_out: int, n_in: int) -> Any:
    """Bytes of a Q8_0 tensor, with all codes from -128 to 127."""
    r = np.random.default_rng((n_out, n_in))
    raw = r.integers(0, 256, (n_out, n_in // 32, 34), dtype=np.uint8)
    scales = (r.standard_normal((n_out, n_in // 32, 1)) * 0.02).astype("<f2")
    raw[:, :, :2] = scales.view(np.uint8)
    return raw


def activations(rows: int, n: int, seed: int = 0) -> tuple[Any, Any]:
    x = np.random.default_rng((seed, rows, n)).standard_normal((rows, n)).astype("f4")
    return activation.quantise_ref(x, 32)


def run(machine: Any, raw: Any, q: Any, d: Any, n_out: int, n_in: int, **how: Any) -> Any:
    w, s = product.pack_q8_0(raw, n_out, n_in)
    rows = q.shape[1]
    y = np.full((rows, how.get("stride") or product.padded(n_out, 16)), np.nan, "f4")
    product.product(machine, y, w, s, q, d, n_rows=rows, n_out=n_out, n_in=n_in, **how)
    return y


# -- layout ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_out", "n_in"), [(16, 128), (48, 384), (5, 32), (40, 160)])
def test_packing_is_undone_by_unpacking(n_out: int, n_in: int) -> None:
    raw = weight(n_out, n_in)
    w, s = product.pack_q8_0(raw.reshape(-1), n_out, n_in)
    assert (w.nbytes, s.nbytes) == product.sizes_q8_0(n_out, n_in)
    np.testing.assert_array_equal(product.unpack_q8_0(w, s, n_out, n_in), raw)
    if n_out % 16 == 0 and n_in % 128 == 0:
        assert w.nbytes + s.nbytes == raw.nbytes


def test_a_byte_is_where_the_layout_says() -> None:
    raw = weight(32, 256)
    w, s = product.pack_q8_0(raw, 32, 256)
    tile, b, g, t = 1, 6, 5, 3
    lane = w[tile, b, 4 * g + t]
    low, high = raw[16 * tile + g, b], raw[16 * tile + g + 8, b]
    np.testing.assert_array_equal(lane[0:4], low[2 + 8 * t : 6 + 8 * t])
    np.testing.assert_array_equal(lane[4:8], high[2 + 8 * t : 6 + 8 * t])
    np.testing.assert_array_equal(lane[8:12], low[6 + 8 * t : 10 + 8 * t])
    np.testing.assert_array_equal(lane[12:16], high[6 + 8 * t : 10 + 8 * t])
    assert s[tile, b // 4, g, b % 4, 0] == low[:2].view("<u2")[0]
    assert s[tile, b // 4, g, b % 4, 1] == high[:2].view("<u2")[0]


@pytest.mark.parametrize(("n_out", "n_in"), [(32, 128), (24, 288), (3, 64)])
def test_the_device_packs_alike(machine: Any, n_out: int, n_in: int) -> None:
    raw = weight(n_out, n_in)
    wanted = product.pack_q8_0(raw, n_out, n_in)
    w, s = (np.full_like(a, 77) for a in wanted)
    product.repack(machine, w, s, raw.reshape(-1).view("<u2"), n_out=n_out, n_in=n_in)
    np.testing.assert_array_equal(w, wanted[0])
    np.testing.assert_array_equal(s, wanted[1])


def test_matrices_that_share_an_input_become_one_weight(machine: Any) -> None:
    one, two = weight(32, 128), weight(20, 128)
    wanted = product.pack_q8_0(np.concatenate([one, two]), 52, 128)
    w, s = (np.full_like(a, 77) for a in wanted)
    for raw, first in ((two, 32), (one, 0)):
        halves = raw.reshape(-1).view("<u2")
        product.repack(machine, w, s, halves, n_out=len(raw), n_in=128, first=first)
    np.testing.assert_array_equal(w, wanted[0])
    np.testing.assert_array_equal(s, wanted[1])


# -- division ----------------------------------------------------------------------------------


def test_inputs_are_divided_as_measured() -> None:
    assert [product.parts_of(*shape) for shape in FLASH] == [2, 8, 8, 16, 4, 8, 8]
    assert {product.parts_of(*shape) for shape in TINY} == {1}


@pytest.mark.parametrize(("n_in", "n_out"), FLASH + TINY + SMALL)
def test_a_part_is_a_whole_number_of_loads(n_in: int, n_out: int) -> None:
    for rows in (8, 16, 24, 32):
        kernel, block = product.kernel_for(n_in, n_out, rows)
        split, ahead = kernel.constants["split"], kernel.constants["ahead"]
        assert block == 32 * split == kernel.block  # type: ignore[operator]
        assert product.padded(n_in, 128) // 32 % (split * ahead) == 0  # type: ignore[operator]
        assert kernel.constants["ragged"] == (n_in % 128 != 0)


# -- product -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_in", "n_out", "rows"),
    [
        (256, 32, 8),  # as ds4-tiny: one part; two tiles
        (384, 16, 16),  # four blocks a chunk
        (96, 24, 8),  # neither inputs nor outputs fill their units
        (160, 5, 24),
        (480, 16, 8),  # two parts, the second one short
        (32, 16, 32),
        (512, 16, 8),  # two parts
        (1024, 16, 8),  # four
        (4096, 16, 8),  # sixteen
    ],
)
def test_products_are_those_of_the_reference(
    machine: Any, n_in: int, n_out: int, rows: int
) -> None:
    raw, (q, d) = weight(n_out, n_in), activations(rows, n_in)
    y = run(machine, raw, q, d, n_out, n_in)
    np.testing.assert_array_equal(y, product.product_ref(raw, q, d, n_out=n_out, n_in=n_in))
    w = dequantize(Tensor("", Quant.Q8_0, (n_out, n_in), raw.reshape(-1)), np.float64)
    x = (q * d[..., None].astype("f8")).swapaxes(0, 1).reshape(rows, n_in)
    most = np.abs(x) @ np.abs(w).T
    assert (np.abs(y[:, :n_out] - x @ w.T) <= 1e-6 * most).all()
    assert not y[:, n_out:].any()


def test_groups_read_inputs_of_their_own(machine: Any) -> None:
    """As attn_output_a: and inputs may lie further apart than a group is wide."""
    raw = weight(96, 128)
    q, d = activations(8, 3 * 256)
    for step in (128, 256):
        y = run(machine, raw, q, d, 96, 128, groups=3, step=step)
        for i in range(3):
            own, at = slice(32 * i, 32 * i + 32), slice(i * step // 32, i * step // 32 + 4)
            alone = product.product_ref(raw[own], q[at], d[at], n_out=32, n_in=128)
            np.testing.assert_array_equal(y[:, own], alone)
        known = product.product_ref(raw, q, d, n_out=96, n_in=128, groups=3, step=step)
        np.testing.assert_array_equal(y, known)


def test_rows_may_be_written_into_longer_ones(machine: Any) -> None:
    raw, (q, d) = weight(16, 128), activations(8, 128)
    y = run(machine, raw, q, d, 16, 128, stride=24)
    np.testing.assert_array_equal(y[:, :16], product.product_ref(raw, q, d, n_out=16, n_in=128))
    assert np.isnan(y[:, 16:]).all()


@pytest.mark.parametrize(("n_in", "n_out"), [(128, 16), (512, 16)])
def test_a_row_has_the_same_bits_among_any_others(machine: Any, n_in: int, n_out: int) -> None:
    """For any number of rows, in any place, beside rows that are not finite."""
    raw, (q, d) = weight(n_out, n_in), activations(1, n_in)
    known = None
    for rows, at in ((8, 0), (16, 9), (24, 22), (32, 31)) if n_in == 128 else ((8, 5), (16, 15)):
        all_q, all_d = activations(rows, n_in, seed=rows + at)
        all_q[:, at], all_d[:, at] = q[:, 0], d[:, 0]
        all_d[:, (at + 1) % rows] = np.nan
        all_d[:, (at + 3) % rows] = np.inf
        y = run(machine, raw, all_q, all_d, n_out, n_in)
        assert np.isnan(y[(at + 1) % rows]).all() and not np.isfinite(y[(at + 3) % rows]).any()
        known = y[at] if known is None else known
        np.testing.assert_array_equal(y[at], known)
    assert known is not None and known.any()


def test_how_many_loads_are_in_flight_changes_no_bit(machine: Any) -> None:
    raw, (q, d) = weight(16, 512), activations(8, 512)
    w, s = product.pack_q8_0(raw, 16, 512)
    found = []
    for ahead in (4, 8):
        y = np.full((8, 16), np.nan, "f4")
        machine.run(product.product_q8_0(1, 2, ahead, False), (1, 1), 64, y, w, s, q, d, 16, 16, 16)
        found.append(y)
    np.testing.assert_array_equal(found[0], found[1])


def test_one_non_finite_block_reaches_every_output(machine: Any) -> None:
    """Also where the weight is zero."""
    raw, (q, d) = weight(16, 256), activations(8, 256)
    raw[3, 2] = 0
    for bad in (np.nan, np.inf):
        d[2, 4] = bad
        q[2, 4] = 0  # as quantisation leaves it
        y = run(machine, raw, q, d, 16, 256)
        assert not np.isfinite(y[4]).any() and np.isfinite(np.delete(y, 4, 0)).all()


def test_extremes_do_not_overflow_on_the_way(machine: Any) -> None:
    """The greatest dot product of a block, and the greatest scale of a weight."""
    raw = weight(16, 128)
    raw[0, :, 2:], raw[1, :, 2:] = 0x80, 0x7F
    raw[:, :, :2] = np.array(65504, "<f2").reshape(1).view(np.uint8)
    q, d = activations(8, 128)
    q[:], d[:] = 127, 1e27
    y = run(machine, raw, q, d, 16, 128)
    np.testing.assert_allclose(y[:, 0], 4 * 32 * -128 * 127 * 65504.0 * 1e27, rtol=1e-6)
    np.testing.assert_array_equal(y, product.product_ref(raw, q, d, n_out=16, n_in=128))


def test_a_product_of_floats_is_close_to_them(machine: Any) -> None:
    """From f32 to f32: both quantisations together are within a percent."""
    r = np.random.default_rng(1)
    x, w = (r.standard_normal((n, 256)).astype("f4") for n in (8, 16))
    raw = quantize(w, Quant.Q8_0).data
    q, d = np.empty((8, 8, 32), "i1"), np.empty((8, 8), "f4")
    activation.quantise(machine, q, d, x, n_rows=8, n=256)
    y = run(machine, raw, q, d, 16, 256)
    wanted = x.astype("f8") @ w.T.astype("f8")
    assert np.sqrt(np.mean((y - wanted) ** 2)) < 0.01 * np.sqrt(np.mean(wanted**2))


def test_the_code_for_inputs_that_128_does_not_divide() -> None:
    kernel, _ = product.kernel_for(96, 64, 32)
    check_code([kernel], 512)  # sixteen warps on an SM


def test_the_code_that_packs() -> None:
    check_code([product.repack_q8_0], product.REPACK_BLOCK)
