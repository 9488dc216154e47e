"""Greedy answers of a model file on the product's CPU engine: lanes within processes.

One thread a process and many lanes: prefill runs a lane at a time, decoding all lanes in one pass.
Prompts that begin alike (questions about one long text) are prefilled once up to where they part,
and go on from a frontier there. The engine is batch-invariant, so none of this changes an answer.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING

import numpy as np

from ds4d.engine import Prefill, Sampling, VerifyWork
from ds4d.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from ds4d.engine import Engine, Frontier

LANES = 16
SHARED = 512  # ids that prompts must have in common before a frontier pays
BUNDLE = 24_000  # ids of prompts that a process is given at once: some five seconds
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Question:
    prompt: npt.NDArray[np.int32]  # [n], at least 2
    most: int  # ids of the answer, end of turn included


@dataclass(frozen=True, slots=True)
class _Common:
    """A prefix that was prefilled: `n` ids, and the pages of the lane that holds its rows."""

    n: int
    frontier: Frontier
    pages: Sequence[int]


class Lanes:
    """Answers questions with an engine that has one lane more than `lanes`: the last one holds
    what questions have in common. Every lane has its own pages for a whole context."""

    def __init__(self, engine: Engine, lanes: int, stop: int) -> None:
        self.engine, self.lanes, self.stop = engine, lanes, stop
        self.page_tokens = engine.geometry.page_tokens
        self.per_lane = -(-engine.geometry.context // self.page_tokens)
        self._never = threading.Event()

    def answer(self, questions: Sequence[Question]) -> list[list[int]]:
        """Ids of each answer; the last is `stop` unless there were `most`.

        Raises ModelFileError when the model's logits are not finite.
        """
        out: list[list[int]] = [[] for _ in questions]
        alone: list[int] = []
        for group in alike([q.prompt for q in questions]):
            if len(group) == 1:
                alone += group
                continue
            common = self._hold(questions[group[0]].prompt, _shared(questions, group))
            self._run(questions, group, out, common)
            self.engine.drop(common.frontier)
            self.engine.vacate(self.lanes)
        self._run(questions, alone, out, None)
        return out

    def _pages(self, lane: int) -> range:
        return range(lane * self.per_lane, (lane + 1) * self.per_lane)

    def _hold(self, prompt: npt.NDArray[np.int32], n: int) -> _Common:
        lane = self.lanes
        self.engine.seat(lane)
        self.engine.map_pages(lane, self._pages(lane))
        self.engine.prefill(Prefill(lane=lane, ids=prompt[:n]), self._never)
        return _Common(n, self.engine.capture(lane), self._pages(lane))

    def _seat(self, lane: int, prompt: npt.NDArray[np.int32], common: _Common | None) -> None:
        """The lane with all of a prompt but its last id."""
        engine, own, n = self.engine, self._pages(lane), 0
        engine.seat(lane)
        if common is None:
            engine.map_pages(lane, own)
        else:
            n = common.n
            whole = n // self.page_tokens
            engine.map_pages(lane, [*common.pages[:whole], *own[whole:]])
            if n % self.page_tokens:  # the lane will write on into this page: its own copy
                engine.copy_page(common.pages[whole], own[whole])
            engine.restore(lane, common.frontier)
        engine.prefill(Prefill(lane=lane, ids=prompt[n:-1]), self._never)

    def _run(
        self,
        questions: Sequence[Question],
        mine: Sequence[int],
        out: list[list[int]],
        common: _Common | None,
    ) -> None:
        waiting = list(reversed(mine))
        seated: dict[int, int] = {}  # lane -> question
        while waiting or seated:
            for lane in range(self.lanes):
                if waiting and lane not in seated:
                    seated[lane] = waiting.pop()
                    self._seat(lane, questions[seated[lane]].prompt, common)
            works = [
                VerifyWork(lane=lane, pending=int((out[i] or questions[i].prompt)[-1]),
                           sampling=GREEDY, position=len(out[i]))
                for lane, i in seated.items()
            ]  # fmt: skip
            for done in self.engine.verify(works):
                if done.failed is not None:
                    raise ModelFileError(f"the engine could not go on: {done.failed}")
                i = seated[done.lane]
                out[i] += done.ids
                if out[i][-1] == self.stop or len(out[i]) >= questions[i].most:
                    self.engine.vacate(done.lane)
                    del seated[done.lane]


def alike(prompts: Sequence[npt.NDArray[np.int32]]) -> list[list[int]]:
    """Indices in groups: prompts of a group share at least SHARED ids and half of their length."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    groups: list[list[int]] = []
    for i in order:
        if groups:
            first = prompts[groups[-1][0]]
            n = common_length(first, prompts[i])
            if n >= SHARED and 2 * n >= max(len(first), len(prompts[i])):
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups


def common_length(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _shared(questions: Sequence[Question], group: Sequence[int]) -> int:
    """Ids that all prompts of a group have in common; each keeps two for its own lane."""
    first = questions[group[0]].prompt
    each = (common_length(first, questions[i].prompt) for i in group)
    return min(min(each), *(len(questions[i].prompt) - 2 for i in group))


# --- many processes ------------------------------------------------------------------------------

_mine: Lanes | None = None  # of a worker process


def open_lanes(path: Path, lanes: int, cache: Path | None) -> Lanes:
    """A CPU engine of one thread on the file. Raises ModelFileError."""
    from ds4d.cpu.engine import CpuEngine
    from ds4d.model import gguf

    file = gguf.open_model(path)
    g = file.geometry
    pages = -(-g.context // g.page_tokens)
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    engine = CpuEngine(
        g, {n: file.tensor(n) for n in file.tensors}, lanes=lanes + 1,
        pages=(lanes + 1) * pages, frontiers=1, threads=1, cache_dir=cache,
    )  # fmt: skip
    return Lanes(engine, lanes, file.vocabulary().eos_id)


def _open(path: Path, lanes: int, cache: Path | None) -> None:
    global _mine
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interruption is the first process's affair
    threading.Thread(target=_follow, daemon=True).start()
    _mine = open_lanes(path, lanes, cache)


def _follow() -> None:
    """End with the process that began this one, however that ends."""
    first = parent_process()
    if first is not None:
        first.join()
        os._exit(1)


def _answer(questions: list[Question]) -> list[list[int]]:
    if _mine is None:
        raise RuntimeError("the process has no engine")
    return _mine.answer(questions)


def bundles(questions: Sequence[Question]) -> list[list[int]]:
    """Indices in parts of some BUNDLE ids to compute, in no order, so that the pace of the first
    ones tells when all are done. What is alike stays together."""
    out: list[list[int]] = []
    room = 0
    for group in alike([q.prompt for q in questions]):
        n = max(len(questions[i].prompt) for i in group) + sum(questions[i].most for i in group)
        if room < n:
            out.append([])
            room = BUNDLE
        out[-1] += group
        room -= n
    random.Random(0).shuffle(out)
    return out


def decode(
    path: Path, questions: Sequence[Question], jobs: int, cache: Path | None, lanes: int = LANES
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Parts of the work as they are done: indices of questions, their answers.

    `cache`: where compiled kernels are kept. Raises ModelFileError.
    """
    parts = bundles(questions)
    if not parts:
        return
    open_lanes(path, 1, cache).engine.close()  # compiles once, and refuses a bad file at once
    with ProcessPoolExecutor(
        min(jobs, len(parts)), get_context("spawn"), _open, (path, lanes, cache)
    ) as pool:
        running = {pool.submit(_answer, [questions[i] for i in part]): part for part in parts}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
