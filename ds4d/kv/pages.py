"""Who holds which page, lane or frontier place: numbered things of a fixed pool, counted by holder.

A page is held once by every session that maps it (a system prompt is one set of pages under many
sessions); a lane and a frontier place work the same way. Owns the counts and nothing else: no
bytes, no contents, no policy about who has to give something back.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Pool:
    """The numbers 0 .. n-1, each free or held by one or more holders."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._refs = [0] * n
        self._free = list(range(n))  # a heap: the lowest number goes first, so runs repeat

    @property
    def n_free(self) -> int:
        return len(self._free)

    def refs(self, number: int) -> int:
        return self._refs[number]

    def can_take(self, n: int) -> bool:
        return n <= len(self._free)

    def take(self, n: int) -> list[int]:
        """`n` free numbers, each with one holder now. Ask `can_take` first."""
        if n > len(self._free):
            raise ValueError(f"{n} wanted of {len(self._free)} free")
        taken = [heapq.heappop(self._free) for _ in range(n)]
        for number in taken:
            self._refs[number] = 1
        return taken

    def share(self, numbers: Iterable[int]) -> None:
        """One holder more of each."""
        for number in numbers:
            if not self._refs[number]:
                raise ValueError(f"{number} is free: nothing to share")
            self._refs[number] += 1

    def give_back(self, numbers: Iterable[int]) -> list[int]:
        """One holder less of each; returns those that nobody holds any more."""
        freed = []
        for number in numbers:
            if not self._refs[number]:
                raise ValueError(f"{number} is free already")
            self._refs[number] -= 1
            if not self._refs[number]:
                heapq.heappush(self._free, number)
                freed.append(number)
        return freed
