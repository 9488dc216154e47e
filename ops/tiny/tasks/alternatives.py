"""Alternatives in a wording: `{one|another}` as the tables beside this file write it."""

from __future__ import annotations

from itertools import pairwise


def expanded(pattern: str) -> list[str]:
    """Every phrasing that `{one|another}` stands for; `{k}` is a place and stays. Groups nest."""
    for start, sign in enumerate(pattern):
        if sign != "{":
            continue
        depth, cuts = 0, [start]
        for end in range(start, len(pattern)):
            depth += {"{": 1, "}": -1}.get(pattern[end], 0)
            if not depth:
                break
            if depth == 1 and pattern[end] == "|":
                cuts.append(end)
        if len(cuts) > 1:
            cuts.append(end)
            parts = [pattern[a + 1 : b] for a, b in pairwise(cuts)]
            before, behind = pattern[:start], pattern[end + 1 :]
            return [done for part in parts for done in expanded(before + part + behind)]
    return [pattern]


def balanced(pattern: str) -> bool:
    """Whether every brace has its partner."""
    depth = 0
    for sign in pattern:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return not depth
