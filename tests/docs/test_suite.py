"""The suite runs alike however it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A shell that starts a job in the background makes it ignore SIGINT, and all that it starts inherits that.
IN_THE_BACKGROUND = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
)


def test_processes_of_tests_can_be_interrupted_where_the_suite_runs_in_the_background() -> None:
    chosen = "tests/unit/cli/test_commands.py::test_an_interrupt_is_quiet_and_130[words0]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen]
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_BACKGROUND, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
