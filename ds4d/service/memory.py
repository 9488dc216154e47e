"""A look at the host's memory once a second: its terms, and why they are cause for concern.

Decides nothing: what may be allocated was promised at start (`sched.memory`).
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

import anyio
from anyio import CapacityLimiter, to_thread

from ds4d import wire
from ds4d.events import emit
from ds4d.sched import host
from ds4d.sched.memory import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from ds4d.engine import Need
    from ds4d.sched.host import Sample
    from ds4d.service.settings import Settings
    from ds4d.waking import Woken

log = logging.getLogger(__name__)

SAMPLE_S: Final = 1.0  # between two looks
LOG_S: Final = 10.0  # between two lines of the log


class MemoryWatch:
    """`run` it; the rest tells what the last look has found."""

    def __init__(
        self, settings: Settings, look: Callable[[int | None], Sample] = host.sample
    ) -> None:
        """`look` at a machine that may have so many bytes; it is called in a worker thread."""
        self._settings = settings
        self._look = look
        self._sample: Sample | None = None

    async def run(self) -> None:
        """Look, until cancelled."""
        total = self._settings.started.memory.simulate_total_gib
        simulated = None if total is None else int(total * (1 << 30))
        limiter = CapacityLimiter(1)  # its own: it goes on while others wait for a thread
        told_at = -math.inf
        while True:
            failed: OSError | None = None
            try:
                self._sample = await to_thread.run_sync(self._look, simulated, limiter=limiter)
            except OSError as error:  # no descriptor is free, say: the next look may succeed
                failed = error
            if (now := anyio.current_time()) >= told_at + LOG_S:
                told_at = now
                self._tell(failed)
            await anyio.sleep(SAMPLE_S)

    def _tell(self, failed: OSError | None) -> None:
        sample = self._sample
        if failed is not None or sample is None:
            emit(log, "memory.sample", level=logging.WARNING, reason=str(failed))
            return
        emit(
            log,
            "memory.sample",
            level=logging.WARNING if self.reasons() else logging.DEBUG,
            available_mib=sample.available // MIB,
            cgroup_mib=None if sample.cgroup is None else sample.cgroup // MIB,
            resident_mib=sample.resident // MIB,
            swap_mib=sample.swap // MIB,
            psi_some=sample.psi_some,
        )

    def reasons(self) -> list[wire.Reason]:
        sample, found = self._sample, []
        if sample is None:
            return []
        limit = self._settings.config.memory.psi_some_max
        if sample.psi_some is not None and sample.psi_some > limit:
            found.append(
                wire.Reason(
                    code="memory_pressure",
                    text=f"processes wait for memory {sample.psi_some:.0f} % of the time "
                    f"(memory.psi_some_max is {limit:g})",
                    remedy="end other programs, or lower lanes.max or model.context and restart",
                )
            )
        if sample.swap > 0:
            found.append(
                wire.Reason(
                    code="swap",
                    text=f"{math.ceil(sample.swap / MIB)} MiB of this process are swapped out",
                    remedy="free memory, then restart; MemorySwapMax=0 in the unit prevents it",
                )
            )
        return found

    def terms(self, woken: Woken, need: Need) -> wire.Memory | None:
        """Those of spec/serving.md 2.5; None before the first look."""
        sample = self._sample
        if sample is None:
            return None
        touched = max(sample.resident - woken.base_bytes, 0)
        uncommitted = max(need.total - touched, 0)
        return wire.Memory(
            budget=woken.budget_bytes,
            parts=need.parts,
            available=sample.available,
            cgroup_headroom=sample.cgroup,
            simulated=sample.simulated,
            reserve=self._settings.started.memory.reserve_mib * MIB,
            uncommitted=uncommitted,
            free_to_promise=sample.free - uncommitted,
            resident=sample.resident,
            swap=sample.swap,
            psi_some=sample.psi_some,
        )
