"""Counts of verdicts and how they are shown: shares with their Wilson intervals, targets beside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ops.tiny.evaluate.cases import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ops.tiny.evaluate.judges import Verdict

Z95 = 1.959964
CALLS = tuple(k for k in KINDS if k.startswith("call"))


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A row over several tasks: how many are right, or well-formed; `target` in per cent."""

    name: str
    kinds: tuple[str, ...]
    target: int
    formed: bool = False


AGGREGATES = (
    Aggregate("well-formed calls", (*CALLS, "parallel"), 98, formed=True),
    Aggregate("right tool, every argument right", CALLS, 90),
    Aggregate("parallel calls", ("parallel",), 85),
    Aggregate("answers from tool results", ("result",), 90),
    Aggregate("correct refusal to call", ("decline",), 90),
    Aggregate("extraction and copy", ("extract", "copy"), 95),
    Aggregate("schema-valid JSON", ("json schema",), 95, formed=True),
    Aggregate("needle at 1k", ("needle 1k",), 95),
    Aggregate("needle at 4k", ("needle 4k",), 95),
    Aggregate("needle at 8k", ("needle 8k",), 95),
)


@dataclass(frozen=True, slots=True)
class Count:
    """`formed` is None where no answer has a form to keep."""

    n: int
    right: int
    formed: int | None = None

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> Count:
        all_of = list(verdicts)
        forms = [v.formed for v in all_of if v.formed is not None]
        right = sum(v.right for v in all_of)
        return cls(len(all_of), right, sum(forms) if forms else None)

    def record(self) -> dict[str, Any]:
        low, high = interval(self.right, self.n)
        out: dict[str, Any] = {"n": self.n, "right": self.right, "low": low, "high": high}
        if self.formed is not None:
            out["formed"] = self.formed
        return out


def interval(k: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the share k of n, 0..1; all of it where nothing was counted."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = k / n, Z95 * Z95
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def aggregates(counts: Mapping[str, Count]) -> dict[str, Count]:
    """Rows of the issue, by name, over those of their tasks that were counted."""
    out = {}
    for a in AGGREGATES:
        mine = [counts[k] for k in a.kinds if k in counts]
        if mine:
            said = [(c.formed or 0) if a.formed else c.right for c in mine]
            out[a.name] = Count(sum(c.n for c in mine), sum(said))
    return out


def table(files: Mapping[str, Mapping[str, Count]]) -> str:
    """Markdown: the issue's rows with their targets, then every task; a column group a file."""
    names = list(files)
    sums = {name: aggregates(counts) for name, counts in files.items()}
    lines = _head(["", "target"], names, ["n", "%", "95 %"])
    for a in AGGREGATES:
        mine = [sums[name].get(a.name) for name in names]
        if any(mine):
            cells = [c for count in mine for c in _share(count)]
            lines.append(_row([a.name, f"{a.target} %", *cells]))
    lines += ["", *_head(["task"], names, ["n", "well-formed %", "right %", "95 %"])]
    for kind in KINDS:
        mine = [files[name].get(kind) for name in names]
        if any(mine):
            lines.append(_row([kind, *(c for count in mine for c in _task(count))]))
    return "\n".join(lines)


def _head(first: Sequence[str], names: Sequence[str], columns: Sequence[str]) -> list[str]:
    titles = [*first, *(f"{name}: {c}" if i == 0 else c for name in names
                        for i, c in enumerate(columns))]  # fmt: skip
    marks = ["---"] * len(first) + ["---:"] * (len(columns) * len(names))
    return [_row(titles), _row(marks)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _share(count: Count | None) -> list[str]:
    if count is None:
        return ["", "", ""]
    low, high = interval(count.right, count.n)
    return [str(count.n), _percent(count.right, count.n), f"{100 * low:.1f} to {100 * high:.1f}"]


def _task(count: Count | None) -> list[str]:
    n, right, range_ = _share(count)
    formed = "" if count is None or count.formed is None else _percent(count.formed, count.n)
    return [n, formed, right, range_]


def _percent(k: int, n: int) -> str:
    return f"{100 * k / n:.1f}" if n else ""
