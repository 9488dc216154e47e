"""How much of the control sockets one may have (spec/serving.md 4.1, 4.3), in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connections: int = 32
    of_one_user: int = 8
    monitors: int = 24  # of all connections, so that those who may act always get in
    half_line_s: float = 30.0  # from the first byte of a line to its end
    stall_s: float = 30.0  # a peer that does not take a line for so long has stopped reading
    full_s: float = 10.0  # and so has one that leaves the queue of a subscription full
    flush_s: float = 1.0  # for what is still to be sent when the daemon goes down
    refusals_logged: int = 10  # lines of each stretch; anybody can be refused as often as they like
    refusals_each_s: float = 10.0
