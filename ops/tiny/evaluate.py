"""What ds4-tiny gets right on prompts made of words, tools and phrasings that training never saw.

    python -m ops.tiny.evaluate ds4d/data/ds4-tiny.gguf [--n 40] [--text .carry/tiny]

Owns the held-out cases, the judgement of a tool call and the table. Decoding is greedy. Three
decoders fill the table: the torch model during training, the NumPy reference, and the CPU engine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.tiny import dialogues, tools
from ops.tiny.dialogues import Dialogue
from ops.tiny.encode import Encoder, Plain, answer, rendered
from ops.tiny.words import Words

if TYPE_CHECKING:
    from collections.abc import Sequence

Decode = Callable[[list[list[int]], int], list[list[int]]]  # prompts, most new ids -> answers
SEED = 20


@dataclass
class Case:
    kind: str
    dialogue: Dialogue  # its last turn is the answer
    prompt: list[int]
    expected: list[int]  # eos included

    @property
    def is_call(self) -> bool:
        return bool(self.dialogue.turns[-1].calls)


def case(kind: str, d: Dialogue, encoder: Encoder) -> Case:
    *before, last = d.turns
    opened = Dialogue(d.kind, before, d.system, d.tools, d.thinking, d.effort)
    prompt, _ = encoder.pieces(rendered(opened, encoder.texts))
    expected, _ = encoder.pieces(answer(last, d.thinking)[1:])
    return Case(kind, d, prompt, expected)


def cases(encoder: Encoder, n: int, seed: int = SEED, longest: int = 1024) -> list[Case]:
    """`n` cases of every kind, none longer than `longest` ids with its answer."""
    out: list[Case] = []
    w = Words(random.Random(seed), unseen=True)

    def thinking(d: Dialogue) -> Dialogue:
        d.thinking = True
        return d

    makers: dict[str, Callable[[], Dialogue]] = {
        "call, 1 tool": lambda: dialogues.single_call(w, 1),
        "call, 2 tools": lambda: dialogues.single_call(w, 2),
        "call, 4 tools": lambda: dialogues.single_call(w, 4),
        "call, thinking": lambda: thinking(dialogues.single_call(w, 2)),
        "call, implied": lambda: dialogues.single_call(w, 2, tools.implied),
        "result": lambda: _until(w, dialogues.tool_use, "result"),
        "decline": lambda: dialogues.declining(w),
        "extract": lambda: dialogues.extraction(w),
        "remember": lambda: _until(w, dialogues.chat, "remember"),
        "chat": lambda: _until(w, dialogues.chat, "chat"),
        **{
            kind: (lambda kind=kind: _until(w, dialogues.small_tasks, kind))  # type: ignore[misc]
            for kind in ("copy", "list", "sum", "json")
        },
        "lookup": lambda: dialogues._dialogue(w, "lookup", [dialogues.lookup(w)]),
    }
    for kind, make in makers.items():
        n_kind = 0
        while n_kind < n:
            d = make()
            if not kind.startswith("call"):
                d.thinking = False
            c = case(kind, d, encoder)
            if len(c.prompt) + len(c.expected) <= longest:
                out.append(c)
                n_kind += 1
    return out


def _until(w: Words, make: Callable[[Words], Dialogue], kind: str) -> Dialogue:
    while True:
        d = make(w)
        if (
            d.kind == kind
            and d.turns[-1].role == "assistant"
            and not (kind == "result" and d.turns[-1].calls)
        ):
            if kind in ("copy", "list", "sum", "json"):
                d.turns = d.turns[:2]
            return d


def needles(encoder: Encoder, n: int, filler: list[str], seed: int = SEED) -> list[Case]:
    """One fact far back: the last question about a text of about 2k, 4k and 7k ids."""
    out = []
    w = Words(random.Random(seed), unseen=True)
    for kind, n_words in (("needle 2k", 1100), ("needle 4k", 2300), ("needle 7k", 3600)):
        n_kind = 0
        while n_kind < n:
            d = dialogues.needle(w, n_words, filler)
            d.turns, d.tools, d.thinking = d.turns[:2], [], False
            c = case(kind, d, encoder)
            if len(c.prompt) + len(c.expected) <= 8192:
                out.append(c)
                n_kind += 1
    return out


# --- judgement -----------------------------------------------------------------------------------

_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"\n]+)">\n(.*?)\n</｜DSML｜invoke>', re.S)
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.S
)
_BLOCK = re.compile(
    r"\n\n<｜DSML｜tool_calls>\n(.*)\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>", re.S
)


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls of an answer that is a whole, well-formed block of them; None if it is not."""
    block = _BLOCK.fullmatch(text)
    if block is None:
        return None
    out: list[tuple[str, dict[str, Any]]] = []
    rest = block[1]
    for invoke in _INVOKE.finditer(rest):
        arguments: dict[str, Any] = {}
        for name, is_text, value in _PARAMETER.findall(invoke[2]):
            try:
                arguments[name] = value if is_text == "true" else json.loads(value)
            except ValueError:
                return None
        if _PARAMETER.sub("", invoke[2]).strip("\n"):
            return None
        out.append((invoke[1], arguments))
    return out if out and not _INVOKE.sub("", rest).strip("\n") else None


def well_formed(text: str, tools: Sequence[dict[str, Any]]) -> bool:
    """Parses, names a declared tool, uses only its parameters with the right types, and gives all
    required ones."""
    calls = parse_calls(text.rpartition("</think>")[2])
    if calls is None:
        return False
    declared = {t["name"]: t["parameters"] for t in tools}
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}
    for name, arguments in calls:
        if name not in declared:
            return False
        properties = declared[name]["properties"]
        if set(declared[name].get("required", [])) - set(arguments):
            return False
        for key, value in arguments.items():
            if key not in properties or not isinstance(value, kinds[properties[key]["type"]]):
                return False
            if isinstance(value, bool) and properties[key]["type"] != "boolean":
                return False
    return True


def right(c: Case, text: str, encoder: Encoder) -> bool:
    """Calls by meaning, words by letter; reasoning is not judged."""
    said = text.rpartition("</think>")[2]
    if c.is_call:
        return parse_calls(said) == [(n, a) for n, a in c.dialogue.turns[-1].calls]
    return said == encoder.decode(c.expected).rpartition("</think>")[2]


def table(
    found: list[Case], answers: list[list[int]], encoder: Encoder
) -> tuple[str, dict[str, float]]:
    """Per kind: cases, well-formed calls, entirely right answers in per cent."""
    rows: dict[str, list[tuple[bool, bool]]] = {}
    for c, ids in zip(found, answers, strict=True):
        text = encoder.decode(ids)
        formed = well_formed(text, c.dialogue.tools) if c.is_call else True
        rows.setdefault(c.kind, []).append((formed, right(c, text, encoder)))
    lines = [f"{'kind':16} {'n':>4} {'well-formed':>12} {'right':>7}"]
    figures = {}
    for kind, judged in rows.items():
        formed, exact = (100 * float(np.mean([j[i] for j in judged])) for i in (0, 1))
        shown = f"{formed:10.1f} %" if kind.startswith("call") else ""
        lines.append(f"{kind:16} {len(judged):4} {shown:>12} {exact:5.1f} %")
        figures[kind] = exact
        if shown:
            figures[kind + ", well-formed"] = formed
    return "\n".join(lines), figures


def samples(found: list[Case], answers: list[list[int]], encoder: Encoder, each: int = 2) -> str:
    """Some questions, answers and what was expected, wrong ones first."""
    lines = []
    for kind in dict.fromkeys(c.kind for c in found):
        mine = [
            (c, encoder.decode(a)) for c, a in zip(found, answers, strict=True) if c.kind == kind
        ]
        mine.sort(key=lambda m: right(m[0], m[1], encoder))
        for c, text in mine[: each - 1] + mine[-1:]:
            asked = c.dialogue.turns[-2].text[-160:]
            verdict = "right" if right(c, text, encoder) else "WRONG"
            lines.append(f"[{kind}] {verdict}: {asked!r}\n    -> {text!r}")
            if verdict == "WRONG":
                lines.append(f"    != {encoder.decode(c.expected)!r}")
    return "\n".join(lines)


# --- decoders of the finished file ---------------------------------------------------------------


def reference_decoder(path: str) -> Decode:
    """Slow: the NumPy reference in its rounded mode."""
    from ds4d.model import gguf
    from ds4d.model.reference import Reference

    file = gguf.open_model(path)
    reference = Reference(file.geometry, {n: file.tensor(n) for n in file.tensors})

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        out = []
        for prompt in prompts:
            state = reference.new_state()
            logits = reference.prefill(state, prompt)
            ids: list[int] = []
            while len(ids) < most:
                ids.append(int(logits.argmax()))
                if ids[-1] == 1:
                    break
                logits = reference.step(state, ids[-1])
            out.append(ids)
        return out

    return decode


def engine_decoder(path: str, lanes: int = 4) -> Decode:
    """The product's CPU engine, `lanes` prompts at a time."""
    import threading

    from ds4d.cpu.engine import CpuEngine
    from ds4d.engine import Prefill, Sampling, VerifyWork
    from ds4d.model import gguf

    file = gguf.open_model(path)
    pages = file.geometry.context // file.geometry.page_tokens
    weights = {n: file.tensor(n) for n in file.tensors}
    engine = CpuEngine(file.geometry, weights, lanes=lanes, pages=lanes * pages, frontiers=1)
    greedy = Sampling(temperature=0.0)

    def decode(prompts: list[list[int]], most: int) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in prompts]
        waiting = list(enumerate(prompts))
        seated: dict[int, int] = {}  # lane -> prompt
        pending: dict[int, int] = {}
        while waiting or seated:
            for lane in range(lanes):
                if lane not in seated and waiting:
                    i, prompt = waiting.pop(0)
                    seated[lane], pending[lane] = i, prompt[-1]
                    engine.seat(lane)
                    engine.map_pages(lane, range(lane * pages, (lane + 1) * pages))
                    ids = np.array(prompt[:-1], np.int32)
                    engine.prefill(Prefill(lane=lane, ids=ids), threading.Event())
            works = [
                VerifyWork(
                    lane=lane,
                    pending=pending[lane],
                    sampling=greedy,
                    position=len(out[seated[lane]]),
                )
                for lane in seated
            ]
            for done in engine.verify(works):
                said = out[seated[done.lane]]
                said += done.ids
                pending[done.lane] = done.ids[-1]
                if said[-1] == 1 or len(said) >= most:
                    engine.vacate(done.lane)
                    del seated[done.lane]
        return out

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--n", type=int, default=20, help="cases of each kind")
    parser.add_argument("--samples", type=int, default=2, help="shown of each kind")
    parser.add_argument("--engine", choices=("cpu", "reference"), default="cpu")
    parser.add_argument(
        "--text", default="", help="folder of texts.py: adds needles of 2k to 7k ids"
    )
    args = parser.parse_args()
    encoder = Encoder()
    found = cases(encoder, args.n)
    if args.text:
        found += needles(encoder, max(2, args.n // 4), Plain(encoder, Path(args.text)).lines)
    decoder = engine_decoder if args.engine == "cpu" else reference_decoder
    answers = decoder(args.file)([c.prompt for c in found], 200)
    print(samples(found, answers, encoder, args.samples))
    print(table(found, answers, encoder)[0])


if __name__ == "__main__":
    main()
