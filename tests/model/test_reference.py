"""The reference forward: exact mode against transformers, rounded mode against its own rules."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import CASES, LENGTHS, VECTORS, Oracle, missing, random_ids, random_tensors, small

from ds4d.model import quants, rows
from ds4d.model.quants import Quant, Tensor
from ds4d.model.reference import Reference
from ds4d.model.reference.forward import attend, hyper_post, largest, rope, sinkhorn
from ds4d.model.reference.products import (
    integer_terms,
    part_of,
    quantize_activations,
    rounded_product,
)

FLASH = small(
    head_dim=512,
    rope_dim=64,
    index_dim=128,
    yarn_original_context=65536,
)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Geometry, weights, ids, and what transformers answered in float64, by prompt length."""
    g, seed = CASES[request.param].geometry, CASES[request.param].seed
    recorded = np.load(VECTORS / f"{request.param}.npz")
    ids = recorded["ids"].astype(np.int64)
    np.testing.assert_array_equal(ids, random_ids(g, seed, LENGTHS[-1]))
    return g, random_tensors(g, seed), ids, {n: recorded[f"logits_{n}"] for n in LENGTHS}


def in_chunks(ref, ids, chunks):
    """Logits [n, V] of a prefill cut into `chunks`, and the state behind it."""
    state, out, at = ref.new_state(), [], 0
    for n in chunks:
        out.append(ref.prefill(state, ids[at : at + n], all_logits=True))
        at += n
    assert at == len(ids)
    return np.concatenate(out), state


# -- exact mode, against transformers ------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-5), (np.float32, 2e-5)])
def test_logits_are_those_of_transformers_at_every_prompt_length(case, dtype, bound):
    g, tensors, ids, want = case
    ref = Reference(g, tensors, dtype=dtype, exact=True)
    for n in LENGTHS:
        got = ref.prefill(ref.new_state(), ids[:n], all_logits=True)
        assert got.dtype == dtype
        assert np.abs(got - want[n]).max() < bound
        assert (got.argmax(axis=1) == want[n].argmax(axis=1)).all()


@pytest.mark.parametrize("chunks", [[131, 37, 37, 37, 37, 21], [1, 2, 3, 122, 128, 44]])
def test_a_chunked_prefill_gives_the_logits_of_transformers(case, chunks):
    g, tensors, ids, want = case
    got, _ = in_chunks(Reference(g, tensors, dtype=np.float64, exact=True), ids, chunks)
    assert np.abs(got - want[300]).max() < 1e-5


@pytest.mark.parametrize(("prompt", "end"), [(1, 12), (120, 140), (127, 131), (130, 300)])
def test_decode_behind_a_prefill_gives_the_logits_of_transformers(case, prompt, end):
    g, tensors, ids, want = case
    ref = Reference(g, tensors, dtype=np.float64, exact=True)
    state = ref.new_state()
    got = [ref.prefill(state, ids[:prompt])]
    got += [ref.step(state, token) for token in ids[prompt:end]]
    assert state.n_tokens == end
    assert np.abs(np.stack(got) - want[300][prompt - 1 : end]).max() < 1e-5


def test_the_recorded_cases_select_clamp_and_use_the_bias():
    """A vector that a part of the model does not touch would test nothing."""

    def change(name, tensor=None, **sizes):
        g, seed = CASES[name].geometry, CASES[name].seed
        tensors, ids = random_tensors(g, seed), random_ids(g, seed, 300)
        before = Reference(g, tensors, exact=True)
        want = before.prefill(before.new_state(), ids, all_logits=True)
        if tensor:
            zeros = np.zeros_like(tensors[tensor].data)
            tensors[tensor] = replace(tensors[tensor], data=zeros)
        after = Reference(replace(g, **sizes), tensors, exact=True)
        difference = after.prefill(after.new_state(), ids, all_logits=True) - want
        return np.abs(difference).max(axis=1)  # [n]

    selection = change("selecting", index_top_k=512)
    assert selection[:35].max() == 0  # 8 rows are complete and visible up to position 34
    assert selection[35:].max() > 1e-2
    wide = (10.0,) * 5
    assert change("clamped", expert_clamp=wide).max() > 1e-2
    assert change("clamped", shared_clamp=wide).max() > 1e-2
    assert change("selecting", window=127)[:127].max() == 0
    assert change("selecting", window=127).max() > 1e-3
    for tensor in (
        "blk.2.exp_probs_b.bias",
        "blk.0.attn_sinks.weight",
        "blk.2.attn_compressor_ape.weight",
        "blk.1.attn_compressor_ape.weight",
        "blk.1.indexer_compressor_ape.weight",
        "blk.3.hc_attn_base.weight",
        "blk.4.hc_ffn_base.weight",
        "output_hc_base.weight",
    ):
        assert change("selecting", tensor).max() > 1e-3, tensor


@pytest.mark.oracle
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_transformers_still_answers_what_was_recorded(name, record_property):
    """And its own chunked prefill and decode agree with it; the errors in float32 on both sides
    are recorded as test properties."""
    g, seed = CASES[name].geometry, CASES[name].seed
    tensors, ids = random_tensors(g, seed), random_ids(g, seed, 300)
    recorded = np.load(VECTORS / f"{name}.npz")
    model = Oracle(g, tensors, "float64")
    ref = Reference(g, tensors, dtype=np.float64, exact=True)
    want = {n: model.logits(ids[:n]) for n in LENGTHS}
    for n in LENGTHS:
        assert np.abs(want[n] - recorded[f"logits_{n}"]).max() < 2e-6
        got = ref.prefill(ref.new_state(), ids[:n], all_logits=True)
        record_property(f"float64 n={n}", float(np.abs(got - want[n]).max()))
        assert np.abs(got - want[n]).max() < 1e-5
    for chunks in ([131, 37, 37, 37, 37, 21], [120] + [1] * 180):
        theirs = model.logits(ids, chunks)
        ours, _ = in_chunks(ref, ids, chunks)
        record_property(f"float64 chunks of {chunks[:2]}", float(np.abs(ours - theirs).max()))
        assert np.abs(ours - theirs).max() < 1e-5
    single, ref = Oracle(g, tensors, "float32"), Reference(g, tensors, exact=True)
    for n in LENGTHS:
        got = ref.prefill(ref.new_state(), ids[:n], all_logits=True)
        error = np.abs(got - single.logits(ids[:n])).max()
        record_property(f"float32 n={n}", float(error))
        assert error < 5e-5


# -- the parts, against the figures of the specification -----------------------------------------


def test_sinkhorn_gives_the_matrix_of_the_specification():
    comb = np.array([[0, 1, 2, 3], [1, 0, -1, 2], [0.5, 0.5, 0.5, 0.5], [-2, 3, 0, 1]])
    M = sinkhorn(comb[None], 20, 1e-6)[0]
    want = [
        [0.071825, 0.057346, 0.466908, 0.403920],
        [0.502960, 0.054348, 0.059887, 0.382804],
        [0.407579, 0.119716, 0.358584, 0.114120],
        [0.017634, 0.768589, 0.114620, 0.099156],
    ]
    np.testing.assert_allclose(M, want, atol=6e-7)
    np.testing.assert_allclose(M.sum(axis=0), 1, atol=2e-6)


def test_hyper_post_sums_over_the_source_stream():
    X = np.array([[[1.0], [10.0]]])  # one token, two streams of width 1
    M = np.array([[[0.0, 1.0], [0.5, 0.0]]])  # stream 0 goes to 1, half of stream 1 to 0
    post = np.array([[2.0, 3.0]])
    np.testing.assert_allclose(hyper_post(X, np.array([[100.0]]), post, M), [[[205], [301]]])


def test_yarn_frequencies_at_flash_sizes_are_those_of_the_specification():
    plain, yarn = FLASH.frequencies
    assert plain[0] == 1.0
    np.testing.assert_allclose(plain[16], 1e-2, rtol=1e-12)
    want = {
        0: 1.0,
        1: 0.687656,
        14: 5.286856e-3,
        15: 3.635539e-3,
        16: 2.265625e-3,
        20: 2.969778e-4,
        25: 5.372313e-6,
        31: 5.680529e-7,
    }
    for i, f in want.items():
        np.testing.assert_allclose(yarn[i], f, rtol=2e-6)


def test_rope_turns_interleaved_pairs_of_the_trailing_channels():
    x = np.zeros((1, 2, 6))
    x[0, :, 0:2] = 7  # not rotated
    x[0, 0, 2:4] = (1, 0)
    x[0, 1, 4:6] = (0, 1)
    y = rope(x, np.array([3]), (0.5, 0.25))
    np.testing.assert_array_equal(y[..., :2], x[..., :2])
    np.testing.assert_allclose(y[0, 0, 2:], [np.cos(1.5), np.sin(1.5), 0, 0])
    np.testing.assert_allclose(y[0, 1, 2:], [0, 0, -np.sin(0.75), np.cos(0.75)])


def test_the_inverse_of_rope_undoes_it_far_out():
    x = np.random.default_rng(0).standard_normal((3, 8, 512))
    pos = np.array([0, 65_537, 1_048_575])
    for frequencies in FLASH.frequencies:
        turned = rope(x, pos, frequencies)
        assert np.abs(turned - x)[1:, :, 448:].max() > 1
        np.testing.assert_allclose(rope(turned, pos, frequencies, inverse=True), x, atol=1e-12)


def test_a_sink_takes_its_share_and_adds_no_value():
    q, seen = np.zeros((2, 4)), np.ones((3, 4))
    sinks = np.array([np.log(3), -1e30])
    np.testing.assert_allclose(attend(q, seen, sinks), [[0.5] * 4, [1.0] * 4])


def test_ties_of_the_largest_go_to_the_lowest_index():
    assert largest(np.array([1.0, 2.0, 2.0, 0.0, 2.0]), 2).tolist() == [1, 2]
    assert largest(np.zeros(600), 3).tolist() == [0, 1, 2]


def test_an_empty_prefill_is_refused():
    case = CASES["selecting"]
    ref = Reference(case.geometry, random_tensors(case.geometry, case.seed))
    with pytest.raises(ValueError, match="no ids"):
        ref.prefill(ref.new_state(), [])


# -- rounded mode --------------------------------------------------------------------------------

TINY = small(
    n_layers=4,
    width=256,
    n_heads=4,
    head_dim=96,
    rope_dim=32,
    q_rank=64,
    out_groups=2,
    out_rank=32,
    ratios=(0, 4, 128, 4),
    n_experts=6,
    n_experts_used=2,
    expert_width=256,
    n_hash_layers=1,
    index_dim=64,
    index_top_k=16,
)
IN_BLOCKS = ("attn_q_a.", "attn_q_b.", "attn_kv.", "attn_output_", "exps", "shexp")


def random_blocks(name, quant, shape, seed):
    """A tensor of valid random blocks, its values about 1 / sqrt(inputs) in size."""
    rng = np.random.default_rng(seed)
    n = int(np.prod(shape)) // quant.block
    raw = rng.integers(0, 256, (n, quant.block_bytes), dtype=np.uint8)
    # mean square of a value over its scale d, roughly: int8, 2-bit, 4-bit and grid values
    spread = {Quant.Q8_0: 74, Quant.Q2_K: 16, Quant.Q4_K: 300, Quant.IQ2_XXS: 60}
    places = {Quant.Q8_0: [0], Quant.Q2_K: [80, 82], Quant.Q4_K: [0, 2], Quant.IQ2_XXS: [0]}
    if quant is Quant.MXFP4:
        raw[:, 0] = rng.integers(119, 123, n)
    for at in places.get(quant, []):
        d = rng.uniform(0.5, 1, n) * shape[-1] ** -0.5 / spread[quant]
        raw[:, at : at + 2] = d.astype("<f2").view(np.uint8).reshape(n, 2)
    return Tensor(name, quant, shape, raw.reshape(-1))


def quantised(g, seed):
    """`random_tensors`, the products of IN_BLOCKS as random blocks, of every kind there is."""
    tensors = random_tensors(g, seed)
    kinds = {"gate_exps": Quant.IQ2_XXS, "up_exps": Quant.IQ2_XXS, "down_exps": Quant.Q2_K}
    for i, (name, tensor) in enumerate(tensors.items()):
        if name == "output.weight" or any(part in name for part in IN_BLOCKS):
            quant = next((q for part, q in kinds.items() if part in name), Quant.Q8_0)
            if name.startswith("blk.3.") and "exps" in name:
                quant = Quant.MXFP4 if "down" in name else Quant.Q4_K
            tensors[name] = random_blocks(name, quant, tensor.shape, seed + i)
    return tensors


@pytest.fixture(scope="module")
def tiny():
    return Reference(TINY, quantised(TINY, 5)), random_ids(TINY, 5, 300)


BLOCK_TYPES = [q for q in Quant if q.activation_block]


@pytest.mark.parametrize("quant", BLOCK_TYPES)
def test_integer_terms_are_the_weight_exactly(quant):
    tensor = random_blocks("w", quant, (6, 512), 1)
    terms = integer_terms(tensor)
    assert len(terms) == (2 if quant in (Quant.Q2_K, Quant.Q4_K) else 1)
    total = sum(scale[..., None].astype(np.float64) * integers for scale, integers in terms)
    for scale, integers in terms:
        assert scale.dtype == np.float32
        np.testing.assert_array_equal(integers, np.rint(integers))
    np.testing.assert_allclose(
        total.swapaxes(0, 1).reshape(6, 512),
        quants.dequantize(tensor, np.float64),
        rtol=1e-12,
        atol=1e-15,
    )


@pytest.mark.parametrize("quant", BLOCK_TYPES)
def test_a_rounded_product_is_the_product_of_what_both_sides_round_to(quant):
    tensor = random_blocks("w", quant, (6, 512), 2)
    w = quants.dequantize(tensor, np.float64)
    x = np.random.default_rng(3).standard_normal((5, 512)).astype(np.float32)
    q, d = quantize_activations(x, quant.activation_block)
    want = (q.astype(np.float64) * d[..., None]).reshape(5, 512) @ w.T
    got = rounded_product(integer_terms(tensor), x, quant.activation_block)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max())
    assert 1e-4 < np.abs(got - x @ w.T).max() / np.abs(want).max() < 5e-2


def test_activation_blocks_round_ties_to_even_and_keep_zero_blocks():
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = (127, 0.5, 1.5, -2.5)
    q, d = quantize_activations(x, 32)
    assert q[0, 0, :4].tolist() == [127, 0, 2, -2]
    assert d.tolist() == [[1, 0]]
    assert not q[0, 1].any()


def test_parts_of_a_tensor_are_its_experts_in_order():
    tensor = random_blocks("w", Quant.Q8_0, (3, 4, 64), 4)
    whole = quants.dequantize(tensor, np.float64)
    for e in range(3):
        np.testing.assert_array_equal(
            quants.dequantize(part_of(tensor, (e, 3)), np.float64), whole[e]
        )


def test_rounded_prefill_is_bit_equal_however_it_is_cut(tiny):
    ref, ids = tiny
    ids = ids[:150]  # beyond one ratio-128 window; the indexer selects from position 67 on
    want, end = in_chunks(ref, ids, [150])
    for chunks in ([1] * 150, [5, 123, 3, 19], [128, 22]):
        got, state = in_chunks(ref, ids, chunks)
        np.testing.assert_array_equal(got, want)
        for layer, (one, other) in enumerate(zip(state.layers, end.layers, strict=True)):
            assert_same(one, other, TINY.ratios[layer], 150)


def assert_same(one, other, ratio, n):
    """Bit-equal: the canonical bytes of every row, and the partial states as f32."""
    kinds = [("ring", min(n, 128))]
    if ratio:
        kinds.append(("compressed", n // ratio))
    if ratio == 4:
        kinds.append(("index", n // ratio))
    for kind, count in kinds:
        planes = (getattr(s, kind).planes(range(count)) for s in (one, other))
        for a, b in zip(*planes, strict=True):
            np.testing.assert_array_equal(a, b)
    for kind in ("partial", "index_partial"):
        a, b = getattr(one, kind), getattr(other, kind)
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.gates, b.gates)


def test_cached_rows_are_what_their_bytes_decode_to(tiny):
    ref, ids = tiny
    _, state = in_chunks(ref, ids[:40], [40])
    own = state.layers[1]
    for cached, decode, n in (
        (own.ring, rows.decode_row, 40),
        (own.compressed, rows.decode_row, 10),
        (own.index, rows.decode_index_row, 10),
    ):
        np.testing.assert_array_equal(decode(cached.planes(range(n))), cached.values[:n])


def test_a_copied_state_is_another_timeline(tiny):
    ref, ids = tiny
    state = ref.new_state()
    ref.prefill(state, ids[:30])
    fork = state.copy()
    ref.prefill(fork, ids[100:140])
    want = ref.step(state, 7)
    again = ref.new_state()
    ref.prefill(again, ids[:30])
    np.testing.assert_array_equal(ref.step(again, 7), want)
    assert (state.n_tokens, fork.n_tokens) == (31, 70)


def test_layers_compose_from_their_entry_points(tiny):
    ref, ids = tiny
    ids = ids[:20]
    state, parts = ref.new_state(), ref.new_state()
    want = ref.prefill(state, ids, all_logits=True)
    X = ref.embed(ids)
    for layer in range(TINY.n_layers):
        for kind in ("attn", "ffn"):
            x, post, M = ref.hyper_pre(layer, kind, X)
            h = ref.rms(x, f"blk.{layer}.{kind}_norm.weight")
            y = ref.attention(layer, h, parts, 0) if kind == "attn" else ref.moe(layer, h, ids)
            X = hyper_post(X, y, post, M)
    np.testing.assert_array_equal(ref.head(X), want)


def test_a_layer_run_at_a_later_position_needs_only_its_own_state(tiny):
    """Forced inputs: layer 3 alone, from 130 on, behind rows that were pushed by it alone."""
    ref, _ = tiny
    h = np.random.default_rng(9).standard_normal((140, 256)).astype(np.float32)
    want = ref.attention(3, h, ref.new_state(), 0)
    state = ref.new_state()
    ref.attention(3, h[:130], state, 0)
    np.testing.assert_array_equal(ref.attention(3, h[130:], state, 130), want[130:])


def test_rounding_costs_a_few_percent_of_a_layers_output(tiny):
    """Free-running comparison would mislead (spec/model.md 9.3), so each part gets forced input."""
    ref, ids = tiny
    exact = Reference(TINY, ref.tensors, exact=True)
    h = np.random.default_rng(8).standard_normal((60, 256)).astype(np.float32)
    for layer in range(TINY.n_layers):
        a = ref.attention(layer, h, ref.new_state(), 0)
        b = exact.attention(layer, h, exact.new_state(), 0)
        assert 1e-3 < np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < 0.08
        a, b = ref.moe(layer, h, ids[:60]), exact.moe(layer, h, ids[:60])
        assert 1e-3 < np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)) < 0.05


def test_experts_chosen_by_table_ignore_the_bias_and_sort_by_id(tiny):
    ref, ids = tiny
    h = np.random.default_rng(8).standard_normal((60, 256)).astype(np.float32)
    table = ref.tensors["blk.0.ffn_gate_tid2eid.weight"]
    table = table.data.view(np.int32).reshape(table.shape)
    chosen, weights = ref.router(0, h, ids[:60])
    np.testing.assert_array_equal(chosen, np.sort(table[ids[:60]], axis=1))
    np.testing.assert_allclose(weights.sum(axis=1), 1.5, rtol=1e-6)
    chosen, weights = ref.router(1, h, ids[:60])
    assert (np.diff(chosen, axis=1) > 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1.5, rtol=1e-6)


def test_a_model_may_have_a_single_expert():
    one = {"n_experts": 1, "n_experts_used": 1, "expert_clamp": (10.0,), "shared_clamp": (10.0,)}
    g = replace(TINY, n_layers=1, ratios=(0,), n_hash_layers=0, **one)
    ref = Reference(g, random_tensors(g, 6), exact=True)
    h = np.random.default_rng(8).standard_normal((4, 256)).astype(np.float32)
    routed = ref.expert("blk.0.", "exps", h, g.expert_scale, 10.0, (0, 1))
    shared = ref.expert("blk.0.", "shexp", h, 1.0, 10.0)
    np.testing.assert_allclose(ref.moe(0, h, np.arange(4)), routed + shared, rtol=1e-6, atol=1e-6)


def test_an_expert_named_twice_by_the_table_counts_twice():
    g = replace(TINY, n_layers=1, ratios=(0,), expert_clamp=(10.0,), shared_clamp=(10.0,))
    tensors = random_tensors(g, 6)
    name = "blk.0.ffn_gate_tid2eid.weight"
    twice = np.full(tensors[name].shape, 3, np.int32)
    tensors[name] = replace(tensors[name], data=twice.reshape(-1).view(np.uint8))
    ref = Reference(g, tensors, exact=True)
    h = np.random.default_rng(8).standard_normal((4, 256)).astype(np.float32)
    both = ref.moe(0, h, np.arange(4))
    once = ref.expert("blk.0.", "exps", h, 1.5, 10.0, (3, 6))
    shared = ref.expert("blk.0.", "shexp", h, 1.0, 10.0)
    np.testing.assert_allclose(both, once + shared, rtol=1e-5, atol=1e-6)
