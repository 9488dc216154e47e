"""Who steps together: the lanes of one verify pass.

All lanes that are ready go, whoever made the loop turn: with batch-invariant kernels a larger
cohort changes no token and costs less per lane. Only when they need more rows than a pass has do
they take turns, those that waited longest first, so that among n lanes each takes part in at least
m / n - 1 of m passes (spec/serving.md 2.10, F1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ready(Protocol):
    @property
    def stepped(self) -> int: ...  # its place in the order of all steps taken so far


R = TypeVar("R", bound=Ready)


def form(ready: Sequence[R], rows_max: int) -> list[R]:
    """At most `rows_max` of `ready` (a row each), those that stepped longest ago first."""
    return sorted(ready, key=lambda one: one.stepped)[:rows_max]
