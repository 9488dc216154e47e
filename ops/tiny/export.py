"""Weights to ds4-tiny's GGUF and back: `python -m ops.tiny.export RUN_FOLDER OUT.gguf`.

Owns the quants of the file (Q8_0 products, F16, F32: 15,909,524 bytes of tensors), its keys, and
the bf16 parts in which a training run is carried from one machine to the next.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ds4d.model import gguf, quants
from ds4d.model.gguf import schema
from ds4d.model.synth import table
from ops.tiny.encode import PATH
from ops.tiny.model import Tiny

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from ds4d.model.quants import Tensor

PARTS = 2  # bf16 files of a checkpoint, each below 16 MiB


def vocabulary() -> gguf.Vocabulary:
    made = json.loads(PATH.read_text("utf-8"))
    types = np.array(made["types"], np.int32)
    return gguf.Vocabulary(made["tokens"], types, made["merges"], bos_id=0, eos_id=1, pad_id=2)


def metadata(model: Tiny) -> dict[str, gguf.Typed]:
    extra = {
        "general.license": gguf.string("MIT"),
        "general.description": gguf.string("Demonstration model of ds4d, trained from scratch"),
        "general.file_type": gguf.u32(7),
        "general.quantization_version": gguf.u32(2),
        schema.TEMPERATURE: gguf.f32(0.0),
        schema.THINKING: gguf.boolean(False),
    }
    return gguf.metadata_of(model.g, vocabulary(), extra)


def tensors(model: Tiny, kinds: str = "q8") -> Iterator[Tensor]:
    for name, quant, _ in table(model.g, kinds):  # type: ignore[arg-type]
        yield quants.quantize(model.tensor(name).detach().cpu().numpy(), quant, name)


def write(model: Tiny, path: str | os.PathLike[str]) -> None:
    gguf.write(path, metadata(model), tensors(model), table=table(model.g, "q8"))


def read(path: str | os.PathLike[str], model: Tiny) -> None:
    """Put the file's weights, as it rounds them, into `model`."""
    with gguf.open_model(path) as file, torch.no_grad():
        for name in model.names():
            values = torch.from_numpy(np.array(quants.dequantize(file.tensor(name))))
            model.tensor(name).copy_(values)


def save(model: Tiny, folder: Path, at: float) -> None:
    """A checkpoint: everything in bf16 (biases of the router and hash tables as they are), in
    parts, and how far the schedule had come."""
    names = model.names()
    sizes = np.cumsum([model.tensor(n).numel() for n in names])
    for part in range(PARTS):
        low, high = sizes[-1] * part / PARTS, sizes[-1] * (part + 1) / PARTS
        mine = [n for n, s in zip(names, sizes, strict=True) if low < s <= high]
        state = {n: _packed(model.tensor(n)) for n in mine}
        path = folder / f"weights-{part}.pt"
        torch.save({"at": at, "state": state}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)  # a run that is cut off leaves whole files


def _packed(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().cpu()
    return t.bfloat16() if t.dim() > 1 and t.is_floating_point() else t.clone()


def load(folder: Path, model: Tiny) -> float:
    """Weights of a checkpoint into `model`; how far the schedule had come, 0..1."""
    at = 0.0
    with torch.no_grad():
        for part in range(PARTS):
            saved = torch.load(folder / f"weights-{part}.pt", map_location="cpu")
            at = float(saved["at"])
            for name, value in saved["state"].items():
                model.tensor(name).copy_(value)
    return at


if __name__ == "__main__":
    made = Tiny()
    load(Path(sys.argv[1]), made)
    write(made, sys.argv[2])
