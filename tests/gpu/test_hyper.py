"""Hyper-connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ds4d.gpu.kernels import hyper
from tests.gpu.machines import check_code

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

EPS, RMS_EPS, ITERATIONS = 1e-6, 1e-6, 20
SIZES = [(4, 64), (2, 128), (4, 256), (1, 128)]  # (streams, width)


@dataclass
class Case:
    streams: int
    width: int
    rows: int
    X: Array
    y: Array
    post: Array
    M: Array
    fn: Array
    scale: Array
    base: Array
    w: Array
    pos: Array

    @property
    def Z(self) -> int:
        return len(self.fn)

    @property
    def slices(self) -> int:
        return hyper.n_slices(self.streams, self.width)


def case(
    streams: int,
    width: int,
    rows: int = 8,
    *,
    head: bool = False,
    half: bool = False,
    seed: int = 0,
) -> Case:
    r = np.random.default_rng([streams, width, rows, seed])

    def normal(*shape: int) -> Array:
        return r.standard_normal(shape).astype("f4")

    Z = streams if head else hyper.outputs(streams)
    fn = normal(Z, streams * width) / np.float32((streams * width) ** 0.5)
    return Case(
        streams, width, rows,
        X=normal(rows, streams, width) * 3, y=normal(rows, width),
        post=normal(rows, streams), M=normal(rows, streams, streams),
        fn=fn.astype("f2" if half else "f4"), scale=normal(3), base=normal(Z), w=normal(width),
        pos=np.arange(rows, dtype="i4"),
    )  # fmt: skip


def words(fn: Array, streams: int) -> Array:
    return hyper.pack(fn, streams).reshape(-1).view("u4")


def post(machine: Any, c: Case, seed: int = 0) -> Array:
    X = c.X.copy()
    machine.run(
        hyper.post_kernel(c.streams), c.slices, hyper.BLOCK,
        X, c.y, c.post, c.M, c.pos, c.rows, c.width, seed=seed,
    )  # fmt: skip
    return X


def product(machine: Any, c: Case, X: Array, seed: int = 0) -> Array:
    part = np.full((c.slices, c.rows, hyper.PART), 7, "f4")
    machine.run(
        hyper.product_kernel(c.streams, c.Z, c.rows, c.fn.dtype == np.float16),
        c.slices, hyper.BLOCK, part, words(c.fn, c.streams), X, c.pos, c.width, seed=seed,
    )  # fmt: skip
    return part


def post_product(machine: Any, c: Case, seed: int = 0) -> tuple[Array, Array]:
    X, part = c.X.copy(), np.full((c.slices, c.rows, hyper.PART), 7, "f4")
    machine.run(
        hyper.post_product_kernel(c.streams, c.Z, c.rows, c.fn.dtype == np.float16),
        c.slices, hyper.BLOCK,
        part, words(c.fn, c.streams), X, c.y, c.post, c.M, c.pos, c.width, seed=seed,
    )  # fmt: skip
    return X, part


def pre(
    machine: Any, c: Case, part: Array, *, maps: bool = True, seed: int = 0
) -> tuple[Array, Array, Array]:
    h, after = np.full((c.rows, c.width), 7, "f4"), np.full((c.rows, c.streams), 7, "f4")
    M = np.full((c.rows, c.streams, c.streams), 7, "f4")
    machine.run(
        hyper.pre_kernel(c.streams, c.width), (c.rows, 2 if maps else 1), hyper.ROW_BLOCK,
        h, after, M, part, c.X, c.w, c.scale, c.base, c.pos, c.rows, EPS, RMS_EPS, ITERATIONS,
        seed=seed,
    )  # fmt: skip
    return h, after, M


def parts_of(c: Case) -> Array:
    """`part` by NumPy: what a slice adds to fn vec(X) and to the sum of squares."""
    flat = c.X.reshape(c.rows, c.streams, c.slices, -1).transpose(2, 0, 1, 3)
    flat = flat.reshape(c.slices, c.rows, hyper.SLICE).astype("f8")
    part = np.zeros((c.slices, c.rows, hyper.PART), "f4")
    fn = hyper.pack(c.fn, c.streams).astype("f8")
    part[:, :, : c.Z] = np.einsum("srk,szk->srz", flat, fn)
    part[:, :, c.Z] = (flat * flat).sum(-1)
    return part


# -- the layout ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("streams", "width"), [*SIZES, (4, 4096)])
def test_unpacking_gives_the_files_bytes_back(streams: int, width: int, dtype: Any) -> None:
    size = streams * width * np.dtype(dtype).itemsize
    fn = np.random.default_rng(0).integers(0, 256, (hyper.outputs(streams), size), "u1")
    packed = hyper.pack(fn.view(dtype), streams)
    assert packed.nbytes == fn.nbytes
    np.testing.assert_array_equal(hyper.unpack(packed, streams).view("u1"), fn)


# -- slices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("streams", "width", "rows"), [(4, 64, 16), (2, 128, 8), (1, 128, 8)])
def test_streams_are_mixed_over_their_first_index(
    machine: Any, streams: int, width: int, rows: int
) -> None:
    c = case(streams, width, rows)
    want = hyper.hyper_post_ref(c.X, c.y, c.post, c.M)
    np.testing.assert_allclose(post(machine, c), want, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize(("half", "head"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("streams", "width"), [(4, 64), (2, 128), (1, 128)])
def test_parts_are_each_slices_share(
    machine: Any, streams: int, width: int, half: bool, head: bool
) -> None:
    c = case(streams, width, head=head, half=half)
    part, want = product(machine, c, c.X), parts_of(c)
    used = c.Z + 1
    np.testing.assert_allclose(part[:, :, :used], want[:, :, :used], rtol=1e-6, atol=1e-5)
    assert (part[:, :, used:] == 7).all()


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("streams", "width"), SIZES[:2])
def test_fused_is_one_by_one(machine: Any, streams: int, width: int, head: bool) -> None:
    c = case(streams, width, 16, head=head, half=streams == 4)
    c.pos[[3, 10, 11, 14, 15]] = -1
    X, part = post_product(machine, c, seed=1)
    want = post(machine, c, seed=2)
    np.testing.assert_array_equal(X, want)
    np.testing.assert_array_equal(part, product(machine, c, want, seed=3))


def test_a_row_alone_has_the_bits_it_has_among_others(machine: Any) -> None:
    """Through all of it, at another place of a larger pass."""
    c = case(4, 64, 16)
    c.pos[[*range(2, 11), 14, 15]] = -1
    X, part = post_product(machine, c)
    c.X = X
    among = pre(machine, c, part)
    for row in (0, 13):
        alone = case(4, 64, 16)
        for name in ("X", "y", "post", "M"):
            of = np.full_like(getattr(alone, name)[:8], np.nan)
            of[5] = getattr(alone, name)[row]
            setattr(alone, name, of)
        alone.rows, alone.pos = 8, np.full(8, -1, "i4")
        alone.pos[5] = 40
        alone.X, part = post_product(machine, alone, seed=row)
        np.testing.assert_array_equal(alone.X[5], X[row])
        for got, want in zip(pre(machine, alone, part, seed=row), among, strict=True):
            np.testing.assert_array_equal(got[5], want[row])


def test_idle_rows_keep_what_they_have(machine: Any) -> None:
    c = case(4, 64, 16)
    c.pos[[0, 2, 3, 4, 5, 7]] = -1
    c.pos[8:] = -1
    idle = c.pos < 0
    c.X[idle] = np.nan
    before = c.X.copy()
    X, part = post_product(machine, c)
    np.testing.assert_array_equal(X[idle], before[idle])
    assert (part[:, idle] == 7).all()
    assert np.isfinite(X[~idle]).all()
    c.X = X
    for out in pre(machine, c, part):
        assert (out[idle] == 7).all()
        assert np.isfinite(out[~idle]).all()


# -- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("streams", "width"), [*SIZES, (4, 2176)])
def test_rows_are_mixed_and_normalised(machine: Any, streams: int, width: int) -> None:
    """2176: some threads have a second group of channels, others have not."""
    c = case(streams, width, 8)
    c.pos[2:] = -1
    h, after, M = (a[:2] for a in pre(machine, c, parts_of(c)))
    want_h, want_post, want_M = hyper.hyper_pre_ref(
        c.X, c.fn, c.scale, c.base, c.w,
        iterations=ITERATIONS, hyper_eps=EPS, rms_eps=RMS_EPS,
    )  # fmt: skip
    np.testing.assert_allclose(after, want_post[:2], rtol=3e-6)
    np.testing.assert_allclose(M, want_M[:2], rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(h, want_h[:2], rtol=1e-5, atol=1e-5)


def test_the_heads_rows_are_mixed_and_normalised(machine: Any) -> None:
    c = case(4, 256, 8, head=True)
    c.pos[1:7] = -1
    h = np.full((8, 256), 7, "f4")
    machine.run(
        hyper.head_kernel(4, 256), 8, hyper.ROW_BLOCK,
        h, parts_of(c), c.X, c.w, c.scale, c.base, c.pos, 8, EPS, RMS_EPS,
    )  # fmt: skip
    want = hyper.hyper_pre_ref(
        c.X, c.fn, c.scale, c.base, c.w, iterations=0, hyper_eps=EPS, rms_eps=RMS_EPS
    )
    np.testing.assert_allclose(h[[0, 7]], want[[0, 7]], rtol=1e-5, atol=1e-5)
    assert (h[1:7] == 7).all()


def test_maps_are_the_same_beside_h_and_apart(machine: Any) -> None:
    c = case(4, 64, 8)
    c.pos[:6] = -1
    part = parts_of(c)
    h, after, M = pre(machine, c, part)
    alone, none, no_M = pre(machine, c, part, maps=False)
    np.testing.assert_array_equal(alone, h)
    assert (none == 7).all()
    assert (no_M == 7).all()
    machine.run(
        hyper.maps_kernel(4, 64), 8, hyper.ROW_BLOCK,
        none, no_M, part, c.scale, c.base, c.pos, 8, EPS, RMS_EPS, ITERATIONS,
    )  # fmt: skip
    np.testing.assert_array_equal(none, after)
    np.testing.assert_array_equal(no_M, M)


def test_sinkhorn_gives_the_specifications_matrix(machine: Any) -> None:
    """spec/model.md 4.3: fn = 0, so that the logits are the base."""
    c = case(4, 64, 8)
    c.pos[1:] = -1
    c.fn[:] = 0
    c.base[8:] = [0, 1, 2, 3, 1, 0, -1, 2, 0.5, 0.5, 0.5, 0.5, -2, 3, 0, 1]
    _, after, M = pre(machine, c, parts_of(c))
    want = [
        [0.071825, 0.057346, 0.466908, 0.403920],
        [0.502960, 0.054348, 0.059887, 0.382804],
        [0.407579, 0.119716, 0.358584, 0.114120],
        [0.017634, 0.768589, 0.114620, 0.099156],
    ]
    np.testing.assert_allclose(M[0], want, atol=2e-6)
    np.testing.assert_allclose(after[0], 2 / (1 + np.exp(-c.base[4:8])), rtol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-18, 1e15])
def test_streams_of_any_size_stay_finite(machine: Any, size: float) -> None:
    """All zeros too; their squares reach the ends of f32."""
    c = case(4, 64, 8)
    c.pos[2:] = -1
    c.X *= np.float32(size)
    h, after, M = pre(machine, c, product(machine, c, c.X))
    for out in (h, after, M):
        assert np.isfinite(out[:2]).all()
    np.testing.assert_allclose(M[:2].sum(1), 1, atol=1e-5)
    if size == 0:
        assert not h[:2].any()


def test_great_logits_do_not_overflow(machine: Any) -> None:
    c = case(4, 64, 8)
    c.pos[1:] = -1
    c.fn[:] = 0
    c.base[:] = np.linspace(-300, 300, 24)
    _, after, M = pre(machine, c, parts_of(c))
    assert np.isfinite(M[0]).all()
    assert (M[0] >= 0).all()
    np.testing.assert_allclose(after[0], 0, atol=1e-6)


def test_a_nan_stays_in_its_row(machine: Any) -> None:
    c = case(4, 64, 8)
    c.pos[3:] = -1
    c.X[1, 2, 40] = np.nan
    X, part = post_product(machine, c)
    assert np.isnan(X[1]).any()
    assert np.isfinite(X[[0, 2]]).all()
    c.X = X
    for out in pre(machine, c, part):
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


# -- code ------------------------------------------------------------------------------------


def test_the_code_that_no_pass_uses() -> None:
    check_code([hyper.post_kernel(4), hyper.product_kernel(4, 24, 8, False)], hyper.BLOCK)
    check_code([hyper.maps_kernel(4, 4096)], hyper.ROW_BLOCK)
