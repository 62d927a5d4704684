"""A mistake inside of a kernel: the kernel's own line.

entry: double(x: float32[4096]) -> float32[4096]
refused: COMPILE_ERROR: offsets is not defined
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x_ptr + offsets, mask=i < n)  # HERE
    tl.store(y_ptr + i, v * 2, mask=i < n)


def double(x):
    y = torch.empty_like(x)
    _double[(16,)](x, y, x.numel(), BLOCK=256)
    return y
