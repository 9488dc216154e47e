"""Verdicts on a waiting turn: admit, wait, refuse. Pure functions of counts.

A turn is refused only at the door, when the queue is full; behind the door it waits for a lane, or
for the pages of its longest possible answer, in the order of the queue: nobody overtakes the first,
so a long prompt is not starved by short ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ds4d.sched.memory import Ledger

FIRST_GUESS_S = 10.0  # service time of a turn before any was seen
LONGEST_RETRY_S = 600
_WEIGHT = 0.2  # of the newest turn in the moving average


@dataclass(frozen=True, slots=True)
class Admit:
    pass


@dataclass(frozen=True, slots=True)
class Wait:
    reason: Literal["lane", "memory"]


@dataclass(frozen=True, slots=True)
class Refuse:
    retry_after_s: int


def at_the_door(
    *, n_queued: int, n_queue_max: int, lanes_free: int, wait_s: float
) -> Admit | Refuse:
    """Turns that a free lane will take in the next plan don't count as queued."""
    if n_queued - lanes_free < n_queue_max:
        return Admit()
    return Refuse(retry_after_s(wait_s))


def retry_after_s(wait_s: float) -> int:
    """A predicted wait as clients can use it: whole seconds, neither none nor for ever."""
    return min(max(math.ceil(wait_s), 1), LONGEST_RETRY_S)


def at_the_lane(*, lanes_free: int, ledger: Ledger, n_pages: int) -> Admit | Wait:
    if not lanes_free:
        return Wait("lane")
    return Admit() if ledger.can_promise(n_pages) else Wait("memory")


class ServiceTime:
    """How long a turn holds a lane, as a moving average."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    def saw(self, seconds: float) -> None:
        mean = self._mean_s
        self._mean_s = seconds if mean is None else mean + _WEIGHT * (seconds - mean)

    def wait_s(self, n_before: int, n_lanes: int) -> float:
        """Predicted wait of a turn with `n_before` queued before it and all lanes busy."""
        mean = FIRST_GUESS_S if self._mean_s is None else self._mean_s
        return (n_before + 1) / n_lanes * mean
