"""Stop strings over visible content (spec/api.md 2.2). Knows text only, not where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopText:
    """Lets text through until a stop string is complete, as if characters came one by one.

    The string that is complete first wins; of two that end together, the one that begins first.
    What could still become a stop string is held back, and nothing more. Empty strings never match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now. After a match, `matched` is set and nothing is shown any more."""
        if self.matched is not None:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        n_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown = text[: len(text) - n_held]
        self._held = text[len(shown) :]
        return shown

    def flush(self) -> str:
        """The text held back, which is no stop string after all: content ends here."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
