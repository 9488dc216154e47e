"""A whole engine without a model: the next token is a function of the prefix.

`FakeEngine` keeps ids where a real engine keeps rows: in pages, reached through a lane's page
table, so that a page which is shared, copied or reused wrongly changes the tokens that come out. It
checks every rule of the contract that a caller could break and raises `ContractBroken` when one is.
"""

from __future__ import annotations

import threading
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ds4d.engine import Draft, Frontier, Logprobs, Need, Prefilled, Verified
from ds4d.errors import OutOfMemory
from ds4d.model.geometry import Geometry
from ds4d.sched.memory import Capacity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ds4d.engine import Cancel, CycleWork, DraftWork, Prefill, Sampling, VerifyWork

EOS = 1
FIRST_TEXT_ID = 16  # ids below are never drawn, but for EOS
GROUPS = 8  # layer groups of a prefill chunk: where it can be cancelled


class ContractBroken(Exception):
    """The caller did what spec/engine.md forbids."""


def geometry(n_vocab: int = 512, context: int = 8192) -> Geometry:
    """ds4-tiny's shape; only the vocabulary, the page size and the context matter here."""
    return Geometry(
        name="fake",
        n_layers=2,
        width=64,
        n_vocab=n_vocab,
        n_heads=2,
        head_dim=96,
        rope_dim=32,
        q_rank=32,
        out_groups=1,
        out_rank=32,
        window=128,
        ratios=(0, 4),
        n_experts=4,
        n_experts_used=2,
        n_shared_experts=1,
        expert_width=32,
        n_hash_layers=1,
        expert_scale=1.5,
        expert_clamp=(10.0, 10.0),
        shared_clamp=(10.0, 10.0),
        index_heads=2,
        index_dim=64,
        index_top_k=16,
        streams=4,
        sinkhorn_iterations=20,
        hyper_eps=1e-6,
        rms_eps=1e-6,
        rope_theta=1e4,
        rope_theta_compressed=1.6e5,
        yarn_factor=16.0,
        yarn_original_context=65536,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        context=context,
    )


@dataclass
class _Lane:
    pages: list[int] = field(default_factory=list)
    n_tokens: int = 0
    floor: int = 0  # no roll back below: where it was restored, or where prefill ended last


class FakeEngine:
    """See the module. `delay_token_s` and `delay_step_s` make it slow; `poison(ids)` says whether
    a lane with that prefix fails alone; `fail_next` breaks the whole device; `hang` blocks it."""

    def __init__(
        self,
        *,
        lanes: int = 4,
        pages: int = 128,
        frontiers: int = 64,
        n_vocab: int = 512,
        context: int = 8192,
        chunk: int = 256,
        rows_max: int = 32,
        delay_token_s: float = 0.0,
        delay_step_s: float = 0.0,
        eos_every: int = 24,
        poison: Callable[[np.ndarray], bool] | None = None,
    ) -> None:
        self.geometry = geometry(n_vocab, context)
        self.rows_max = rows_max
        self.page_bytes = 4 * self.geometry.page_tokens
        self.row_fingerprint = "fake"
        self.heartbeat = 0
        self.delay_token_s = delay_token_s
        self.delay_step_s = delay_step_s
        self.eos_every = eos_every
        self.poison = poison
        self.fail_next: Exception | None = None
        self.hang = threading.Event()
        self.closed = False
        self.n_prefilled = 0  # tokens, over the engine's life
        self.cohorts: list[tuple[int, ...]] = []  # lanes of each pass
        self.calls: list[str] = []  # prefill and verify, in order
        self._script: dict[bytes, int] = {}
        self._frontiers_max = frontiers
        self._n_lanes = lanes
        self._chunk = chunk
        self._lanes: dict[int, _Lane] = {}
        self._pages = np.full((pages, self.geometry.page_tokens), -1, np.int32)
        self._frontiers: dict[int, tuple[int, int]] = {}  # key → (n_tokens, sum over the prefix)
        self._n_captured = 0
        self.thread: int | None = None  # the first that uses it

    @property
    def capacity(self) -> Capacity:
        """All of it, for a scheduler or runner above."""
        return Capacity(
            lanes=self._n_lanes,
            pages=len(self._pages),
            frontiers=self._frontiers_max,
            chunk=self._chunk,
            context=self.geometry.context,
            page_tokens=self.geometry.page_tokens,
        )

    # What it answers

    def say(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """After `prompt` draw exactly `answer` (end it with a stop id)."""
        ids = np.asarray(prompt, np.int32)
        for token in answer:
            self._script[ids.tobytes()] = token
            ids = np.append(ids, np.int32(token))

    def next_id(self, ids: np.ndarray, sampling: Sampling, position: int) -> int:
        """What follows `ids` [n] int32."""
        data = np.ascontiguousarray(ids, np.int32).tobytes()
        scripted = self._script.get(data)
        if scripted is not None:
            return scripted
        value = zlib.crc32(data)
        if not sampling.greedy:
            value = zlib.crc32(f"{sampling.seed} {position}".encode(), value)
        if self.eos_every and value % self.eos_every == 0:
            return EOS
        return FIRST_TEXT_ID + value % (self.geometry.n_vocab - FIRST_TEXT_ID)

    def answer(self, prompt: Sequence[int], sampling: Sampling, n_max: int) -> list[int]:
        """The whole answer that `prompt` must get, by whatever road: EOS ends it and is left out"""
        ids = np.asarray(prompt, np.int32)
        out: list[int] = []
        while len(out) < n_max:
            token = self.next_id(ids, sampling, len(out))
            if token == EOS:
                break
            out.append(token)
            ids = np.append(ids, np.int32(token))
        return out

    # The protocol

    def need(self, *, lanes: int, pages: int, frontiers: int, chunk: int) -> Need:
        return Need(
            {
                "weights": 1 << 20,
                "arena": 64 * chunk,
                "lanes": 4096 * lanes,
                "pages": self.page_bytes * pages,
                "frontiers": 1024 * frontiers,
            }
        )

    def seat(self, lane: int) -> None:
        self._check_thread()
        if lane in self._lanes:
            raise ContractBroken(f"lane {lane} is seated already")
        if not 0 <= lane < self._n_lanes:
            raise OutOfMemory(f"lane {lane} of {self._n_lanes}")
        self._lanes[lane] = _Lane()

    def map_pages(self, lane: int, pages: Sequence[int]) -> None:
        self._check_thread()
        for page in pages:
            if not 0 <= page < len(self._pages):
                raise OutOfMemory(f"page {page} of {len(self._pages)}")
            if page in self._lanes[lane].pages:
                raise ContractBroken(f"page {page} is in lane {lane} already")
            self._lanes[lane].pages.append(page)

    def vacate(self, lane: int) -> None:
        self._check_thread()
        del self._lanes[lane]

    def prefill(self, work: Prefill, cancel: Cancel) -> Prefilled:
        self._begin("prefill")
        lane, n = self._lanes[work.lane], len(work.ids)
        if not n:
            raise ContractBroken("an empty chunk")
        for _ in range(GROUPS):
            if cancel.is_set():
                return Prefilled(lane=work.lane, n_tokens=lane.n_tokens, cancelled=True, ms=0.0)
            self.heartbeat += 1
            if self.delay_token_s:
                time.sleep(self.delay_token_s * n / GROUPS)
        self._write(work.lane, work.ids)
        lane.floor = lane.n_tokens
        self.n_prefilled += n
        return Prefilled(lane=work.lane, n_tokens=lane.n_tokens, cancelled=False, ms=1.0)

    def draft(self, cohort: Sequence[DraftWork]) -> Sequence[Draft]:
        """Right twice, then wrong: proposals that are sometimes accepted."""
        drafts = []
        for work in cohort:
            ids = np.append(self._ids(work.lane), np.int32(work.pending))
            proposed: list[int] = []
            while len(proposed) < work.n_max:
                token = self.next_id(ids, work.sampling, work.position + len(proposed))
                if len(proposed) % 3 == 2:
                    token = FIRST_TEXT_ID + (token + 1) % (self.geometry.n_vocab - FIRST_TEXT_ID)
                proposed.append(token)
                ids = np.append(ids, np.int32(token))
            drafts.append(Draft(work.lane, tuple(proposed), (0.7,) * len(proposed)))
        return drafts

    def verify(self, cohort: Sequence[VerifyWork]) -> Sequence[Verified]:
        self._begin("verify")
        if sum(1 + len(work.draft) for work in cohort) > self.rows_max:
            raise ContractBroken("more rows than a pass has")
        if len({work.lane for work in cohort}) < len(cohort):
            raise ContractBroken("a lane twice in a cohort")
        if self.delay_step_s:
            time.sleep(self.delay_step_s)
        self.heartbeat += 1
        self.cohorts.append(tuple(work.lane for work in cohort))
        return [self._verify(work) for work in cohort]

    def cycle(self, cohort: Sequence[CycleWork]) -> Sequence[Verified]:
        drafts = self.draft([work.draft for work in cohort])
        return self.verify(
            [
                _with_draft(work.verify, draft.ids)
                for work, draft in zip(cohort, drafts, strict=True)
            ]
        )

    def capture(self, lane: int) -> Frontier:
        self._check_thread()
        if len(self._frontiers) == self._frontiers_max:
            raise OutOfMemory(f"all {self._frontiers_max} frontiers are taken")
        self._n_captured += 1
        n_tokens = self._lanes[lane].n_tokens
        self._frontiers[self._n_captured] = n_tokens, self._sum(self._ids(lane))
        return Frontier(self._n_captured, n_tokens, 1024)

    def restore(self, lane: int, frontier: Frontier) -> None:
        self._check_thread()
        n_tokens, total = self._frontiers[frontier.key]
        self._lanes[lane].n_tokens = self._lanes[lane].floor = n_tokens
        if self._sum(self._ids(lane)) != total:
            raise ContractBroken(f"the pages of lane {lane} are not those of the frontier")

    def drop(self, frontier: Frontier) -> None:
        self._check_thread()
        del self._frontiers[frontier.key]

    def truncate(self, lane: int, n_tokens: int) -> None:
        self._check_thread()
        one = self._lanes[lane]
        if not max(one.n_tokens - self.rows_max, one.floor) <= n_tokens <= one.n_tokens:
            raise ContractBroken(f"lane {lane}: {one.n_tokens} cannot roll back to {n_tokens}")
        one.n_tokens = n_tokens

    def read_page(self, page: int) -> bytes:
        return self._pages[page].tobytes()

    def write_page(self, page: int, data: bytes) -> None:
        self._pages[page] = np.frombuffer(data, np.int32)

    def read_frontier(self, frontier: Frontier) -> bytes:
        return np.array(self._frontiers[frontier.key], np.int64).tobytes()

    def write_frontier(self, data: bytes) -> Frontier:
        n_tokens, total = np.frombuffer(data, np.int64)
        self._n_captured += 1
        self._frontiers[self._n_captured] = int(n_tokens), int(total)
        return Frontier(self._n_captured, int(n_tokens), 1024)

    def copy_page(self, source: int, target: int) -> None:
        self._check_thread()
        self._pages[target] = self._pages[source]

    def close(self) -> None:
        self.closed = True

    # Within

    @property
    def n_frontiers(self) -> int:
        return len(self._frontiers)

    @property
    def lanes_seated(self) -> set[int]:
        return set(self._lanes)

    def _verify(self, work: VerifyWork) -> Verified:
        ids = np.append(self._ids(work.lane), np.int32(work.pending))
        if self.poison is not None and self.poison(ids):
            return Verified(lane=work.lane, ids=(), n_accepted=0, failed="a logit is not finite")
        drawn: list[int] = []
        for i, proposed in enumerate((*work.draft, None)):
            token = self.next_id(ids, work.sampling, work.position + i)
            if work.mask is not None:
                while not work.mask[i, token // 32] >> np.uint32(token % 32) & 1:
                    token = FIRST_TEXT_ID + (token + 1) % (self.geometry.n_vocab - FIRST_TEXT_ID)
            drawn.append(token)
            if token != proposed:
                break
            ids = np.append(ids, np.int32(token))
        self._write(work.lane, np.array([work.pending, *drawn[:-1]], np.int32))
        n_top = work.sampling.top_logprobs
        logprobs = [] if n_top is None else [_logprobs(token, n_top) for token in drawn]
        return Verified(
            lane=work.lane, ids=tuple(drawn), n_accepted=len(drawn) - 1, logprobs=tuple(logprobs)
        )

    def _begin(self, call: str) -> None:
        self._check_thread()
        self.calls.append(call)
        while self.hang.is_set():
            time.sleep(0.001)
        if self.fail_next is not None:
            raise self.fail_next

    def _write(self, lane: int, ids: np.ndarray) -> None:
        one, size = self._lanes[lane], self.geometry.page_tokens
        if one.n_tokens + len(ids) > size * len(one.pages):
            raise ContractBroken(f"lane {lane} has no page for {one.n_tokens + len(ids)} tokens")
        for position, token in enumerate(ids, one.n_tokens):
            page = one.pages[position // size]
            for other, their in self._lanes.items():
                if other != lane and page in their.pages[: -(-their.n_tokens // size)]:
                    raise ContractBroken(f"lane {lane} writes to page {page} of lane {other}")
            self._pages[page, position % size] = token
        one.n_tokens += len(ids)

    def _ids(self, lane: int) -> np.ndarray:
        one = self._lanes[lane]
        if not one.pages:
            return np.empty(0, np.int32)
        return self._pages[one.pages].reshape(-1)[: one.n_tokens]

    def _sum(self, ids: np.ndarray) -> int:
        return zlib.crc32(np.ascontiguousarray(ids).tobytes())

    def _check_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.get_ident()
        if threading.get_ident() != self.thread:
            raise ContractBroken("the engine is used outside its thread")


def _with_draft(work: VerifyWork, ids: tuple[int, ...]) -> VerifyWork:
    return replace(work, draft=ids, draft_is_own=True)


def _logprobs(token: int, n_top: int) -> Logprobs:
    return Logprobs(chosen=-0.5, top=tuple((token + i, -0.5 - i) for i in range(n_top)))
