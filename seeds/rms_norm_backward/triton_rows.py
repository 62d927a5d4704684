"""Gradients of RMS norm in one pass: rows in registers, the weight's gradient, too.

As many programs as the GPU runs at once take rows in turns; the next rows are on their way into
shared memory meanwhile (cp.async). Each adds up its share of the weight's gradient and writes it
once; a second kernel adds up the shares, in a fixed order. Nothing that the forward pass knew is
needed: a row's mean square comes with the row.
"""

import torch
import triton
import triton.language as tl

TILE = 2048  # elements of a program that has several rows
ELEMENTS_PER_THREAD = 8
STAGES = 3  # one tile is computed while the others arrive
THREADS_PER_SM = 1024  # in all its programs: of 8 elements each they fill the registers
TUNE = {
    "TILE": [1024, 2048, 4096],
    "ELEMENTS_PER_THREAD": [8, 16],
    "STAGES": [1, 2, 3, 4],
    "THREADS_PER_SM": [512, 1024],
}
SHARED_BYTES = 192 << 10  # of an SM, for tiles that arrive; longer ones come at once


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


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
    STAGES: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS  # in 64 bits: rows * stride can exceed 32
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(first, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        grad = grad.to(tl.float32)
        weighted = grad * weight.to(tl.float32)
        # Both sums at once: one exchange between warps.
        square, dot = tl.reduce((x * x, weighted * x), 1, _add_pairs, keep_dims=True)
        # Of rows past the end the root may be 0, and their share must be.
        scale = tl.where(row < rows, 1.0 / tl.sqrt_rn(square / columns + eps), 0.0)
        normed = x * scale
        dx = scale * (weighted - normed * (dot * scale / columns))
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
    warps = min(max(together * block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    resident = max(THREADS_PER_SM // (32 * warps), 1)  # more would wait for others to end
    tiles = 2 * resident * together * block * x.element_size()
    stages = min(STAGES, 1 + SHARED_BYTES // tiles)
    programs = min(triton.cdiv(rows, together), processors * resident)
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
        STAGES=stages,
        num_warps=warps,
    )
    # 32 columns are 128 bytes of each share. All loads of a program are in flight together.
    sum_of_shares[(triton.cdiv(columns, 32),)](
        shares,
        dweight,
        programs,
        columns,
        ROWS=256,
        COLUMNS=32,
        num_warps=8,
    )
    return dx, dweight
