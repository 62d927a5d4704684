"""RMS norm with rows in registers: one read and one write.

A program has a tile of whole rows, so that short rows (the heads of a query-key norm) fill it too.
The weight is read by every program; it stays in the L2 cache.
"""

import torch
import triton
import triton.language as tl

TILE = 4096  # elements of a program that has several rows
ELEMENTS_PER_THREAD = 16
TUNE = {"TILE": [2048, 4096, 8192], "ELEMENTS_PER_THREAD": [8, 16, 32]}


# `rows` only bounds a mask: it is not worth kernels of its own for 1 row and for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_rows(
    x_ptr,
    weight_ptr,
    y_ptr,
    stride,
    rows,
    columns,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # In 64 bits: rows * stride can exceed 32.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / columns + eps)
    y = x * scale * weight
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    together = max(TILE // block, 1)
    warps = min(max(together * block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    rms_norm_rows[(triton.cdiv(rows, together),)](
        x,
        weight,
        y,
        x.stride(0),
        rows,
        columns,
        eps,
        ROWS=together,
        BLOCK=block,
        num_warps=warps,
    )
    return y
