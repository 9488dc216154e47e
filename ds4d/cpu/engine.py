"""The CPU engine: `ds4d.engine.Engine` on Numba kernels, for any geometry.

Owns lanes, pages and frontiers and what lies in them; the pass itself is a program that a team of
threads replays (`forward.py`, `team.py`). Prefill and verify are the same program over up to
`rows_max` rows, and no kernel lets rows meet but through the cached rows of their own lane. Hence
alone = in a cohort = in chunks of any size = on any number of threads, bit for bit.

Knows no policy: which lane runs, who shares a page and what is kept is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu import jit, sampler
from ds4d.cpu.arena import ROWS_MAX, arena_bytes
from ds4d.cpu.arrays import zeros
from ds4d.cpu.forward import Forward, weight_bytes
from ds4d.cpu.kernels import attention, hyper, moe, replay
from ds4d.cpu.state import ABI, State
from ds4d.cpu.team import Team
from ds4d.engine import (
    LAST_DRAWN,
    CycleWork,
    Draft,
    DraftWork,
    Frontier,
    Need,
    Prefilled,
    Verified,
)
from ds4d.errors import CheckpointError, ModelFileError, OutOfMemory
from ds4d.model.layout import Layout, pad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from ds4d.engine import Cancel, Prefill, VerifyWork
    from ds4d.model.geometry import Geometry
    from ds4d.model.quants import Tensor

LAYERS_A_GROUP = 4
"""Between groups of this many layers, prefill looks whether it was cancelled."""

HASHED_WHOLE = 1 << 30
"""Tensors up to this many bytes in all enter the row fingerprint whole, larger ones by samples."""


@dataclass(slots=True)
class Lane:
    """One timeline. Rows at positions below `n_tokens` are valid."""

    n_tokens: int = 0
    origin: int = 0  # it began here: at 0, or restored from a frontier
    highest: int = 0  # positions below this were written into the rings at some time
    pages: list[int] = field(default_factory=list)
    drawn: int | None = None  # the last id that verify drew


class CpuEngine:
    """See `ds4d.engine.Engine`.

    `tensors` maps GGUF names (spec/model.md 2.3); an open file's are kept, not copied, where the
    kernels read the file's own bytes. `lanes`, `pages` and `frontiers` are allocated now. `threads`
    counts the caller's (None: `default_threads()`). `exact` leaves out every rounding
    (spec/numerics.md 1), for comparisons only. `cache_dir` keeps compiled kernels; None compiles
    and forgets. `progress(what, share)` is called while opening.

    Raises ModelFileError where the model is beyond what the kernels' fixed scratch allows, where a
    token table names no expert, and for weights that are not finite.
    """

    rows_max = ROWS_MAX

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, Tensor],
        *,
        lanes: int,
        pages: int,
        frontiers: int,
        threads: int | None = None,
        exact: bool = False,
        cache_dir: Path | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        _check(geometry)
        self.geometry = geometry
        self.threads = threads or default_threads()
        self._tensors, self._exact = tensors, exact
        self._layout = Layout(geometry, rows_max=ROWS_MAX, exact=exact)
        self.page_bytes = self._layout.page_bytes
        self._state = State(self._layout, lanes=lanes, pages=pages)
        self._forward = Forward(
            geometry, tensors, self._state, n_threads=self.threads, exact=exact, progress=progress
        )
        self._program = self._forward.program
        if progress is not None:
            progress("sampler", 0.0)
        sampler.prepare(cache_dir)
        kernels = [*self._program.kernels(), replay.replay, replay.serve]
        jit.prepare(kernels, cache_dir, progress)
        self._program.assemble()
        self._team = Team(self._program, self.threads)
        self._lanes: list[Lane | None] = [None] * lanes
        self._n_pages = pages
        # Behind the promised frontiers lies one more: the lane before a chunk of a prompt.
        self._frontiers = zeros((frontiers + 1, pad(self._layout.frontier_bytes_max, 64)), np.uint8)
        self._free = list(range(frontiers))
        self._live: dict[int, tuple[int, Frontier]] = {}
        self._next_key = 1
        self.row_fingerprint = _fingerprint(geometry, tensors, self._layout)

    @property
    def heartbeat(self) -> int:
        return self._team.done

    # -- memory --------------------------------------------------------------------------------

    def need(self, *, lanes: int, pages: int, frontiers: int, chunk: int) -> Need:
        """Bytes by part. A chunk runs in blocks of `rows_max` rows, so its size costs nothing."""
        return need(
            self.geometry,
            self._tensors,
            lanes=lanes,
            pages=pages,
            frontiers=frontiers,
            threads=self.threads,
            exact=self._exact,
        )

    # -- lanes and pages -----------------------------------------------------------------------

    def seat(self, lane: int) -> None:
        """Begin an empty timeline. Raises OutOfMemory beyond the lanes there are."""
        if not 0 <= lane < len(self._lanes):
            raise OutOfMemory(f"lane {lane} of {len(self._lanes)}")
        if self._lanes[lane] is not None:
            raise ValueError(f"lane {lane} is seated already")
        self._lanes[lane] = Lane()

    def map_pages(self, lane: int, pages: Sequence[int]) -> None:
        mine = self._lane(lane)
        most = self._state.pages_per_lane
        if len(mine.pages) + len(pages) > most:
            raise OutOfMemory(f"lane {lane} would have more than {most} pages")
        for page in pages:
            self._check_page(page)
        for page in pages:
            address = self._state.page_address(page)
            self._state.page_table[lane, len(mine.pages)] = address
            mine.pages.append(page)

    def vacate(self, lane: int) -> None:
        self._lane(lane)
        self._lanes[lane] = None

    def length(self, lane: int) -> int:
        """Positions in the lane's timeline."""
        return self._lane(lane).n_tokens

    def truncate(self, lane: int, n_tokens: int) -> None:
        """Roll back. Raises ValueError outside the window in which nothing was overwritten."""
        mine = self._lane(lane)
        least = max(mine.origin, mine.highest - self.rows_max)
        if not least <= n_tokens <= mine.n_tokens:
            raise ValueError(
                f"lane {lane} can be rolled back to {least}..{mine.n_tokens}, not to {n_tokens}"
            )
        mine.n_tokens = n_tokens
        mine.drawn = None

    # -- work ----------------------------------------------------------------------------------

    def prefill(self, work: Prefill, cancel: Cancel) -> Prefilled:
        """Run all of `work.ids`. When cancelled, the lane is as it was before."""
        start = time.perf_counter()
        mine = self._lane(work.lane)
        before = mine.n_tokens
        ids = np.asarray(work.ids)
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"prefill got ids of shape {ids.shape}, expected at least one")
        self._check_ids(ids)
        self._check_room(work.lane, len(ids))
        keep = self._frontiers[-1]
        n_kept = self._state.read(work.lane, before, keep)
        cancelled = False
        for at in range(0, len(ids), self.rows_max):
            some = ids[at : at + self.rows_max]
            pos = np.arange(mine.n_tokens, mine.n_tokens + len(some))
            self._forward.step.set(some, pos, np.full(len(some), work.lane))
            if not self._pass(cancel):
                cancelled = True
                break
            mine.n_tokens += len(some)
            mine.highest = max(mine.highest, mine.n_tokens)
        if cancelled:
            mine.n_tokens = self._state.write(work.lane, keep[:n_kept])
            mine.origin = mine.highest = before
        else:
            mine.drawn = None
        ms = (time.perf_counter() - start) * 1e3
        return Prefilled(lane=work.lane, n_tokens=mine.n_tokens, cancelled=cancelled, ms=ms)

    def verify(self, cohort: Sequence[VerifyWork]) -> Sequence[Verified]:
        """One pass over `[pending, *draft]` of every lane, then accept and draw, lane by lane."""
        start = time.perf_counter()
        logits, spans = self.logits(cohort)
        results = []
        for work, span in zip(cohort, spans, strict=True):
            mine = self._lane(work.lane)
            rows = logits[span]
            mine.highest = max(mine.highest, mine.n_tokens + len(rows))
            unread = (mine.drawn,) if work.pending == LAST_DRAWN and mine.drawn is not None else ()
            taken = sampler.accept_rows(rows, work, unread=unread)
            if taken.failed is None:
                mine.n_tokens += taken.n_accepted + 1
                mine.drawn = taken.ids[-1]
            results.append((work.lane, taken))
        ms = (time.perf_counter() - start) * 1e3
        return [
            Verified(
                lane=lane,
                ids=taken.ids,
                n_accepted=taken.n_accepted,
                logprobs=taken.logprobs,
                ms=ms,
                failed=taken.failed,
            )
            for lane, taken in results
        ]

    def draft(self, cohort: Sequence[DraftWork]) -> Sequence[Draft]:
        raise NotImplementedError("no drafter is loaded")

    def cycle(self, cohort: Sequence[CycleWork]) -> Sequence[Verified]:
        raise NotImplementedError("no drafter is loaded")

    def logits(self, cohort: Sequence[VerifyWork]) -> tuple[npt.NDArray[np.float32], list[slice]]:
        """Run the rows of a cohort: logits [rows, V], which the next pass overwrites, and whose
        they are."""
        tokens: list[int] = []
        positions: list[int] = []
        lanes: list[int] = []
        spans = []
        for work in cohort:
            mine = self._lane(work.lane)
            pending = work.pending
            if pending == LAST_DRAWN:
                if mine.drawn is None:
                    raise ValueError(f"lane {work.lane} has drawn nothing since it changed")
                pending = mine.drawn
            run = (pending, *work.draft)
            self._check_room(work.lane, len(run))
            spans.append(slice(len(tokens), len(tokens) + len(run)))
            tokens += run
            positions += range(mine.n_tokens, mine.n_tokens + len(run))
            lanes += [work.lane] * len(run)
        if len({work.lane for work in cohort}) != len(cohort):
            raise ValueError("a lane stands twice in the cohort")
        if not 1 <= len(tokens) <= self.rows_max:
            raise ValueError(f"the cohort has {len(tokens)} rows, expected 1..{self.rows_max}")
        self._check_ids(np.asarray(tokens))
        self._forward.step.set(tokens, positions, lanes)
        self._team.run(0, len(self._program))
        return self._forward.arena.logits[: len(tokens), : self.geometry.n_vocab], spans

    def _pass(self, cancel: Cancel) -> bool:
        """The layers over the rows that were set, no head. False: cancelled on the way."""
        starts = self._forward.layer_starts
        first = 0
        for i in range(LAYERS_A_GROUP, len(starts) - 1 + LAYERS_A_GROUP, LAYERS_A_GROUP):
            if cancel.is_set():
                return False
            end = starts[min(i, len(starts) - 1)]
            self._team.run(first, end)
            first = end
        return True

    # -- frontiers and bytes -------------------------------------------------------------------

    def capture(self, lane: int) -> Frontier:
        mine = self._lane(lane)
        place = self._take_place()
        n_bytes = self._state.read(lane, mine.n_tokens, self._frontiers[place])
        return self._hold(place, mine.n_tokens, n_bytes)

    def restore(self, lane: int, frontier: Frontier) -> None:
        mine = self._lane(lane)
        n = frontier.n_tokens
        if len(mine.pages) * self.geometry.page_tokens < n and any(self.geometry.ratios):
            raise ValueError(f"lane {lane} has {len(mine.pages)} pages, too few for {n} positions")
        self._state.write(lane, self._data(frontier))
        mine.n_tokens = mine.origin = mine.highest = n
        mine.drawn = None

    def drop(self, frontier: Frontier) -> None:
        place, _ = self._held(frontier)
        del self._live[frontier.key]
        self._free.append(place)

    def read_frontier(self, frontier: Frontier) -> bytes:
        return self._data(frontier).tobytes()

    def write_frontier(self, data: bytes) -> Frontier:
        """Raises CheckpointError for bytes that are no frontier of this geometry."""
        raw = np.frombuffer(data, np.uint8)
        n = self._state.position(raw)
        place = self._take_place()
        self._frontiers[place, : len(raw)] = raw
        return self._hold(place, n, len(raw))

    def read_page(self, page: int) -> bytes:
        self._check_page(page)
        return self._state.pages[page, : self.page_bytes].tobytes()

    def write_page(self, page: int, data: bytes) -> None:
        """Raises CheckpointError for bytes of another length."""
        self._check_page(page)
        if len(data) != self.page_bytes:
            raise CheckpointError(f"a page of {len(data)} bytes, expected {self.page_bytes}")
        self._state.pages[page, : self.page_bytes] = np.frombuffer(data, np.uint8)

    def copy_page(self, source: int, target: int) -> None:
        self._check_page(source)
        self._check_page(target)
        self._state.pages[target] = self._state.pages[source]

    def close(self) -> None:
        self._team.close()

    # -- checks --------------------------------------------------------------------------------

    def _lane(self, lane: int) -> Lane:
        mine = self._lanes[lane] if 0 <= lane < len(self._lanes) else None
        if mine is None:
            raise ValueError(f"lane {lane} is not seated")
        return mine

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self._n_pages:
            raise OutOfMemory(f"page {page} of {self._n_pages}")

    def _check_ids(self, ids: npt.NDArray[Any]) -> None:
        if int(ids.min()) < 0 or int(ids.max()) >= self.geometry.n_vocab:
            raise ValueError(f"an id lies outside the vocabulary of {self.geometry.n_vocab}")

    def _check_room(self, lane: int, n: int) -> None:
        mine, g = self._lane(lane), self.geometry
        end = mine.n_tokens + n
        room = len(mine.pages) * g.page_tokens if any(g.ratios) else g.context
        if end > min(room, g.context):
            raise OutOfMemory(
                f"lane {lane} has room for {min(room, g.context)} positions, not {end}"
            )

    def _take_place(self) -> int:
        if not self._free:
            raise OutOfMemory(f"all {len(self._frontiers) - 1} frontiers are taken")
        return self._free.pop()

    def _hold(self, place: int, n_tokens: int, n_bytes: int) -> Frontier:
        frontier = Frontier(self._next_key, n_tokens, n_bytes)
        self._next_key += 1
        self._live[frontier.key] = place, frontier
        return frontier

    def _held(self, frontier: Frontier) -> tuple[int, Frontier]:
        held = self._live.get(frontier.key)
        if held is None:
            raise ValueError(f"frontier {frontier.key} was dropped or is another engine's")
        return held

    def _data(self, frontier: Frontier) -> npt.NDArray[np.uint8]:
        place, held = self._held(frontier)
        return self._frontiers[place, : held.n_bytes]


def need(
    geometry: Geometry,
    tensors: Mapping[str, Tensor],
    *,
    lanes: int,
    pages: int,
    frontiers: int,
    threads: int = 1,
    exact: bool = False,
) -> Need:
    """Bytes that a CpuEngine of these sizes allocates, by part. Allocates nothing."""
    layout = Layout(geometry, rows_max=ROWS_MAX, exact=exact)
    per_lane = max(1, min(pages, -(-geometry.context // geometry.page_tokens)))
    arena = arena_bytes(geometry, layout, pages_per_lane=per_lane, n_threads=threads)
    return Need(
        {
            "weights": weight_bytes(geometry, tensors, exact=exact),
            "arena": arena,
            "pages": pages * pad(max(layout.page_bytes, 1), 64),
            "lanes": lanes * (layout.lane_bytes + 8 * per_lane),
            "frontiers": (frontiers + 1) * pad(layout.frontier_bytes_max, 64),
        }
    )


def default_threads(processors: int | None = None) -> int:
    """The processors (None: those that this process may run on) less one, which is the event
    loop's; at least 1."""
    return max(1, (processors or len(os.sched_getaffinity(0))) - 1)


def _check(geometry: Geometry) -> None:
    """Raises ModelFileError for sizes beyond the kernels' scratch."""
    problem = geometry.check()
    limits = (
        ("head_dim", geometry.head_dim, attention.DIM_MAX),
        ("indexer width", geometry.index_dim, attention.DIM_MAX),
        ("streams", geometry.streams, hyper.STREAMS_MAX),
        ("n_experts", geometry.n_experts, moe.EXPERTS_MAX),
    )
    for name, value, most in limits:
        if problem is None and value > most:
            problem = f"{name} is {value}, the CPU engine has room for {most}"
    if problem is not None:
        raise ModelFileError(problem)


def _fingerprint(geometry: Geometry, tensors: Mapping[str, Tensor], layout: Layout) -> str:
    """Which pages and frontiers may be exchanged at all (spec/engine.md 4)."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((geometry, layout.kv, layout.index, layout.rows_max, ABI)).encode())
    whole = sum(t.data.nbytes for t in tensors.values()) <= HASHED_WHOLE
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, int(tensor.quant), tensor.shape)).encode())
        if whole:
            digest.update(tensor.data.data)
        else:
            step = max(1, tensor.data.nbytes // 4096)
            digest.update(tensor.data[::step].tobytes())
    return digest.hexdigest()
