"""A device-made descriptor and no triton.set_allocator: fails on a GPU too, so say what is missing.

entry: copy(x: float16[128,128]) -> float16[128,128]
refused: RUNTIME_ERROR: triton.set_allocator(lambda size, align, stream
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _copy(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    y_desc.store([0, 0], x_desc.load([0, 0]))


def copy(x):
    y = torch.empty_like(x)
    _copy[(1, 1)](x, y, *x.shape, BLOCK=128)  # HERE
    return y
