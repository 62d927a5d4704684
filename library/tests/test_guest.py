"""The library is a guest in its caller's process, and leaves that as it was: a process of its own
for each operator is asked before and after.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TASKS = sorted(p.name for p in (Path(__file__).parent / "tasks").iterdir() if p.is_dir())


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc and the C library of Linux")
@pytest.mark.parametrize("task", TASKS)
def test_importing_and_calling_leave_the_process_as_it_was(task):
    visit = Path(__file__).with_name("visit.py")
    command = [sys.executable, str(visit), task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != -11, f"an input was written, or memory of others:\n{done.stdout}"
    assert done.returncode == 0, done.stdout + done.stderr
