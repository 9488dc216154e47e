"""What the host can give us: memory and processors. Read anew each time; decides nothing.

Everything comes from small files of the kernel below `proc` and where it says that control groups
are mounted: version 1, version 2, or both at once as on hybrid hosts. What a kernel or a container
does not show is None, never a guess. Reading takes about a millisecond: call it in a thread.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
_NO_LIMIT = 1 << 60  # version 1 writes about 2^63 where there is none
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Bytes. Swap is never counted as room: a model that swaps is a model that stands still."""

    available: int  # what the kernel could hand out without swapping
    cgroup: int | None  # headroom under the tightest limit of our control groups; None: no limit
    simulated: int | None  # what is left of a smaller machine that an operator asked for
    resident: int  # of this process
    swap: int  # of this process
    psi_some: float | None  # percent of the last 10 s in which something waited for memory
    oom_kills: int | None  # in our control group, since it exists

    @property
    def free(self) -> int:
        limits = (self.available, self.cgroup, self.simulated)
        return max(0, min(limit for limit in limits if limit is not None))


def sample(simulate_total_bytes: int | None = None, *, proc: Path = PROC) -> Sample:
    """Raises OSError where there is no `proc`: nothing can be promised then."""
    groups = list(_groups(proc, "memory"))
    rooms = [room for room in map(_headroom, groups) if room is not None]
    kills = [n for n in map(_oom_kills, groups) if n is not None]
    status = _table((proc / "self" / "status").read_text())
    resident = _KIB * status.get("VmRSS", 0)
    return Sample(
        available=_KIB * _table((proc / "meminfo").read_text())["MemAvailable"],
        cgroup=min(rooms, default=None),
        simulated=None if simulate_total_bytes is None else simulate_total_bytes - resident,
        resident=resident,
        swap=_KIB * status.get("VmSwap", 0),
        psi_some=_pressure(proc / "pressure" / "memory"),
        oom_kills=kills[0] if kills else None,
    )


def processors(*, proc: Path = PROC) -> int:
    """Those that we may run on, or fewer where a control group's quota gives us less time."""
    quotas = [quota for quota in map(_quota, _groups(proc, "cpu")) if quota is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


# Control groups


class _Group(NamedTuple):
    version: Literal[1, 2]
    path: Path


class _Mount(NamedTuple):
    root: Path  # which group lies at `point`
    point: Path


def _groups(proc: Path, controller: str) -> Iterator[_Group]:
    """Our control groups of `controller` and their ancestors, whose limits bind us as well: ours
    first. Of version 2 all of them, since only their files tell which controllers they have."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        version: Literal[1, 2] = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        mount = _mount(proc, controller if version == 1 else None)
        if mount is None:
            continue
        # In a container the path may be one of the host's, and its own group the mount's root.
        ours = Path(path)
        seen = ours.is_relative_to(mount.root) and ".." not in ours.parts
        within = ours.relative_to(mount.root) if seen else Path()
        for one in (within, *within.parents):
            yield _Group(version, mount.point / one)


def _mount(proc: Path, controller: str | None) -> _Mount | None:
    """Where version 2 is mounted, or the `controller` of version 1; see proc(5), mountinfo."""
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        root, point = map(_unescaped, before.split()[3:5])
        kind, *_, options = after.split()
        if kind == ("cgroup2" if controller is None else "cgroup") and (
            controller is None or controller in options.split(",")
        ):
            return _Mount(Path(root), Path(point))
    return None


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _headroom(group: _Group) -> int | None:
    """Limit - current + file pages that can be dropped; None: no limit, or none of our business."""
    names = {
        1: (("limit_in_bytes",), "usage_in_bytes", "total_inactive_file"),
        2: (("max", "high"), "current", "inactive_file"),
    }
    limit_names, current, inactive = names[group.version]
    limits = [_number(group.path / f"memory.{name}") for name in limit_names]
    limit = min((n for n in limits if n is not None), default=_NO_LIMIT)
    used = _number(group.path / f"memory.{current}")
    if limit >= _NO_LIMIT or used is None:
        return None
    return limit - used + _counts(group.path / "memory.stat").get(inactive, 0)


def _oom_kills(group: _Group) -> int | None:
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    return _counts(group.path / name).get("oom_kill")


def _quota(group: _Group) -> float | None:
    """Processors' worth of time that the group gets; None: as much as there is."""
    if group.version == 2:
        quota, _, period = _text(group.path / "cpu.max").partition(" ")
    else:
        quota = _text(group.path / "cpu.cfs_quota_us")
        period = _text(group.path / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():  # "max", "-1", or no such file
        return None
    return int(quota) / int(period) if int(period) else None


# Files of the kernel


def _pressure(path: Path) -> float | None:
    found = re.search(r"^some avg10=([\d.]+)", _text(path))
    return float(found[1]) if found else None


def _number(path: Path) -> int | None:
    """None for `max`, and where there is no such file: in a root group, in old kernels."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _counts(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _table(text: str) -> dict[str, int]:
    """Lines like `VmRSS:  123 kB`."""
    return {name: int(n) for name, n in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    """Empty where the kernel has no such file, or does not let us read it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
