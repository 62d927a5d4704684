"""A limit on each kernel's compile.

The limit is on CPU time, so that a busy machine refuses nobody. Passes inside of Triton's compiler
cannot be interrupted from Python, so two look: a timer of this process raises when Python gets to
run again, and whoever watches it reads its clock (`process.cpu_clock`), ends it and still names the
kernel.
Compilers that are processes of their own (ptxas, g++) have the kernel's limit on each of them.
"""

from __future__ import annotations

import contextlib
import math
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.data.verdict import Stage, Status

on_compile: Callable[[str | None], None] | None = None
"""Called with a kernel's name when its compile starts, with None when it ends."""


_TIMER, _OVER = signal.SIGPROF, signal.SIGXCPU
# What callers say of a compiler that the system has ended at its limit: g++ of its parts, Triton of
# ptxas. The system counts whole ticks of the clock, and may come to more than was used.
_ENDED = re.compile(rf"CPU time limit exceeded|SIGXCPU|error code -{int(_OVER)}\b")
_ENDED_SHARE = 0.5


def _used_s() -> float:
    """CPU time in seconds of this process and of those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def too_slow(kernel: str, limit_s: float) -> BuildRejected:
    """The rejection of a kernel that takes too long to compile."""
    return BuildRejected(
        Stage.BUILD,
        Status.TIMEOUT,
        f"compiling kernel {kernel} took longer than {limit_s:g} s of CPU time: use smaller tiles, "
        "fewer unrolled iterations (tl.static_range, num_stages), fewer template instances or more "
        "warps",
    )


@contextlib.contextmanager
def compile_limit(kernel: str, limit_s: float | None) -> Iterator[Callable[[Exception], Exception]]:
    """Limit the CPU time of what runs inside, and tell the watcher about it.

    Args:
        kernel: Its name in a rejection.
        limit_s: Seconds of CPU time; None: no limit.

    Yields:
        What an exception becomes that leaves the block now.

    Raises:
        BuildRejected: TIMEOUT, naming the kernel.
    """
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield lambda error: error
        return

    over = False

    def expired(signum: int, _frame: FrameType | None) -> None:
        nonlocal over
        if signum == _OVER and _used_s() - start < limit_s:
            return  # see `allowed`: this process's own clock did not begin at 0
        over = True
        raise too_slow(kernel, limit_s)

    def told(error: Exception) -> Exception:
        # Triton wraps what is raised in its compiler; of a compiler that was ended, its caller
        # complains.
        if isinstance(error, BuildRejected):
            return error
        share = (_used_s() - start) / limit_s
        ended = share >= _ENDED_SHARE and _ENDED.search(str(error)) is not None
        return too_slow(kernel, limit_s) if over or share >= 1 or ended else error

    if on_compile is not None:
        on_compile(kernel)
    start = _used_s()
    handlers = {number: signal.signal(number, expired) for number in (_TIMER, _OVER)}
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # Processes that this one starts begin at 0, and inherit the limit.
    own_s, allowed = time.process_time(), math.ceil(limit_s)
    if own_s >= allowed:
        allowed = math.ceil(own_s + limit_s)
    lowest = min(x for x in (allowed, soft, hard) if x != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_CPU, (lowest, hard))
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield told
    except Exception as error:
        if (instead := told(error)) is not error:
            raise instead from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if on_compile is not None:
            on_compile(None)
