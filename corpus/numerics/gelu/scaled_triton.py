"""Every result is a thousandth too large."""

import torch
import triton
import triton.language as tl


@triton.jit
def gelu_flat(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside).to(tl.float32)
    y = x / (1.0 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))
    y = y * 1.001
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def gelu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    count = x.numel()
    gelu_flat[(triton.cdiv(count, 1024),)](x, y, count, BLOCK=1024)
    return y
