"""The figures of a run over time: `curve.csv`, and a picture of it where matplotlib is there."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, float]
_OWN = "progress step tokens loss right align norm speed seconds".split()


def write(lines: list[Line], folder: Path) -> None:
    """`lines`: one for each report of a run; keys beside the usual ones are held-out scores."""
    keys = list(dict.fromkeys(k for line in lines for k in line))
    with (folder / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(lines)
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return
    plt.switch_backend("agg")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(19, 6))
    millions = [x["tokens"] / 1e6 for x in lines]
    left.plot(millions, [x["loss"] for x in lines], label="loss")
    left.plot(millions, [max(x["align"], 1e-4) for x in lines], label="alignment of the indexers")
    left.set(xlabel="million tokens", yscale="log")
    left.legend()
    middle.plot(millions, [100 - x["right"] for x in lines], label="answer tokens wrong, %")
    middle.set(xlabel="million tokens", yscale="log")
    middle.legend()
    scored = [x for x in lines if x.keys() - set(_OWN)]
    for i, kind in enumerate(k for k in keys if k not in _OWN):
        style = ("-", "--", ":")[i // 10 % 3]
        right.plot([x["tokens"] / 1e6 for x in scored], [x.get(kind, 0.0) for x in scored],
                   style, label=kind)  # fmt: skip
    right.set(xlabel="million tokens", ylabel="held-out answers right in every token, %")
    if scored:
        right.legend(fontsize=7, ncol=2, loc="lower right")
    figure.tight_layout()
    figure.savefig(folder / "curve.png", dpi=80)
