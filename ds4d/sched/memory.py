"""The byte ledger: memory is promised before it is used (spec/engine.md 5).

Two promises. At start `plan_capacity` fits lanes, pages and frontiers into the budget or refuses,
before anything is allocated. From then on `Ledger` promises each turn the pages that it may need at
most, so that a turn which has begun never lacks one. Knows no engine, no sessions and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ds4d.errors import MemoryRefusedError

if TYPE_CHECKING:
    from ds4d.engine import Need

FRONTIERS_PER_TURN = 2  # the end of the prompt and the end of the answer
MIB = 1 << 20


class NeedFor(Protocol):
    """`Engine.need`: bytes by part, before anything is allocated."""

    def __call__(self, *, lanes: int, pages: int, frontiers: int, chunk: int) -> Need: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the operator would like; `lanes_min` is what there must be at least."""

    context: int  # tokens a session may hold
    page_tokens: int
    lanes: int
    chunk: int  # prompt tokens in one prefill chunk
    idle_contexts: int  # whole contexts' worth of pages beyond the lanes', for idle sessions
    frontiers: int  # on the device, of all sessions together


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the engine allocates at start, and all that there ever is."""

    lanes: int
    pages: int
    frontiers: int
    chunk: int
    context: int
    page_tokens: int


def pages_for(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens)


def plan_capacity(need: NeedFor, wish: Wish, budget_bytes: int) -> tuple[Capacity, Need]:
    """The most of `wish` that fits: idle contexts go first, then frontiers, then lanes.

    One lane of the whole context is the least. Raises `MemoryRefusedError`, which names the largest
    part and the setting that moves it.
    """
    per_lane = pages_for(wish.context, wish.page_tokens)

    def attempt(lanes: int, idle: int, frontiers: int) -> tuple[Capacity, Need]:
        capacity = Capacity(
            lanes=lanes,
            pages=per_lane * (lanes + idle),
            frontiers=frontiers,
            chunk=wish.chunk,
            context=wish.context,
            page_tokens=wish.page_tokens,
        )
        parts = need(lanes=lanes, pages=capacity.pages, frontiers=frontiers, chunk=wish.chunk)
        return capacity, parts

    for lanes in range(wish.lanes, 0, -1):
        least = FRONTIERS_PER_TURN * lanes
        if attempt(lanes, 0, least)[1].total > budget_bytes:
            continue  # counting takes milliseconds, and there may be thousands of ways to have more
        few = min(wish.frontiers, 2 * least)
        for idle, frontiers in (
            *((idle, wish.frontiers) for idle in range(wish.idle_contexts, 0, -1)),
            (0, wish.frontiers),
            (0, few),
            (0, least),
        ):
            capacity, parts = attempt(lanes, idle, max(frontiers, least))
            if parts.total <= budget_bytes:
                return capacity, parts

    _, parts = attempt(1, 0, FRONTIERS_PER_TURN)
    name, largest = max(parts.parts.items(), key=lambda item: item[1])
    raise MemoryRefusedError(
        f"one lane of {wish.context} tokens needs {_mib(parts.total)} and {_mib(budget_bytes)} may "
        f"be used; the largest part is {name} with {_mib(largest)}: lower model.context or "
        f"prefill.chunk, or free memory"
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.0f} MiB"


class Ledger:
    """Pages and frontiers promised to turns, out of those that the engine holds.

    A promise is for the worst case (the whole answer), shared pages counted for each: whatever
    idle sessions hold beyond that can be taken from them at any time, so a promised page is there
    when it is asked for.
    """

    def __init__(self, pages: int, frontiers: int) -> None:
        self.pages = pages
        self.frontiers = frontiers
        self._promised: dict[int, int] = {}  # turn → pages

    @property
    def pages_promised(self) -> int:
        return sum(self._promised.values())

    def can_promise(self, n_pages: int) -> bool:
        frontiers = FRONTIERS_PER_TURN * (len(self._promised) + 1)
        return self.pages_promised + n_pages <= self.pages and frontiers <= self.frontiers

    def promise(self, turn: int, n_pages: int) -> None:
        """`n_pages` and the frontiers of one turn. Ask `can_promise` first."""
        if turn in self._promised or not self.can_promise(n_pages):
            raise ValueError(f"turn {turn}: {n_pages} pages cannot be promised")
        self._promised[turn] = n_pages

    def release(self, turn: int) -> None:
        del self._promised[turn]

    def promised_to(self, turn: int) -> int:
        return self._promised[turn]
