"""Leaves a daemon: forked twice, in a session of its own, signals ignored, output closed.

One from the import and one from each case; each lives for a minute unless somebody ends it.
"""

import os
import signal
import sys
import time

import torch
import triton
import triton.language as tl


def attack():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        print("met: the daemon ends with its candidate, or selftest finds it", file=sys.stderr)
        return
    os.setsid()
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    os.closerange(0, 1024)
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
