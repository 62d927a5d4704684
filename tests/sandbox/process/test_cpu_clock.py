"""CPU clocks of other processes."""

import os
import subprocess
import sys
import time

from kagent_sandbox.process.cpu_clock import cpu_s
from kagent_sandbox.process.process_tree import kill_tree, used_cpu_s

BURN = "import time\nwhile time.process_time() < {}: pass"


def test_the_clock_of_another_process_can_be_read():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        while cpu_s(child.pid) < 0.05:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert cpu_s(child.pid) == 0.0
    assert cpu_s(os.getpid()) > 0


def test_the_cpu_time_of_a_tree_is_that_of_running_and_of_ended_processes():
    """Its first process waits for all but the last, which runs. The kernel counts ticks of 10 ms,
    a user's and its own apart, and leaves out what a tick is not full of.
    """
    code = (
        "import subprocess, sys\n"
        f"ended = subprocess.run([sys.executable, '-c', {BURN.format(0.3)!r}])\n"
        f"last = subprocess.Popen([sys.executable, '-c', {BURN.format(0.3)!r} + '\\nwhile True: "
        "time.sleep(60)'])\n"
        "print(flush=True)\n"
        "last.wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        child.stdout.read(1)
        assert used_cpu_s(child.pid) >= 0.27, "the one that has ended"
        while used_cpu_s(child.pid) < 0.55:
            time.sleep(0.01)
        assert cpu_s(child.pid) < 0.3, "not its own"
    finally:
        kill_tree(child.pid)
        child.wait()
    assert used_cpu_s(child.pid) == 0.0
