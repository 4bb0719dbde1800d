"""A run that is slow, uneven, or busy with something else is not a run that hangs.

12 seconds and three epochs here, five minutes with `HEADWAY_FAULTS=full`, beside a process that takes a core away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

SCRIPT = Path(__file__).parents[1] / "scripts" / "soak.py"
SECONDS = 300 if os.environ.get("HEADWAY_FAULTS") == "full" else 12


@pytest.mark.alone  # it measures beside a load of its own
@pytest.mark.timeout(SECONDS + 200)
def test_nothing_is_taken_for_a_hang(tmp_path: Path) -> None:
    environ = os.environ | {"HEADWAY_WATCHDOG": "4", "SOAK": str(SECONDS)}
    command = [sys.executable, "-m", "headway", "run", "--nproc", "3", str(SCRIPT), str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            done = warm.run(command, env=environ, capture_output=True, text=True)
        finally:
            busy.kill()
    assert done.returncode == 0, done.stderr
    assert "soaked for " in done.stdout
    assert "no rank has made progress" not in done.stderr and "Timeout (" not in done.stderr
    print(done.stdout.splitlines()[-1])
