"""A daemon that forks and exits every millisecond, to be a step ahead of whoever kills it by its pid.

2,000 generations at most.
"""

import os
import sys
import time

import torch
import triton
import triton.language as tl


def attack():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        print("met: the chain ends with its candidate, or selftest finds it", file=sys.stderr)
        return
    os.setsid()
    try:
        for _ in range(2_000):
            if os.fork():
                os._exit(0)
            time.sleep(0.001)
    except OSError:
        pass  # below tier T2 its dead count until the candidate ends: the last one stays
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
