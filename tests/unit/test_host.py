"""Memory and processors as the kernel's files tell them, on trees of such files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ds4d.sched import host

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@dataclass
class Machine:
    """`/proc` and the control groups of one machine, as files."""

    root: Path

    def __post_init__(self) -> None:
        self.write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 5 kB\nMemAvailable:    4096 kB\n")
        self.write("proc/self/status", "Name:\tds4d\nVmRSS:\t   1024 kB\nVmSwap:\t      8 kB\n")

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def groups(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mounts(self, *mounts: tuple[str, str, str, str]) -> None:
        """(group that is mounted, where, type, options)"""
        lines = [
            f"{i} 23 0:28 {root} {self.root}/{point} rw,relatime shared:9 - {kind} x rw,{options}"
            for i, (root, point, kind, options) in enumerate(mounts, 30)
        ]
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/vda rw\n" + "\n".join(lines))

    def version_2(self, path: str = "/system.slice/ds4d.service") -> None:
        self.groups(f"0::{path}")
        self.mounts(("/", "sys", "cgroup2", "nsdelegate"))

    def limit(self, group: str, limit: str, current: int, inactive_file: int = 0) -> None:
        self.write(f"sys/{group}/memory.max", f"{limit}\n")
        self.write(f"sys/{group}/memory.current", f"{current}\n")
        self.write(f"sys/{group}/memory.stat", f"anon 5\ninactive_file {inactive_file}\n")

    def limit_1(self, group: str, limit: int, usage: int, inactive_file: int = 0) -> None:
        self.write(f"{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{group}/memory.usage_in_bytes", f"{usage}\n")
        stat = f"inactive_file 1\ntotal_inactive_file {inactive_file}\n"
        self.write(f"{group}/memory.stat", stat)

    def sample(self, simulated: int | None = None) -> host.Sample:
        return host.sample(simulated, proc=self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_the_kernel_says_what_is_free(machine: Machine) -> None:
    sample = machine.sample()
    assert sample.cgroup is None
    assert sample.free == sample.available == 4 * MIB
    assert (sample.resident, sample.swap) == (MIB, 8 << 10)
    assert sample.psi_some is None, "a kernel without it"
    assert sample.oom_kills is None


def test_the_machine_that_runs_this_can_be_read() -> None:
    sample = host.sample()
    assert sample.free > 0
    assert sample.resident > MIB
    assert host.processors() >= 1


def test_pressure_is_the_share_of_the_last_ten_seconds(machine: Machine) -> None:
    some = "some avg10=12.50 avg60=1.00 avg300=0.10 total=5\n"
    machine.write("proc/pressure/memory", some + "full avg10=3.00 avg60=0.00 avg300=0.00 total=1\n")
    assert machine.sample().psi_some == 12.5


def test_a_smaller_machine_can_be_simulated(machine: Machine) -> None:
    sample = machine.sample(3 * MIB)
    assert sample.simulated == 2 * MIB, "what this process holds already is taken from it"
    assert sample.free == 2 * MIB
    assert machine.sample(1).free == 0


# Version 2


def test_the_tightest_limit_of_our_control_groups_counts(machine: Machine) -> None:
    machine.version_2()
    machine.limit("system.slice/ds4d.service", "max", 100)
    assert machine.sample().cgroup is None
    machine.limit("system.slice", "1000", 700, inactive_file=50)
    assert machine.sample().cgroup == 350
    machine.limit("system.slice/ds4d.service", "400", 300)
    assert machine.sample().cgroup == machine.sample().free == 100


def test_a_soft_limit_is_a_limit_since_beyond_it_the_kernel_slows_us_down(machine: Machine) -> None:
    machine.version_2("/ds4d")
    machine.limit("ds4d", "max", 300)
    machine.write("sys/ds4d/memory.high", "350\n")
    assert machine.sample().cgroup == 50
    machine.write("sys/ds4d/memory.high", "max\n")
    assert machine.sample().cgroup is None


def test_a_group_beyond_its_limit_has_no_room(machine: Machine) -> None:
    machine.version_2("/ds4d")
    machine.limit("ds4d", "400", 500)
    assert machine.sample().cgroup == -100
    assert machine.sample().free == 0


def test_kills_are_those_of_our_own_group(machine: Machine) -> None:
    machine.version_2()
    machine.write("sys/system.slice/memory.events", "low 0\noom 7\noom_kill 7\n")
    machine.write("sys/system.slice/ds4d.service/memory.events", "low 0\noom 3\noom_kill 2\n")
    assert machine.sample().oom_kills == 2


def test_a_container_sees_its_own_group_as_the_root(machine: Machine) -> None:
    """Without a cgroup namespace: the path is the host's, and that group is what is mounted."""
    machine.groups("0::/docker/abc")
    machine.mounts(("/docker/abc", "sys", "cgroup2", ""))
    machine.limit(".", "900", 100)
    assert machine.sample().cgroup == 800


@pytest.mark.parametrize("path", ["/../elsewhere", "/host/path"])
def test_a_group_that_is_not_mounted_here_counts_as_the_root_of_what_is(
    machine: Machine, path: str
) -> None:
    machine.groups(f"0::{path}")
    machine.mounts(("/docker/abc" if "host" in path else "/", "sys", "cgroup2", ""))
    machine.limit(".", "900", 100)
    machine.limit("../elsewhere", "1", 1)
    assert machine.sample().cgroup == 800


def test_a_mount_point_may_have_blanks_in_its_name(machine: Machine) -> None:
    machine.groups("0::/")
    machine.mounts(("/", r"my\040groups", "cgroup2", ""))
    for name, text in (("max", "900"), ("current", "100")):
        machine.write(f"my groups/memory.{name}", text)
    assert machine.sample().cgroup == 800


# Version 1, and both


def hybrid(machine: Machine) -> None:
    machine.groups("9:name=systemd:/", "4:memory:/box/inner", "2:cpu,cpuacct:/box", "0::/unit")
    machine.mounts(
        ("/", "cg/memory", "cgroup", "memory"),
        ("/", "cg/cpu", "cgroup", "cpu,cpuacct"),
        ("/", "cg/unified", "cgroup2", "nsdelegate"),
    )


def test_on_a_hybrid_host_the_memory_controller_is_version_1(machine: Machine) -> None:
    hybrid(machine)
    machine.limit_1("cg/memory/box/inner", 0x7FFFFFFFFFFFF000, 100)
    assert machine.sample().cgroup is None, "what version 1 writes where there is no limit"
    machine.limit_1("cg/memory/box", 1000, 700, inactive_file=60)
    assert machine.sample().cgroup == 360
    machine.limit_1("cg/memory/box/inner", 500, 450)
    machine.write("cg/memory/box/inner/memory.oom_control", "oom_kill_disable 0\noom_kill 4\n")
    sample = machine.sample()
    assert (sample.cgroup, sample.oom_kills) == (50, 4)


def test_where_both_versions_limit_us_the_tighter_one_counts(machine: Machine) -> None:
    hybrid(machine)
    machine.limit_1("cg/memory/box", 1000, 700)
    machine.write("cg/unified/unit/memory.max", "210")
    machine.write("cg/unified/unit/memory.current", "10")
    assert machine.sample().cgroup == 200


def test_a_version_1_container_sees_its_own_group_as_the_root(machine: Machine) -> None:
    machine.groups("4:memory:/docker/abc")
    machine.mounts(("/docker/abc", "cg/memory", "cgroup", "memory"))
    machine.limit_1("cg/memory", 1000, 700)
    assert machine.sample().cgroup == 300


# Processors


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.usefixtures("many")
def test_a_quota_of_processor_time_counts_as_fewer_processors(machine: Machine) -> None:
    machine.version_2("/box/inner")
    assert host.processors(proc=machine.proc) == 64
    machine.write("sys/box/inner/cpu.max", "max 100000\n")
    machine.write("sys/box/cpu.max", "250000 100000\n")
    assert host.processors(proc=machine.proc) == 3
    machine.write("sys/box/inner/cpu.max", "50000 100000\n")
    assert host.processors(proc=machine.proc) == 1


@pytest.mark.usefixtures("many")
def test_version_1_knows_quotas_too(machine: Machine) -> None:
    hybrid(machine)
    machine.write("cg/cpu/box/cpu.cfs_period_us", "100000\n")
    machine.write("cg/cpu/box/cpu.cfs_quota_us", "-1\n")
    assert host.processors(proc=machine.proc) == 64
    machine.write("cg/cpu/box/cpu.cfs_quota_us", "150000\n")
    assert host.processors(proc=machine.proc) == 2
