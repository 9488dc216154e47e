"""Random models: their sizes are those of the real file, their products have unit variance, their
routing tables are valid."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ds4d.model import gguf, synth
from ds4d.model.quants import Quant, dequantize

MICRO, MINI = synth.geometry("micro"), synth.geometry("mini")


def test_the_flash_table_has_the_size_of_the_published_file():
    """spec/model.md 2.4, byte for byte."""
    table = synth.table(synth.geometry("flash"), "2bit")
    sizes = {name: quant.n_bytes(shape) for name, quant, shape in table}
    assert len(table) == 1328
    assert sum(int(np.prod(shape, dtype=np.int64)) for _, _, shape in table) == 284_334_567_511
    assert sum(sizes.values()) == 86_714_775_900
    assert sum(-(-n // 32) * 32 for n in sizes.values()) == 86_714_777_664
    by_quant = {q: sum(sizes[n] for n, kind, _ in table if kind is q) for q in Quant}
    assert by_quant[Quant.IQ2_XXS] == 47_613_739_008
    assert by_quant[Quant.Q2_K] == 30_299_652_096
    assert by_quant[Quant.Q8_0] == 6_598_885_376
    assert by_quant[Quant.F16] == 2_191_345_664
    assert by_quant[Quant.I32] + by_quant[Quant.F32] == 11_153_756


def test_a_full_size_file_costs_its_header_on_disk_and_opens(tmp_path):
    path = tmp_path / "flash.gguf"
    synth.write_sparse(path, synth.geometry("flash"))
    status = path.stat()
    assert status.st_size > 86_714_777_664 and status.st_blocks * 512 < 16 << 20
    with gguf.open_model(path) as model:
        assert model.geometry == synth.geometry("flash")
        assert len(model.vocabulary().tokens) == 129_280
        assert not model.tensor("blk.42.ffn_down_shexp.weight").data[-100:].any()


@pytest.mark.parametrize("preset", ["f32", "q8", "2bit", "4bit", "mxfp4"])
def test_a_random_model_opens_in_every_mix_of_types(tmp_path, preset):
    synth.write_model(tmp_path / "m.gguf", MINI, preset, seed=1)
    with gguf.open_model(tmp_path / "m.gguf") as model:
        assert model.geometry == MINI
        for name in model.tensors:
            assert np.isfinite(dequantize(model.tensor(name))).all(), name


@pytest.mark.parametrize("preset", ["f32", "q8", "2bit", "4bit", "mxfp4"])
def test_products_keep_about_unit_variance(preset):
    rng = np.random.default_rng(2)
    plain = ("token_embd", "norm", "ape", "base", "scale", "sinks", "exp_probs_b", "tid2eid")
    for tensor in synth.random_tensors(MINI, preset, seed=2):
        if any(part in tensor.name for part in plain):
            continue
        w = dequantize(tensor).reshape(-1, tensor.shape[-1])
        out = w @ rng.standard_normal((w.shape[1], 16)).astype(np.float32)
        assert 0.7 < out.std() < 1.4, tensor.name
        assert abs(w.mean()) < 0.2 * w.std() + 0.01, tensor.name


def test_nothing_that_a_forward_pass_reads_is_idle():
    """A part that is all zero or all one could be left out unnoticed."""
    for tensor in synth.random_tensors(MICRO, "q8", seed=3):
        values = dequantize(tensor)
        assert values.size == 1 or values.std() > 1e-3, tensor.name


@pytest.mark.parametrize("geometry", [MICRO, MINI])
def test_a_token_is_routed_to_distinct_experts(geometry):
    for tensor in synth.random_tensors(geometry, "q8"):
        if tensor.quant is Quant.I32:
            table = dequantize(tensor)
            assert table.shape == (geometry.n_vocab, geometry.n_experts_used)
            assert table.min() >= 0 and table.max() < geometry.n_experts
            assert all(len(set(row)) == len(row) for row in table.tolist())
            assert len(np.unique(table)) == geometry.n_experts


def test_a_tensor_depends_on_seed_and_name_alone():
    once, again, other = (list(synth.random_tensors(MICRO, "q8", seed=s)) for s in (1, 1, 2))
    assert [t.data.tobytes() for t in once] == [t.data.tobytes() for t in again]
    assert not any(np.array_equal(a.data, b.data) for a, b in zip(once, other, strict=True))
    plain = {t.name: t for t in synth.random_tensors(MICRO, "f32", seed=1)}
    assert all(np.allclose(dequantize(t), dequantize(plain[t.name]), atol=0.06) for t in once)


def test_patterns_choose_types_where_a_tensor_may_have_them():
    kinds = {"blk.0.*": Quant.BF16, "*_exps.weight": Quant.Q4_K}
    found = {name: quant for name, quant, _ in synth.table(MINI, kinds)}
    assert found["blk.0.ffn_up_exps.weight"] is Quant.BF16
    assert found["blk.0.attn_norm.weight"] is Quant.F32  # may be nothing else
    assert found["blk.1.ffn_up_exps.weight"] is Quant.Q4_K
    assert found["blk.1.attn_kv.weight"] is Quant.F32
    with pytest.raises(ValueError) as error:
        synth.table(MICRO, "4bit")
    assert str(error.value) == (
        "tensor blk.0.ffn_gate_exps.weight has rows of 64, expected a multiple of 256 for Q4_K"
    )


def test_the_synthetic_vocabulary_encodes_any_text_and_back():
    v = synth.vocabulary(320)
    ids = {token: i for i, token in enumerate(v.tokens)}
    assert len(ids) == len(v.tokens) == len(v.types) == 320
    pairs = [tuple(merge.split(" ")) for merge in v.merges]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Decoder()
    text = "".join(map(chr, range(300))) + "the end 字 🙂\n"
    encoded = tokenizer.encode(text).ids
    assert tokenizer.decode(encoded, skip_special_tokens=False) == text
    assert len(encoded) < len(text.encode())  # some merges apply
    for marker in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"):
        assert v.types[ids[marker]] == 4
    assert [v.tokens[i] for i in (v.bos_id, v.eos_id)] == [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ]


def test_a_vocabulary_too_small_for_bytes_and_markers_is_refused():
    assert synth.vocabulary(268).merges == []
    with pytest.raises(ValueError, match="a vocabulary of 267 tokens, expected at least 268"):
        synth.vocabulary(267)
