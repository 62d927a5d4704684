"""Another process that has a device, for as long as a test wants."""

import contextlib
import subprocess
import sys

_SCRIPT = """
import sys
from kagent_sandbox.process.device_lock import CPU, DeviceLock
with DeviceLock(CPU).turn("timing"):
    print(flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def cpu_held():
    """A process that times on the CPU until its stdin is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        yield other
