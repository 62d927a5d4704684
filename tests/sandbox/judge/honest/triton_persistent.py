"""Persistent programs that walk over rows, reduce with a combine function"""

import torch
import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def k(x_ptr, y_ptr, stride, rows, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for r in range(tl.program_id(0), rows, tl.num_programs(0)):
        v = tl.load(x_ptr + r * stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
        e = tl.exp(v - tl.reduce(v, 0, larger))
        tl.store(
            y_ptr + r * n + i, (e / tl.reduce(e, 0, plus)).to(y_ptr.dtype.element_ty), mask=i < n
        )


def softmax(x):
    rows, n = x.shape
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    k[(min(rows, 7),)](x, y, x.stride(0), rows, n, BLOCK=triton.next_power_of_2(n))
    return y
