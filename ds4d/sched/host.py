"""What the host can give us: memory and processors. Read anew each time; decides nothing."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Bytes. Swap is never counted: a model that swaps is a model that stands still."""

    available: int  # what the kernel could hand out without swapping
    cgroup: int | None  # headroom under the tightest limit of our control groups; None: no limit
    simulated: int | None  # what is left of a smaller machine that an operator asked for

    @property
    def free(self) -> int:
        limits = (self.available, self.cgroup, self.simulated)
        return max(0, min(limit for limit in limits if limit is not None))


def sample(
    simulate_total_bytes: int | None = None,
    *,
    cgroups: Path = _CGROUPS,
    own_cgroup: Path = _OWN_CGROUP,
) -> Host:
    resident = psutil.Process().memory_info().rss
    return Host(
        available=psutil.virtual_memory().available,
        cgroup=_cgroup_headroom(cgroups, own_cgroup),
        simulated=None if simulate_total_bytes is None else simulate_total_bytes - resident,
    )


def processors(*, cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Those that we may run on, or fewer where a control group's quota gives us less time."""
    quotas = [_quota(one) for one in _groups(cgroups, own_cgroup)]
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(math.ceil(q) for q in quotas if q is not None)]))


def _groups(cgroups: Path, own_cgroup: Path) -> list[Path]:
    """Our control group and its ancestors (version 2), whose limits bind us as well."""
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return []
    group = cgroups / path.strip("/")
    return [one for one in (group, *group.parents) if one.is_relative_to(cgroups)]


def _quota(group: Path) -> float | None:
    """Processors' worth of time that the group gets; None: as much as there is."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # the root group and old kernels have no such file


def _cgroup_headroom(cgroups: Path, own_cgroup: Path) -> int | None:
    """The least of max - current + reclaimable file pages over our groups."""
    rooms = [_headroom(one) for one in _groups(cgroups, own_cgroup)]
    return min((room for room in rooms if room is not None), default=None)


def _headroom(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        current = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - current + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None  # the root group and old kernels have no such files
