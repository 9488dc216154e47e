"""The model as numbers: what follows from a geometry, and what does not fit together."""

from dataclasses import replace
from itertools import pairwise

import pytest

from ds4d.model import synth

FLASH = synth.geometry("flash")
MICRO = synth.geometry("micro")


@pytest.mark.parametrize("name", ["flash", "pro", "tiny", "micro", "mini"])
def test_named_geometries_fit_together(name):
    assert synth.geometry(name).check() is None


def test_a_name_that_is_unknown_is_refused():
    with pytest.raises(KeyError):
        synth.geometry("huge")


def test_flash_is_the_model_of_the_specification():
    """spec/model.md 1: 2 sliding, 21 ratio-4 and 20 ratio-128 layers, the last of ratio 4."""
    counts = {ratio: FLASH.ratios.count(ratio) for ratio in (0, 4, 128)}
    assert counts == {0: 2, 4: 21, 128: 20}
    assert FLASH.ratios[:5] == (0, 0, 4, 128, 4)
    assert (FLASH.nope_dim, FLASH.mix_dim) == (448, 24)
    assert (FLASH.compressor_width(2), FLASH.compressor_width(3)) == (1024, 512)
    assert FLASH.compressor_width(2, FLASH.index_dim) == 256
    assert FLASH.rows_are_e4m3 and FLASH.index_rows_are_fp4
    assert (FLASH.page_tokens, FLASH.pages_per_segment) == (2048, 8)
    assert [FLASH.hashed(layer) for layer in (2, 3)] == [True, False]


def test_pro_has_no_sliding_layer():
    pro = synth.geometry("pro")
    assert {ratio: pro.ratios.count(ratio) for ratio in (0, 4, 128)} == {0: 0, 4: 30, 128: 31}


def test_tiny_is_the_model_that_the_design_fixes():
    tiny = synth.geometry("tiny")
    assert tiny.ratios == (0, 0, 4, 128, 4, 128, 4, 128)
    assert (tiny.width, tiny.n_vocab, tiny.n_heads, tiny.head_dim) == (256, 4096, 8, 96)
    assert tiny.rows_are_e4m3 and tiny.index_rows_are_fp4
    assert (tiny.page_tokens, tiny.pages_per_segment) == (256, 2)


def test_the_test_models_cover_both_row_encodings():
    mini = synth.geometry("mini")
    assert not MICRO.rows_are_e4m3 and not MICRO.index_rows_are_fp4
    assert mini.rows_are_e4m3 and mini.index_rows_are_fp4
    for g in (MICRO, mini):
        assert set(g.ratios) == {0, 4, 128} and 0 < g.n_hash_layers < g.n_layers


def test_frequencies_are_plain_on_sliding_and_scaled_on_compressed_layers():
    """YaRN leaves fast pairs, divides slow ones by the factor, and goes over between them."""
    plain, yarn = FLASH.frequencies
    assert len(plain) == len(yarn) == 32
    assert plain[0] == yarn[0] == 1.0
    assert plain[31] == pytest.approx(10_000 ** (-31 / 32))
    assert yarn[31] == pytest.approx(160_000 ** (-31 / 32) / 16)
    ratios = [y * 160_000 ** (i / 32) for i, y in enumerate(yarn)]
    assert all(a >= b - 1e-12 for a, b in pairwise(ratios))


MISFITS = {
    "n_layers": (0, "n_layers is 0, expected at least 1"),
    "context": (0, "context is 0, expected at least 1"),
    "yarn_original_context": (0, "yarn_original_context is 0, expected at least 1"),
    "expert_clamp": ((10.0,), "expert_clamp has 1 entries, expected 5"),
    "shared_clamp": (
        (10.0, 10.0, -1.0, 10.0, 10.0),
        "shared_clamp of layer 2 is -1.0, expected a positive number",
    ),
    "ratios": ((0, 4, 64, 4, 0), "ratio of layer 2 is 64, expected 0, 4 or 128"),
    "rope_dim": (34, "rope_dim 34 is odd or above head_dim 32"),
    "out_groups": (3, "8 heads do not divide into 3 output groups"),
    "n_experts_used": (13, "13 experts used of 12"),
    "n_shared_experts": (0, "0 shared experts, expected 1"),
    "n_hash_layers": (6, "6 hash layers of 5"),
    "index_top_k": (0, "a ratio-4 layer needs indexer heads, width and top_k of at least 1"),
    "index_dim": (4, "indexer width 4 is below rope_dim 8"),
    "expert_scale": (float("nan"), "expert_scale is nan, expected a positive number"),
    "rms_eps": (0.0, "rms_eps is 0.0, expected a positive number"),
    "yarn_factor": (float("inf"), "yarn_factor is inf, expected a positive number"),
    "rope_theta": (1.0, "rope_theta is 1.0, expected a number above 1"),
    "rope_theta_compressed": (-2.0, "rope_theta_compressed is -2.0, expected a number above 1"),
    "yarn_beta_fast": (0.5, "yarn_beta_fast is 0.5, expected at least yarn_beta_slow 1.0"),
    "yarn_beta_slow": (0.0, "yarn_beta_slow is 0.0, expected a positive number"),
}


@pytest.mark.parametrize("field", MISFITS)
def test_what_does_not_fit_is_named(field):
    value, sentence = MISFITS[field]
    assert replace(MICRO, **{field: value}).check() == sentence


def test_an_indexer_is_asked_for_only_where_a_layer_needs_it():
    sliding = replace(MICRO, ratios=(0, 128, 128, 0, 0), index_heads=0, index_dim=0, index_top_k=0)
    assert sliding.check() is None
