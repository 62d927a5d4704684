"""A limit on each kernel's compile.

Passes inside of Triton's compiler cannot be interrupted from Python, so the alarm does two things:
it raises when Python gets to run again (ptxas is a process: there it acts at once), and it is a
fact about this process that whoever watches it can read (`compiling`), so that the watcher can end
the process and still name the kernel.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.data.verdict import Stage, Status

on_compile: Callable[[str | None], None] | None = None
"""Called with a kernel's name when its compile starts, with None when it ends."""


def too_slow(kernel: str, limit_s: float) -> BuildRejected:
    """The rejection of a kernel that takes too long to compile."""
    return BuildRejected(
        Stage.BUILD,
        Status.TIMEOUT,
        f"compiling kernel {kernel} took longer than {limit_s:g} s: use smaller tiles, fewer "
        "unrolled iterations (tl.static_range, num_stages), fewer template instances or more warps",
    )


@contextlib.contextmanager
def compile_limit(kernel: str, limit_s: float | None) -> Iterator[None]:
    """Limit what runs inside, and tell the watcher about it.

    Raises:
        BuildRejected: TIMEOUT, naming the kernel.
    """
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise too_slow(kernel, limit_s)

    if on_compile is not None:
        on_compile(kernel)
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if on_compile is not None:
            on_compile(None)
