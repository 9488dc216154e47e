"""What the model needs of a GGUF: metadata keys to and from `Geometry`, and the tensor table.

`expected_tensors` is the one place that says which tensors a geometry has, in which shapes and
types; the reader checks against it, `synth` builds from it (spec/model.md 2.2, 2.3). Any geometry
is served: keys are checked for presence, type, range and consistency, not for Flash's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from ds4d.errors import ModelFileError
from ds4d.model.geometry import Geometry
from ds4d.model.gguf.container import Kind, Typed, array, boolean, f32, string, u32
from ds4d.model.quants import Quant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from ds4d.model.gguf.container import Field, Metadata

ARCHITECTURE = "deepseek4"
PREFIX = f"{ARCHITECTURE}."
TOKENS = "tokenizer.ggml.tokens"
TOKEN_TYPES = "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
TEMPERATURE = "general.sampling.temp"  # f32; what to sample with when the client says nothing
THINKING = "ds4d.thinking"  # bool; whether to think when the client says nothing

MAX_LAYERS = 1024
MAX_TOKEN_TYPE = 6

# (key behind the prefix, field of Geometry, largest value taken). The bounds keep an absurd value
# from costing memory or time before the tensors' shapes could contradict it.
_COUNTS = (
    ("embedding_length", "width", 1 << 20),
    ("vocab_size", "n_vocab", 1 << 24),
    ("attention.head_count", "n_heads", 1 << 16),
    ("attention.key_length", "head_dim", 1 << 16),
    ("rope.dimension_count", "rope_dim", 1 << 16),
    ("attention.q_lora_rank", "q_rank", 1 << 20),
    ("attention.output_group_count", "out_groups", 1 << 16),
    ("attention.output_lora_rank", "out_rank", 1 << 20),
    ("attention.sliding_window", "window", 1 << 20),
    ("expert_count", "n_experts", 1 << 16),
    ("expert_used_count", "n_experts_used", 1 << 16),
    ("expert_shared_count", "n_shared_experts", 1 << 16),
    ("expert_feed_forward_length", "expert_width", 1 << 20),
    ("hash_layer_count", "n_hash_layers", MAX_LAYERS),
    ("attention.indexer.head_count", "index_heads", 1 << 16),
    ("attention.indexer.key_length", "index_dim", 1 << 16),
    ("attention.indexer.top_k", "index_top_k", 1 << 20),
    ("hyper_connection.count", "streams", 64),
    ("hyper_connection.sinkhorn_iterations", "sinkhorn_iterations", 1000),
    ("rope.scaling.original_context_length", "yarn_original_context", 1 << 26),
)
_MAY_BE_ZERO = {"n_hash_layers", "index_heads", "index_dim", "index_top_k"}
_FLOATS = (
    ("expert_weights_scale", "expert_scale"),
    ("hyper_connection.epsilon", "hyper_eps"),
    ("attention.layer_norm_rms_epsilon", "rms_eps"),
    ("rope.freq_base", "rope_theta"),
    ("attention.compress_rope_freq_base", "rope_theta_compressed"),
    ("rope.scaling.factor", "yarn_factor"),
    ("rope.scaling.yarn_beta_fast", "yarn_beta_fast"),
    ("rope.scaling.yarn_beta_slow", "yarn_beta_slow"),
)
MAX_CONTEXT = 1 << 26
_ORIGINAL_CONTEXT = "rope.scaling.original_context_length"
_U32 = (Kind.U32,)
_WIDE = (Kind.U32, Kind.U64)
_FLOAT = (Kind.F32, Kind.F64, Kind.U32, Kind.I32)
_INTEGER = (Kind.I32, Kind.U32)

_PRODUCT = frozenset(Quant) - {Quant.I32}
_PLAIN = frozenset({Quant.F32, Quant.F16, Quant.BF16})
_PLAIN_OR_Q8 = _PLAIN | {Quant.Q8_0}
_F32 = frozenset({Quant.F32})
_I32 = frozenset({Quant.I32})


class ExpectedTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]  # NumPy order
    quants: frozenset[Quant]  # the types it may have
    required: bool = True


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the byte-level alphabet, special ones as their literal text (spec/model.md 8)."""

    tokens: list[str]  # [V]
    types: npt.NDArray[np.int32]  # [V]; 1 normal, 3 control, 4 user-defined
    merges: list[str]  # "left right", in rank order
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    pre: str = "joyai-llm"  # name of the pre-tokenisation


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the file recommends when the client says nothing; None: it says nothing either."""

    temperature: float | None = None
    thinking: bool | None = None


def expected_tensors(geometry: Geometry) -> list[ExpectedTensor]:
    """Every tensor of a model, in the order in which files hold them (spec/model.md 2.3)."""
    g = geometry
    hyper, heads = g.streams * g.width, g.n_heads * g.head_dim
    table = [
        ExpectedTensor("token_embd.weight", (g.n_vocab, g.width), _PLAIN_OR_Q8),
        ExpectedTensor("output_hc_base.weight", (g.streams,), _F32),
        ExpectedTensor("output_hc_fn.weight", (g.streams, hyper), _PLAIN),
        ExpectedTensor("output_hc_scale.weight", (1,), _F32),
        ExpectedTensor("output_norm.weight", (g.width,), _F32),
        ExpectedTensor("output.weight", (g.n_vocab, g.width), _PRODUCT),
    ]

    for layer, ratio in enumerate(g.ratios):

        def add(
            name: str,
            *shape: int,
            quants: frozenset[Quant],
            required: bool = True,
            prefix: str = f"blk.{layer}.",
        ) -> None:
            table.append(ExpectedTensor(prefix + name, shape, quants, required))

        for site in ("attn", "ffn"):
            add(f"hc_{site}_fn.weight", g.mix_dim, hyper, quants=_PLAIN)
            add(f"hc_{site}_scale.weight", 3, quants=_F32)
            add(f"hc_{site}_base.weight", g.mix_dim, quants=_F32)

        add("attn_norm.weight", g.width, quants=_F32)
        add("attn_q_a.weight", g.q_rank, g.width, quants=_PRODUCT)
        add("attn_q_a_norm.weight", g.q_rank, quants=_F32)
        add("attn_q_b.weight", heads, g.q_rank, quants=_PRODUCT)
        add("attn_kv.weight", g.head_dim, g.width, quants=_PRODUCT)
        add("attn_kv_a_norm.weight", g.head_dim, quants=_F32)
        add("attn_sinks.weight", g.n_heads, quants=_F32)
        out_rows = g.out_groups * g.out_rank
        add("attn_output_a.weight", out_rows, heads // g.out_groups, quants=_PRODUCT)
        add("attn_output_b.weight", g.width, out_rows, quants=_PRODUCT)
        if ratio:
            columns = g.compressor_width(layer)
            add("attn_compressor_ape.weight", ratio, columns, quants=_PLAIN)
            add("attn_compressor_kv.weight", columns, g.width, quants=_PLAIN)
            add("attn_compressor_gate.weight", columns, g.width, quants=_PLAIN)
            add("attn_compressor_norm.weight", g.head_dim, quants=_F32)
        if ratio == 4:
            columns = g.compressor_width(layer, g.index_dim)
            index = g.index_heads * g.index_dim
            add("indexer.attn_q_b.weight", index, g.q_rank, quants=_PLAIN_OR_Q8)
            add("indexer.proj.weight", g.index_heads, g.width, quants=_PLAIN)
            add("indexer_compressor_ape.weight", ratio, columns, quants=_PLAIN)
            add("indexer_compressor_kv.weight", columns, g.width, quants=_PLAIN)
            add("indexer_compressor_gate.weight", columns, g.width, quants=_PLAIN)
            add("indexer_compressor_norm.weight", g.index_dim, quants=_F32)

        add("ffn_norm.weight", g.width, quants=_F32)
        add("ffn_gate_inp.weight", g.n_experts, g.width, quants=_PLAIN)
        if g.hashed(layer):
            add("ffn_gate_tid2eid.weight", g.n_vocab, g.n_experts_used, quants=_I32)
        else:
            add("exp_probs_b.bias", g.n_experts, quants=_F32, required=False)
        inner, outer = (g.expert_width, g.width), (g.width, g.expert_width)
        for kind, experts in (("exps", (g.n_experts,)), ("shexp", ())):
            add(f"ffn_gate_{kind}.weight", *experts, *inner, quants=_PRODUCT)
            add(f"ffn_up_{kind}.weight", *experts, *inner, quants=_PRODUCT)
            add(f"ffn_down_{kind}.weight", *experts, *outer, quants=_PRODUCT)
    return table


def metadata_of(
    geometry: Geometry,
    vocabulary: Vocabulary | None = None,
    extra: Mapping[str, Typed] | None = None,
) -> dict[str, Typed]:
    """The keys of a file with this geometry; those of the tokenizer if there is a vocabulary.
    `extra` comes last and may replace keys."""
    g = geometry
    keys: dict[str, Typed] = {"general.architecture": string(ARCHITECTURE)}
    if g.name:
        keys["general.name"] = string(g.name)
    own = {
        "block_count": u32(g.n_layers),
        "context_length": u32(g.context),
        "attention.head_count_kv": u32(1),
        "attention.value_length": u32(g.head_dim),
        **{key: u32(getattr(g, field)) for key, field, _ in _COUNTS},
        **{key: f32(getattr(g, field)) for key, field in _FLOATS},
        "rope.scaling.type": string("yarn"),
        "expert_weights_norm": boolean(True),
        "expert_gating_func": u32(4),
        # One entry more than layers: the last belongs to the next-token layer, which is not here.
        "attention.compress_ratios": array(Kind.I32, [*g.ratios, 0]),
        "swiglu_clamp_exp": array(Kind.F32, g.expert_clamp),
        "swiglu_clamp_shexp": array(Kind.F32, g.shared_clamp),
    }
    keys |= {PREFIX + key: typed for key, typed in own.items()}
    if vocabulary is not None:
        v = vocabulary
        keys["tokenizer.ggml.model"] = string("gpt2")
        keys["tokenizer.ggml.pre"] = string(v.pre)
        keys[TOKENS] = array(Kind.STRING, v.tokens)
        keys[TOKEN_TYPES] = array(Kind.I32, v.types)  # type: ignore[arg-type]
        keys[MERGES] = array(Kind.STRING, v.merges)
        for name, token in (("bos", v.bos_id), ("eos", v.eos_id), ("padding", v.pad_id)):
            if token is not None:
                keys[f"tokenizer.ggml.{name}_token_id"] = u32(token)
        keys["tokenizer.ggml.add_bos_token"] = boolean(False)
        keys["tokenizer.ggml.add_eos_token"] = boolean(False)
    return keys | dict(extra or {})


def read_geometry(path: str, metadata: Metadata) -> Geometry:
    """The geometry that the keys describe, checked. Raises ModelFileError."""
    keys = _Keys(path, metadata)
    architecture = keys.text("general.architecture")
    if architecture != ARCHITECTURE:
        keys.fail(f"key general.architecture is {architecture!r}, expected '{ARCHITECTURE}'")
    sizes: dict[str, Any] = {
        field: keys.count(
            PREFIX + key,
            most,
            least=0 if field in _MAY_BE_ZERO else 1,
            kinds=_WIDE if key == _ORIGINAL_CONTEXT else _U32,
        )
        for key, field, most in _COUNTS
    }
    sizes |= {field: keys.number(PREFIX + key) for key, field in _FLOATS}
    n_layers = keys.count(PREFIX + "block_count", MAX_LAYERS)

    keys.exactly("attention.head_count_kv", 1)
    keys.exactly("attention.value_length", sizes["head_dim"], because="the key length")
    keys.exactly("expert_weights_norm", True, kinds=(Kind.BOOL,))
    keys.exactly("rope.scaling.type", "yarn", kinds=(Kind.STRING,), optional=True)
    keys.exactly("expert_gating_func", 4, optional=True)
    keys.exactly("expert_group_count", 0, optional=True)
    keys.exactly("expert_group_used_count", 0, optional=True)

    ratios = keys.array(PREFIX + "attention.compress_ratios", _INTEGER, n_layers)
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, 4, 128):
            keys.fail(
                f"key {PREFIX}attention.compress_ratios holds {ratio} for layer {layer}, "
                "expected 0, 4 or 128"
            )
    clamp = keys.floats(PREFIX + "swiglu_clamp_exp", n_layers)
    shared = PREFIX + "swiglu_clamp_shexp"
    context = PREFIX + "context_length"
    geometry = Geometry(
        name=keys.text("general.name") if "general.name" in metadata else "",
        n_layers=n_layers,
        ratios=tuple(int(r) for r in ratios[:n_layers]),
        expert_clamp=clamp,
        shared_clamp=keys.floats(shared, n_layers) if shared in metadata else clamp,
        context=(
            keys.count(context, MAX_CONTEXT)
            if context in metadata
            else min(round(sizes["yarn_factor"] * sizes["yarn_original_context"]), MAX_CONTEXT)
        ),
        **sizes,
    )
    misfit = geometry.check()
    if misfit:
        keys.fail(f"its keys do not fit together: {misfit}")
    return geometry


def check_tokenizer(path: str, metadata: Metadata, n_vocab: int) -> None:
    """Types, lengths and ids of the tokenizer's keys, without decoding the strings."""
    keys = _Keys(path, metadata)
    model = keys.text("tokenizer.ggml.model")
    if model != "gpt2":
        keys.fail(f"key tokenizer.ggml.model is {model!r}, expected 'gpt2'")
    if "tokenizer.ggml.pre" in metadata:
        keys.text("tokenizer.ggml.pre")
    n_tokens = keys.typed(TOKENS, (Kind.STRING,), is_array=True).count
    if n_tokens != n_vocab:
        keys.fail(f"key {TOKENS} has {n_tokens} entries, expected {n_vocab} as {PREFIX}vocab_size")
    keys.typed(MERGES, (Kind.STRING,), is_array=True)
    if TOKEN_TYPES in metadata:
        types = keys.array(TOKEN_TYPES, (Kind.I32,), n_vocab, one_more=False)
        strange = np.flatnonzero((types < 0) | (types > MAX_TOKEN_TYPE))
        if strange.size:
            i = int(strange[0])
            keys.fail(
                f"key {TOKEN_TYPES} holds {types[i]} for token {i}, expected 0 to {MAX_TOKEN_TYPE}"
            )
    for name in ("bos", "eos", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            keys.count(key, n_vocab - 1, least=0)


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Decodes what `check_tokenizer` has passed; whether tokens and merges suit each other is the
    tokenizer's to find."""
    tokens: list[str] = metadata[TOKENS]
    types = metadata.get(TOKEN_TYPES)
    return Vocabulary(
        tokens=tokens,
        types=np.ones(len(tokens), np.int32) if types is None else types.astype(np.int32),
        merges=metadata[MERGES],
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
        pre=metadata.get("tokenizer.ggml.pre", "joyai-llm"),
    )


def read_defaults(path: str, metadata: Metadata) -> Defaults:
    """Raises ModelFileError if a default has the wrong type or cannot be sampled with."""
    keys = _Keys(path, metadata)
    temperature = thinking = None
    if TEMPERATURE in metadata:
        temperature = keys.number(TEMPERATURE)
        if temperature < 0:
            keys.fail(f"key {TEMPERATURE} is {temperature}, expected at least 0")
    if THINKING in metadata:
        keys.typed(THINKING, (Kind.BOOL,))
        thinking = bool(metadata[THINKING])
    return Defaults(temperature, thinking)


class _Keys:
    """Reads keys under their expected types; whatever is amiss is one sentence."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        self.path = path
        self.metadata = metadata

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {what}")

    def typed(self, key: str, kinds: Sequence[Kind], *, is_array: bool = False) -> Field:
        expected = ("array of " if is_array else "") + " or ".join(k.name.lower() for k in kinds)
        field = self.metadata.field(key)
        if field is None:
            self.fail(f"key {key} is missing, expected {expected}")
        if field.is_array != is_array or field.kind not in kinds:
            self.fail(f"key {key} has type {field.type_name}, expected {expected}")
        return field

    def text(self, key: str) -> str:
        self.typed(key, (Kind.STRING,))
        return str(self.metadata[key])

    def count(self, key: str, most: int, *, least: int = 1, kinds: Sequence[Kind] = _U32) -> int:
        self.typed(key, kinds)
        value: int = self.metadata[key]
        if not least <= value <= most:
            self.fail(f"key {key} is {value}, expected {least} to {most}")
        return value

    def number(self, key: str) -> float:
        self.typed(key, _FLOAT)
        value = _decimal(self.metadata[key])
        if not math.isfinite(value):
            self.fail(f"key {key} is {value}, expected a finite number")
        return value

    def array(
        self, key: str, kinds: Sequence[Kind], n: int, *, one_more: bool = True
    ) -> npt.NDArray[Any]:
        """`n` elements; or one more, for the next-token layer that other files count in."""
        count = self.typed(key, kinds, is_array=True).count
        if count != n and not (one_more and count == n + 1):
            expected = f"{n} or {n + 1}" if one_more else str(n)
            self.fail(f"key {key} has {count} entries, expected {expected}")
        values: npt.NDArray[Any] = self.metadata[key]
        return values

    def floats(self, key: str, n: int) -> tuple[float, ...]:
        values = tuple(_decimal(v) for v in self.array(key, _FLOAT, n).tolist())
        for i, value in enumerate(values):
            if not math.isfinite(value):
                self.fail(f"key {key} holds {value} for layer {i}, expected a finite number")
        return values[:n]

    def exactly(
        self,
        name: str,
        expected: object,
        *,
        kinds: Sequence[Kind] = _U32,
        optional: bool = False,
        because: str = "",
    ) -> None:
        key = PREFIX + name
        if optional and key not in self.metadata:
            return
        self.typed(key, kinds)
        value = self.metadata[key]
        if value != expected:
            why = f" as {because}" if because else ""
            self.fail(f"key {key} is {value!r}, expected {expected!r}{why}")


def _decimal(value: float) -> float:
    """The shortest decimal that gives the same f32: 1e-6 stored as f32 reads as 1e-6, so that a
    geometry read from a file equals the one it was written from."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))
