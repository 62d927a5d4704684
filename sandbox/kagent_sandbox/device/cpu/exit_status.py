"""Whose fault it is that a process of native code ended, and what to say about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.process.child_handle import LOST_SUPERVISOR, Exit

_HINTS: Mapping[int, str] = {
    4: ": an instruction that this CPU lacks",
    6: ": abort, a failed assertion or an exception that left the kernel",
    8: ": an integer division by zero",
    11: ": an address outside of all buffers, or the stack overflowed",
    24: ": the limit of CPU time",
}


def blame(exit_: Exit, limit_s: float, *, hung: str) -> LaunchFailed:
    """The verdict on native code; `hung` is what did not return."""
    if hung:
        return LaunchFailed(Status.TIMEOUT, f"{hung} did not return within {limit_s:.1f} s")
    printed = exit_.log_tail.partition("Fatal Python error: ")[0]  # the rest shows our frames
    tail = "\n".join(printed.strip().splitlines()[:4])
    message = f"native code {exit_.describe()}"
    if exit_.signal is not None and exit_.reason is None:
        message += _HINTS.get(exit_.signal, "")
    if "Thread creation failed" in exit_.log_tail:
        message += ": only OpenMP's default number of threads is available, or one, and no others"
    status = Status.RUNTIME_ERROR
    if exit_.timed_out:
        status = Status.TIMEOUT
    elif exit_.reason is not None and "limit" in exit_.reason:
        status = Status.RESOURCE_LIMIT
    # Killed by nobody of ours: by the kernel for want of memory, or by somebody at the keyboard.
    stray = exit_.signal == signal.SIGKILL and exit_.reason in (None, LOST_SUPERVISOR)
    text = f"{message}\n{tail}" if tail else message
    return LaunchFailed(status, text, blame="unclear" if stray else "kernel")
