"""The longest known prefix of a prompt, and which positions are worth a frontier.

A state resumes only where a frontier stands, so what counts is not how much of a timeline is common
but the highest frontier below that point: the rest is replayed. In memory the candidate of least
predicted time is the one with the fewest tokens to replay (spec/serving.md 3.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    import numpy as np
    import numpy.typing as npt

_BLOCK = 256  # ids compared at first; most strangers differ within the first block


class Known(Protocol):
    """A timeline that a prompt may begin with."""

    @property
    def ids(self) -> npt.NDArray[np.int32]: ...  # [n], those whose state is there

    @property
    def frontiers(self) -> Collection[int]: ...  # positions where it can be resumed

    @property
    def idle(self) -> bool: ...

    @property
    def used(self) -> float: ...  # when it was used last


K = TypeVar("K", bound=Known)


@dataclass(frozen=True, slots=True)
class Match(Generic[K]):
    known: K
    usable: int  # the frontier to resume from
    common: int  # ids that agree

    @property
    def extends(self) -> bool:
        """Whether going on in place loses nothing: it is idle and ends where we resume."""
        return self.known.idle and self.usable == len(self.known.ids)


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many leading ids of `a` and `b` agree."""
    n, start, size = min(len(a), len(b)), 0, _BLOCK
    while start < n:
        stop = min(start + size, n)
        differ = a[start:stop] != b[start:stop]
        if differ.any():
            return start + int(differ.argmax())
        start, size = stop, 2 * size
    return n


def best_match(ids: npt.NDArray[np.int32], known: Iterable[K]) -> Match[K] | None:
    """The timeline that leaves the fewest of `ids` to compute; None if none saves any.

    The last id is never taken from a state: it has to be run to draw what follows it. Among equals
    one that can go on in place wins, then the one used last.
    """
    best: Match[K] | None = None
    limit = len(ids) - 1
    for one in known:
        floor = best.usable if best else 1
        if max((p for p in one.frontiers if p <= limit), default=0) < floor:
            continue
        common = common_prefix(ids[:limit], one.ids)
        usable = max((p for p in one.frontiers if p <= common), default=0)
        if usable < floor:
            continue
        match = Match(one, usable, common)
        if best is None or _rank(match) > _rank(best):
            best = match
    return best


def _rank(match: Match[K]) -> tuple[int, bool, float]:
    return match.usable, match.extends, match.known.used


def spread(positions: Iterable[int], end: int, n_max: int) -> set[int]:
    """The at most `n_max` of `positions` that are worth a frontier in a timeline whose prompt ends
    at `end`.

    First come those at or behind `end`, then going back from it each that is more than twice as far
    away as the one before: a few per doubling of the length are enough, since a client that
    rewrites the last d tokens then causes a replay of about 2 d at most. The lowest, which is where
    the system prompt ends and strangers begin to share, stays as long as two may. Then those
    between, the nearest to the end first.
    """
    ordered = sorted(set(positions), reverse=True)
    steps: list[int] = []
    reach = 0
    for position in ordered:
        if end - position >= reach or position >= end:
            steps.append(position)
            reach = 2 * max(end - position, 0) + 1
    if n_max < 2 or not ordered:
        return set(steps[:n_max])
    wanted = dict.fromkeys([*steps[: n_max - 1], ordered[-1], *steps, *ordered])
    return set(list(wanted)[:n_max])
