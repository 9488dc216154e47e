"""Each CPU kernel against its reference, over shapes that end inside a vector, a tile, a block."""

import ctypes
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ds4d.cpu import jit
from ds4d.cpu.arena import Activation
from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels import (
    activation,
    attention,
    compress,
    embed,
    hyper,
    index,
    moe,
    norm,
    product,
    rope,
    simd,
)
from ds4d.cpu.kernels import rows as cached
from ds4d.cpu.program import Program
from ds4d.cpu.state import table
from ds4d.cpu.weights import pack, packed_bytes
from ds4d.model import layout, quants, rows, synth
from ds4d.model.layout import RowFormat, index_format, kv_format, pad
from ds4d.model.quants import Quant, Tensor
from ds4d.model.reference.products import integer_terms, rounded_product

F32 = np.float32
QUANTS = list(product.TILES)


@pytest.fixture(scope="module")
def folder(request):
    return request.config.cache.mkdir("ds4d-kernels")


@pytest.fixture
def run(folder):
    """Call a kernel with arguments as `Program.add` takes them, as each of n threads in turn."""

    def call(kernel, n_threads=1, **args):
        program = Program()
        program.add(kernel, **args)
        jit.prepare(program.kernels(), folder)
        program.assemble()
        _, words, n, _ = (int(word) for word in program.table[0])
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (2 + n))(kernel.address)
        given = (ctypes.c_int64 * n).from_address(words)
        for tid in range(n_threads):
            function(tid, n_threads, *given)

    return call


def _step(n_rows: int, selecting: int = 0) -> np.ndarray:
    step = zeros((16,), np.int64)
    step[0], step[index.SELECTING] = n_rows, selecting
    return step


def _ints(values) -> np.ndarray:
    array = zeros((len(values),), np.int64)
    array[:] = values
    return array


def _floats(values) -> np.ndarray:
    array = zeros(np.shape(values), F32)
    array[...] = values
    return array


def _activation(x: np.ndarray, *blocks: int) -> Activation:
    made = Activation(len(x), x.shape[1], zeros)
    for block in blocks:
        made.want(block)
    made.x[:, : x.shape[1]] = x
    return made


def _int8(made: Activation, block: int):
    q, d, s = made._keep[3 * sorted(made.blocks).index(block) :][:3]
    return q, d, s


def _tensor(quant: Quant, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    if quant in (Quant.F32, Quant.F16, Quant.Q8_0, Quant.BF16):
        return quants.quantize(rng.standard_normal(shape, F32) * shape[-1] ** -0.5, quant, "w")
    return synth._random_blocks("w", quant, shape, rng)


def _relative(y: np.ndarray, ref: np.ndarray) -> float:
    return float(np.abs(y - ref).max() / np.abs(ref).max())


# -- compiling ------------------------------------------------------------------------------------


def test_any_change_to_any_kernel_source_gives_another_cache_folder(tmp_path, monkeypatch):
    """Numba alone would not notice that a callee in another file has changed."""
    (tmp_path / "kernels").mkdir()
    here = Path(jit.__file__)
    for path in (here, *(here.parent / "kernels").glob("*.py")):
        (tmp_path / path.relative_to(here.parent)).write_bytes(path.read_bytes())
    before = jit.source_key()
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    assert jit.source_key() == before
    with (tmp_path / "kernels" / "simd.py").open("a") as file:
        file.write("# changed\n")
    assert jit.source_key() != before


def test_kernels_that_no_start_has_used_for_a_month_are_removed(tmp_path):
    mine = jit.cache_folder(tmp_path)
    old, recent, other = (tmp_path / name for name in ("kernels-0", "kernels-1", "kv"))
    for folder in (old, recent, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"1")
    long_ago = time.time() - jit.UNUSED_S - 60
    for folder in (mine, old, other):
        os.utime(folder, (long_ago, long_ago))
    assert jit.cache_folder(tmp_path) == mine
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, "kernels-1", "kv"}
    assert mine.stat().st_mtime > long_ago + 60


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_damaged_file_in_the_cache_costs_time_and_nothing_else(tmp_path, suffix):
    def fresh():
        kernel = jit.kernel(embed.embed_f32.function)
        kernel.prepare(tmp_path)
        return kernel.address

    assert fresh()
    files = [path for path in tmp_path.rglob("*") if path.suffix == suffix]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:50])
    assert fresh()
    assert all(path.stat().st_size > 50 for path in files)


def test_a_kernel_that_was_not_prepared_says_so():
    with pytest.raises(RuntimeError, match="_never was not prepared"):
        _ = jit.kernel(_never).address


def test_arguments_go_by_the_names_of_the_kernels_parameters():
    program = Program()
    with pytest.raises(TypeError, match="_never: stride, width missing or unknown"):
        program.add(jit.kernel(_never), step=_step(1), stride=3)


def _never(tid: jit.N, n_threads: jit.N, step: jit.I8, width: jit.N):
    pass


# -- products -------------------------------------------------------------------------------------


def _product(run, weight, x: Activation, n_rows: int, n_threads: int = 1) -> np.ndarray:
    run(activation.quantise, step=_step(n_rows), act=x.table, per_row=1)
    stored = pad(weight.n_out)
    out = zeros((n_rows, weight.groups * stored), F32)
    run(
        product.product, n_threads, step=_step(n_rows), weight=weight, out=out,
        acts=x.tables(weight.groups, 0), stride=out.shape[1], stored=stored,
        rows=_ints(range(n_rows)), when=0,
    )  # fmt: skip
    return out.reshape(n_rows, weight.groups, stored)[..., : weight.n_out].reshape(n_rows, -1)


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
@pytest.mark.parametrize(("n_out", "blocks"), [(16, 1), (40, 2), (23, 3)])
def test_a_product_is_its_reference(run, quant, n_out, blocks):
    rng = np.random.default_rng(n_out)
    n_in = blocks * 256 if quant not in (Quant.F32, Quant.F16) else 64 * blocks - 31
    tensor = _tensor(quant, (n_out, n_in), rng)
    x = rng.standard_normal((5, n_in)).astype(F32)
    y = _product(run, pack(tensor), _activation(x, *{quant.activation_block} - {0}), 5)
    if quant.activation_block:
        ref = rounded_product(integer_terms(tensor), x, quant.activation_block)
    else:
        ref = product.product_ref(quants.dequantize(tensor), x)
    assert _relative(y, ref) < 2e-6  # only the order of float sums differs


def test_the_q8_reference_beside_the_kernel_is_the_models_own():
    rng = np.random.default_rng(0)
    tensor = _tensor(Quant.Q8_0, (8, 64), rng)
    x = rng.standard_normal((3, 64)).astype(F32)
    raw = tensor.data.reshape(8, 2, 34)
    scale = raw[..., :2].copy().view("<f2")[..., 0].astype(F32)
    q, d = activation.quantise_ref(x, 32)
    y = product.product_q8_ref(scale, raw[..., 2:].view(np.int8), d, q.reshape(3, 2, 32))
    assert _relative(y, rounded_product(integer_terms(tensor), x, 32)) < 1e-6


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(run, quant):
    rng = np.random.default_rng(1)
    weight = pack(_tensor(quant, (32, 256), rng))
    x = rng.standard_normal((9, 256)).astype(F32)
    blocks = {quant.activation_block} - {0}
    together = _product(run, weight, _activation(x, *blocks), 9, n_threads=3)
    for r in range(9):
        alone = _product(run, weight, _activation(x[r : r + 1], *blocks), 1)
        assert alone.tobytes() == together[r].tobytes()


def test_groups_are_stored_apart_and_weights_counted_before_they_are_packed(run):
    rng = np.random.default_rng(2)
    tensor = _tensor(Quant.F16, (3 * 20, 48), rng)
    weight = pack(tensor, groups=3)
    assert weight.n_bytes == weight.data.nbytes == packed_bytes(tensor, groups=3)
    x = rng.standard_normal((2, 48)).astype(F32)
    ref = product.product_ref(quants.dequantize(tensor), x)
    assert _relative(_product(run, weight, _activation(x), 2), ref) < 1e-6


def test_the_portable_path_has_the_bits_of_the_fast_one(run, monkeypatch):
    rng = np.random.default_rng(3)
    weight = pack(_tensor(Quant.Q8_0, (16, 96), rng))
    x = _activation(rng.standard_normal((5, 96)).astype(F32) * 100, 32)
    fast = _product(run, weight, x, 5)
    monkeypatch.setattr(simd, "PORTABLE", True)
    portable = jit.Kernel(product.tile_q8_0.function, jit.TILE)
    portable.prepare(None)
    assert _product(run, replace(weight, tile=portable), x, 5).tobytes() == fast.tobytes()


# -- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 256])
def test_int8_blocks_are_the_rules_own_to_the_bit(run, block):
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((6, 512)) * 10.0 ** rng.integers(-6, 6, (6, 1))).astype(F32)
    x[2] = 0
    x[3] = np.round(x[3] / x[3].max() * 127) / 2  # ties
    made = _activation(x, block)
    run(activation.quantise, 2, step=_step(3), act=made.table, per_row=2)
    q, d, s = _int8(made, block)
    q_ref, d_ref = activation.quantise_ref(x, block)
    assert np.array_equal(q, q_ref)
    assert np.array_equal(d, d_ref)
    assert np.array_equal(s, -128 * q_ref.reshape(6, -1, block).astype(np.int32).sum(2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_not_lost_in_int8(run, bad):
    x = np.ones((1, 64), F32)
    x[0, 40] = bad
    weight = pack(_tensor(Quant.Q8_0, (16, 64), np.random.default_rng(5)))
    with np.errstate(invalid="ignore"):
        y = _product(run, weight, _activation(x, 32), 1)
    assert not np.isfinite(y).any()


# -- cached rows ----------------------------------------------------------------------------------


@jit.kernel
def _encode(
    tid: jit.N, n_threads: jit.N, form: jit.I8, block: jit.N, n: jit.N, x: jit.F4, width: jit.N
):
    for r in range(n):
        cached.encode_row(form, block, r, simd.at(x, r * width))


@jit.kernel
def _decode(
    tid: jit.N, n_threads: jit.N, form: jit.I8, block: jit.N, n: jit.N, x: jit.F4, width: jit.N
):
    for r in range(n):
        cached.decode_row(form, block, r, simd.at(x, r * width))


def _hard_rows(n: int, dim: int) -> np.ndarray:
    """All sizes, ties of both formats, zeros of both signs, and codes' own values."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-9, 5, (n, 1))
    x[0], x[1] = 0, -0.0
    x[2] = rng.choice([0.25, -0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -6], dim)
    x[3] = rng.choice(rows.E4M3_VALUES[np.isfinite(rows.E4M3_VALUES)], dim)
    x[4] = (1 + rng.integers(0, 16, dim) / 16) * 2.0 ** rng.integers(-8, 8, dim)
    return x.astype(F32)


@pytest.mark.parametrize("name", ["tiny", "mini", "micro", "flash"])
def test_rows_are_encoded_to_the_canonical_bytes_and_back(run, name):
    g, n = synth.geometry(name), 40
    form = kv_format(g, exact=False)
    x = _hard_rows(n, g.head_dim)
    block = zeros((form.block_bytes(n),), np.uint8)
    run(_encode, form=table(form, n), block=block, n=n, x=x.copy(), width=g.head_dim)
    codes, halves, scales = form.views(block, n)
    truth = rows.encode_row(g, x)
    if form.kind == layout.HALF:
        assert codes.tobytes() == truth.halves.tobytes()
    else:
        assert np.array_equal(codes, truth.codes)
        assert np.array_equal(scales[:, : form.n_scales], truth.scales)
        assert halves.tobytes() == truth.halves.tobytes()
    back = zeros((n, pad(g.head_dim)), F32)
    run(_decode, form=table(form, n), block=block, n=n, x=back, width=back.shape[1])
    assert np.array_equal(back[:, : g.head_dim], rows.decode_row(truth))


@pytest.mark.parametrize("name", ["tiny", "mini", "flash"])
def test_index_rows_are_encoded_to_the_canonical_bytes(run, name):
    g, n = synth.geometry(name), 40
    form = index_format(g, exact=False)
    x = _hard_rows(n, g.index_dim)
    block = zeros((form.block_bytes(n),), np.uint8)
    run(_encode, form=table(form, n), block=block, n=n, x=x.copy(), width=g.index_dim)
    codes, _, scales = form.views(block, n)
    truth = rows.encode_index_row(g, x)
    assert np.array_equal(codes, truth.codes)
    assert np.array_equal(scales[:, : form.n_scales], truth.scales)


# -- norms, angles, embedding, hyper-connections ---------------------------------------------------


@pytest.mark.parametrize("n", [16, 40, 256])
def test_rmsnorm_is_its_reference(run, n):
    rng = np.random.default_rng(7)
    x, w = zeros((4, pad(n)), F32), zeros((pad(n),), F32)
    x[:, :n], w[:n] = rng.standard_normal((4, n)), rng.standard_normal(n)
    out = Activation(4, n, zeros)
    stride = x.shape[1]
    run(norm.rmsnorm, 3, step=_step(4), x=x, stride=stride, w=w, act=out.table, n=n, eps=1e-6)
    assert _relative(out.x[:, :n], norm.rms_ref(x[:, :n], w[:n], 1e-6)) < 1e-6


def test_angles_are_right_a_million_positions_out(run):
    g = synth.geometry("flash")
    plain, yarn = (_floats(f) for f in g.frequencies)
    pos = _ints([0, 3, 127, 1_048_575])
    table = zeros((4, 4, 2, 32), F32)
    run(rope.angles, step=_step(4), pos=pos, plain=plain, yarn=yarn, pairs=32, turns=table)
    x = np.random.default_rng(8).standard_normal((4, 64)).astype(F32)
    for kind, p, f in ((0, pos, plain), (1, pos, yarn), (3, pos - 127, yarn)):
        at = np.arange(4) if kind < 3 else np.array([2, 3])
        u, v = x[at, 0::2].astype(np.float64), x[at, 1::2].astype(np.float64)
        cos, sin = table[at, kind].astype(np.float64).transpose(1, 0, 2)
        turned = np.stack([u * cos - v * sin, u * sin + v * cos], -1).reshape(len(at), 64)
        assert _relative(turned, rope.rope_ref(x[at], p[at], f)) < 1e-6


def _turn(run, pos, frequencies, turns):
    """Fill the table of angles, all sets with the same frequencies."""
    both = {"plain": frequencies, "yarn": frequencies, "pairs": len(frequencies)}
    run(rope.angles, step=_step(len(pos)), pos=pos, turns=turns, **both)


@pytest.mark.parametrize("quant", [Quant.F16, Quant.F32], ids=lambda q: q.name)
def test_every_stream_begins_as_the_embedding(run, quant):
    table = _tensor(quant, (50, 40), np.random.default_rng(9))
    values = quants.dequantize(table)
    X = zeros((3, 4 * 48), F32)
    tokens = _ints([7, 0, 49])
    kernel = embed.embed_f16 if quant is Quant.F16 else embed.embed_f32
    sizes = {"width": 40, "streams": 4, "stored": 48}
    run(kernel, step=_step(3), token=tokens, table=table.data, X=X, **sizes)
    X = X.reshape(3, 4, 48)
    assert np.array_equal(X[..., :40], embed.embed_ref(values, tokens, 4))
    assert not X[..., 40:].any()


COMB = [[0, 1, 2, 3], [1, 0, -1, 2], [0.5, 0.5, 0.5, 0.5], [-2, 3, 0, 1]]
MIXED = [
    [0.071825, 0.057346, 0.466908, 0.403920],
    [0.502960, 0.054348, 0.059887, 0.382804],
    [0.407579, 0.119716, 0.358584, 0.114120],
    [0.017634, 0.768589, 0.114620, 0.099156],
]


def _hyper(run, rng, streams: int, width: int, comb=None):
    """What `hyper_pre` makes of random streams: X, z and h, post, M."""
    stored, n, mix = pad(width), 3, 2 * streams + streams**2
    X = zeros((n, streams, stored), F32)
    X[..., :width] = rng.standard_normal((n, streams, width))
    root = np.sqrt((X.astype(np.float64) ** 2).reshape(n, -1).sum(1) / (streams * width) + 1e-6)
    z = zeros((n, pad(mix)), F32)
    z[:, :mix] = rng.standard_normal((n, mix)) * root[:, None]
    scale, base = _floats([0.5, 0.7, 0.9]), _floats(rng.standard_normal(mix))
    if comb is not None:
        z[:, 2 * streams : mix], base[2 * streams :], scale[2] = 0, np.ravel(comb), 1
    w = _floats(np.pad(rng.standard_normal(width), (0, stored - width)))
    h = Activation(n, width, zeros)
    post, M = zeros((n, streams), F32), zeros((n, streams * streams), F32)
    run(
        hyper.hyper_pre, 2, step=_step(n), X=X, n=streams, width=width, stored=stored, z=z,
        z_stride=z.shape[1], scale=scale, base=base, hyper_eps=1e-6, rms_eps=1e-6, w=w,
        act=h.table, iterations=20, post=post, M=M,
    )  # fmt: skip
    t = z[:, :mix] / root[:, None]
    return X, t, scale, base, w, h, post, M.reshape(n, streams, streams)


@pytest.mark.parametrize(("streams", "width"), [(4, 64), (4, 40), (3, 48), (1, 16)])
def test_hyper_pre_is_its_reference(run, streams, width):
    rng = np.random.default_rng(10)
    X, t, scale, base, w, h, post, M = _hyper(run, rng, streams, width)
    n = streams
    pre = 1 / (1 + np.exp(-(t[:, :n] * scale[0] + base[:n]))) + 1e-6
    assert _relative(post, 2 / (1 + np.exp(-(t[:, n : 2 * n] * scale[1] + base[n : 2 * n])))) < 2e-6
    x = (pre[..., None] * X[..., :width]).sum(1)
    assert _relative(h.x[:, :width], norm.rms_ref(x, w[:width], 1e-6)) < 2e-6
    for r in range(len(X)):
        comb = (t[r, 2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
        assert np.abs(M[r] - hyper.sinkhorn_ref(comb, 20, 1e-6)).max() < 2e-6


def test_sinkhorn_gives_the_published_matrix(run):
    *_, M = _hyper(run, np.random.default_rng(11), 4, 64, comb=COMB)
    assert np.abs(M[0] - MIXED).max() < 1e-6


@pytest.mark.parametrize(("streams", "width"), [(4, 64), (3, 40)])
def test_hyper_post_sums_over_the_source_stream(run, streams, width):
    rng = np.random.default_rng(12)
    stored, n = pad(width), 3
    X, y = zeros((n, streams, stored), F32), zeros((n, stored), F32)
    X[..., :width], y[:, :width] = rng.random((n, streams, width)), rng.random((n, width))
    post, M = _floats(rng.random((n, streams))), _floats(rng.random((n, streams, streams)))
    ref = post[..., None] * y[:, None] + np.einsum("rjk,rjd->rkd", M, X)
    args = {"X": X, "n": streams, "stored": stored, "y": y, "post": post, "M": M}
    run(hyper.hyper_post, 2, step=_step(n), **args)
    assert _relative(X, ref) < 1e-6


# -- compressors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_a_compressed_row_is_the_pool_of_its_window(run, ratio, window):
    rng = np.random.default_rng(13)
    dim, pairs = 48, 4
    series = 2 if ratio == 4 else 1
    width, capacity = series * dim, (8 if ratio == 4 else 128) + 32
    rings = zeros((1, 2, capacity, width), F32)
    rings[...] = rng.standard_normal(rings.shape)
    w = _floats(rng.random(dim))
    form = RowFormat(layout.FLOAT, dim, 0, 0, 4 * dim, 0, 0)
    page = zeros((8, dim), F32)
    pages = _ints([page.ctypes.data])
    paged = table(form, 8, pages.ctypes.data, 1, 0, 8)
    p = window * ratio + ratio - 1
    turns = zeros((1, 4, 2, pairs), F32)
    frequencies = rng.random(pairs).astype(F32)
    _turn(run, _ints([p]), frequencies, turns)
    run(
        compress.compress_emit, step=_step(1), pos=_ints([p]), lane=_ints([0]), rings=rings,
        capacity=capacity, width=width, ratio=ratio, stored=dim, w=w, eps=1e-6, turns=turns,
        pairs=pairs, paged=paged,
    )  # fmt: skip
    now = np.arange(window * ratio, p + 1) % capacity
    before = (np.arange(window * ratio - ratio, window * ratio) % capacity) if window else now[:0]
    u, g = rings[0]
    if ratio == 4:
        u, g = (np.concatenate([a[before, :dim], a[now, dim:]]) for a in (u, g))
    else:
        u, g = u[now], g[now]
    row = norm.rms_ref(compress.pool_ref(u, g)[None], w, 1e-6)
    row = rope.rope_ref(row, np.array([window * ratio]), frequencies)
    assert _relative(page[window], row[0]) < 2e-6
    assert not np.delete(page, window, 0).any()


# -- indexer --------------------------------------------------------------------------------------


def _choose(run, pos, scores, k):
    chosen, counts = zeros((len(pos), k), np.int64), zeros((1, index.BINS), np.int64)
    run(
        index.index_choose, step=_step(len(pos), 1), pos=pos, scores=scores,
        stride=scores.shape[1], top_k=k, chosen=chosen, counts=counts,
    )  # fmt: skip
    return chosen


@pytest.mark.parametrize("name", ["tiny", "mini", "micro"])
def test_scores_and_choice_are_those_of_the_reference(run, name):
    """Rows of the reference encoder; exact here, as FP4 products are."""
    g = synth.geometry(name)
    rng = np.random.default_rng(14)
    n, k, heads, dim = 150, g.index_top_k, g.index_heads, g.index_dim
    stored, groups = pad(dim), pad(heads) // 16
    form = index_format(g, exact=False)
    page = zeros((form.block_bytes(n),), np.uint8)
    K = rng.standard_normal((n, dim)).astype(F32)
    planes = rows.encode_index_row(g, K)
    codes, _, scales = form.views(page, n)
    codes[...] = planes.codes if form.kind == layout.FP4 else planes.halves.view(np.uint8)
    scales[:, : form.n_scales] = planes.scales
    pairs = g.rope_dim // 2
    pos = _ints([4 * k - 1, 4 * (n - 3) - 1, 4 * n - 1])
    visible = [k, n - 3, n]
    q = zeros((3, heads * stored), F32)
    q.reshape(3, heads, stored)[..., :dim] = rng.standard_normal((3, heads, dim))
    w = zeros((3, pad(heads)), F32)
    w[:, :heads] = rng.standard_normal((3, heads))
    turns = zeros((3, 4, 2, pairs), F32)
    frequencies = _floats(g.frequencies[1])
    _turn(run, pos, frequencies, turns)
    turned = rope.rope_ref(q.reshape(3, heads, stored)[..., :dim], pos, frequencies).astype(F32)
    codes = zeros((3 * groups, dim, 16), F32)
    queries = {"codes": codes, "floats": codes, "groups": groups}
    queries["sums"] = zeros((3 * groups, 8, 16), np.int32)
    queries["scales"] = zeros((3 * groups, 8, 16), F32)
    run(
        index.index_query, 2, step=_step(3, 1), q=q, heads=heads, stored=stored, turns=turns,
        pairs=pairs, form=table(form, 1), **queries,
    )  # fmt: skip
    scores, factor = zeros((3, n), F32), (heads * dim) ** -0.5
    pages = _ints([page.ctypes.data])
    run(
        index.index_score, 2, step=_step(3, 1), pos=pos, lane=_ints([0, 0, 0]), w=w, **queries,
        paged=table(form, n, pages.ctypes.data, 1, 0, n), scores=scores, stride=n, top_k=k,
        factor=factor,
    )  # fmt: skip
    chosen = _choose(run, pos, scores, k)
    keys = rows.decode_index_row(planes)
    assert not scores[0].any()  # nothing to choose: not even scored
    for r in (1, 2):
        rounded = rows.round_index_query(g, turned[r])
        ref, rows_ref = index.index_ref(rounded, w[r, :heads] * factor, keys[: visible[r]], k)
        # A query on a rounding tie may fall to the other side: one head of many.
        assert np.abs(scores[r, : visible[r]] - ref).max() < 0.02 * np.abs(ref).max()
        assert len(set(chosen[r]) & set(rows_ref)) >= k - 1
        own = np.sort(np.argsort(-scores[r, : visible[r]], kind="stable")[:k])
        assert np.array_equal(chosen[r], own)


@pytest.mark.parametrize(("n", "k"), [(65, 64), (300, 1), (1000, 64), (70, 69)])
def test_the_choice_is_exact_and_ties_go_to_the_lowest_row(run, n, k):
    rng = np.random.default_rng(n)
    for scale in (0, 0.5, 1e-3, 1e30):
        x = rng.standard_normal(n) * scale
        scores = _floats(np.round(x * 2) / 2 if scale == 0.5 else x)[None]
        scores[0, rng.random(n) < 0.2] = -0.0
        chosen = _choose(run, _ints([4 * n - 1]), scores, k)
        assert np.array_equal(chosen[0], np.sort(np.argsort(-scores[0], kind="stable")[:k]))


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 6, 1])
@pytest.mark.parametrize(("dim", "exact"), [(96, False), (40, True)])
@pytest.mark.parametrize("p", [0, 70, 300])
def test_attention_is_its_reference(run, heads, dim, exact, p):
    rng = np.random.default_rng(15)
    g = synth.geometry("tiny")
    form = kv_format(g, exact=False)
    if exact:
        form = RowFormat(layout.FLOAT, dim, 0, 0, 4 * dim, 0, 0)
    stored, pairs, window, capacity, ratio, per_page, k = pad(dim), 4, 128, 160, 4, 64, 24
    frequencies = rng.random(pairs).astype(F32)
    turns = zeros((1, 4, 2, pairs), F32)
    _turn(run, _ints([p]), frequencies, turns)

    ring = zeros((form.block_bytes(capacity),), np.uint8)
    pages = zeros((2, pad(form.block_bytes(per_page), 64)), np.uint8)
    page_table = _ints([page.ctypes.data for page in pages])

    def fill(block, n_rows):
        x = rng.standard_normal((n_rows, dim)).astype(F32)
        run(_encode, form=table(form, n_rows), block=block, n=n_rows, x=x.copy(), width=dim)
        back = zeros((n_rows, stored), F32)
        run(_decode, form=table(form, n_rows), block=block, n=n_rows, x=back, width=stored)
        return back[:, :dim]

    raw = fill(ring, capacity)[np.arange(max(0, p - window + 1), p + 1) % capacity]
    compressed = np.concatenate([fill(page, per_page) for page in pages])
    visible = (p + 1) // ratio
    chosen = _ints(np.sort(rng.choice(max(visible, k), k, replace=False)))
    seen = compressed[chosen] if visible > k else compressed[:visible]

    q = zeros((1, heads * stored), F32)
    q.reshape(heads, stored)[:, :dim] = rng.standard_normal((heads, dim)) * 3
    sinks = _floats(rng.standard_normal(heads))
    o = zeros((1, pad(heads * dim)), F32)
    tiles = zeros((2, attention.TILE * stored), F32)
    run(
        attention.attend, 2, step=_step(1), pos=_ints([p]), lane=_ints([0]), q=q, heads=heads,
        stored=stored, eps=1e-6, turns=turns, pairs=pairs, turn_set=1, scale=dim**-0.5,
        sinks=sinks, window=window, ring=table(form, capacity, ring.ctypes.data, 0, capacity),
        ratio=ratio, paged=table(form, per_page, page_table.ctypes.data, 2, 0, per_page),
        chosen=chosen, top_k=k, o=o, o_stride=o.shape[1], tiles=tiles,
    )  # fmt: skip
    query = norm.rms_ref(q.reshape(heads, stored)[:, :dim], 1, 1e-6)
    query = rope.rope_ref(query[None], np.array([p]), frequencies)[0]
    ref = attention.attention_ref(query, np.concatenate([raw, seen]), sinks)
    ref = rope.rope_ref(ref[None], np.array([p]), frequencies, inverse=True)[0]
    assert _relative(o[0, : heads * dim].reshape(heads, dim), ref) < 5e-6


# -- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
def test_the_router_is_its_reference(run, biased):
    rng = np.random.default_rng(16)
    n, experts, k = 20, 12, 4
    z, bias = zeros((n, 16), F32), _floats(rng.standard_normal(experts))
    z[:, :experts] = rng.standard_normal((n, experts)) * 3
    z[0, :experts] = 0.5  # all equal
    z[1, :experts] = np.linspace(-50, 50, experts)
    expert, share = zeros((n, k), np.int64), zeros((n, k), F32)
    run(
        moe.route, 3, step=_step(n), z=z, stride=16, n_experts=experts, k=k, table=None,
        bias=bias if biased else None, token=_ints([0] * n), scale=1.5, expert=expert,
        weight=share,
    )  # fmt: skip
    for r in range(n):
        chosen, weights = moe.route_ref(z[r, :experts], bias * biased, k, 1.5)
        assert np.array_equal(expert[r], chosen)
        assert _relative(share[r], weights) < 1e-6


def test_a_hash_layer_takes_the_table_in_ascending_order(run):
    z = zeros((1, 16), F32)
    z[0, :12] = np.arange(12)
    table = np.array([[1, 2, 3], [9, 4, 7]], np.int32)
    expert, share = zeros((1, 3), np.int64), zeros((1, 3), F32)
    run(
        moe.route, step=_step(1), z=z, stride=16, n_experts=12, k=3, bias=None, table=table,
        token=_ints([1]), scale=2.5, expert=expert, weight=share,
    )  # fmt: skip
    assert expert[0].tolist() == [4, 7, 9]
    s = np.sqrt(np.logaddexp(0, z[0, [4, 7, 9]].astype(np.float64)))
    assert _relative(share[0], 2.5 * s / s.sum()) < 1e-6


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0, Quant.Q4_K], ids=lambda q: q.name)
def test_experts_add_up_in_ascending_order_with_the_shared_one_last(run, quant):
    rng = np.random.default_rng(17)
    n, experts, k, width, inner, clamp = 7, 6, 2, 256, 256, 1.0
    routed = [_tensor(quant, (experts, inner, width), rng) for _ in range(2)]
    routed.append(_tensor(quant, (experts, width, inner), rng))
    shared = [_tensor(Quant.Q8_0, (inner, width), rng) for _ in range(2)]
    shared.append(_tensor(Quant.Q8_0, (width, inner), rng))
    expert = _ints(range(2 * n)).reshape(n, k)
    expert[:] = np.sort([rng.choice(experts, k, replace=False) for _ in range(n)])
    share = _floats(rng.random((n, k)))
    blocks = {quant.activation_block, 32} - {0}
    x = rng.standard_normal((n, width)).astype(F32)
    h, mid = _activation(x, *blocks), Activation(n * (k + 1), inner, zeros)
    for block in blocks:
        mid.want(block)
    run(activation.quantise, step=_step(n), act=h.table, per_row=1)
    lists = zeros((2 * experts + 5 + 2 * 32 * (k + 1),), np.int64)
    common = {"lists": lists, "n_experts": experts, "k": k}
    run(moe.group, step=_step(n), expert=expert, **common)
    gate, up, down = (pack(t, groups=experts) for t in routed)
    shared_gate, shared_up, shared_down = (pack(t) for t in shared)
    run(
        moe.experts_up, 2, **common, weight=share, h=h.table, width=inner, mid=mid.table,
        clamp=clamp, shared_clamp=2.0, gate=gate, up=up, shared_gate=shared_gate,
        shared_up=shared_up,
    )  # fmt: skip
    run(activation.quantise, step=_step(n), act=mid.table, per_row=k + 1)
    y = zeros((n, width), F32)
    run(
        moe.experts_down, 2, step=_step(n), **common, mid=mid.table, y=y, stride=width, down=down,
        shared_down=shared_down,
    )  # fmt: skip

    def dot(tensor, part, x):
        shape = tensor.shape[-2:]
        data = tensor.data.reshape(-1, tensor.quant.n_bytes(shape))[part]
        one = Tensor("", tensor.quant, shape, data)
        if not tensor.quant.activation_block:
            return x @ quants.dequantize(one).T
        return rounded_product(integer_terms(one), x[None], tensor.quant.activation_block)[0]

    for r in range(n):
        ref = np.zeros(width, F32)
        runs = [(routed, e, w, clamp) for e, w in zip(expert[r], share[r], strict=True)]
        for three, e, w, c in (*runs, (shared, 0, 1, 2.0)):
            a, b = np.minimum(dot(three[0], e, x[r]), c), np.clip(dot(three[1], e, x[r]), -c, c)
            ref += dot(three[2], e, (w * (a / (1 + np.exp(-a)) * b)).astype(F32))
        # An int8 step of the middle may fall to the other side.
        assert _relative(y[r], ref) < 5e-3
        assert np.median(np.abs(y[r] - ref)) < 5e-4 * np.abs(ref).max()


def test_the_exponential_is_within_two_ulp_and_keeps_what_is_no_number(run):
    x = _floats(np.concatenate([np.linspace(-87, 88, 4078), [0, -0.0, np.nan, -np.inf] * 4]))
    x = _floats(x[: len(x) // 16 * 16])
    y = zeros(x.shape, F32)
    run(_exp, y=y, x=x, n=len(x))
    good = np.isfinite(x)
    ref = np.exp(x[good].astype(np.float64))
    assert np.abs(y[good] / ref - 1).max() < 2.4e-7
    assert np.isnan(y[np.isnan(x)]).all()
    assert (y[np.isneginf(x)] < 1e-37).all()


@jit.kernel
def _exp(tid: jit.N, n_threads: jit.N, y: jit.F4, x: jit.F4, n: jit.N):
    for k in range(0, n, 16):
        simd.store(y, k, simd.exp(simd.load(x, k)))
