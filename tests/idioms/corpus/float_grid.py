"""A grid from a true division.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: triton.cdiv
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    y = torch.empty_like(x)
    _double[(x.numel() / 256,)](x, y, x.numel(), BLOCK=256)  # HERE
    return y
