"""Triton's tutorial 09: descriptors made on the device live in global scratch from triton.set_allocator.

entry: copy(x: float16[1024,512]) -> float16[1024,512]
ops: alloc alloc launch free
check: plan.buffers[2].nbytes % (8 * 4 * 128) == 0 and type(plan.launches[0].args[-2]).__name__ == "Pointer"
"""
from typing import Optional

import torch

import triton
import triton.language as tl


@triton.jit
def _copy(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N])
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BLOCK_M, BLOCK_N])
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    y_desc.store([row, col], x_desc.load([row, col]))


def copy(x):
    M, N = x.shape
    y = torch.empty_like(x)

    def alloc_fn(size: int, alignment: int, stream: Optional[int]):
        return torch.empty(size, device="cuda", dtype=torch.int8)

    triton.set_allocator(alloc_fn)
    _copy[(triton.cdiv(M, 128), triton.cdiv(N, 128))](x, y, M, N, BLOCK_M=128, BLOCK_N=128)
    return y
