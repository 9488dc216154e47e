"""The engine contract: all that the scheduler and an engine say to each other (spec/engine.md).

The scheduler decides, the runner hops to the engine thread, the engine computes. Everything here is
data; nothing calls back. An engine belongs to the one thread that calls it, but for `heartbeat`
and `Cancel.is_set`, which any thread may read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from ds4d.model.geometry import Geometry

LAST_DRAWN = -1
"""Pending id that means "what this lane drew last", so that a step can be queued before the
previous one was read."""


class Cancel(Protocol):
    """A flag that another thread may set; `threading.Event` is one."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampler settings of one request, in the order in which they act (spec/numerics.md 5).

    `seed` is always there: a fresh one where the client gave none. `seeded` decides the accept rule
    and whether `epoch` enters the noise key.
    """

    bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    exempt: tuple[int, ...] = ()  # ids that penalties never touch
    temperature: float = 1.0  # 0: argmax, lowest id wins
    min_p: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    seed: int = 0  # 64 bits
    seeded: bool = False
    top_logprobs: int | None = None  # None: no log-probabilities wanted; 0: of the chosen id alone

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def penalised(self) -> bool:
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What penalties look at: distinct ids seen, how often each was generated (0: prompt only)."""

    ids: npt.NDArray[np.int32]  # [n]
    generated: npt.NDArray[np.int32]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One chunk of a prompt for one lane. `ids` follow the lane's present end."""

    lane: int
    ids: npt.NDArray[np.int32]  # [n], n at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """`cancelled`: the lane is as it was before the chunk."""

    lane: int
    n_tokens: int  # the lane's length now
    cancelled: bool
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWork:
    """Propose up to `n_max` ids behind `pending` (the pending id is not run through the target)."""

    lane: int
    pending: int
    n_max: int
    sampling: Sampling
    epoch: int
    position: int  # request-local position of the first id proposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    lane: int
    ids: tuple[int, ...]
    confidences: tuple[float, ...]  # of each id, given that those before it were accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyWork:
    """One pass of the target over `[pending, *draft]` of one lane, then accept and draw."""

    lane: int
    pending: int  # or LAST_DRAWN
    draft: tuple[int, ...] = ()
    draft_is_own: bool = False  # the engine's own drafter made it: its q lies on the device
    sampling: Sampling
    epoch: int = 0  # restores of this request so far; enters the noise of unseeded requests only
    position: int  # request-local position of the first id to be drawn: 0 for the first answer id
    history: History | None = None  # iff sampling.penalised
    mask: npt.NDArray[np.uint32] | None = None  # [K+1, ceil(V/32)], bit set: allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleWork:
    """Draft and verify in one replay."""

    draft: DraftWork
    verify: VerifyWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log-softmax of the raw target logits of one drawn id; `top` is sorted, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """`ids`: accepted drafts, then the newly drawn id, which is pending and not yet in the lane.

    The lane has grown by `n_accepted + 1` positions: the old pending id and the accepted drafts.
    `failed` (a non-finite logit, say) concerns this lane alone: `ids` is empty and its state is
    to be vacated.
    """

    lane: int
    ids: tuple[int, ...]
    n_accepted: int
    logprobs: tuple[Logprobs, ...] = ()
    confidences: tuple[float, ...] = ()
    ms: float = 0.0
    failed: str | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """A captured position: what makes it resumable and is not in pages. A handle; drop it once."""

    key: int
    n_tokens: int
    n_bytes: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by part, before anything is allocated: weights, arena, pages, lanes, frontiers, ..."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Engine(Protocol):
    """See spec/engine.md. Lanes, pages and frontiers are small ints or handles that the ledger has
    promised; an engine obeys or raises `OutOfMemory`.

    A lane's timeline is the ids given to `prefill` and committed by `verify`; its compressed rows
    lie in the pages mapped to it, `geometry.page_tokens` positions each, in order.
    """

    geometry: Geometry
    rows_max: int  # rows in one draft or verify pass: a multiple of 8
    page_bytes: int  # of one page as read_page gives it
    row_fingerprint: str  # which pages and frontiers may be exchanged at all (spec/engine.md 4)

    @property
    def heartbeat(self) -> int:
        """Moves at least once per layer group while the engine works."""
        ...

    def need(self, *, lanes: int, pages: int, frontiers: int, chunk: int) -> Need: ...

    def seat(self, lane: int) -> None:
        """Begin an empty timeline in `lane`."""
        ...

    def map_pages(self, lane: int, pages: Sequence[int]) -> None:
        """Append `pages` to the lane's page table. A page may be mapped into several lanes as
        long as none of them writes to it: rows below a lane's length never change."""
        ...

    def vacate(self, lane: int) -> None:
        """Forget the lane's timeline and page table."""
        ...

    def prefill(self, work: Prefill, cancel: Cancel) -> Prefilled:
        """Run all of `work.ids`; no logits. Stops at a layer-group boundary when cancelled."""
        ...

    def draft(self, cohort: Sequence[DraftWork]) -> Sequence[Draft]: ...

    def verify(self, cohort: Sequence[VerifyWork]) -> Sequence[Verified]: ...

    def cycle(self, cohort: Sequence[CycleWork]) -> Sequence[Verified]: ...

    def capture(self, lane: int) -> Frontier: ...

    def restore(self, lane: int, frontier: Frontier) -> None:
        """Set `lane`, whose mapped pages hold the rows below, to the frontier's position."""
        ...

    def drop(self, frontier: Frontier) -> None: ...

    def truncate(self, lane: int, n_tokens: int) -> None:
        """Roll back to `n_tokens`, at most `rows_max` below the end."""
        ...

    def read_page(self, page: int) -> bytes: ...

    def write_page(self, page: int, data: bytes) -> None: ...

    def read_frontier(self, frontier: Frontier) -> bytes: ...

    def write_frontier(self, data: bytes) -> Frontier: ...

    def copy_page(self, source: int, target: int) -> None: ...

    def close(self) -> None: ...
