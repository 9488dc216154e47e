"""Small random models for the CPU engine, and how tests drive it."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from ds4d.cpu.engine import CpuEngine
from ds4d.engine import Prefill, Sampling, VerifyWork
from ds4d.model import synth

NEVER = threading.Event()
GREEDY = Sampling(temperature=0.0)

# Rows under the e4m3 and FP4 rules; every kind of layer.
PACKED = replace(
    synth.geometry("micro"), name="packed", head_dim=80, rope_dim=16, index_dim=32, index_heads=32
)
# Nothing is a multiple of sixteen that need not be; rows are F16, and of one width with the
# indexer's, so that what is told apart by size alone is not told apart.
AWKWARD = replace(
    synth.geometry("micro"), name="awkward", n_vocab=301, head_dim=40, out_groups=2, index_dim=40,
    index_heads=20, n_experts=5, n_experts_used=2, streams=3,
)  # fmt: skip


def tensors_of(geometry, kinds="q8", seed=0):
    return {t.name: t for t in synth.random_tensors(geometry, kinds, seed)}


def random_ids(geometry, n, seed=0):
    return np.random.default_rng(seed).integers(0, geometry.n_vocab, n).astype(np.int32)


def open_engine(geometry, tensors, folder, **how):
    sizes = {"lanes": 4, "pages": 12, "frontiers": 4, "threads": 1} | how
    return CpuEngine(geometry, tensors, cache_dir=folder, **sizes)


def seat(engine, lane, pages):
    engine.seat(lane)
    engine.map_pages(lane, pages)


def prefill(engine, lane, ids, cancel=NEVER):
    return engine.prefill(Prefill(lane=lane, ids=np.asarray(ids, np.int32)), cancel)


def work(lane, pending, draft=(), sampling=GREEDY, position=0):
    return VerifyWork(
        lane=lane, pending=int(pending), draft=tuple(int(i) for i in draft), sampling=sampling,
        position=position,
    )  # fmt: skip


def run_rows(engine, lane, ids):
    """Logits [n, V] of all `ids` as one verify pass, every id accepted."""
    logits, _ = engine.logits([work(lane, ids[0], ids[1:])])
    logits = logits.copy()
    mine = engine._lane(lane)
    mine.n_tokens += len(ids)
    mine.highest = max(mine.highest, mine.n_tokens)
    return logits


def run_all(engine, lane, ids, block=32):
    return np.concatenate(
        [run_rows(engine, lane, ids[i : i + block]) for i in range(0, len(ids), block)]
    )
