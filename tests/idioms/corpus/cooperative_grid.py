"""A grid barrier needs a cooperative launch.

entry: scale(x: float32[4096]) -> float32[4096]
ops: alloc alloc fill launch free
check: plan.launches[0].cooperative
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _scale(x_ptr, y_ptr, barrier_ptr, n, BLOCK: tl.constexpr):
    tl.atomic_add(barrier_ptr, 1)
    while tl.atomic_add(barrier_ptr, 0) < tl.num_programs(0):
        pass
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def scale(x):
    y = torch.empty_like(x)
    barrier = torch.zeros(1, dtype=torch.int32, device=x.device)
    _scale[(triton.cdiv(x.numel(), 256),)](x, y, barrier, x.numel(), BLOCK=256, launch_cooperative_grid=True)
    return y
