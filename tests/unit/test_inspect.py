"""What a model file holds and needs, against the figures of spec/model.md 5 and 7."""

import json

import pytest

from ds4d.errors import ModelFileError
from ds4d.model import gguf, inspect, synth
from ds4d.model.quants import Quant


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    path = tmp_path_factory.mktemp("flash") / "flash.gguf"
    synth.write_sparse(path, synth.geometry("flash"))
    with gguf.open_model(path) as model:
        yield model


def test_bytes_by_component_are_those_of_the_specification(flash):
    assert inspect.report(flash)["components"] == {
        "embedding, token tables": 1_068_369_920,
        "output head": 562_626_560,
        "hyper-connections": 67_642_440,
        "attention output": 3_066_036_224,
        "attention q, kv": 1_820_734_208,
        "attention compressor": 522_971_136,
        "indexer": 451_465_728,
        "router": 90_218_496,
        "routed experts": 77_913_391_104,
        "shared expert": 1_149_763_584,
        "norms, head hyper-connection": 1_556_500,
    }


def test_memory_is_that_of_the_specification(flash):
    memory = inspect.report(flash)["memory"]
    weights = 86_714_775_900
    assert memory["weights"] == weights
    assert memory["per_token"] == 3514.25
    assert memory["per_lane"] == 12_206_080 + 3_214_336
    assert memory["total_of_one_lane"] == {
        8192: weights + 44_209_152,
        131_072: weights + 476_040_192,
        1_048_576: weights + 3_700_378_624,
    }


def test_the_text_says_what_a_reader_asks_first(flash):
    text = inspect.describe(flash)
    for part in (
        "DeepSeek-V4-Flash, 1328 tensors, 80.7",
        "43: 2 sliding, 21 ratio 4, 20 ratio 128",
        "44.34 GiB (47,613,739,008 B) in 86",
        "3,514.25 B",
        "with 1,048,576 tokens",
        "e4m3, of the indexer FP4",
    ):
        assert part in text
    assert "recommends" not in text


def test_a_small_model_is_told_up_to_its_own_context(tmp_path):
    path = tmp_path / "tiny.gguf"
    extra = {"general.sampling.temp": gguf.f32(0.0), "ds4d.thinking": gguf.boolean(False)}
    tiny = synth.geometry("micro")
    synth.write_model(path, tiny, extra=extra)
    told = json.loads(inspect.main(path, as_json=True))
    assert list(told["memory"]["total_of_one_lane"]) == ["2048"]
    assert told["geometry"]["ratios"] == [0, 4, 128, 4, 0]
    assert told["defaults"] == {"temperature": 0.0, "thinking": False}
    assert told["file_bytes"] == path.stat().st_size
    assert sum(told["components"].values()) == told["memory"]["weights"]
    assert "temperature 0, thinking off" in inspect.main(path)


def test_what_the_model_does_not_use_is_counted_apart(tmp_path):
    path = tmp_path / "m.gguf"
    geometry = synth.geometry("micro")
    table = [*synth.table(geometry, "q8"), ("blk.9.attn_kv.weight", Quant.Q8_0, (4, 32))]
    gguf.write_header(path, gguf.metadata_of(geometry, synth.vocabulary(320)), table)
    with gguf.open_model(path) as model:
        assert inspect.report(model)["components"]["not used"] == 4 * 34


def test_a_file_that_cannot_be_read_is_an_error_of_the_model_file(tmp_path):
    with pytest.raises(ModelFileError):
        inspect.main(tmp_path / "none.gguf")
