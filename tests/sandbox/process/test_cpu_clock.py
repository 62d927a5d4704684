"""CPU clocks of other processes."""

import os
import subprocess
import sys
import time

from kagent_sandbox.process.cpu_clock import cpu_s


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
