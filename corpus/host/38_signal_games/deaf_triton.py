"""Cannot be told to stop: ignores and blocks every signal, leaves its group and session, asks not to die with its parent.

It then compiles as ever, and hangs on in a child that nothing but SIGKILL ends.
"""

import ctypes
import os
import signal
import sys
import time

import torch
import triton
import triton.language as tl


def attack():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    libc = ctypes.CDLL(None)
    print(f"met: death signal {libc.prctl(1, 0)}, undumpable {libc.prctl(4, 0)}", file=sys.stderr)
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


attack()


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
