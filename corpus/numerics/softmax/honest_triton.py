"""Right: what the others are small changes of."""

import torch
import triton
import triton.language as tl


# Sizes and strides have no machine code of their own: some twenty cases are compiled.
@triton.jit(do_not_specialize=["x_stride", "y_stride", "columns"])
def softmax_rows(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    maximum = tl.max(x, 0)
    e = tl.exp(x - maximum)
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * y_stride + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 1024, 1), 32)
    softmax_rows[(rows,)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block, num_warps=warps)
    return y
