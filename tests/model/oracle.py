"""The independent implementation: transformers 5.23.0 `deepseek_v4` on small random models.

Both sides build their weights from a seed (`random_tensors`), so a recorded vector holds only ids
and logits. torch and transformers are imported lazily: CI has neither and reads `vectors/*.npz`,
which `ops/scripts/record-vectors` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ds4d.model.geometry import Geometry
from ds4d.model.quants import Quant, Tensor

VECTORS = Path(__file__).parent / "vectors"
LENGTHS = (5, 131, 300)


def small(**changes: Any) -> Geometry:
    """All layer kinds, both routings, an indexer of 32 heads that selects from position 35 on
    (fewer heads make exact ties at the boundary, where torch's choice is its own)."""
    sizes: dict[str, Any] = {
        "name": "small",
        "n_layers": 5,
        "width": 64,
        "n_vocab": 64,
        "n_heads": 8,
        "head_dim": 32,
        "rope_dim": 8,
        "q_rank": 24,
        "out_groups": 4,
        "out_rank": 16,
        "window": 128,
        "ratios": (0, 4, 128, 4, 0),
        "n_experts": 12,
        "n_experts_used": 3,
        "n_shared_experts": 1,
        "expert_width": 32,
        "n_hash_layers": 2,
        "expert_scale": 1.5,
        "expert_clamp": 10.0,
        "shared_clamp": None,
        "index_heads": 32,
        "index_dim": 16,
        "index_top_k": 8,
        "streams": 4,
        "sinkhorn_iterations": 20,
        "hyper_eps": 1e-6,
        "rms_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_theta_compressed": 160000.0,
        "yarn_factor": 16.0,
        "yarn_original_context": 65536,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "context": 4096,
    } | changes
    n, clamp = sizes["n_layers"], sizes.pop("expert_clamp")
    del sizes["shared_clamp"]
    return Geometry(**sizes, expert_clamp=(clamp,) * n, shared_clamp=(clamp,) * n)


@dataclass(frozen=True)
class Case:
    geometry: Geometry
    seed: int


CASES = {
    "selecting": Case(small(), 1),
    "dense": Case(small(index_top_k=512), 2),
    "clamped": Case(small(expert_clamp=0.5), 3),
    # Other sizes throughout; YaRN's ramp falls inside the few pairs there are, each eps is large
    # enough for its absence to show.
    "other": Case(
        small(
            n_layers=4,
            width=48,
            n_heads=6,
            head_dim=40,
            rope_dim=12,
            q_rank=20,
            out_groups=2,
            out_rank=10,
            window=32,
            ratios=(4, 128, 0, 4),
            n_experts=8,
            n_experts_used=4,
            expert_width=24,
            n_hash_layers=1,
            expert_scale=2.5,
            index_heads=40,
            index_dim=20,
            index_top_k=16,
            streams=2,
            sinkhorn_iterations=7,
            hyper_eps=1e-3,
            rms_eps=1e-4,
            yarn_original_context=512,
            rope_theta_compressed=40000.0,
        ),
        4,
    ),
}


def shapes(g: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape (spec/model.md 2.3), by GGUF name."""
    S, D, width = g.streams, g.width, g.streams * g.width
    out: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (g.n_vocab, D),
        "output.weight": (g.n_vocab, D),
        "output_norm.weight": (D,),
        "output_hc_fn.weight": (S, width),
        "output_hc_base.weight": (S,),
        "output_hc_scale.weight": (1,),
    }
    for i, ratio in enumerate(g.ratios):
        blk = {
            "attn_norm": (D,),
            "attn_q_a": (g.q_rank, D),
            "attn_q_a_norm": (g.q_rank,),
            "attn_q_b": (g.n_heads * g.head_dim, g.q_rank),
            "attn_kv": (g.head_dim, D),
            "attn_kv_a_norm": (g.head_dim,),
            "attn_sinks": (g.n_heads,),
            "attn_output_a": (g.out_groups * g.out_rank, g.n_heads * g.head_dim // g.out_groups),
            "attn_output_b": (D, g.out_groups * g.out_rank),
            "ffn_norm": (D,),
            "ffn_gate_inp": (g.n_experts, D),
            "ffn_gate_exps": (g.n_experts, g.expert_width, D),
            "ffn_up_exps": (g.n_experts, g.expert_width, D),
            "ffn_down_exps": (g.n_experts, D, g.expert_width),
            "ffn_gate_shexp": (g.expert_width, D),
            "ffn_up_shexp": (g.expert_width, D),
            "ffn_down_shexp": (D, g.expert_width),
        }
        for part in ("attn", "ffn"):
            blk |= {f"hc_{part}_fn": (g.mix_dim, width), f"hc_{part}_scale": (3,)}
            blk |= {f"hc_{part}_base": (g.mix_dim,)}
        if ratio:
            blk |= _compressor("attn_compressor_", g, i, g.head_dim)
        if ratio == 4:
            blk |= _compressor("indexer_compressor_", g, i, g.index_dim)
            blk |= {"indexer.attn_q_b": (g.index_heads * g.index_dim, g.q_rank)}
            blk |= {"indexer.proj": (g.index_heads, D)}
        if g.hashed(i):
            blk |= {"ffn_gate_tid2eid": (g.n_vocab, g.n_experts_used)}
        out |= {f"blk.{i}.{name}.weight": shape for name, shape in blk.items()}
        if not g.hashed(i):
            out[f"blk.{i}.exp_probs_b.bias"] = (g.n_experts,)
    return out


def _compressor(prefix: str, g: Geometry, layer: int, dim: int) -> dict[str, tuple[int, ...]]:
    columns = g.compressor_width(layer, dim)
    return {
        prefix + "kv": (columns, g.width),
        prefix + "gate": (columns, g.width),
        prefix + "ape": (g.ratios[layer], columns),
        prefix + "norm": (dim,),
    }


def random_tensors(g: Geometry, seed: int) -> dict[str, Tensor]:
    """F32 weights (I32 for the hash table), tensor after tensor from one PCG64 stream of raw bits,
    which NumPy promises never to change. Every parameter is random, those included that training
    starts at zero; matrices are scaled so that activations stay of order 1."""
    bits = np.random.PCG64(seed)

    def uniform(n: int) -> np.ndarray:  # of unit variance
        return (bits.random_raw(n) * 2.0**-63 - 1) * 3**0.5

    out = {}
    for name, shape in shapes(g).items():
        x = uniform(int(np.prod(shape))).reshape(shape)
        if "tid2eid" in name:  # distinct experts for every token
            keys = uniform(g.n_vocab * g.n_experts).reshape(g.n_vocab, g.n_experts)
            x = np.argsort(keys, axis=1)[:, : g.n_experts_used]
        elif "norm" in name or name.endswith("scale.weight"):
            x = 1 + 0.2 * x
        elif "ape" in name or "sinks" in name or "base" in name:
            x = 0.5 * x
        elif "exp_probs_b" in name:
            x = 0.1 * x
        elif "token_embd" not in name:
            x = x * shape[-1] ** -0.5
        integers = "tid2eid" in name
        data = x.astype(np.int32 if integers else np.float32).reshape(-1).view(np.uint8)
        out[name] = Tensor(name, Quant.I32 if integers else Quant.F32, shape, data)
    return out


def random_ids(g: Geometry, seed: int, n: int) -> np.ndarray:
    """[n] int64 ids, uniform over the vocabulary."""
    return (np.random.PCG64(seed + 1000).random_raw(n) % np.uint64(g.n_vocab)).astype(np.int64)


def missing() -> str | None:
    """Why the oracle cannot run here, or None."""
    try:
        found = version("torch"), version("transformers")
    except PackageNotFoundError as e:
        return f"{e.name} is not installed"
    if found[1] != "5.23.0":
        return f"transformers is {found[1]}, the oracle is 5.23.0"
    return None


class Oracle:
    """The transformers model with the weights of `random_tensors`, in float64 or float32. It keeps
    cos and sin, hyper-connection maps and some softmaxes in float32 even then."""

    def __init__(self, g: Geometry, tensors: dict[str, Tensor], dtype: str) -> None:
        import torch
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

        self.torch = torch
        kinds = {
            0: "sliding_attention",
            4: "compressed_sparse_attention",
            128: "heavily_compressed_attention",
        }
        self.config = DeepseekV4Config(
            vocab_size=g.n_vocab,
            hidden_size=g.width,
            moe_intermediate_size=g.expert_width,
            num_hidden_layers=g.n_layers,
            num_attention_heads=g.n_heads,
            head_dim=g.head_dim,
            q_lora_rank=g.q_rank,
            num_experts_per_tok=g.n_experts_used,
            n_routed_experts=g.n_experts,
            routed_scaling_factor=g.expert_scale,
            max_position_embeddings=g.context,
            rope_theta=g.rope_theta,
            compress_rope_theta=g.rope_theta_compressed,
            # Flat: the config splits it in two and forces attention_factor 1.
            rope_parameters={
                "rope_type": "yarn",
                "factor": g.yarn_factor,
                "original_max_position_embeddings": g.yarn_original_context,
                "beta_fast": g.yarn_beta_fast,
                "beta_slow": g.yarn_beta_slow,
            },
            partial_rotary_factor=g.rope_dim / g.head_dim,
            layer_types=[kinds[r] for r in g.ratios],
            mlp_layer_types=["hash_moe" if g.hashed(i) else "moe" for i in range(g.n_layers)],
            hc_mult=g.streams,
            hc_sinkhorn_iters=g.sinkhorn_iterations,
            hc_eps=g.hyper_eps,
            rms_norm_eps=g.rms_eps,
            swiglu_limit=g.expert_clamp[0],
            sliding_window=g.window,
            o_groups=g.out_groups,
            o_lora_rank=g.out_rank,
            index_n_heads=g.index_heads,
            index_head_dim=g.index_dim,
            index_topk=g.index_top_k,
            attn_implementation="eager",
            experts_implementation="eager",  # the default grouped product refuses float64
        )
        model = DeepseekV4ForCausalLM(self.config).to(getattr(torch, dtype)).eval()
        weights = {
            name: torch.from_numpy(np.array(array)) for name, array in _hf_names(g, tensors).items()
        }
        # strict: a parameter left at its initial value would test nothing
        model.load_state_dict(weights, strict=True)
        self.model = model

    def logits(self, ids: np.ndarray, chunks: list[int] | None = None) -> np.ndarray:
        """[n, V] of `ids` [n], in one call, or in calls of the given lengths through the cache."""
        torch = self.torch
        tokens, out, cache, at = torch.from_numpy(ids)[None], [], None, 0
        with torch.no_grad():
            for n in chunks or [len(ids)]:
                result = self.model(tokens[:, at : at + n], past_key_values=cache, use_cache=True)
                cache, at = result.past_key_values, at + n
                out.append(result.logits[0].numpy())
        return np.concatenate(out)


def e4m3_samples() -> np.ndarray:
    """f32 [n, 64]: every e4m3 value below 448 and every midpoint of two neighbours with the floats
    beside it, both signs, and as many numbers of all sizes; a 448 in each block makes its scale 1.
    """
    from ds4d.model.rows import E4M3_VALUES

    values = E4M3_VALUES[:127]
    middles = (values[1:] + values[:-1]) / 2
    edges = np.concatenate(
        [
            values,
            middles,
            np.nextafter(middles, np.float32(0)),
            np.nextafter(middles, np.float32(449)),
        ]
    )
    bits = np.random.PCG64(7)
    sizes = bits.random_raw(1500) * 2.0**-64 * 19 - 11  # exponents -11 .. 8
    x = np.concatenate([edges, -edges, np.exp2(sizes), -np.exp2(sizes)]).astype(np.float32)
    x = x[np.abs(x) <= 448]
    x = x[: x.size // 63 * 63].reshape(-1, 63)
    return np.concatenate([x, np.full((len(x), 1), 448, np.float32)], axis=1)


def torch_e4m3(x: np.ndarray) -> np.ndarray:
    """torch's cast of `x` to float8_e4m3fn, as bytes."""
    import torch

    return torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def record() -> None:
    """Write every vector anew."""
    np.savez_compressed(VECTORS / "e4m3.npz", codes=torch_e4m3(e4m3_samples()))
    for name, case in CASES.items():
        tensors = random_tensors(case.geometry, case.seed)
        ids = random_ids(case.geometry, case.seed, LENGTHS[-1])
        model = Oracle(case.geometry, tensors, "float64")
        logits = {f"logits_{n}": model.logits(ids[:n]).astype(np.float32) for n in LENGTHS}
        np.savez_compressed(VECTORS / f"{name}.npz", ids=ids.astype(np.uint8), **logits)


def _hf_names(g: Geometry, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Weights by transformers' names (spec/model.md 6)."""

    def array(name: str) -> np.ndarray:
        tensor = tensors[name]
        integers = tensor.quant is Quant.I32
        return tensor.data.view(np.int32 if integers else np.float32).reshape(tensor.shape)

    out = {
        "model.embed_tokens.weight": array("token_embd.weight"),
        "lm_head.weight": array("output.weight"),
        "model.norm.weight": array("output_norm.weight"),
    }
    for part in ("fn", "base", "scale"):
        out[f"model.hc_head.hc_{part}"] = array(f"output_hc_{part}.weight")
    for i, ratio in enumerate(g.ratios):
        blk, hf = f"blk.{i}.", f"model.layers.{i}."
        names = {
            "input_layernorm.weight": "attn_norm",
            "post_attention_layernorm.weight": "ffn_norm",
            "self_attn.q_a_proj.weight": "attn_q_a",
            "self_attn.q_a_norm.weight": "attn_q_a_norm",
            "self_attn.q_b_proj.weight": "attn_q_b",
            "self_attn.kv_proj.weight": "attn_kv",
            "self_attn.kv_norm.weight": "attn_kv_a_norm",
            "self_attn.sinks": "attn_sinks",
            "self_attn.o_a_proj.weight": "attn_output_a",
            "self_attn.o_b_proj.weight": "attn_output_b",
            "mlp.gate.weight": "ffn_gate_inp",
            "mlp.experts.down_proj": "ffn_down_exps",
            "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp",
            "mlp.shared_experts.up_proj.weight": "ffn_up_shexp",
            "mlp.shared_experts.down_proj.weight": "ffn_down_shexp",
        }
        for part in ("fn", "base", "scale"):
            names |= {f"attn_hc.{part}": f"hc_attn_{part}", f"ffn_hc.{part}": f"hc_ffn_{part}"}
        compressors = {"self_attn.compressor.": "attn_compressor_"} if ratio else {}
        if ratio == 4:
            indexer = "self_attn.compressor.indexer."
            compressors[indexer] = "indexer_compressor_"
            names |= {
                indexer + "q_b_proj.weight": "indexer.attn_q_b",
                indexer + "scorer.weights_proj.weight": "indexer.proj",
            }
        for theirs, ours in compressors.items():
            names |= {
                theirs + "kv_proj.weight": ours + "kv",
                theirs + "gate_proj.weight": ours + "gate",
                theirs + "position_bias": ours + "ape",
                theirs + "kv_norm.weight": ours + "norm",
            }
        if g.hashed(i):
            names["mlp.gate.tid2eid"] = "ffn_gate_tid2eid"
        out |= {hf + theirs: array(f"{blk}{ours}.weight") for theirs, ours in names.items()}
        if not g.hashed(i):
            out[hf + "mlp.gate.e_score_correction_bias"] = array(blk + "exp_probs_b.bias")
        out[hf + "mlp.experts.gate_up_proj"] = np.concatenate(
            [array(blk + "ffn_gate_exps.weight"), array(blk + "ffn_up_exps.weight")], axis=1
        )
    return out


if __name__ == "__main__":
    if reason := missing():
        raise SystemExit(reason)
    record()
