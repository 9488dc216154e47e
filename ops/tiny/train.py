"""Train ds4-tiny on one GPU: `python -m ops.tiny.train --minutes 9 --out RUN` (see README.md).

Owns the schedule, the optimisers and what a run prints. The schedule goes by the clock: a run does
the part from --begin to --end of it in --minutes and always leaves checkpoint, GGUF, curve and
table behind; a later run goes on from the checkpoint (--resume) with a new warm-up.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ops.tiny import evaluate, export
from ops.tiny.encode import Encoder, Feed, Plain
from ops.tiny.model import BLOCK, Tiny

SHORT, LONG = 1024, 8192  # tokens in a row
DECODE_S = 20  # left of a run's time, without which no answers are decoded at its end
SELECT_FROM = 0.20  # before: the indexer only learns; from here on it chooses
LONG_FROM = 0.40  # from here on some batches hold long rows
LONG_EVERY = 3
DECAY_FROM = 0.45
ADAM_RATES = {  # by the end of the tensor's name, the first that fits
    "token_embd.weight": 4e-3, "output.weight": 2e-3, "fn.weight": 1e-3,
    "ffn_gate_inp.weight": 2e-3, "ape.weight": 3e-3, "": 3e-3,
}  # fmt: skip
MUON_RATE, MUON_DECAY, MOMENTUM = 0.02, 0.02, 0.95
CLIP = 1.0


# --- optimisers ----------------------------------------------------------------------------------


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """About U V^T of every matrix [n, rows <= columns]: five Newton-Schulz steps in bf16, with the
    usual quintic coefficients."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x


class Muon:
    """Momentum, then an orthogonal step, for matrices; all of one shape at once."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for p in params:
            groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.groups = list(groups.values())
        self.momenta = [[torch.zeros_like(p) for p in ps] for ps in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for params, momenta in zip(self.groups, self.momenta, strict=True):
            grads = [p.grad for p in params]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(grads, momenta, MOMENTUM)
            rows, columns = params[0].shape[-2:]
            stacked = torch.cat([a.reshape(-1, rows, columns) for a in ahead])
            tall = rows > columns
            step = orthogonal(stacked.mT if tall else stacked)
            step = (step.mT if tall else step).float() * max(1.0, rows / columns) ** 0.5
            sizes = [p.numel() // (rows * columns) for p in params]
            steps = [s.view(p.shape) for s, p in zip(step.split(sizes), params, strict=True)]
            torch._foreach_mul_(params, 1 - rate * MUON_DECAY)
            torch._foreach_add_(params, steps, alpha=-rate)


def optimisers(model: Tiny) -> tuple[Muon, torch.optim.Optimizer]:
    matrices, groups = [], {}
    for name in model.names():
        p = model.tensor(name)
        if not p.requires_grad:
            continue
        end = next(e for e in ADAM_RATES if name.endswith(e))
        if p.dim() > 1 and end == "":
            matrices.append(p)
        else:
            groups.setdefault(end, []).append(p)
    adam = torch.optim.AdamW(
        [{"params": ps, "lr": ADAM_RATES[e], "rate": ADAM_RATES[e]} for e, ps in groups.items()],
        betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=model.had.is_cuda,
    )  # fmt: skip
    return Muon(matrices), adam


# --- batches -------------------------------------------------------------------------------------


class Batches:
    """Moves batches of one row length to the device ahead of use, in a thread."""

    def __init__(self, feed: Feed, n_rows: int, device: torch.device) -> None:
        self.feed, self.n_rows, self.device = feed, n_rows, device
        self.ready: queue.Queue[Any] = queue.Queue(4)
        threading.Thread(target=self._fill, daemon=True).start()

    def _fill(self) -> None:
        while True:
            try:
                made = on_device(self.feed.take(self.n_rows), self.device)
            except queue.Empty:
                continue
            self.ready.put(made)

    def take(self) -> tuple[torch.Tensor, ...]:
        return self.ready.get(timeout=180)


def on_device(rows: tuple[np.ndarray, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """ids, targets [B, T] int64, weights [B, T] f32 (of the target), owner [B, T / 128]."""
    ids, weights, owner = (torch.from_numpy(r) for r in rows)
    if device.type == "cuda":
        ids, weights, owner = (
            t.pin_memory().to(device, non_blocking=True) for t in (ids, weights, owner)
        )
    ids, weights = ids.long(), weights.float()
    targets = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    weights = torch.cat([weights[:, 1:], torch.zeros_like(weights[:, :1])], 1)
    return ids, targets, weights, owner.int()


# --- one step, one evaluation --------------------------------------------------------------------


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = Tiny().to(self.device)
        self.muon, self.adam = optimisers(self.model)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.compiled = False
        self.scale = 1.0  # lowered for good when a step is not finite
        self.skipped = 0
        self.broken = torch.zeros((), dtype=torch.long, device=self.device)
        self.flags = {b: torch.tensor(b, device=self.device) for b in (False, True)}

    def compile(self) -> None:
        if self.args.no_compile or self.compiled:
            return
        import torch._dynamo as dynamo

        for limit in ("recompile_limit", "cache_size_limit"):
            if hasattr(dynamo.config, limit):
                setattr(dynamo.config, limit, 64)
        self.model.compile()
        self.compiled = True

    def _fall_back(self) -> None:
        from ops.tiny.model import head_loss, layer

        print(
            "WARNING: compiling failed, going on without:\n" + traceback.format_exc(limit=-4),
            flush=True,
        )
        self.model.layer, self.model.head_loss = layer, head_loss
        self.compiled, self.args.no_compile = False, True

    def losses(
        self, batch: tuple[torch.Tensor, ...], dense: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Weighted loss, summed weight, alignment loss, right argmaxes [B, T], loads [L, E]."""
        ids, targets, weights, owner = batch
        X, align, loads = self.model.streams(ids, owner, dense)
        total, hits = self.model.head_loss(
            self.model.params(""), X.flatten(0, 1), targets.flatten(), weights.flatten(),
            self.model.precision, self.model.g,
        )  # fmt: skip
        return total, weights.sum(), align, hits.view(ids.shape), loads

    def step(
        self, batch: tuple[torch.Tensor, ...], progress: float, warm: float, micro: int
    ) -> dict[str, Any]:
        try:
            return self._step(batch, progress, warm, micro)
        except Exception as error:
            if not self.compiled or isinstance(error, torch.OutOfMemoryError):
                raise
            self._fall_back()
            return self._step(batch, progress, warm, micro * 2)

    def _step(
        self, batch: tuple[torch.Tensor, ...], progress: float, warm: float, micro: int
    ) -> dict[str, Any]:
        dense = self.flags[progress < SELECT_FROM]
        for p in self.params:
            p.grad = None
        whole = batch[2].sum().clamp_min(1.0)
        sums = []
        for part in zip(*(t.chunk(micro) for t in batch), strict=True):
            total, weight, align, hits, loads = self.losses(part, dense)
            (total / whole + align / micro).backward()
            answers = part[2] > 0.9
            counts = torch.stack(
                [total.detach(), weight, align.detach(), (hits & answers).sum(), answers.sum()]
            )
            sums.append((counts, loads.detach()))
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm = self._clip()
        decay = min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
        rate = warm * (0.02 + 0.98 * decay) * self.scale
        self.muon.step(MUON_RATE * rate)
        for group in self.adam.param_groups:
            group["lr"] = group["rate"] * rate
        self.adam.step()
        self._balance(sum(loads for _, loads in sums) / micro)
        return {"counts": sum(c for c, _ in sums), "norm": norm, "micro": micro}

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        """Scale gradients to a norm of at most CLIP; all of them to 0 if one is not finite. Never
        waits for the device: that would cost the time of all launches of a step."""
        grads = [p.grad for p in self.params]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        finite = torch.isfinite(norm)
        self.broken += (~finite).long()
        for grad in grads:
            grad.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_mul_(grads, torch.where(finite, (CLIP / (norm + 1e-6)).clamp(max=1.0), 0.0))
        return norm

    def count_broken(self) -> None:
        """Steps whose gradient was not finite; each lowers the rate for good."""
        n = int(self.broken)
        self.scale *= 0.8 ** (n - self.skipped)
        self.skipped = n

    @torch.no_grad()
    def _balance(self, loads: torch.Tensor) -> None:
        """Nudge the router's biases towards equal use of the experts."""
        for i in range(self.model.g.n_hash_layers, self.model.g.n_layers):
            bias = self.model.tensor(f"blk.{i}.exp_probs_b.bias")
            bias.add_(torch.sign(loads[i].mean() - loads[i]), alpha=0.001)

    def exact(self, found: list[evaluate.Case], length: int, n_rows: int) -> dict[str, float]:
        """Per kind: per cent of cases whose whole answer is the argmax everywhere, which is what
        greedy decoding would write."""
        right: dict[str, list[bool]] = {}
        sparse = self.flags[False]
        for at in range(0, len(found), n_rows):
            mine = found[at : at + n_rows]
            ids = np.full((n_rows, length), 2, np.int16)
            weights = np.zeros((n_rows, length), np.float16)
            for row, c in enumerate(mine):
                n, m = len(c.prompt), len(c.expected)
                ids[row, : n + m] = c.prompt + c.expected
                weights[row, n : n + m] = 1
            owner = np.zeros((n_rows, length // BLOCK), np.int16)
            batch = on_device((ids, weights, owner), self.device)
            hits = self.losses(batch, sparse)[3]
            good = (hits | (batch[2] == 0)).all(1).cpu().tolist()
            for c, ok in zip(mine, good, strict=False):
                right.setdefault(c.kind, []).append(ok)
        return {kind: 100 * float(np.mean(v)) for kind, v in right.items()}

    def decode(
        self, prompts: list[list[int]], most: int, length: int, n_rows: int, until: float
    ) -> list[list[int]]:
        """Greedy answers by whole forwards over rows of `length`, no cache: simple, and fast enough
        for a few hundred prompts. Stops early at the clock time `until`."""
        out: list[list[int]] = []
        sparse = self.flags[False]
        for at in range(0, len(prompts), n_rows):
            mine = prompts[at : at + n_rows]
            ids = torch.full((n_rows, length), 2, dtype=torch.long, device=self.device)
            ends = torch.ones(n_rows, dtype=torch.long, device=self.device)
            for row, prompt in enumerate(mine):
                ids[row, : len(prompt)] = torch.tensor(prompt, device=self.device)
                ends[row] = len(prompt)
            starts = ends.clone()
            owner = torch.zeros(n_rows, length // BLOCK, dtype=torch.int32, device=self.device)
            row_at = torch.arange(n_rows, device=self.device)
            live = torch.ones(n_rows, dtype=torch.bool, device=self.device)
            from ops.tiny.model import head

            for _ in range(most):
                X, _, _ = self.model.streams(ids, owner, sparse)
                with torch.no_grad():
                    last = X.detach()[row_at, ends - 1]
                    new = head(
                        self.model.params(""), last, self.model.precision, self.model.g
                    ).argmax(-1)
                    live &= ends < length - 1
                    at_end = torch.where(live, ends, length - 1)
                    ids[row_at, at_end] = torch.where(live, new, ids[row_at, at_end])
                    ends = torch.where(live, ends + 1, ends)
                    live &= new != 1
                if not bool(live.any()) or time.monotonic() > until:
                    break
            out += [ids[i, starts[i] : ends[i]].tolist() for i in range(len(mine))]
        return out


# --- a run ---------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    began = time.monotonic()
    until = began + args.minutes * 60
    stop_at = until - args.reserve
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(int(args.begin * 1000) + 7)
    torch.set_float32_matmul_precision("high")
    folder = Path(args.text) if args.text else None
    if folder is None:
        print("WARNING: no folder of plain text: dialogues only", flush=True)
    # Processes first: they are forked, and must not inherit a GPU.
    n_short = max(1, args.tokens // SHORT)
    n_long = max(1, args.tokens // args.long)
    seed = int(args.begin * 100) + 1
    n_far = 0 if args.no_long else max(1, args.workers // 3)
    short_feed = Feed(folder, SHORT, max(1, n_short // 4), max(1, args.workers - n_far), seed)
    long_feed = Feed(folder, args.long, 1, n_far, seed + 50)
    encoder = Encoder()
    plain = Plain(encoder, folder)
    found = evaluate.cases(encoder, args.cases)
    far = (
        evaluate.needles(encoder, max(2, args.cases // 4), plain.lines)
        if (args.end >= 1 and not args.no_long)
        else []
    )

    trainer = Trainer(args)
    if args.resume:
        print("resumed at", export.load(Path(args.resume), trainer.model), flush=True)
    trainer.compile()
    print(
        f"device {trainer.device}, {sum(p.numel() for p in trainer.params):,} parameters",
        flush=True,
    )
    short = Batches(short_feed, n_short, trainer.device)
    long: Batches | None = None
    rows_short, rows_long = n_short // args.micro, max(1, n_long // args.long_micro)

    curve: list[dict[str, float]] = []
    progress, steps, tokens, shown, evaluated = args.begin, 0, 0, time.monotonic(), time.monotonic()
    since, window, saved = tokens, [], time.monotonic()
    started, anchor = 0.0, args.begin  # the schedule's clock runs from `started`, at `anchor`
    while True:
        now = time.monotonic()
        if now > stop_at or (args.steps and steps >= args.steps):
            break
        if started:
            share = (now - started) / max(1.0, stop_at - started)
            progress = anchor + (args.end - anchor) * min(1.0, share)
        short_feed.stage.value = long_feed.stage.value = progress
        warm = min(1.0, (steps + 1) / args.warm)
        is_long = not args.no_long and progress >= LONG_FROM and steps % LONG_EVERY == 0
        if is_long and long is None:
            long = Batches(long_feed, n_long, trainer.device)
        try:
            batch = (long if is_long and long else short).take()
        except queue.Empty:
            print("WARNING: no data for three minutes, stopping", flush=True)
            break
        before = time.monotonic()
        made = trainer.step(batch, progress, warm, args.long_micro if is_long else args.micro)
        if time.monotonic() - before > 5 and trainer.device.type == "cuda":
            print(f"(a step of {time.monotonic() - before:.0f} s: compiling)", flush=True)
            since, shown = tokens, time.monotonic()
            started, anchor = shown, progress  # what compiling took is no part of the schedule
        steps += 1
        tokens += args.tokens
        window.append((made["counts"], made["norm"], made["micro"]))
        if steps == 2:
            started = time.monotonic()
            since, shown = tokens, started
        if time.monotonic() - shown > args.every and window:
            trainer.count_broken()
            line = _line(
                trainer, window, progress, steps, tokens - since, time.monotonic() - shown, warm
            )
            line["seconds"] = time.monotonic() - began
            if time.monotonic() - evaluated > args.eval_every:
                scores = trainer.exact(found, SHORT, rows_short)
                line |= scores
                print(
                    "   exact %: " + ", ".join(f"{k} {v:.0f}" for k, v in scores.items()),
                    flush=True,
                )
                evaluated = time.monotonic()
            curve.append(line)
            window, since, shown = [], tokens, time.monotonic()
        if time.monotonic() - saved > args.save_every:
            export.save(trainer.model, out, progress)
            saved = time.monotonic()
    export.save(trainer.model, out, progress)
    print(
        f"stopped at {progress:.3f} after {steps} steps, {tokens / 1e6:.1f} M tokens; "
        f"{trainer.skipped} skipped",
        flush=True,
    )
    _curve(curve, out)
    for feed in (short_feed, long_feed):
        feed.close()
    try:
        export.write(trainer.model, out / "ds4-tiny.gguf")
        export.read(out / "ds4-tiny.gguf", trainer.model)  # judge what the file holds
        _final(trainer, encoder, found, far, args, rows_short, rows_long, until, out)
    except Exception:
        traceback.print_exc()
    print(
        f"done in {time.monotonic() - began:.0f} s, peak {_peak_gib():.1f} GiB",
        flush=True,
    )


def _line(
    trainer: Trainer,
    window: list[Any],
    progress: float,
    steps: int,
    tokens: int,
    seconds: float,
    warm: float,
) -> dict[str, float]:
    counts = torch.stack([c for c, _, _ in window]).sum(0).tolist()
    norm = torch.stack([n for _, n, _ in window]).median().item()
    loss, align, hit = (
        counts[0] / counts[1],
        counts[2] / sum(m for _, _, m in window),
        counts[3] / max(1, counts[4]),
    )
    speed = tokens / seconds
    print(f"{progress:.3f} step {steps} loss {loss:.4f} answer tokens right {100 * hit:.2f} % "
          f"align {align:.4f} norm {norm:.2f} warm {warm:.2f} {speed / 1000:.0f}k tok/s",
          flush=True)  # fmt: skip
    return {
        "progress": progress,
        "step": steps,
        "loss": loss,
        "hit": hit,
        "align": align,
        "speed": speed,
    }


def _final(
    trainer: Trainer, encoder: Encoder, found: list[evaluate.Case], far: list[evaluate.Case],
    args: argparse.Namespace, rows_short: int, rows_long: int, until: float, out: Path,
) -> None:  # fmt: skip
    if args.no_final:
        return
    print(
        "teacher-forced exact %:",
        {k: round(v, 1) for k, v in trainer.exact(found, SHORT, rows_short).items()},
        flush=True,
    )
    if far and time.monotonic() < until - 25:
        scores = trainer.exact(far, args.long, rows_long)
        print("needles exact %:", {k: round(v, 1) for k, v in scores.items()}, flush=True)
    if time.monotonic() > until - DECODE_S:
        return
    mine = [c for c in found if c.is_call]  # well-formedness needs decoding
    mine = (
        mine[:: max(1, len(mine) // (5 * rows_short) + 1)] if len(mine) > 5 * rows_short else mine
    )
    answers = trainer.decode([c.prompt for c in mine], 110, SHORT, rows_short, until - 8)
    text, _ = evaluate.table(mine, answers, encoder)
    shown = evaluate.samples(mine, answers, encoder, 3)
    (out / "report.txt").write_text(shown + "\n" + text + "\n", "utf-8")
    print(shown + "\n" + text, flush=True)


def _curve(curve: list[dict[str, float]], out: Path) -> None:
    keys = list(dict.fromkeys(k for line in curve for k in line))
    with (out / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(curve)
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return
    plt.switch_backend("agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5))
    left.plot([c["seconds"] for c in curve], [c["loss"] for c in curve], label="loss")
    left.plot([c["seconds"] for c in curve], [c["align"] for c in curve], label="alignment")
    left.set(xlabel="seconds", yscale="log")
    left.legend()
    scored = [c for c in curve if "copy" in c]
    for kind in [k for k in keys if k not in "progress step loss hit align speed seconds".split()]:
        right.plot([c["seconds"] for c in scored], [c[kind] for c in scored], label=kind)
    right.set(xlabel="seconds", ylabel="held-out answers exactly right, %")
    if scored:
        right.legend(fontsize=7)
    figure.savefig(out / "curve.png", dpi=90)


def probe(args: argparse.Namespace) -> None:
    """Speed and memory of a few settings, and compiled against eager on the same batch."""
    torch.set_float32_matmul_precision("high")
    folder = Path(args.text) if args.text else None
    began = time.monotonic()
    feeds = {n: Feed(folder, n, 4, max(1, args.workers // 2), 1) for n in (SHORT, args.long)}
    trainer = Trainer(args)
    batches = {n: on_device(f.take(args.tokens // n), trainer.device) for n, f in feeds.items()}
    t = time.monotonic()
    rows = sum(len(feeds[SHORT].take(64)[0]) for _ in range(12))
    print(
        f"data: {rows * SHORT / (time.monotonic() - t) / 1000:.0f}k tok/s "
        f"from {len(feeds[SHORT].workers)} processes"
    )
    for feed in feeds.values():
        feed.close()
    wait = torch.cuda.synchronize if trainer.device.type == "cuda" else (lambda: None)

    def measure(name: str, length: int, micro: int, seconds: float) -> None:
        if trainer.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        t0 = time.monotonic()
        try:
            trainer.step(batches[length], 0.5, 0.01, micro)
            trainer.step(batches[length], 0.5, 0.01, micro)
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory", flush=True)
            return
        wait()
        t1 = time.monotonic()
        n = 0
        while time.monotonic() - t1 < seconds or n < 2:
            trainer.step(batches[length], 0.5, 0.01, micro)
            n += 1
        wait()
        took = time.monotonic() - t1
        peak = _peak_gib()
        print(f"{name}: first two steps {t1 - t0:.1f} s, "
              f"then {n * args.tokens / took / 1000:.0f}k tok/s, "
              f"{1000 * took / n:.0f} ms a step, peak {peak:.1f} GiB "
              f"[{time.monotonic() - began:.0f} s]", flush=True)  # fmt: skip

    part = tuple(t[:4] for t in batches[SHORT])
    dense = torch.tensor(False, device=trainer.device)
    with torch.no_grad():
        eager = [x.float().mean().item() for x in trainer.losses(part, dense)[:3]]
    print("eager loss", eager, flush=True)
    measure(f"eager {args.tokens} tokens, micro {args.micro * 4}", SHORT, args.micro * 4, 4)
    trainer.compile()
    measure(
        f"compiled {args.tokens} tokens, rows of {SHORT}, micro {args.micro}", SHORT, args.micro, 8
    )
    total, weight, align, *_ = trainer.losses(
        tuple(t[: len(t) // args.micro] for t in batches[SHORT]), dense
    )
    trainer.model.layer, trainer.model.head_loss = _eager()
    with torch.no_grad():
        e_total, _, e_align, *_ = trainer.losses(
            tuple(t[: len(t) // args.micro] for t in batches[SHORT]), dense
        )
    print(f"compiled loss {total.item() / weight.item():.5f} align {align.item():.5f}, "
          f"eager {e_total.item() / weight.item():.5f} align {e_align.item():.5f}",
          flush=True)  # fmt: skip
    if not args.no_compile:
        trainer.compiled = False
        trainer.compile()
        measure(
            f"compiled {args.tokens} tokens, rows of {args.long}, micro {args.long_micro}",
            args.long,
            args.long_micro,
            6,
        )


def _peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def _eager() -> tuple[Any, Any]:
    from ops.tiny.model import head_loss, layer

    return layer, head_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--begin", type=float, default=0.0, help="where in the schedule to begin")
    parser.add_argument("--end", type=float, default=1.0, help="where in the schedule to end")
    parser.add_argument("--resume", default="", help="folder of a checkpoint")
    parser.add_argument("--out", default="build/tiny")
    parser.add_argument("--text", default=".carry/tiny", help="folder of texts.py; empty: none")
    parser.add_argument("--tokens", type=int, default=65536, help="of one optimiser step")
    parser.add_argument("--micro", type=int, default=2, help="parts of a step, short rows")
    parser.add_argument("--long-micro", type=int, default=2, help="parts of a step, long rows")
    parser.add_argument("--long", type=int, default=LONG, help="length of the long rows")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--warm", type=int, default=150, help="steps of warm-up")
    parser.add_argument("--no-long", action="store_true", help="short rows only")
    parser.add_argument("--reserve", type=float, default=50.0, help="seconds for files and tables")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds, checkpoints")
    parser.add_argument("--cases", type=int, default=32, help="held-out cases of each kind")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between lines")
    parser.add_argument("--eval-every", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many (tests)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-final", action="store_true")
    parser.add_argument("--probe", action="store_true")
    args = parser.parse_args()
    if args.text and not Path(args.text, "kjv.txt").exists():
        sys.exit(f"{args.text}/kjv.txt is missing: run python -m ops.tiny.texts, or --text ''")
    (probe if args.probe else run)(args)


if __name__ == "__main__":
    main()
