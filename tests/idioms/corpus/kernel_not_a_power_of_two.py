"""A block size that is no power of two.

entry: double(x: float32[4096]) -> float32[4096]
refused: COMPILE_ERROR: power of 2
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # HERE
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    y = torch.empty_like(x)
    _double[(16,)](x, y, x.numel(), BLOCK=300)
    return y
