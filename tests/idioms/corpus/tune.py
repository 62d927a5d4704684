"""Tunables declared for the harness.

entry: double(x: float32[4096]) -> float32[4096]
ops: alloc launch
configs: 6
check: config == {"BLOCK": 512, "WARPS": 4} and plan.launches[0].grid == (8, 1, 1)
"""
import torch

import triton
import triton.language as tl

TUNE = {"BLOCK": [256, 512, 1024], "WARPS": [2, 4]}
BLOCK = 512
WARPS = 4


@triton.jit
def _double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    y = torch.empty_like(x)
    _double[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return y
