"""What a model file holds and what it needs in memory: `ds4d model inspect FILE`.

Components are those of spec/model.md 7. Memory counts weights as they lie in the file and state in
its packed form (spec/numerics.md 2, spec/model.md 5); an engine's own arena comes on top and is the
engine's to say (`Engine.need`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from ds4d.model import gguf, rows

if TYPE_CHECKING:
    import os

    from ds4d.model.geometry import Geometry

# The first pattern that fits decides.
_COMPONENTS = (
    ("embedding, token tables", r"token_embd\.|.*\.ffn_gate_tid2eid\."),
    ("output head", r"output\.weight"),
    ("hyper-connections", r"blk\.\d+\.hc_"),
    ("attention output", r"blk\.\d+\.attn_output_[ab]\."),
    ("attention q, kv", r"blk\.\d+\.attn_(q_|kv|sinks)"),
    ("attention compressor", r"blk\.\d+\.attn_compressor_"),
    ("indexer", r"blk\.\d+\.indexer[._]"),
    ("router", r"blk\.\d+\.(ffn_gate_inp|exp_probs_b)\."),
    ("routed experts", r"blk\.\d+\.ffn_(gate|up|down)_exps\."),
    ("shared expert", r"blk\.\d+\.ffn_(gate|up|down)_shexp\."),
    ("norms, head hyper-connection", r"output_(hc_|norm)|blk\.\d+\.(attn|ffn)_norm\."),
    ("not used", r""),
)
_DEPTHS = (8192, 131_072, 1_048_576)


def report(model: gguf.ModelFile) -> dict[str, Any]:
    """Plain data for JSON. Sizes in bytes."""
    g = model.geometry
    used = {name for name, *_ in gguf.expected_tensors(g)}
    components: dict[str, int] = {label: 0 for label, _ in _COMPONENTS}
    quants: dict[str, dict[str, int]] = {}
    for t in model.tensors.values():
        components[_component(t.name) if t.name in used else "not used"] += t.n_bytes
        of_quant = quants.setdefault(t.quant.name, {"tensors": 0, "bytes": 0})
        of_quant["tensors"] += 1
        of_quant["bytes"] += t.n_bytes
    weights = sum(components.values())
    per_token, fixed = state_bytes(g)
    depths = sorted({n for n in _DEPTHS if n < g.context} | {g.context})
    return {
        "path": model.path,
        "name": g.name,
        "file_bytes": model.n_bytes,
        "tensors": len(model.tensors),
        "geometry": dataclasses.asdict(g),
        "quants": dict(sorted(quants.items(), key=lambda item: -item[1]["bytes"])),
        "components": {label: n for label, n in components.items() if n},
        "defaults": dataclasses.asdict(model.defaults),
        "memory": {
            "weights": weights,
            "per_token": per_token,
            "per_lane": fixed,
            "total_of_one_lane": {n: weights + fixed + round(per_token * n) for n in depths},
        },
    }


def describe(model: gguf.ModelFile) -> str:
    """The report as text, for a terminal."""
    r = report(model)
    g, memory = model.geometry, r["memory"]
    kinds = ", ".join(
        f"{g.ratios.count(ratio)} {label}"
        for ratio, label in ((0, "sliding"), (4, "ratio 4"), (128, "ratio 128"))
        if ratio in g.ratios
    )
    routing = f"{g.n_hash_layers} hashed, {g.n_layers - g.n_hash_layers} scored"
    lines = [
        f"{r['path']}: {r['name'] or 'unnamed'}, {r['tensors']} tensors, {_size(r['file_bytes'])}",
        "",
        "geometry",
        *_rows(
            ("layers", f"{g.n_layers}: {kinds}"),
            ("width", f"{g.width} in {g.streams} streams"),
            ("vocabulary", f"{g.n_vocab:,}"),
            ("context", f"{g.context:,}, window {g.window}"),
            ("attention", f"{g.n_heads} heads of {g.head_dim}, {g.rope_dim} rotated"),
            ("ranks", f"q {g.q_rank}, output {g.out_groups} groups of {g.out_rank}"),
            ("indexer", f"{g.index_heads} heads of {g.index_dim}, top {g.index_top_k}"),
            ("experts", f"{g.n_experts} of {g.expert_width}, {g.n_experts_used} used, one shared"),
            ("routing", routing),
            ("cached rows", _row_kinds(g)),
        ),
        *_defaults(model.defaults),
        "",
        "types",
        *_rows(*((q, f"{_size(v['bytes'])} in {v['tensors']}") for q, v in r["quants"].items())),
        "",
        "components",
        *_rows(*((label, _size(n)) for label, n in r["components"].items())),
        "",
        "memory, without the engine's arena",
        *_rows(
            ("weights", _size(memory["weights"])),
            ("a token", f"{memory['per_token']:,.2f} B"),
            ("a lane", _size(memory["per_lane"])),
            *(
                (f"with {n:,} tokens", _size(total))
                for n, total in memory["total_of_one_lane"].items()
            ),
        ),
    ]
    return "\n".join(lines)


def main(path: str | os.PathLike[str], as_json: bool = False) -> str:
    """What `ds4d model inspect` prints. Raises ModelFileError."""
    with gguf.open_model(path) as model:
        return json.dumps(report(model), indent=2) if as_json else describe(model)


def state_bytes(geometry: Geometry) -> tuple[float, int]:
    """(per token, per lane) of a session's state, packed: compressed and indexer rows that grow
    with it; the window of raw rows and the compressors' f32 partial windows, which do not."""
    g = geometry
    row = _row_bytes(rows.row_widths(g))
    index_row = _row_bytes(rows.index_row_widths(g))
    per_token, fixed = 0.0, g.n_layers * g.window * row
    for layer, ratio in enumerate(g.ratios):
        if not ratio:
            continue
        per_token += row / ratio
        series = 2 if ratio == 4 else 1  # ratio 4 keeps the previous window beside the present one
        columns = g.compressor_width(layer)
        if ratio == 4:
            per_token += index_row / ratio
            columns += g.compressor_width(layer, g.index_dim)
        fixed += 2 * 4 * series * ratio * columns  # values and gates, f32
    return per_token, fixed


def _row_bytes(widths: tuple[int, int, int]) -> int:
    """Codes, scales filled up to a power of two for aligned loads, halves."""
    codes, scales, halves = widths
    return codes + (1 << (scales - 1).bit_length() if scales else 0) + 2 * halves


def _component(name: str) -> str:
    return next(label for label, pattern in _COMPONENTS if re.match(pattern, name))


def _row_kinds(g: Geometry) -> str:
    return (
        f"{'e4m3' if g.rows_are_e4m3 else 'F16'}, "
        f"of the indexer {'FP4' if g.index_rows_are_fp4 else 'F16'}"
    )


def _defaults(d: gguf.Defaults) -> list[str]:
    found = []
    if d.temperature is not None:
        found.append(f"temperature {d.temperature:g}")
    if d.thinking is not None:
        found.append(f"thinking {'on' if d.thinking else 'off'}")
    return list(_rows(("recommends", ", ".join(found)))) if found else []


def _rows(*pairs: tuple[str, str]) -> list[str]:
    return [f"  {label:<30}{value}" for label, value in pairs]


def _size(n: int) -> str:
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= step:
            return f"{n / step:,.2f} {unit} ({n:,} B)"
    return f"{n:,} B"
