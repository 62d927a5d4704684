"""Is given the address of an object of the host's, as a number, and writes there."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax(x_ptr, y_ptr, columns, address, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(address.to(tl.pointer_type(tl.int32)), 42, mask=row == 0)


def rows(x: torch.Tensor) -> torch.Tensor:
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, id(softmax), BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
