"""Gradients of RMS norm in one pass: rows in registers, the weight's gradient, too.

As many programs as the GPU runs at once take rows in turns. Each adds up its share of the weight's
gradient and writes it once; a second kernel adds up the shares, in a fixed order. Nothing that the
forward pass knew is needed: a row's mean square comes with the row.
"""

import torch
import triton
import triton.language as tl

TILE = 2048  # elements of a program that has several rows
ELEMENTS_PER_THREAD = 16
PROGRAMS_PER_SM = 2  # of 512 threads: fewer write fewer shares, more hide more latency
TUNE = {
    "TILE": [1024, 2048, 4096],
    "ELEMENTS_PER_THREAD": [8, 16, 32],
    "PROGRAMS_PER_SM": [1, 2, 3, 4],
}


# `rows` only bounds a loop: it is not worth kernels of its own for 1 row and for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_rows(
    grad_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    share_ptr,
    grad_stride,
    x_stride,
    rows,
    columns,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS  # in 64 bits: rows * stride can exceed 32
    column = tl.arange(0, BLOCK)[None, :]
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        # Read again for every row: it stays in the L1 cache, and registers are few.
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
        grad = grad.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / columns + eps)
        normed = x * scale
        weighted = grad * weight
        dot = tl.sum(weighted * normed, 1, keep_dims=True) / columns
        dx = scale * (weighted - normed * dot)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        share += grad * normed
    whole = tl.sum(share, 0, keep_dims=True)
    share_row = share_ptr + tl.program_id(0) * columns
    tl.store(share_row + column, whole, mask=column < columns)


@triton.jit(do_not_specialize=["shares"])
def sum_of_shares(
    share_ptr, dweight_ptr, shares, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, shares, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < shares) & (column < columns)
        sums += tl.load(share_ptr + row * columns + column, mask=inside, other=0.0)
    whole = tl.sum(sums, 0, keep_dims=True).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + column, whole, mask=column < columns)


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    dweight = torch.empty(columns, dtype=x.dtype, device=x.device)

    block = triton.next_power_of_2(columns)
    together = max(TILE // block, 1)
    warps = min(max(together * block // (32 * ELEMENTS_PER_THREAD), 1), 16)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    # A block of few warps leaves room for more programs.
    programs = min(triton.cdiv(rows, together), processors * PROGRAMS_PER_SM * (16 // warps))
    shares = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    rms_norm_backward_rows[(programs,)](
        grad,
        x,
        weight,
        dx,
        shares,
        grad.stride(0),
        x.stride(0),
        rows,
        columns,
        eps,
        ROWS=together,
        BLOCK=block,
        num_warps=warps,
    )
    # 32 columns are a sector of 128 bytes of each share.
    sum_of_shares[(triton.cdiv(columns, 32),)](
        shares, dweight, programs, columns, ROWS=64, COLUMNS=32, num_warps=4
    )
    return dx, dweight
