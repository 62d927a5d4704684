"""Staged tiles of more than 48 KiB: nothing to opt in to, the plan says how much.

entry: matmul(a: float16[256,256], b: float16[256,256]) -> float32[256,256]
ops: alloc launch
check: 49152 < plan.launches[0].shared <= 232448
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + cols[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc)


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=torch.float32)
    _matmul[(2, 2)](a, b, c, b.shape[1], a.shape[1], BLOCK=128, BLOCK_K=64, num_stages=4, num_warps=8)
    return c
