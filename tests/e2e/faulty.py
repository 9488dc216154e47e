"""Starts ds4d with an engine that hangs on command; for test_systemd.py, in its container.

The command is a line in a file: `PID sleep` (the engine's thread stands, all others go on) or
`PID hold` (a call that keeps the lock of the interpreter: nothing goes on). It names the process,
so the next one is well again. `load SECONDS` makes starts slow, `step SECONDS` every step, so that
streams last as long as a test needs them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4d import cli
from ds4d.cpu import engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ds4d.engine import Verified, VerifyWork

COMMAND = Path("/etc/ds4d/fault")


def command() -> list[str]:
    try:
        return COMMAND.read_text().split()
    except FileNotFoundError:
        return []


class Faulty(engine.CpuEngine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        match command():
            case ["load", seconds]:
                time.sleep(float(seconds))
        super().__init__(*arguments, **options)

    def verify(self, cohort: Sequence[VerifyWork]) -> Sequence[Verified]:
        match command():
            case ["step", seconds]:
                time.sleep(float(seconds))
            case [pid, "sleep"] if int(pid) == os.getpid():
                time.sleep(3600)
            case [pid, "hold"] if int(pid) == os.getpid():
                ctypes.PyDLL(None).sleep(3600)
        return super().verify(cohort)


if __name__ == "__main__":
    engine.CpuEngine = Faulty  # type: ignore[misc]
    sys.exit(cli.main())
