"""A host descriptor on a target without TMA: Triton passes pointer, shape and strides instead.

target: sm_80
entry: copy(x: float16[256,128]) -> float16[256,128]
ops: alloc launch
check: "TensorMap" not in [type(a).__name__ for a in plan.launches[0].args]
"""
import torch

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def _copy(x_desc, y_desc, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    y_desc.store([row, 0], x_desc.load([row, 0]))


def copy(x):
    y = torch.empty_like(x)
    block = [64, x.shape[1]]
    _copy[(x.shape[0] // 64,)](TensorDescriptor.from_tensor(x, block), TensorDescriptor.from_tensor(y, block), BLOCK=64)
    return y
