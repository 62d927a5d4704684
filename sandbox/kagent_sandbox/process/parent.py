"""Ending a process whose parent was killed, and so could not end it."""

from __future__ import annotations

import os
import signal

from kagent_sandbox.confine.libc import prctl

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; at once where
    `parent`, its process, has ended before that.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
