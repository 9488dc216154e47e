"""Fewer lines in the log about what anybody can do as often as they like.

Who may only knock at a door must not drive the lines of others out of the journal. Knows no event.
"""

from __future__ import annotations

import time


class Sparing:
    """Lets through some lines of each stretch of time, and counts the rest."""

    def __init__(self, n_lines: int, each_s: float) -> None:
        self._n_lines = n_lines
        self._each_s = each_s
        self._until = 0.0
        self._n = 0  # in this stretch
        self._left_out = 0  # since the last line

    def line(self, now: float | None = None) -> int | None:
        """Asked before each line: how many were left out before it, or None to leave it out."""
        now = time.monotonic() if now is None else now
        if now >= self._until:
            self._until, self._n = now + self._each_s, 0
        self._n += 1
        if self._n > self._n_lines:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out
