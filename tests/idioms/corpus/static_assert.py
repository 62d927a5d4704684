"""tl.static_assert in a kernel.

entry: double(x: float32[4096]) -> float32[4096]
refused: COMPILE_ERROR: BLOCK must be at least 512
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK >= 512, "BLOCK must be at least 512")  # HERE
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    y = torch.empty_like(x)
    _double[(16,)](x, y, x.numel(), BLOCK=256)
    return y
