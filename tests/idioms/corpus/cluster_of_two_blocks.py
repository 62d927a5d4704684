"""num_ctas makes clusters: the plan's grid counts blocks.

entry: matmul(a: float16[256,128], b: float16[128,256]) -> float16[256,256]
ops: alloc launch
check: plan.launches[0].cluster == (2, 1, 1) and plan.launches[0].grid == (4, 1, 1)
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, 256)
    k = tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + cols[None, :])
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], tl.dot(a, b).to(tl.float16))


def matmul(a, b):
    c = a.new_empty((a.shape[0], b.shape[1]))
    _matmul[(a.shape[0] // 128,)](a, b, c, b.shape[1], K=a.shape[1], BLOCK=128, num_ctas=2)
    return c
