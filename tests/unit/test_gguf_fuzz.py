"""A few hundred of the mutated headers that `ops/scripts/fuzz-gguf` makes by the ten thousand."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "ops" / "scripts" / "fuzz-gguf"


def test_a_mutated_header_opens_or_is_refused_and_nothing_else():
    done = subprocess.run(
        [sys.executable, SCRIPT, "--count", "400", "--seed", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    opened, refused, reasons = map(
        int, re.search(r"(\d+) opened, (\d+) refused for (\d+)", done.stdout).groups()
    )
    assert opened + refused == 400
    assert opened > 5 and reasons > 20  # the mutations reach deep and do not only destroy
