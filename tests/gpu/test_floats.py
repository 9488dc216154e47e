"""Products with F16 and F32 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ds4d.gpu.kernels import floats

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

HALF = [np.float16, np.float32]


def random_weight(n_out: int, n_in: int, dtype: Any, seed: int = 0) -> Array:
    r = np.random.default_rng([n_out, n_in, seed])
    return r.standard_normal((n_out, n_in)).astype(dtype)


def run(
    machine: Any,
    w: Array,
    x: Array,
    n_rows: int,
    *,
    splits: int,
    warps: int,
    seed: int = 0,
    launches: int = 1,
) -> Array:
    """y [R, n_out], cut to the outputs that the weight has; 7 where nothing was written."""
    n_out, n_in = w.shape
    tiles, above = floats.padded(n_out) // floats.TILE, len(x) // floats.ROWS
    y = np.full((len(x), floats.padded(n_out)), 7, "f4")
    part = np.full(max(1, splits * tiles * above * floats.SUMS), np.nan, "f4")
    arrived = np.zeros(max(1, tiles * above), "u4")
    kernel = floats.product_kernel(n_in, splits, warps, w.dtype == np.float16)
    words, count = floats.pack(w), np.array([n_rows], "i4")
    for _ in range(launches):
        machine.run(
            kernel, (above, tiles, splits), 32 * warps,
            y, words, x, count, part, arrived, y.shape[1], tiles, seed=seed,
        )  # fmt: skip
    assert not arrived.any(), "a counter did not come back to zero"
    return y[:, :n_out]


# -- the layout ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n_out", "n_in"), [(16, 64), (24, 256), (64, 128), (100, 192)])
def test_unpacking_gives_the_files_bytes_back(n_out: int, n_in: int, dtype: Any) -> None:
    w = np.random.default_rng(0).integers(0, 256, (n_out, n_in * np.dtype(dtype).itemsize), "u1")
    words = floats.pack(w.view(dtype))
    assert words.nbytes == floats.padded(n_out) * w.shape[1]
    np.testing.assert_array_equal(floats.unpack(words, n_out, n_in, dtype).view("u1"), w)


@pytest.mark.parametrize("dtype", HALF)
def test_a_lanes_words_are_where_the_docstring_says(dtype: Any) -> None:
    w = np.arange(32 * 128).reshape(32, 128).astype(dtype)  # f16 holds these only to 2048
    w = np.minimum(w, 2048).astype(dtype)
    packed = floats.pack(w).view(dtype)
    tile, step, u, o, j = 1, 1, 2, 3, 5
    lane = 8 * o + j
    got = []
    for i in range(2):
        if dtype == np.float16:
            at = (((tile * 2 + step) * 4 + u) * 32 + lane) * 8 + 4 * i
        else:
            at = ((((tile * 2 + step) * 4 + u) * 2 + i) * 32 + lane) * 4
        got += packed[at : at + 4].tolist()
    row = w[16 * tile + 4 * u + o, 64 * step :]
    assert got == row[[20, 21, 22, 23, 52, 53, 54, 55]].tolist()


def test_matrices_that_share_an_input_are_one_weight() -> None:
    a, b = random_weight(16, 64, "f2"), random_weight(8, 64, "f2", 1)
    both = floats.unpack(floats.pack(a, b), 24, 64, "f2")
    np.testing.assert_array_equal(both, np.concatenate([a, b]))


@pytest.mark.parametrize(
    ("n_out", "n_in"),
    [(2048, 4096), (1024, 4096), (2624, 4096), (576, 4096), (64, 4096), (256, 4096), (24, 16384),
     (128, 256), (8, 256), (16, 256), (24, 1024), (40, 192)],
)  # fmt: skip
def test_a_plan_covers_the_input(n_out: int, n_in: int) -> None:
    splits, warps = floats.plan(n_out, n_in)
    assert n_in % (floats.STEP * splits * warps) == 0
    if n_in == 4096:
        assert floats.padded(n_out) // 16 * splits >= floats.BLOCKS


# -- products --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("n_out", "n_in", "rows", "splits", "warps"),
    [
        (16, 64, 8, 1, 1),
        (24, 256, 8, 1, 2),
        (40, 192, 8, 1, 1),  # three steps of one warp
        (8, 256, 16, 4, 1),  # ds4-tiny's router
        (32, 512, 8, 2, 2),
        (16, 512, 24, 1, 4),
        (16, 2048, 8, 4, 8),  # half of Flash's router, one tile of its sixteen
    ],
)  # fmt: skip
def test_sums_are_those_of_the_reference(
    machine: Any, n_out: int, n_in: int, rows: int, splits: int, warps: int, dtype: Any
) -> None:
    w = random_weight(n_out, n_in, dtype)
    x = np.random.default_rng(1).standard_normal((rows, n_in)).astype("f4")
    real = 4 if n_in == 2048 else rows  # the emulator's time
    y = run(machine, w, x, real, splits=splits, warps=warps)[:real]
    x = x[:real]
    want = floats.product_ref(w, x)
    # Half a unit in the last place of a growing sum at each of its steps, which go both ways.
    size = np.abs(x).astype("f8") @ np.abs(w).astype("f8").T
    assert (np.abs(y - want) < 4e-7 * size).all(), np.max(np.abs(y - want) / size)


def order_ref(w: Array, x: Array, splits: int, warps: int) -> Array:
    """The sum in the order that the kernel's docstring names, [R, n_out] f32."""
    n_out, n_in = w.shape
    per_warp = n_in // (splits * warps * floats.STEP)
    cut_w = w.astype("f4").reshape(1, n_out, splits, warps, per_warp, 2, 8, 4)
    cut_x = x.reshape(len(x), 1, splits, warps, per_warp, 2, 8, 4)
    acc = np.zeros((len(x), n_out, splits, warps, 8), "f4")
    for step in range(per_warp):
        for i in range(2):
            for e in range(4):
                a, b = cut_w[..., step, i, :, e], cut_x[..., step, i, :, e]
                acc = (a.astype("f8") * b.astype("f8") + acc).astype("f4")
    for far in (4, 2, 1):
        acc = acc + acc[..., np.arange(8) ^ far]
    acc = acc[..., 0]
    over_warps = acc[..., 0]
    for k in range(1, warps):
        over_warps = over_warps + acc[..., k]
    total = over_warps[..., 0]
    for k in range(1, splits):
        total = total + over_warps[..., k]
    return total


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("splits", "warps"), [(1, 4), (4, 1), (2, 2), (1, 1)])
def test_the_order_of_a_sum_is_the_documented_one(
    machine: Any, splits: int, warps: int, dtype: Any
) -> None:
    w = random_weight(16, 512, dtype)
    x = np.random.default_rng(2).standard_normal((8, 512)).astype("f4")
    y = run(machine, w, x, 8, splits=splits, warps=warps, seed=3)
    np.testing.assert_array_equal(y, order_ref(w, x, splits, warps))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", HALF)
def test_a_row_alone_has_the_bits_it_has_among_others(
    machine: Any, splits: int, dtype: Any
) -> None:
    w = random_weight(16, 256, dtype)
    x = np.random.default_rng(4).standard_normal((16, 256)).astype("f4")
    among = run(machine, w, x, 16, splits=splits, warps=1, seed=5)
    for row in (0, 5, 13):
        alone = np.full((8, 256), np.nan, "f4")
        alone[0] = x[row]
        y = run(machine, w, alone, 1, splits=splits, warps=1, seed=row)
        np.testing.assert_array_equal(y[0], among[row])


@pytest.mark.parametrize("n_rows", [0, 1, 4, 5, 8, 9, 16])
@pytest.mark.parametrize("splits", [1, 2])
def test_only_real_rows_are_written(machine: Any, n_rows: int, splits: int) -> None:
    w = random_weight(16, 128, "f2")
    x = np.full((16, 128), np.nan, "f4")
    x[:n_rows] = np.random.default_rng(6).standard_normal((n_rows, 128))
    y = run(machine, w, x, n_rows, splits=splits, warps=1)
    want = floats.product_ref(w, x[:n_rows])
    np.testing.assert_allclose(y[:n_rows], want, rtol=1e-5, atol=1e-5)
    assert (y[n_rows:] == 7).all()


def test_a_second_launch_finds_the_counters_at_zero(machine: Any) -> None:
    w, x = random_weight(16, 256, "f4"), np.ones((8, 256), "f4")
    once = run(machine, w, x, 3, splits=4, warps=1)
    np.testing.assert_array_equal(run(machine, w, x, 3, splits=4, warps=1, launches=3), once)


@pytest.mark.parametrize("dtype", HALF)
def test_values_at_the_edges_of_f16_are_widened_exactly(machine: Any, dtype: Any) -> None:
    """Subnormals, the greatest, both zeros, and infinity: one input each."""
    values = np.array([2.0**-24, -(2.0**-14) + 2.0**-24, 65504, -0.0, 0.0, np.inf], dtype)
    w = np.zeros((16, 64), dtype)
    w[np.arange(6), np.arange(6) * 9] = values
    x = np.zeros((8, 64), "f4")
    x[0] = 1
    y = run(machine, w, x, 1, splits=1, warps=1)
    np.testing.assert_array_equal(y[0, :6], values.astype("f4"))


def test_a_nan_stays_in_its_row(machine: Any) -> None:
    w, x = random_weight(16, 64, "f2"), np.ones((8, 64), "f4")
    x[2, 17] = np.nan
    y = run(machine, w, x, 4, splits=1, warps=1)
    assert np.isnan(y[2]).all()
    assert np.isfinite(y[[0, 1, 3]]).all()
