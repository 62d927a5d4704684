"""GELU over the elements in order, whatever the shape: each program takes one block of them.

Bound by memory: one read and one write. Many small programs keep many loads in flight, and the
hardware's scheduler balances them.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048
NUM_WARPS = 8
TUNE = {"BLOCK": [1024, 2048, 4096, 8192], "NUM_WARPS": [4, 8, 16]}


@triton.jit
def gelu_flat(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    # In 64 bits: more than 2^31 elements fit a large GPU.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # A mask whose end is no multiple of 16 elements is loaded element by element: full blocks have
    # none.
    if start + BLOCK <= count:
        _gelu_block(x_ptr, y_ptr, offsets, None)
    else:
        _gelu_block(x_ptr, y_ptr, offsets, offsets < count)


@triton.jit
def _gelu_block(x_ptr, y_ptr, offsets, inside):
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    # x (1 + tanh u) / 2 = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): no digits cancel
    # where x is negative, and -2u log2(e) is one polynomial.
    y = x / (1.0 + tl.exp2(x * (-2.302208198 - 0.1029432397 * x * x)))
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def gelu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    count = x.numel()
    gelu_flat[(triton.cdiv(count, BLOCK),)](x, y, count, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return y
