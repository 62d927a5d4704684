"""CPU time of another process: a limit on it refuses nobody on a busy machine."""

from __future__ import annotations

import time


def cpu_s(pid: int) -> float:
    """CPU time in seconds that a process has used, without its children's; 0 where it is gone.

    By its clock, whose number follows from `pid` (clock_getcpuclockid(3)): a confined process can
    read that, but not /proc.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0
