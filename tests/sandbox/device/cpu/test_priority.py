"""Both sides of a comparison are pinned, or neither."""

import os
import subprocess
import sys

import pytest
from kagent_sandbox.device.cpu import priority

LACKING = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
given = open("/proc/self/status").read().split("CapPrm:")[1].split()[0]
kept = int(given, 16) & ~(1 << 23)
low, high = kept & 0xFFFFFFFF, kept >> 32
head = struct.pack("Ii", 0x20080522, 0)
assert libc.capset(head, struct.pack("6I", low, low, 0, high, high, 0)) == 0
from kagent_sandbox.device.cpu.priority import CpuPriority, reaches_launchers
assert not reaches_launchers()
cores = os.sched_getaffinity(0)
with CpuPriority(os.getpid(), [os.getpid()] * len(cores)):
    assert os.sched_getaffinity(0) == cores
print("left alone")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_root_without_the_capability_pins_nobody():
    done = subprocess.run(
        [sys.executable, "-c", LACKING], capture_output=True, text=True, check=False
    )
    assert done.stdout == "left alone\n", done.stderr


def test_others_pin_their_own(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert priority.reaches_launchers()
