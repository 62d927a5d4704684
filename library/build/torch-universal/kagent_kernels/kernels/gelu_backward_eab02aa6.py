"""Gradient of GELU over the elements in order, whatever the shape: a block for each program.

Bound by memory: two reads and one write. Many small programs keep many loads in flight, and the
hardware's scheduler balances them.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4
TUNE = {"BLOCK": [1024, 2048, 4096, 8192], "NUM_WARPS": [4, 8, 16]}


@triton.jit
def gelu_backward_flat(grad_ptr, x_ptr, dx_ptr, count, BLOCK: tl.constexpr):
    # In 64 bits: more than 2^31 elements fit a large GPU.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # A mask whose end is no multiple of 16 elements is loaded element by element: full blocks have
    # none.
    if start + BLOCK <= count:
        _gelu_backward_block(grad_ptr, x_ptr, dx_ptr, offsets, None)
    else:
        _gelu_backward_block(grad_ptr, x_ptr, dx_ptr, offsets, offsets < count)


@triton.jit
def _gelu_backward_block(grad_ptr, x_ptr, dx_ptr, offsets, inside):
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    # gelu(x) = x s, s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); the derivative is
    # s + x s (1 - s) 2u'. With t = exp(-|2u|), which is at most 1, s and 1 - s are 1 / (1 + t) and
    # t / (1 + t), the larger first where u is positive: no digits cancel, nothing overflows.
    square = x * x
    twice_u = x * (1.595769122 + 0.0713548163 * square)
    slope = 1.595769122 + 0.214064449 * square
    t = tl.exp2(-1.4426950408889634 * tl.abs(twice_u))
    larger = 1.0 / (1.0 + t)
    smaller = t * larger
    s = tl.where(x > 0, larger, smaller)
    dx = grad * (s + x * (slope * (larger * smaller)))
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    count = x.numel()
    programs = (triton.cdiv(count, BLOCK),)
    gelu_backward_flat[programs](grad, x, dx, count, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return dx
