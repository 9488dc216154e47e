"""Train ds4-tiny: `python -m ops.tiny.train --minutes 20 --out RUN` (see README.md).

Owns the schedule, the step as two graphs, and what a run prints. The schedule goes by the clock: a
run does the part from --begin to --end of it in --minutes and always leaves checkpoint, GGUF and
curve behind; a later run goes on from the checkpoint (--resume) with a new warm-up. Under torchrun
every process takes one GPU and the gradients are averaged.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed

from ops.tiny import curve, export
from ops.tiny.encode import Encoder, Feed
from ops.tiny.evaluate.cases import small
from ops.tiny.model import BLOCK, Precision, Tiny
from ops.tiny.optimise import Optimiser

if TYPE_CHECKING:
    from ops.tiny.evaluate.cases import Case

LENGTH = 8192  # tokens in a row
SELECT_FROM = 0.15  # before: the indexer only learns; from here on it chooses
DECAY_FROM = 0.45
BALANCE = 0.001  # nudge of a router's bias a step
_COUNTS = 5  # weighted loss, weight, alignment, right answer tokens, answer tokens
Batch = tuple[torch.Tensor, ...]


# --- batches -------------------------------------------------------------------------------------


def tensors(ids: np.ndarray, weights: np.ndarray, owner: np.ndarray) -> Batch:
    """ids, targets [B, T] int64, weights of the targets [B, T] f32, owner [B, T / 128] int32."""
    i, w = torch.from_numpy(ids).long(), torch.from_numpy(weights).float()
    return (
        i,
        i.roll(-1, 1),
        torch.cat([w[:, 1:], torch.zeros_like(w[:, :1])], 1),
        torch.from_numpy(owner).int(),
    )


class Batches:
    """Takes batches from the processes ahead of use, in a thread, into memory the GPU can read."""

    def __init__(self, feed: Feed, n_rows: int, pinned: bool) -> None:
        self.feed, self.n_rows, self.pinned = feed, n_rows, pinned
        self.ready: queue.Queue[Batch] = queue.Queue(6)
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self) -> None:
        while True:
            try:
                made = tensors(*self.feed.take(self.n_rows))
            except queue.Empty:
                continue
            self.ready.put(tuple(t.pin_memory() for t in made) if self.pinned else made)

    def take(self) -> Batch:
        return self.ready.get(timeout=180)


# --- one step, one evaluation --------------------------------------------------------------------


class Trainer:
    """The model and its step on one device: forward and backward as one graph, the optimiser as
    another, gradients averaged in between where there are several devices."""

    def __init__(self, n_rows: int, compiled: bool = True, length: int = LENGTH) -> None:
        self.world = distributed.get_world_size() if distributed.is_initialized() else 1
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else (
            torch.device("cpu"))  # fmt: skip
        self.model = Tiny(precision=Precision(torch.bfloat16 if on_gpu else torch.float32))
        self.model.to(self.device)
        g = self.model.g
        self.optimiser = Optimiser(self.model, g.n_layers * g.n_experts + _COUNTS)
        self.dense = torch.ones((), dtype=torch.bool, device=self.device)
        zeros = np.zeros((n_rows, length))
        batch = tensors(zeros.astype(np.int16), zeros.astype(np.float16),
                        np.zeros((n_rows, length // BLOCK), np.int16))  # fmt: skip
        self.batch = tuple(t.to(self.device) for t in batch)
        self.totals = torch.zeros(_COUNTS, device=self.device)
        self.scale = 1.0  # lowered for good when a step is not finite
        self.skipped = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.behind: list[torch.cuda.Event] = []
        if compiled and on_gpu:
            import torch._dynamo as dynamo

            dynamo.config.recompile_limit = 64
            self.model.compile()

    # forward, backward, optimiser

    def _gradients(self) -> None:
        ids, targets, weights, owner = self.batch
        whole = weights.sum().clamp_min(1.0)
        total, align, hits, loads = self._losses(ids, targets, weights, owner)
        params = self.optimiser.params
        self.optimiser.take(torch.autograd.grad(total / whole + align, params, allow_unused=True))
        answers = weights > 0.9
        counts = torch.stack(
            [total.detach(), whole, align.detach(), (hits & answers).sum(), answers.sum()]
        )
        self.optimiser.extra.copy_(torch.cat([loads.detach().flatten(), counts]))

    def _losses(
        self, ids: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, owner: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Weighted loss, alignment loss, right argmaxes [B, T], loads [L, E]."""
        X, align, loads = self.model.streams(ids, owner, self.dense)
        total, hits = self.model.head_loss(
            self.model.params(""), X.flatten(0, 1), targets.flatten(), weights.flatten(),
            self.model.precision, self.model.g,
        )  # fmt: skip
        return total, align, hits.view(ids.shape), loads

    @torch.no_grad()
    def _update(self) -> None:
        self.optimiser.step()
        g = self.model.g
        loads, counts = self.optimiser.extra.split([g.n_layers * g.n_experts, _COUNTS])
        self.totals += counts
        loads = loads.view(g.n_layers, g.n_experts)
        for i in range(g.n_hash_layers, g.n_layers):
            bias = self.model.tensor(f"blk.{i}.exp_probs_b.bias")
            bias.add_(torch.sign(loads[i].mean() - loads[i]), alpha=BALANCE)

    def _average(self) -> None:
        if self.world > 1:
            distributed.all_reduce(self.optimiser.flat, op=distributed.ReduceOp.AVG)

    def step(self, batch: Batch, progress: float, warm: float) -> None:
        """One step; returns before the device has done it."""
        decay = min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
        self.optimiser.rate.fill_(warm * (0.02 + 0.98 * decay) * self.scale)
        self.dense.fill_(progress < SELECT_FROM)
        for to, values in zip(self.batch, batch, strict=True):
            to.copy_(values, non_blocking=True)
        if self.graphs:
            self.graphs[0].replay()
            self._average()
            self.graphs[1].replay()
        else:
            self._gradients()
            self._average()
            self._update()
        if self.device.type == "cuda":
            self._wait()

    def _wait(self) -> None:
        """Keep the host at most three steps ahead."""
        event = torch.cuda.Event()
        event.record()
        self.behind.append(event)
        if len(self.behind) > 3:
            self.behind.pop(0).synchronize()

    def capture(self) -> None:
        """Turn the step into graphs. Everything has been compiled by then."""
        torch.cuda.synchronize()
        for work in (self._gradients, self._update):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            self.graphs.append(graph)

    def figures(self) -> dict[str, float]:
        """What was counted since the last call; waits for the device. A step whose gradient was
        not finite lowers the rate for good."""
        total, weight, align, right, answers = self.totals.tolist()
        self.totals.zero_()
        broken = int(self.optimiser.broken)
        self.scale *= 0.8 ** (broken - self.skipped)
        self.skipped = broken
        return {"loss": total / max(weight, 1.0), "right": 100 * right / max(answers, 1.0),
                "align": align, "norm": float(self.optimiser.norm)}  # fmt: skip

    # teacher-forced exactness

    def exact(self, found: list[Case]) -> dict[str, float]:
        """Per kind: per cent of cases whose whole answer is the argmax everywhere, which is what
        greedy decoding would write. Every process does its part."""
        n_rows, length = self.batch[0].shape
        rank = distributed.get_rank() if self.world > 1 else 0
        mine = found[rank :: self.world]
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(c.kind for c in found))}
        table = torch.zeros(len(kinds), 2, device=self.device)
        for batch, places in packed(mine, n_rows, length):
            for to, values in zip(self.batch, batch, strict=True):
                to.copy_(values)
            hits = self._losses(*self.batch)[2].detach()
            good = (hits | (self.batch[2] == 0)).cpu().numpy()
            for row, start, end, kind in places:
                table[kinds[kind], 0] += bool(good[row, start:end].all())
                table[kinds[kind], 1] += 1
        if self.world > 1:
            distributed.all_reduce(table)
        right, n = table.T.tolist()
        return {kind: 100 * right[i] / max(1.0, n[i]) for kind, i in kinds.items()}


def packed(
    found: list[Case], n_rows: int, length: int
) -> list[tuple[Batch, list[tuple[int, int, int, str]]]]:
    """Cases laid into batches as dialogues; (row, first, behind last target, kind) of each."""
    out = []
    places: list[tuple[int, int, int, str]] = []

    def blank() -> tuple[np.ndarray, ...]:
        return (np.full((n_rows, length), 2, np.int16), np.zeros((n_rows, length), np.float16),
                np.zeros((n_rows, length // BLOCK), np.int16))  # fmt: skip

    ids, weights, owner = blank()
    row, at, number = 0, 0, 0
    for c in found:
        n = len(c.prompt) + len(c.expected)
        if n > length:
            continue
        if at + n > length:
            owner[row, at // BLOCK :] = number
            row, at, number = row + 1, 0, 0
        if row == n_rows:
            out.append((tensors(ids, weights, owner), places))
            ids, weights, owner = blank()
            row, places = 0, []
        end = -(-(at + n) // BLOCK) * BLOCK
        ids[row, at : at + n] = [*c.prompt, *c.expected]
        weights[row, at + len(c.prompt) : at + n] = 1
        owner[row, at // BLOCK : end // BLOCK] = number
        # weights of targets lie one to the left
        places.append((row, at + len(c.prompt) - 1, at + n - 1, c.kind))
        at, number = end, number + 1
    owner[row, at // BLOCK :] = number
    out.append((tensors(ids, weights, owner), places))
    return out


# --- a run ---------------------------------------------------------------------------------------


class Run:
    """A part of the schedule by the clock, with reports, checkpoints and held-out scores."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.stop_at = self.began + args.minutes * 60 - args.reserve
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.lines: list[curve.Line] = []
        self.last = self.began  # report
        folder = Path(args.text) if args.text else None
        self.say("" if folder else "WARNING: no folder of plain text: dialogues only")
        # Processes first: they are forked, and must not inherit a GPU.
        seed = (int(args.begin * 1000) + args.seed) * 64 + self.rank
        self.feed = Feed(folder, args.length, max(1, args.workers // self.world), seed)
        self.cases = small(Encoder(), args.cases, longest=args.length - 512, folder=folder)
        if self.world > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            here = torch.device("cuda", torch.cuda.current_device())
            distributed.init_process_group("nccl", device_id=here)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.trainer = Trainer(args.rows, not args.no_compile, args.length)
        if args.resume:
            if args.resume.endswith(".gguf"):
                export.read(args.resume, self.trainer.model)
                self.say(f"goes on from the weights of {args.resume}")
            else:
                at = export.load(Path(args.resume), self.trainer.model)
                self.say(f"resumed at {at}")
        self.trainer.scale = args.rate
        n = sum(p.numel() for p in self.trainer.optimiser.params)
        self.say(f"{self.world} x {self.trainer.device}, {n:,} parameters, "
                 f"{self.world * args.rows * args.length:,} tokens a step")  # fmt: skip

    def say(self, text: str) -> None:
        if self.rank == 0 and text:
            print(text, flush=True)

    def go(self) -> None:
        args, trainer = self.args, self.trainer
        source = Batches(self.feed, args.rows, trainer.device.type == "cuda")
        progress, steps = args.begin, 0
        for _ in range(3):  # compiling; at a rate that changes next to nothing
            trainer.step(source.take(), progress, 0.01)
        if trainer.device.type == "cuda":
            trainer.capture()
        trainer.figures()
        self.say(f"compiled and captured after {time.monotonic() - self.began:.0f} s")
        started = shown = scored = saved = self.last = time.monotonic()
        since = 0
        while True:
            now = time.monotonic()
            if self._over(now, steps):
                break
            share = (now - started) / max(1.0, self.stop_at - started)
            progress = args.begin + (args.end - args.begin) * min(1.0, share)
            self.feed.stage.value = progress
            trainer.step(source.take(), progress, min(1.0, (steps + 1) / args.warm))
            steps += 1
            if steps % 16 == 0 and self._agreed(now - shown > args.every):
                line = self._report(progress, steps, steps - since)
                if self._agreed(now - scored > args.eval_every):
                    line |= self._score(now)
                    scored = time.monotonic()
                shown, since = time.monotonic(), steps
                line["seconds"] = shown - self.began
                if self.rank == 0 and shown - saved > args.save_every:
                    export.save(trainer.model, self.out, progress)
                    saved = shown
                self.last = shown
        self._finish(progress, steps, steps - since)

    def _agreed(self, mine: bool) -> bool:
        """The first process decides for all: they must take the same steps."""
        if self.world == 1:
            return mine
        flag = torch.tensor(float(mine), device=self.trainer.device)
        distributed.broadcast(flag, 0)
        return bool(flag)

    def _over(self, now: float, steps: int) -> bool:
        if self.args.steps:
            return steps >= self.args.steps
        return steps % 16 == 0 and self._agreed(now > self.stop_at)

    def _report(self, progress: float, steps: int, n: int) -> curve.Line:
        figures = self.trainer.figures()
        figures["align"] /= n
        each = self.world * self.args.rows * self.args.length
        seconds = time.monotonic() - self.last
        line = {"progress": progress, "step": steps, "tokens": steps * each, **figures,
                "speed": n * each / seconds}  # fmt: skip
        self.say(f"{progress:.3f} step {steps} loss {line['loss']:.4f} "
                 f"answer tokens right {line['right']:.2f} % align {line['align']:.4f} "
                 f"norm {line['norm']:.2f} {line['speed'] / 1000:.0f}k tok/s")  # fmt: skip
        self.lines.append(line)
        return line

    def _score(self, now: float) -> dict[str, float]:
        scores = self.trainer.exact(self.cases)
        self.say("   exact %: " + ", ".join(f"{k} {v:.0f}" for k, v in scores.items())
                 + f" ({time.monotonic() - now:.1f} s)")  # fmt: skip
        return scores

    def _finish(self, progress: float, steps: int, n: int) -> None:
        self._report(progress, steps, max(1, n))
        self.lines[-1]["seconds"] = time.monotonic() - self.began
        self.feed.close()
        if self.rank == 0:
            export.save(self.trainer.model, self.out, progress)
            export.write(self.trainer.model, self.out / "ds4-tiny.gguf")
        self.say(f"stopped at {progress:.3f} after {steps} steps, {self.trainer.skipped} skipped")
        try:
            # Judge what the file holds; the files are there already if this fails.
            if self.world > 1:
                distributed.barrier()
            export.read(self.out / "ds4-tiny.gguf", self.trainer.model)
            self.trainer.dense.fill_(False)
            self.lines[-1] |= self._score(time.monotonic())
        except Exception:
            traceback.print_exc()
        if self.rank == 0:
            curve.write(self.lines, self.out)
        self.say(f"done in {time.monotonic() - self.began:.0f} s, peak {_peak_gib():.1f} GiB")
        if self.world > 1:
            distributed.destroy_process_group()


def _peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--begin", type=float, default=0.0, help="where in the schedule to begin")
    parser.add_argument("--end", type=float, default=1.0, help="where in the schedule to end")
    parser.add_argument("--resume", default="", help="folder of a checkpoint, or a GGUF")
    parser.add_argument("--out", default="build/tiny")
    parser.add_argument("--text", default=".carry/tiny", help="folder of texts.py; empty: none")
    parser.add_argument("--rows", type=int, default=4, help="rows of a step, on each GPU")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=14, help="processes that make data, in all")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=1.0, help="share of the full learning rate")
    parser.add_argument("--warm", type=int, default=150, help="steps of warm-up")
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds kept for the end")
    parser.add_argument("--save-every", type=float, default=90.0, help="seconds, checkpoints")
    parser.add_argument("--cases", type=int, default=48, help="held-out cases of each kind")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between lines")
    parser.add_argument("--eval-every", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if args.text and not Path(args.text, "kjv.txt").exists():
        sys.exit(f"{args.text}/kjv.txt is missing: run python -m ops.tiny.texts, or --text ''")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Run(args).go()


if __name__ == "__main__":
    main()
