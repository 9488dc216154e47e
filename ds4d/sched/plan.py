"""What the scheduler asks of the engine, and what came of it: plain records.

A plan is a list of moves that the engine carries out in order, then at most one piece of work. The
scheduler makes it, the runner carries it out and hands the outcome back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ds4d.engine import Frontier, Prefill, Prefilled, Verified, VerifyWork


@dataclass(frozen=True, slots=True)
class Seat:
    """Begin a timeline in `lane`: copy one page if asked, map `pages`, restore `frontier`."""

    lane: int
    pages: tuple[int, ...]
    copy: tuple[int, int] | None  # source, target
    frontier: Frontier | None  # None: from nothing


@dataclass(frozen=True, slots=True)
class Extend:
    lane: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Truncate:
    lane: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Capture:
    lane: int
    session: int


@dataclass(frozen=True, slots=True)
class Vacate:
    lane: int


@dataclass(frozen=True, slots=True)
class Drop:
    frontier: Frontier


Move = Seat | Extend | Truncate | Capture | Vacate | Drop


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of one prompt; `capture` asks for a frontier at its end."""

    turn: int
    session: int
    work: Prefill
    capture: bool
    replay: bool = False  # its first token had been computed before, but no frontier stood there
    stalls: bool = False  # lanes that decode wait for it


@dataclass(frozen=True, slots=True)
class Step:
    """One verify pass over a cohort."""

    turns: tuple[int, ...]
    cohort: tuple[VerifyWork, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    moves: tuple[Move, ...]
    work: Chunk | Step | None

    @property
    def idle(self) -> bool:
        return not self.moves and self.work is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a plan. `captured` is keyed by session; `failed` says why a chunk's lane did."""

    captured: Mapping[int, Frontier] = field(default_factory=dict)
    prefilled: Prefilled | None = None
    verified: Sequence[Verified] = ()
    failed: str | None = None
    ms: float = 0.0  # of the work alone
