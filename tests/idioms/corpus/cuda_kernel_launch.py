"""CUDA C++ in the same kind of file, beside a Triton kernel.

entry: double(x: float32[4096]) -> float32[4096]
ops: alloc launch launch
check: {k.language for k in plan.kernels} == {"cuda", "triton"}
"""
import torch

import triton
import triton.language as tl
from kagent_sandbox.lang import cuda_kernel

add_self = cuda_kernel(
    "add_self",
    r"""
    extern "C" __global__ void add_self(const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = x[i] + x[i];
    }
    """,
)


@triton.jit
def _identity(y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(y_ptr + i, mask=i < n), mask=i < n)


def double(x):
    y = torch.empty_like(x)
    add_self.launch((x.numel() + 255) // 256, 256, x, y, x.numel())
    _identity[(4,)](y, x.numel(), BLOCK=1024)
    return y
