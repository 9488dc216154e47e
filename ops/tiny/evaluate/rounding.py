"""What the roundings cost: `python -m ops.tiny.evaluate.rounding FILE [--n 200]`.

Mean loss of each answer token of held-out dialogues, by the torch model with the file's weights,
in float32: as it is, with int8 activation blocks, with rounded rows (e4m3, FP4, bf16), with both.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from ds4d.errors import ModelFileError
from ds4d.model import gguf
from ops.tiny import export
from ops.tiny.evaluate.cases import SEED, TASKS, cases
from ops.tiny.evaluate.served import Served
from ops.tiny.model import BLOCK, Precision, Tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ops.tiny.evaluate.cases import Case

MODES = {  # activations, rows
    "float32": (False, False), "int8 activations": (True, False), "rounded rows": (False, True),
    "both, as served": (True, True),
}  # fmt: skip


class Loss(NamedTuple):
    """Of one precision: loss and right argmaxes of every answer token, in the same order."""

    each: np.ndarray
    right: np.ndarray


def measure(model: Tiny, found: Sequence[Case]) -> Loss:
    """A case at a time, padded to whole blocks behind its end, where nothing looks."""
    losses, hits = [], []
    sparse = torch.zeros((), dtype=torch.bool)
    for c in found:
        whole = torch.tensor([*c.prompt, *c.expected], dtype=torch.int64)
        n = -(-len(whole) // BLOCK) * BLOCK
        ids = F.pad(whole, (0, n - len(whole)))[None]
        owner = torch.zeros(1, n // BLOCK, dtype=torch.int32)
        with torch.no_grad():
            logits = model.logits(ids, owner, sparse)[0].float()
        at = slice(len(c.prompt) - 1, len(whole) - 1)  # each predicts the next
        targets = whole[len(c.prompt) :]
        losses.append(F.cross_entropy(logits[at], targets, reduction="none").numpy())
        hits.append((logits[at].argmax(-1) == targets).numpy())
    return Loss(np.concatenate(losses), np.concatenate(hits))


def _in_mode(path: str, found: Sequence[Case], activations: bool, rows: bool) -> Loss:
    """One precision, on one thread: its many small products only wait for each other on two."""
    torch.set_num_threads(1)
    with gguf.open_model(path) as file:
        geometry = file.geometry
    precision = Precision(dtype=torch.float32, activations=activations, rows=rows)
    model = Tiny(geometry, precision).eval()
    export.read(path, model)
    return measure(model, found)


def held_out(served: Served, n: int, seed: int, longest: int) -> list[Case]:
    """`n` cases of all tasks but paragraphs and needles."""
    kinds = [k for k in TASKS if k != "paragraph"]
    each = -(-n // len(kinds))
    found = [c for k in kinds for c in cases(k, each, served, (), seed, longest)]
    random.Random(seed).shuffle(found)
    return found[:n]


def table(measured: dict[str, Loss]) -> str:
    """Markdown; the difference to float32 with its standard error, token by token."""
    exact = next(iter(measured.values()))
    lines = ["| precision | mean loss | more than float32 | right tokens % |",
             "| --- | ---: | ---: | ---: |"]  # fmt: skip
    for name, loss in measured.items():
        more = loss.each - exact.each
        error = float(more.std()) / math.sqrt(len(more))
        shown = "" if loss is exact else f"{more.mean():+.5f} ± {error:.5f}"
        lines.append(
            f"| {name} | {loss.each.mean():.5f} | {shown} | {100 * loss.right.mean():.2f} |"
        )
    return "\n".join([*lines, "", f"{len(exact.each):,} answer tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.tiny.evaluate.rounding",
                                     description=__doc__)  # fmt: skip
    parser.add_argument("file", help="a GGUF file of ds4-tiny")
    parser.add_argument("--n", type=int, default=200, help="dialogues")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--longest", type=int, default=1_024, help="ids of a dialogue")
    args = parser.parse_args()
    try:
        found = held_out(Served.of_file(args.file), args.n, args.seed, args.longest)
    except (ModelFileError, OSError) as error:
        sys.exit(str(error))
    print(f"{len(found)} dialogues in {len(MODES)} precisions", file=sys.stderr, flush=True)
    jobs = min(len(MODES), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        losses = {name: pool.submit(_in_mode, args.file, found, *mode)
                  for name, mode in MODES.items()}  # fmt: skip
        print(table({name: loss.result() for name, loss in losses.items()}))


if __name__ == "__main__":
    main()
