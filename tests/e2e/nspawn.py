"""A real systemd in a throw-away container, for tests that must see one at work.

The host's root is the read-only lower layer of an overlay on a private tmpfs: nothing that happens
inside reaches the host, and nothing of it is left when the last process of the container ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

BOOT_S = 30.0
POWEROFF = signal.SIGRTMIN + 4
CLONE_NEWNET = 0x40000000
CGROUPS = Path("/sys/fs/cgroup")

# The shell becomes nspawn, which is process 1 of a namespace of its own: when that ends, however it
# ends, the kernel kills all that is in there. It ends with `unshare`, and `unshare` with the tests.
ALONE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child"]
ALONE += ["--mount", "--propagation", "private", "--mount-proc"]
BOOT = """
set -e
for group in "$@"; do mkdir "$group"; echo 0 > "$group/cgroup.procs"; done
mount -t tmpfs tmpfs /mnt
mkdir /mnt/lower /mnt/upper /mnt/work /mnt/root
mount --bind / /mnt/lower
mount -o remount,bind,ro /mnt/lower
mount -t overlay overlay -o lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
mount -t tmpfs tmpfs /run
exec systemd-nspawn --quiet --directory=/mnt/root --boot --register=no --keep-unit \
    --link-journal=no --private-network --machine=ds4d-test --console=pipe $BINDS \
    systemd.unit=basic.target
"""


class CannotBoot(Exception):
    """Why this host runs no container."""


class Machine:
    """A booted container. Its files are seen below `path("/")`, its processes through `run`."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.environ: dict[str, str] = {}  # of every command

    def path(self, absolute: str) -> Path:
        return Path(f"/proc/{self.leader}/root", absolute.lstrip("/"))

    def write(self, absolute: str, text: str, mode: int = 0o644) -> None:
        path = self.path(absolute)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def run(
        self, *command: str, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` in there as root. Raises AssertionError with its output if it fails."""
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        done = subprocess.run(
            [
                "nsenter",
                "--all",
                "--root",
                "--target",
                str(self.leader),
                "env",
                *variables,
                *command,
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done

    def connect(self, port: int, timeout: float = 30) -> socket.socket:
        """A connection from within, to its own loopback. A socket stays in the network in which it
        was made, so a short-lived thread goes there to make it."""
        made: list[socket.socket | OSError] = []

        def dial() -> None:
            try:
                with open(f"/proc/{self.leader}/ns/net") as network:
                    if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                made.append(socket.create_connection(("127.0.0.1", port), timeout))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=dial)
        thread.start()
        thread.join()
        (one,) = made
        if isinstance(one, OSError):
            raise one
        return one


def why_not() -> str | None:
    """What this host lacks to run a container; None: nothing that can be told without trying."""
    if os.geteuid() != 0:
        return "only root can start a container"
    tools = ("systemd-nspawn", "systemctl", "nsenter", "unshare", "setpriv")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed (Debian: apt install systemd-container)"
    tried = subprocess.run(
        [*ALONE, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        return f"no right to make namespaces or to mount: {tried.stderr.strip()}"
    return None


@contextmanager
def booted(
    log: Path, *, read_only: Mapping[Path, str], writable: Mapping[Path, str]
) -> Iterator[Machine]:
    """Boot a container that sees the host's folders at the places named. Raises CannotBoot."""
    groups = [root / f"ds4d-test-{os.getpid()}" for root in _hierarchies()]
    binds = [f"--bind-ro={source}:{place}" for source, place in read_only.items()]
    binds += [f"--bind={source}:{place}" for source, place in writable.items()]
    with log.open("w") as output:
        unshare = subprocess.Popen(
            [*ALONE, "bash", "-c", BOOT, "bash", *map(str, groups)],
            env=os.environ | {"BINDS": " ".join(binds)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield Machine(_leader(unshare, log))
    finally:
        _power_off(unshare)
        for group in groups:
            _remove(group)


def wait(what: str, happens: Callable[[], bool], within_s: float = 60.0) -> None:
    """Until `happens`. Raises AssertionError that names `what`."""
    end = time.monotonic() + within_s
    while not happens():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.1)  # each look costs a process or two, which the daemon could do with


def _hierarchies() -> list[Path]:
    """Where processes are sorted into groups: one tree (version 2), or systemd's own beside it."""
    named = [CGROUPS / "unified", CGROUPS / "systemd"]
    return [one for one in (*named, CGROUPS) if (one / "cgroup.procs").exists()]


def _leader(unshare: subprocess.Popen[bytes], log: Path) -> int:
    """The container's process 1, once its systemd has nothing left to start."""
    end, state = time.monotonic() + BOOT_S, "no process"
    while time.monotonic() < end and unshare.poll() is None:
        if (leader := _find_leader(unshare)) is not None:
            asked = Machine(leader.pid).run("systemctl", "is-system-running", check=False)
            state = asked.stdout.strip()
            if state in ("running", "degraded"):
                return leader.pid
        time.sleep(0.05)
    lines = log.read_text(errors="replace").strip().splitlines()
    raise CannotBoot(f"systemd-nspawn does not boot ({state}): {' / '.join(lines[-3:])}")


def _find_leader(unshare: subprocess.Popen[bytes]) -> psutil.Process | None:
    """The child of unshare's child, which is nspawn."""
    with suppress(psutil.NoSuchProcess):
        for nspawn in psutil.Process(unshare.pid).children():
            for leader in nspawn.children():
                return leader
    return None


def _power_off(unshare: subprocess.Popen[bytes]) -> None:
    if (leader := _find_leader(unshare)) is not None:
        with suppress(psutil.NoSuchProcess):
            leader.send_signal(POWEROFF)
    try:
        unshare.wait(10)
    except subprocess.TimeoutExpired:
        unshare.kill()  # the others go with it
        unshare.wait()


def _remove(group: Path) -> None:
    """A control group and those below it, all of them empty by now."""
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)
