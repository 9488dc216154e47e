"""Model files: what is written is read, by us and by the gguf package; each defect has its
sentence."""

import os
import re
import struct
from dataclasses import replace

import gguf as theirs
import numpy as np
import pytest

from ds4d.errors import ModelFileError
from ds4d.model import gguf, synth
from ds4d.model.gguf import Kind, array, boolean, container, f32, string, u32
from ds4d.model.quants import Quant, Tensor, dequantize

GEOMETRY = replace(
    synth.geometry("micro"),
    name="test",
    n_layers=2,
    ratios=(0, 4),
    expert_clamp=(10.0, 10.0),
    shared_clamp=(7.0, 10.0),
    n_hash_layers=1,
    n_vocab=280,
)
VOCABULARY = synth.vocabulary(280)
KEYS = gguf.metadata_of(GEOMETRY, VOCABULARY)
TABLE = synth.table(GEOMETRY, "q8")
NAMES = [name for name, _, _ in TABLE]
P = "deepseek4."


def sparse(path, keys=KEYS, table=TABLE, patch=(), alignment=32):
    """A file of these keys and tensors, which are holes; `patch` overwrites bytes of its header:
    (marker, distance behind the marker, new bytes)."""
    header, _, size = container.layout(keys, table, alignment)
    raw = bytearray(header)
    for marker, distance, new in patch:
        at = raw.index(marker) + len(marker) + distance
        raw[at : at + len(new)] = new
    path.write_bytes(raw)
    os.truncate(path, size)
    return path


def failure(path):
    """The sentence with which opening `path` fails, without the name of the file."""
    with pytest.raises(ModelFileError) as error:
        gguf.open_model(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


def without(*names):
    return {key: value for key, value in KEYS.items() if key not in names}


def retyped(name, quant):
    return [(n, quant if n == name else q, s) for n, q, s in TABLE]


def reshaped(name, *shape):
    return [(n, q, shape if n == name else s) for n, q, s in TABLE]


def u32s(*values):
    return struct.pack(f"<{len(values)}I", *values)


def u64s(*values):
    return struct.pack(f"<{len(values)}Q", *values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


# What is written is read.


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_a_written_file_reads_back_whole(path, alignment):
    tensors = list(synth.random_tensors(GEOMETRY, "q8", seed=3))
    extra = {"general.sampling.temp": f32(0.0), "ds4d.thinking": boolean(False)}
    keys = gguf.metadata_of(GEOMETRY, VOCABULARY, extra)
    gguf.write(path, keys, tensors, alignment=alignment)
    with gguf.open_model(path) as model:
        assert model.geometry == GEOMETRY
        assert model.defaults == gguf.Defaults(temperature=0.0, thinking=False)
        assert list(model.tensors) == [t.name for t in tensors]
        for t in tensors:
            found = model.tensor(t.name)
            assert (found.name, found.quant, found.shape) == (t.name, t.quant, t.shape)
            assert np.array_equal(found.data, t.data)
            assert model.tensors[t.name].offset % alignment == 0
            assert not found.data.flags.writeable
        v = model.vocabulary()
        assert (v.tokens, v.merges) == (VOCABULARY.tokens, VOCABULARY.merges)
        assert np.array_equal(v.types, VOCABULARY.types) and v.types.dtype == np.int32
        assert (v.bos_id, v.eos_id, v.pad_id, v.pre) == (0, 1, 2, "joyai-llm")
        assert model.n_bytes == path.stat().st_size


def test_metadata_gives_python_values_and_arrays(path):
    extra = {
        "x.u8": gguf.Typed(Kind.U8, 255),
        "x.i64": gguf.Typed(Kind.I64, -(2**63)),
        "x.f64": gguf.Typed(Kind.F64, 0.1),
        "x.bools": array(Kind.BOOL, [True, False]),
        "x.texts": array(Kind.STRING, ["", "é\0", "字"]),
        "x.none": array(Kind.STRING, []),
        "x.shorts": array(Kind.I16, np.array([-1, 2])),
    }
    with gguf.open_model(sparse(path, KEYS | extra)) as model:
        m = model.metadata
        assert (m["x.u8"], m["x.i64"], m["x.f64"]) == (255, -(2**63), 0.1)
        assert m["general.architecture"] == "deepseek4" and m[P + "expert_weights_norm"] is True
        assert m["x.bools"].tolist() == [True, False] and m["x.shorts"].dtype == np.int16
        assert m["x.texts"] == ["", "é\0", "字"] and m["x.none"] == []
        assert list(m) == [*KEYS, *extra] and len(m) == len(list(m)) and "x.y" not in m


def test_the_gguf_package_reads_what_we_write(path):
    tensors = list(synth.random_tensors(GEOMETRY, "q8", seed=5))
    gguf.write(path, KEYS, tensors)
    reader = theirs.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(fields) == list(KEYS)
    for key, typed in KEYS.items():
        found = fields[key].contents()
        if typed.kind is Kind.F32:
            assert np.array_equal(np.float32(found), np.float32(typed.value))
        else:
            assert found == (list(typed.value) if typed.is_array else typed.value), key
    assert [t.name for t in reader.tensors] == NAMES
    for t, found in zip(tensors, reader.tensors, strict=True):
        values = found.data
        if t.quant is not Quant.I32:
            values = theirs.quants.dequantize(values, found.tensor_type)
        assert np.array_equal(values.reshape(t.shape), dequantize(t))


def test_we_read_what_the_gguf_package_writes(path):
    writer = theirs.GGUFWriter(path, "deepseek4")
    writer.add_custom_alignment(64)
    for key, typed in KEYS.items():
        if key == "general.architecture":
            continue
        if typed.is_array:
            writer.add_array(key, np.asarray(typed.value).tolist())
        else:
            writer.add_key_value(key, typed.value, theirs.GGUFValueType(typed.kind.value))
    tensors = list(synth.random_tensors(GEOMETRY, "f32", seed=6))
    for t in tensors:
        writer.add_tensor(t.name, dequantize(t))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with gguf.open_model(path) as model:
        assert model.geometry == GEOMETRY
        for t in tensors:
            assert np.array_equal(dequantize(model.tensor(t.name)), dequantize(t))


def test_leniency_is_that_of_the_specification(path):
    """f32 keys as f64, u32 or i32; ratios of either sign; wide context; any order; what is unknown
    is ignored; what is absent has its default."""
    keys = without(
        P + "swiglu_clamp_shexp", P + "context_length", P + "rope.scaling.type",
        P + "expert_gating_func", "tokenizer.ggml.token_type", "general.name",
        "tokenizer.ggml.bos_token_id", "tokenizer.ggml.pre",
    )  # fmt: skip
    keys |= {
        P + "rope.freq_base": u32(10000),
        P + "rope.scaling.factor": gguf.Typed(Kind.I32, 16),
        P + "hyper_connection.epsilon": gguf.Typed(Kind.F64, 1e-6),
        P + "swiglu_clamp_exp": array(Kind.F64, [10.0, 10.0, 3.0]),
        P + "attention.compress_ratios": array(Kind.U32, [0, 4]),
        P + "rope.scaling.original_context_length": gguf.Typed(Kind.U64, 65536),
        P + "expert_group_count": u32(0),
        "strange.key": array(Kind.F64, [float("nan")]),
    }
    keys = dict(reversed(keys.items()))
    table = [*reversed(TABLE), ("strange.weight", Quant.Q4_K, (2, 256))]
    table = [row for row in table if row[0] != "blk.1.exp_probs_b.bias"]
    with gguf.open_model(sparse(path, keys, table)) as model:
        assert model.geometry == replace(
            GEOMETRY, name="", shared_clamp=(10.0, 10.0), context=1_048_576
        )
        assert model.vocabulary().types.tolist() == [1] * 280
        assert model.vocabulary().bos_id is None and model.vocabulary().pre == "joyai-llm"
        assert model.defaults == gguf.Defaults(None, None)
        assert "strange.weight" in model.tensors


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.F16, Quant.BF16, Quant.F32, Quant.MXFP4])
def test_a_product_may_have_any_type_whose_blocks_divide_its_rows(path, quant):
    table = retyped("blk.0.attn_q_b.weight", quant)
    with gguf.open_model(sparse(path, table=table)) as model:
        assert model.tensors["blk.0.attn_q_b.weight"].quant is quant


def test_a_view_outlives_its_file_and_a_closed_file_gives_no_more(path):
    gguf.write(path, KEYS, synth.random_tensors(GEOMETRY, "q8"), table=TABLE)
    model = gguf.open_model(path)
    data = model.tensor("output_norm.weight").data
    before = data.tobytes()
    model.close()
    model.close()
    assert data.tobytes() == before
    with pytest.raises(ValueError, match="is closed"):
        model.tensor("output_norm.weight")


# Each defect has its sentence.


def test_what_is_no_file_is_refused(tmp_path):
    assert failure(tmp_path / "none.gguf") == "no such file"
    assert failure(tmp_path) == "is a directory, expected a GGUF file"
    os.mkfifo(tmp_path / "fifo")
    assert failure(tmp_path / "fifo") == "is not a regular file, expected a GGUF file"
    (tmp_path / "empty").touch()
    assert failure(tmp_path / "empty") == "is empty, expected a GGUF file"
    with pytest.raises(ModelFileError, match=r"^a\\x00b: not a file name$"):
        gguf.open_model("a\0b")


def test_a_file_that_this_user_may_not_read_is_refused(path):
    path.touch(mode=0o000)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        with pytest.raises(ModelFileError) as error:
            gguf.open_model(path)
    finally:
        if was_root:
            os.seteuid(0)
    assert str(error.value) == (
        f"{path}: permission denied, expected a file that this user may read"
    )


BYTES = {
    "magic": (
        [(b"", 0, b"GGML")],
        "begins with b'GGML', expected b'GGUF': not a GGUF file",
    ),
    "version": ([(b"GGUF", 0, u32s(2))], "GGUF version is 2, expected 3"),
    "big-endian": ([(b"GGUF", 0, b"\0\0\0\3")], "GGUF version is 50331648, expected 3"),
    "absurd tensor count": (
        [(b"GGUF", 4, u64s(2**63))],
        "claims 9223372036854775808 tensors of at least 33 bytes, but ROOM bytes are left for them",
    ),
    "absurd key count": (
        [(b"GGUF", 12, u64s(2**64 - 1))],
        "claims 18446744073709551615 keys of at least 14 bytes, but ROOM bytes are left for them",
    ),
    "one tensor more than there are": (
        [(b"GGUF", 4, u64s(len(TABLE) + 1))],
        f"name of tensor {len(TABLE)} has 0 bytes, expected 1 to 65535",
    ),
    "a key without a name": (
        [(b"GGUF", 20, u64s(0))],
        "key 0 has 0 bytes, expected 1 to 65535",
    ),
    "a key's name that is too long": (
        [(b"GGUF", 20, u64s(65536))],
        "key 0 has 65536 bytes, expected 1 to 65535",
    ),
    "a key's name that is not UTF-8": (
        [(b"general.", 0, b"\xff")],
        r"key 0 is not UTF-8: b'general.\xffrchitecture'",
    ),
    "a value type that does not exist": (
        [(b"deepseek4.block_count", 0, u32s(13))],
        "key deepseek4.block_count has value type 13, expected 0 to 12",
    ),
    "an array of arrays": (
        [(b"deepseek4.swiglu_clamp_exp", 0, u32s(9, 9))],
        "key deepseek4.swiglu_clamp_exp is an array of arrays, "
        "expected an array of scalars or strings",
    ),
    "an array longer than the file": (
        [(b"deepseek4.swiglu_clamp_exp", 8, u64s(2**62))],
        "claims 4611686018427387904 elements in key deepseek4.swiglu_clamp_exp "
        "of at least 4 bytes, but ROOM bytes are left for them",
    ),
    "more strings than the file could hold": (
        [(b"tokenizer.ggml.tokens", 8, u64s(2**40))],
        "claims 1099511627776 strings in key tokenizer.ggml.tokens of at least 8 bytes, "
        "but ROOM bytes are left for them",
    ),
    "a string longer than the file": (
        [(b"tokenizer.ggml.tokens", 16, u64s(2**63))],
        "the file ends after SIZE bytes, inside string 0 of key tokenizer.ggml.tokens",
    ),
    "a text longer than the file": (
        [(b"general.architecture", 4, u64s(2**63))],
        "the file ends after SIZE bytes, inside key general.architecture",
    ),
    "a token that is not UTF-8": (
        [("<｜User｜>".encode(), -1, b"\xff")],
        "string 262 of key tokenizer.ggml.tokens is not UTF-8",
    ),
    "a text that is not UTF-8": (
        [(b"general.architecture", 12, b"\xc0")],
        r"key general.architecture is not UTF-8: b'\xc0eepseek4'",
    ),
    "a bool of two": (
        [(b"deepseek4.expert_weights_norm", 4, b"\2")],
        "key deepseek4.expert_weights_norm holds the byte 2, expected a bool of 0 or 1",
    ),
    "no dimensions": (
        [(b"blk.0.attn_q_a.weight", 0, u32s(0))],
        "tensor blk.0.attn_q_a.weight has 0 dimensions, expected 1 to 4",
    ),
    "too many dimensions": (
        [(b"blk.0.attn_q_a.weight", 0, u32s(5))],
        "tensor blk.0.attn_q_a.weight has 5 dimensions, expected 1 to 4",
    ),
    "an empty axis": (
        [(b"blk.0.attn_q_a.weight", 4, u64s(0))],
        "tensor blk.0.attn_q_a.weight has shape [32, 0], expected no empty axis",
    ),
    "unknown quant": (
        [(b"blk.0.attn_q_a.weight", 20, u32s(14))],
        "tensor blk.0.attn_q_a.weight has ggml type 14, expected one of 0 F32, 1 F16, 8 Q8_0, "
        "10 Q2_K, 12 Q4_K, 16 IQ2_XXS, 26 I32, 30 BF16, 39 MXFP4",
    ),
    "rows that do not divide into blocks": (
        [(b"blk.0.attn_q_a.weight", 4, u64s(63))],
        "tensor blk.0.attn_q_a.weight has rows of 63, expected a multiple of 32 for Q8_0",
    ),
    "an offset that is not aligned": (
        [(b"blk.0.attn_q_a.weight", 24, u64s(33))],
        "tensor blk.0.attn_q_a.weight has offset 33, expected a multiple of 32",
    ),
    "an offset past the end": (
        [(b"blk.0.attn_q_a.weight", 24, u64s(2**40))],
        "tensor blk.0.attn_q_a.weight ends at byte END, but the file has SIZE: "
        "expected all of its data and padding inside",
    ),
    "a shape beyond the file": (
        [(b"blk.0.attn_q_a.weight", 12, u64s(2**62))],
        "tensor blk.0.attn_q_a.weight ends at byte FAR, but the file has SIZE: "
        "expected all of its data and padding inside",
    ),
    "overlapping tensors": (
        [(b"output_hc_base.weight", 16, u64s(32))],
        "tensor output_hc_base.weight begins at byte BEGIN, expected it behind tensor "
        "token_embd.weight, which ends at byte BEHIND",
    ),
    "a tensor's name that is not UTF-8": (
        [(b"output_norm", -1, b"\xff")],
        r"name of tensor 4 is not UTF-8: b'output_nor\xff.weight'",
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_a_header_that_is_damaged_names_the_place(path, case):
    patch, sentence = BYTES[case]
    sparse(path, patch=patch)
    found = failure(path)
    size = path.stat().st_size
    header = container.read_header("", memoryview(sparse(path).read_bytes()), size)
    base, embedding = header.data_start, header.tensors["token_embd.weight"]
    q_a = header.tensors["blk.0.attn_q_a.weight"]
    for word, number in {
        "SIZE": size,
        "END": base + 2**40 + q_a.n_bytes,
        "FAR": q_a.offset + 2**62 * 68,
        "BEGIN": base + 32,
        "BEHIND": embedding.offset + embedding.n_bytes,
    }.items():
        sentence = sentence.replace(word, str(number))
    if "ROOM" in sentence:
        room = int(found.split("but ")[1].split()[0])
        assert 0 < room < size
        sentence = sentence.replace("ROOM", str(room))
    assert found == sentence


def test_what_occurs_twice_is_named(path):
    keys = KEYS | {"x.a": u32(1), "x.b": u32(2)}
    sparse(path, keys, patch=[(b"x.b", -3, b"x.a")])
    assert failure(path) == "key x.a occurs twice"
    table = [*TABLE, ("y.a", Quant.F32, (1,)), ("y.b", Quant.F32, (1,))]
    sparse(path, table=table, patch=[(b"y.b", -3, b"y.a")])
    assert failure(path) == "tensor y.a occurs twice"


def test_a_name_that_would_break_the_line_is_shown_escaped(path):
    sparse(path, KEYS | {"a\nb": u32(1), "a\nc": u32(1)}, patch=[(b"a\nc", -3, b"a\nb")])
    assert failure(path) == r"key a\nb occurs twice"
    long = "k" * 200
    sparse(path, KEYS | {long + "a": u32(1), "@": u32(1)}, patch=[(b"k" * 200 + b"a", 0, u32s(77))])
    assert failure(path) == f"key {'k' * 77}... has value type 77, expected 0 to 12"


@pytest.mark.parametrize("value", [0, 4, 33, 1 << 17])
def test_an_alignment_that_cannot_be_is_refused(path, value):
    sparse(path, alignment=64, patch=[(b"general.alignment", 4, u32s(value))])
    assert failure(path) == (
        f"key general.alignment is {value}, expected a power of two from 8 to 65536"
    )


def test_an_alignment_of_another_type_is_refused(path):
    sparse(path, alignment=64, patch=[(b"general.alignment", 0, u32s(5))])
    assert failure(path) == "key general.alignment has type i32, expected u32"


def test_a_header_beyond_the_bound_is_refused_and_never_walked_to_its_end(path):
    """A sparse file costs nothing, so a count of any size may have bytes behind it."""
    sparse(path, patch=[(b"tokenizer.ggml.tokens", 8, u64s(2**32))])
    os.truncate(path, 2**40)
    assert failure(path).startswith(
        "claims 4294967296 strings in key tokenizer.ggml.tokens of at least 8 bytes, but 335"
    )
    sparse(path, patch=[(b"tokenizer.ggml.tokens", 16, u64s(2**39))])
    os.truncate(path, 2**40)
    assert failure(path) == (
        "string 0 of key tokenizer.ggml.tokens runs past the 33554432 bytes that a header may take"
    )


REQUIRED = [
    key
    for key in KEYS
    if key
    not in {
        "general.name", P + "context_length", P + "rope.scaling.type", P + "expert_gating_func",
        P + "swiglu_clamp_shexp", "tokenizer.ggml.pre", "tokenizer.ggml.token_type",
        "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.padding_token_id", "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
    }
]  # fmt: skip
WIDER = {
    **{key: "f32 or f64 or u32 or i32" for key, typed in KEYS.items() if typed.kind is Kind.F32},
    P + "swiglu_clamp_exp": "array of f32 or f64 or u32 or i32",
    P + "swiglu_clamp_shexp": "array of f32 or f64 or u32 or i32",
    P + "attention.compress_ratios": "array of i32 or u32",
    P + "rope.scaling.original_context_length": "u32 or u64",
    "general.sampling.temp": "f32 or f64 or u32 or i32",
}


def expected_type(key, typed):
    own = ("array of " if typed.is_array else "") + typed.kind.name.lower()
    return WIDER.get(key, own)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_key_that_is_missing_is_named(path, key):
    expected = expected_type(key, KEYS[key])
    assert failure(sparse(path, without(key))) == f"key {key} is missing, expected {expected}"


DEFAULTS = {"general.sampling.temp": f32(0.5), "ds4d.thinking": boolean(True)}
TYPED = {
    k: v for k, v in (KEYS | DEFAULTS).items() if not k.endswith(("add_bos_token", "add_eos_token"))
}


@pytest.mark.parametrize("key", TYPED)
def test_a_key_of_another_type_is_named(path, key):
    expected = expected_type(key, TYPED[key])
    for wrong, name in ((gguf.Typed(Kind.U8, 1), "u8"), (array(Kind.U8, [1]), "array of u8")):
        found = failure(sparse(path, KEYS | {key: wrong}))
        assert found == f"key {key} has type {name}, expected {expected}"


ONE_MORE = "has 4 entries, expected 2 or 3"
VALUES = {
    "another architecture": (
        {"general.architecture": string("llama")},
        "key general.architecture is 'llama', expected 'deepseek4'",
    ),
    "no layers": (
        {P + "block_count": u32(0)},
        "key deepseek4.block_count is 0, expected 1 to 1024",
    ),
    "absurdly many layers": (
        {P + "block_count": u32(2**32 - 1)},
        "key deepseek4.block_count is 4294967295, expected 1 to 1024",
    ),
    "absurd width": (
        {P + "embedding_length": u32(2**31)},
        "key deepseek4.embedding_length is 2147483648, expected 1 to 1048576",
    ),
    "absurd context": (
        {P + "context_length": u32(2**32 - 1)},
        "key deepseek4.context_length is 4294967295, expected 1 to 67108864",
    ),
    "a layer too many": (
        {P + "block_count": u32(4)},
        "key deepseek4.attention.compress_ratios has 3 entries, expected 4 or 5",
    ),
    "too many ratios": (
        {P + "attention.compress_ratios": array(Kind.I32, [0, 4, 0, 0])},
        f"key deepseek4.attention.compress_ratios {ONE_MORE}",
    ),
    "a ratio that is none": (
        {P + "attention.compress_ratios": array(Kind.I32, [0, -4])},
        "key deepseek4.attention.compress_ratios holds -4 for layer 1, expected 0, 4 or 128",
    ),
    "too many clamps": (
        {P + "swiglu_clamp_exp": array(Kind.F32, [1, 2, 3, 4])},
        f"key deepseek4.swiglu_clamp_exp {ONE_MORE}",
    ),
    "too few shared clamps": (
        {P + "swiglu_clamp_shexp": array(Kind.F32, [1])},
        "key deepseek4.swiglu_clamp_shexp has 1 entries, expected 2 or 3",
    ),
    "a clamp that is not finite": (
        {P + "swiglu_clamp_exp": array(Kind.F32, [1, float("nan")])},
        "key deepseek4.swiglu_clamp_exp holds nan for layer 1, expected a finite number",
    ),
    "a clamp of nothing": (
        {P + "swiglu_clamp_exp": array(Kind.F32, [1, 0])},
        "its keys do not fit together: expert_clamp of layer 1 is 0.0, expected a positive number",
    ),
    "a float that is not finite": (
        {P + "rope.freq_base": f32(float("inf"))},
        "key deepseek4.rope.freq_base is inf, expected a finite number",
    ),
    "a float beyond f32": (
        {P + "rope.freq_base": gguf.Typed(Kind.F64, 1e300)},
        "key deepseek4.rope.freq_base is inf, expected a finite number",
    ),
    "an epsilon of nothing": (
        {P + "hyper_connection.epsilon": f32(0)},
        "its keys do not fit together: hyper_eps is 0.0, expected a positive number",
    ),
    "two key heads": (
        {P + "attention.head_count_kv": u32(2)},
        "key deepseek4.attention.head_count_kv is 2, expected 1",
    ),
    "values narrower than keys": (
        {P + "attention.value_length": u32(16)},
        "key deepseek4.attention.value_length is 16, expected 32 as the key length",
    ),
    "another gating function": (
        {P + "expert_gating_func": u32(2)},
        "key deepseek4.expert_gating_func is 2, expected 4",
    ),
    "weights that are not normalised": (
        {P + "expert_weights_norm": boolean(False)},
        "key deepseek4.expert_weights_norm is False, expected True",
    ),
    "expert groups": (
        {P + "expert_group_count": u32(8)},
        "key deepseek4.expert_group_count is 8, expected 0",
    ),
    "expert groups used": (
        {P + "expert_group_used_count": u32(1)},
        "key deepseek4.expert_group_used_count is 1, expected 0",
    ),
    "another scaling": (
        {P + "rope.scaling.type": string("linear")},
        "key deepseek4.rope.scaling.type is 'linear', expected 'yarn'",
    ),
    "groups that do not divide": (
        {P + "attention.output_group_count": u32(3)},
        "its keys do not fit together: 8 heads do not divide into 3 output groups",
    ),
    "more experts used than there are": (
        {P + "expert_used_count": u32(13)},
        "its keys do not fit together: 13 experts used of 12",
    ),
    "two shared experts": (
        {P + "expert_shared_count": u32(2)},
        "its keys do not fit together: 2 shared experts, expected 1",
    ),
    "more hash layers than layers": (
        {P + "hash_layer_count": u32(3)},
        "its keys do not fit together: 3 hash layers of 2",
    ),
    "no indexer for a layer that needs it": (
        {P + "attention.indexer.head_count": u32(0)},
        "its keys do not fit together: "
        "a ratio-4 layer needs indexer heads, width and top_k of at least 1",
    ),
    "an odd rotated width": (
        {P + "rope.dimension_count": u32(7)},
        "its keys do not fit together: rope_dim 7 is odd or above head_dim 32",
    ),
    "fewer tokens than the vocabulary": (
        {"tokenizer.ggml.tokens": array(Kind.STRING, ["a", "b"])},
        "key tokenizer.ggml.tokens has 2 entries, expected 280 as deepseek4.vocab_size",
    ),
    "a vocabulary of another size": (
        {P + "vocab_size": u32(300)},
        "key tokenizer.ggml.tokens has 280 entries, expected 300 as deepseek4.vocab_size",
    ),
    "a token type too few": (
        {"tokenizer.ggml.token_type": array(Kind.I32, [1] * 279)},
        "key tokenizer.ggml.token_type has 279 entries, expected 280",
    ),
    "a token type that is none": (
        {"tokenizer.ggml.token_type": array(Kind.I32, [1] * 279 + [7])},
        "key tokenizer.ggml.token_type holds 7 for token 279, expected 0 to 6",
    ),
    "another tokenizer": (
        {"tokenizer.ggml.model": string("llama")},
        "key tokenizer.ggml.model is 'llama', expected 'gpt2'",
    ),
    "an end token beyond the vocabulary": (
        {"tokenizer.ggml.eos_token_id": u32(280)},
        "key tokenizer.ggml.eos_token_id is 280, expected 0 to 279",
    ),
    "a recommended temperature below zero": (
        {"general.sampling.temp": f32(-0.5)},
        "key general.sampling.temp is -0.5, expected at least 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_key_of_a_value_that_cannot_be_served_is_named(path, case):
    changed, sentence = VALUES[case]
    assert failure(sparse(path, KEYS | changed)) == sentence


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_missing_is_named(path, name):
    shape = next(s for n, _, s in TABLE if n == name)
    sparse(path, table=[row for row in TABLE if row[0] != name])
    if name == "blk.1.exp_probs_b.bias":
        gguf.open_model(path).close()  # the one that may be absent
    else:
        assert failure(path) == f"tensor {name} is missing, expected {list(shape)}"


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_shape_is_named(path, name):
    shape = next(s for n, _, s in TABLE if n == name)
    for wrong in ((shape[0] + 1, *shape[1:-1], 64), (1, *shape)):
        table = [(n, q, wrong if n == name else s) for n, q, s in TABLE]
        assert failure(sparse(path, table=table)) == (
            f"tensor {name} has shape {list(wrong)}, expected {list(shape)}"
        )


PRODUCT = "F32 or F16 or Q8_0 or Q2_K or Q4_K or IQ2_XXS or BF16 or MXFP4"
TYPES = {
    "output_norm.weight": (Quant.F16, "F32"),
    "blk.1.exp_probs_b.bias": (Quant.F16, "F32"),
    "blk.0.attn_sinks.weight": (Quant.BF16, "F32"),
    "blk.0.ffn_gate_inp.weight": (Quant.Q8_0, "F32 or F16 or BF16"),
    "blk.1.indexer.attn_q_b.weight": (Quant.MXFP4, "F32 or F16 or Q8_0 or BF16"),
    "token_embd.weight": (Quant.MXFP4, "F32 or F16 or Q8_0 or BF16"),
    "blk.0.ffn_gate_tid2eid.weight": (Quant.F32, "I32"),
    "blk.0.attn_kv.weight": (Quant.I32, PRODUCT),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_tensor_of_a_type_that_it_may_not_have_is_named(path, name):
    wrong, expected = TYPES[name]
    assert failure(sparse(path, table=retyped(name, wrong))) == (
        f"tensor {name} has type {wrong.name}, expected {expected}"
    )


def test_gate_and_up_of_one_layer_share_a_type(path):
    assert failure(sparse(path, table=retyped("blk.1.ffn_up_exps.weight", Quant.F16))) == (
        "tensor blk.1.ffn_up_exps.weight has type F16, expected Q8_0 as blk.1.ffn_gate_exps.weight"
    )


# Truncation.


def test_a_file_cut_at_any_byte_of_its_header_is_refused(path):
    small = replace(
        GEOMETRY, n_layers=1, ratios=(4,), expert_clamp=(1.0,), shared_clamp=(1.0,), n_vocab=2
    )
    vocabulary = gguf.Vocabulary(["a", "字"], np.ones(2, np.int32), ["a b"], bos_id=0)
    sparse(path, gguf.metadata_of(small, vocabulary), synth.table(small, "q8"))
    with gguf.open_model(path) as model:
        header = min(t.offset for t in model.tensors.values())
    for n in range(header, 0, -1):
        os.truncate(path, n)
        assert re.match(r"the file ends after|claims \d+|tensor \S+ ends at", failure(path)), n


def test_a_file_cut_anywhere_is_refused(path):
    size = sparse(path).stat().st_size
    cuts = [*range(size - 40, size), *range(1, size, size // 97)]
    for n in sorted(cuts, reverse=True):
        os.truncate(path, n)
        failure(path)


@pytest.mark.parametrize("alignment", [32, 4096])
def test_a_cut_in_the_data_or_its_padding_names_the_tensor(path, alignment):
    sparse(path, alignment=alignment)
    with gguf.open_model(path) as model:
        last = model.tensors[NAMES[-1]]
        size = model.n_bytes
    os.truncate(path, size - 1)
    assert failure(path) == (
        f"tensor {last.name} ends at byte {size}, but the file has {size - 1}: "
        "expected all of its data and padding inside"
    )


# The writer.


def test_a_write_that_fails_leaves_what_was_there(path):
    path.write_text("old")
    good = list(synth.random_tensors(GEOMETRY, "q8"))
    broken = [*good[:-1], Tensor(good[-1].name, good[-1].quant, good[-1].shape, good[0].data)]
    for tensors in (broken, good[:-1], [*good[1:], good[0]]):
        with pytest.raises(ValueError):
            gguf.write(path, KEYS, tensors, table=TABLE)
        assert path.read_text() == "old"
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("keys", "table", "sentence"),
    [
        ({"general.alignment": u32(8)}, [], "general.alignment follows from the argument"),
        ({"k": u32(-1)}, [], "key k holds -1, which is no U32"),
        ({"k": u32(2**32)}, [], "key k holds 4294967296, which is no U32"),
        ({"k": array(Kind.I32, [1.5])}, [], "key k holds [1.5], which is no I32"),
        ({}, [("", Quant.F32, (1,))], "tensor name '' is empty, too long or used twice"),
        ({}, [("a", Quant.F32, (1,))] * 2, "tensor name 'a' is empty, too long or used twice"),
        ({}, [("a", Quant.F32, ())], "tensor a has shape (), which F32 cannot hold"),
        ({}, [("a", Quant.F32, (1,) * 5)], f"tensor a has shape {(1,) * 5}, which F32 cannot hold"),
        ({}, [("a", Quant.Q8_0, (33,))], "tensor a has shape (33,), which Q8_0 cannot hold"),
    ],
)  # fmt: skip
def test_the_writer_refuses_what_no_reader_would_take(path, keys, table, sentence):
    with pytest.raises(ValueError) as error:
        gguf.write_header(path, keys, table)
    assert str(error.value) == sentence
    assert not path.exists()
