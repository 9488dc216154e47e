"""Judge model files on held-out tasks: `python -m ops.tiny.evaluate FILE [FILE2 ...]`.

Owns the order of work and what is printed: progress on stderr, the table on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arena import ROWS_MAX
from ds4d.errors import ModelFileError
from ops.tiny import texts
from ops.tiny.evaluate import judges
from ops.tiny.evaluate.answers import Answers
from ops.tiny.evaluate.cases import KINDS, LENGTHS, SEED, Case, TooShort, cases, filler
from ops.tiny.evaluate.decoders import LANES, Question, decode
from ops.tiny.evaluate.served import Served
from ops.tiny.evaluate.table import Count, aggregates, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EVERY_S = 10.0  # between two lines of progress
PARAGRAPH = 240  # most ids of a paragraph


@dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    ids: list[int]
    verdict: judges.Verdict
    known: float | None  # share of a paragraph's words that training has


def main() -> None:
    args = _arguments().parse_args()
    kinds = _kinds(args.tasks)
    folder = Path(args.text)
    if any(k in LENGTHS for k in kinds) and not (folder / "kjv.txt").is_file():
        sys.exit(f"{folder}: no plain text to hide needles in; fetch it with"
                 f" `python -m ops.tiny.texts {folder}`, or name other --tasks")  # fmt: skip
    results: dict[str, dict[str, list[Judged]]] = {}
    for name, path in _names(args.files).items():
        try:
            results[name] = evaluate(path, kinds, args, folder)
        except (ModelFileError, TooShort, OSError) as error:
            sys.exit(str(error))
        except (KeyboardInterrupt, BrokenProcessPool) as error:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else "a process died"
            sys.exit(f"{path}: {why}; the answers so far are kept in {args.cache}")
    counts = {name: {k: Count.of(j.verdict for j in found) for k, found in by_kind.items()}
              for name, by_kind in results.items()}  # fmt: skip
    print(table(counts))
    for name, by_kind in results.items():
        share = [j.known for j in by_kind.get("paragraph", ()) if j.known is not None]
        if share:
            print(f"\n{name}: {100 * np.mean(share):.2f} % of the words of a paragraph are"
                  " training's or its prompt's")  # fmt: skip
        if args.samples:
            print("\n" + samples(name, Served.of_file(_names(args.files)[name]), by_kind,
                                 args.samples))  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(_record(args, counts), indent=1) + "\n", "utf-8")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ops.tiny.evaluate", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="GGUF files, a column group each")
    parser.add_argument("--n", type=_positive, default=500, help="cases of each task")
    parser.add_argument("--tasks", nargs="+", default=[], help="names of tasks or how they begin")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--samples", type=int, default=0, help="wrong answers shown of each task")
    parser.add_argument("--json", help="file for the counts")
    parser.add_argument("--text", default=str(texts.FOLDER), help="folder of texts.py")
    parser.add_argument("--cache", default="build/evaluate", help="folder that keeps answers")
    parser.add_argument("--jobs", type=_positive, default=len(os.sched_getaffinity(0)),
                        help="processes, one thread each")  # fmt: skip
    parser.add_argument(
        "--lanes",
        type=int,
        default=LANES,
        choices=range(1, ROWS_MAX + 1),
        metavar="LANES",
        help=f"prompts at once in a process, 1 to {ROWS_MAX}",
    )
    return parser


def _positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n}, expected at least 1")
    return n


def _kinds(wanted: Sequence[str]) -> list[str]:
    for word in wanted:
        if not any(k.startswith(word) for k in KINDS):
            sys.exit(f"--tasks: no task begins with {word!r}; there are {', '.join(KINDS)}")
    exact = {w for w in wanted if w in KINDS}
    return [k for k in KINDS if not wanted or k in exact
            or any(k.startswith(w) for w in wanted if w not in exact)]  # fmt: skip


def _names(files: Sequence[str]) -> dict[str, Path]:
    """A short name for each file, the path where two would have the same."""
    paths = [Path(f) for f in dict.fromkeys(files)]
    stems = [p.stem for p in paths]
    return {p.stem if stems.count(p.stem) == 1 else str(p): p for p in paths}


def evaluate(
    path: Path, kinds: Sequence[str], args: argparse.Namespace, folder: Path
) -> dict[str, list[Judged]]:
    """Every task's cases with their answers and verdicts. Raises ModelFileError."""
    served = Served.of_file(path)
    text = filler(folder) if any(k in LENGTHS for k in kinds) else ()
    _say(f"{path}: making {len(kinds)} tasks of {args.n} cases")
    found = [c for k in kinds for c in cases(k, args.n, served, text, args.seed)]
    with Answers(Path(args.cache), path) as store:
        answered = _answered(path, found, store, args)
    known = training_words() if "paragraph" in kinds else frozenset[str]().__contains__
    out: dict[str, list[Judged]] = {k: [] for k in kinds}
    for c, ids in zip(found, answered, strict=True):
        said = served.read(ids, c.dialogue)
        share = (judges.known_share(c.dialogue, said.content, known)
                 if c.kind == "paragraph" else None)  # fmt: skip
        verdict = judges.judge(c.kind, c.dialogue, said, known)
        out[c.kind].append(Judged(c, ids, verdict, share))
    return out


def most_of(c: Case) -> int:
    """Ids that an answer may have; a longer one would be wrong all the same."""
    return PARAGRAPH if c.kind == "paragraph" else len(c.expected) * 5 // 4 + 24


def _answered(
    path: Path, found: Sequence[Case], store: Answers, args: argparse.Namespace
) -> list[list[int]]:
    questions = [Question(np.asarray(c.prompt, np.int32), most_of(c)) for c in found]
    out = [store.get(q.prompt, q.most) for q in questions]
    todo = [i for i, ids in enumerate(out) if ids is None]
    _say(f"{path}: {len(found) - len(todo):,} answers known, {len(todo):,} to be given,"
         f" {sum(len(questions[i].prompt) for i in todo):,} ids of prompts")  # fmt: skip
    begun = shown = time.monotonic()
    n = 0
    asked = [questions[i] for i in todo]
    cache_dir = Path(args.cache) / "kernels"
    for part, answers in decode(path, asked, args.jobs, cache_dir, args.lanes):
        for at, ids in zip(part, answers, strict=True):
            out[todo[at]] = ids
            store.put(asked[at].prompt, asked[at].most, ids)
        store.flush()
        n += len(part)
        now = time.monotonic()
        if now - shown > EVERY_S or n == len(todo):
            shown = now
            left = (now - begun) * (len(todo) - n) / n
            _say(f"{path}: {n:,} of {len(todo):,} answers, {n / (now - begun):.1f} a second,"
                 f" {left / 60:.1f} min left")  # fmt: skip
    return [ids for ids in out if ids is not None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@cache
def training_words() -> Callable[[str], bool]:
    """Whether training uses a word: its lists, and what its own paragraphs are made of."""
    import random

    from ops.tiny.tasks import prose
    from ops.tiny.words import POOLS, Words

    w = Words(random.Random(SEED))
    words = set().union(*(judges.words_of(text) for text in POOLS.values()))
    for _ in range(4_000):
        words |= judges.words_of(prose.paragraph(w)[1])
    return words.__contains__


# --- what is shown -------------------------------------------------------------------------------


def samples(name: str, served: Served, found: dict[str, list[Judged]], each: int) -> str:
    """Wrong answers of each task: the end of the prompt, what was said, what was right."""
    lines = [f"## Wrong answers of {name}"]
    for kind, judged in found.items():
        wrong = [j for j in judged if not j.verdict.right]
        lines.append(f"\n### {kind}: {len(wrong)} of {len(judged)}")
        for j in wrong[:each]:
            asked = j.case.dialogue.turns[-2].text
            lines += [f"\n    asked    {asked[-300:]!r}",
                      f"    said     {served.text(j.ids)!r}",
                      f"    expected {served.text(j.case.expected)!r}"]  # fmt: skip
    return "\n".join(lines)


def _record(args: argparse.Namespace, counts: dict[str, dict[str, Count]]) -> dict[str, Any]:
    return {
        "n": args.n,
        "seed": args.seed,
        "files": {
            name: {
                "tasks": {k: c.record() for k, c in mine.items()},
                "rows": {k: c.record() for k, c in aggregates(mine).items()},
            }
            for name, mine in counts.items()
        },
    }


if __name__ == "__main__":
    main()
