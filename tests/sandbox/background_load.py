"""Other programs that keep the machine busy: started by a test, but not under its process."""

import contextlib
import os
import signal
import subprocess
import sys

_SPIN = """
import os
if os.fork():
    os._exit(0)  # so that nobody's parent is the test
os.setsid()
print(os.getpid(), flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def busy(count):
    """`count` processes that compute, ended at the end."""
    pids = []
    try:
        for _ in range(count):
            with subprocess.Popen(
                [sys.executable, "-c", _SPIN], stdout=subprocess.PIPE, text=True
            ) as starter:
                pids.append(int(starter.stdout.readline()))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
