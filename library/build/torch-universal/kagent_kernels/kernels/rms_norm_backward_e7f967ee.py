"""Gradients of RMS norm in one pass: rows in registers, the weight's gradient, too.

As many programs as the GPU runs at once take rows in turns; the next rows are on their way into
registers meanwhile. Each program adds up its share of the weight's gradient and writes it once; a
second kernel, which starts while the first one drains, adds up the shares, in a fixed order.
Nothing that the forward pass knew is needed: a row's mean square comes with the row.
"""

import math

import torch
import triton
import triton.language as tl

TILE = 2048  # elements of a program that has several rows
ELEMENTS_PER_THREAD = 8
AHEAD = 1  # tiles that are loaded while one is computed
THREADS_PER_SM = 1024  # in all its programs: of 8 elements each they fill the registers
EVEN = True  # a number of programs that divides the tiles, if there is one near the most
TUNE = {"AHEAD": [1, 2], "THREADS_PER_SM": [768, 1024], "EVEN": [True, False]}


@triton.jit
def _add_pairs(a, b, other_a, other_b):
    return a + other_a, b + other_b


@triton.jit
def _load(
    ptr, start, rows, columns, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile; past the end it is zeros, which no memory is read for."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (row < rows - start) & (column < columns)
    # The first row's place in 64 bits, once for all threads; from there 32 do.
    at = ptr + start * stride + (row * stride + column)
    return tl.load(at, mask=inside, other=0.0)


# The compiler knows of a number only whether 16 divides it. Strides and columns come in words of
# WORD elements: of words * WORD it sees that WORD divides it, and loads and stores whole words.
# They are not worth kernels of their own for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["grad_words", "x_words", "rows", "words"])
def rms_norm_backward_rows(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, share_ptr, grad_words, x_words, rows, words, eps,
    WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    grad_stride, x_stride, columns = grad_words * WORD, x_words * WORD, words * WORD
    first = tl.program_id(0) * ROWS
    step = tl.num_programs(0) * ROWS
    origin = tl.program_id(0).to(tl.int64) * 0  # makes places in memory numbers of 64 bits
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    grad = _load(grad_ptr, first + origin, rows, columns, grad_stride, ROWS, BLOCK)
    x = _load(x_ptr, first + origin, rows, columns, x_stride, ROWS, BLOCK)
    if AHEAD >= 2:
        at = origin + first + step
        grad_1 = _load(grad_ptr, at, rows, columns, grad_stride, ROWS, BLOCK)
        x_1 = _load(x_ptr, at, rows, columns, x_stride, ROWS, BLOCK)
    if ROWS > 1:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    share = tl.zeros([ROWS, BLOCK], tl.float32)
    share_of_column = 1.0 / columns
    for start in tl.range(first, rows, step, num_stages=1):
        at = origin + start + AHEAD * step
        last_grad = _load(grad_ptr, at, rows, columns, grad_stride, ROWS, BLOCK)
        last_x = _load(x_ptr, at, rows, columns, x_stride, ROWS, BLOCK)
        if ROWS == 1:  # from the L1 cache, each time: as float32 it would take 8 registers
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
        wide, weighted = x.to(tl.float32), grad.to(tl.float32) * weight.to(tl.float32)
        # Both sums at once: one exchange between warps.
        square, dot = tl.reduce((wide * wide, weighted * wide), 1, _add_pairs, keep_dims=True)
        # Of rows past the end the root may be 0, and their share must be.
        root = tl.sqrt_rn(square * share_of_column + eps)
        scale = tl.where(row < rows - start, 1.0 / root, 0.0)
        factor = dot * scale * share_of_column
        normed = x.to(tl.float32) * scale
        wide_grad = grad.to(tl.float32)
        share += wide_grad * normed
        dx = scale * (wide_grad * weight.to(tl.float32) - normed * factor)
        inside = (row < rows - start) & (column < columns)
        dx_at = dx_ptr + (start + origin) * columns + (row * columns + column)
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if AHEAD == 1:
            grad, x = last_grad, last_x
        else:
            grad, x, grad_1, x_1 = grad_1, x_1, last_grad, last_x
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    whole = tl.sum(share, 0, keep_dims=True)
    share_row = share_ptr + tl.program_id(0) * columns
    tl.store(share_row + column, whole, mask=column < columns)


@triton.jit(do_not_specialize=["shares", "words"])
def sum_of_shares(
    share_ptr, dweight_ptr, shares, words,
    WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    columns = words * WORD
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
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
    if together * max(grad.stride(0), x.stride(0)) >= 2**31:
        together = 1  # places in a tile have 32 bits
    warps = min(max(together * block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    # More programs would wait for others to end. Several rows take some more registers.
    threads = min(THREADS_PER_SM, 768) if together > 1 else THREADS_PER_SM
    resident = max(threads // (32 * warps), 1)
    turns = triton.cdiv(rows, together)
    most = min(turns, processors * resident)
    even = (p for p in range(most, most * 15 // 16, -1) if turns % p == 0)
    programs = next(even, most) if EVEN else most
    word = math.gcd(columns, grad.stride(0), x.stride(0), 16 // x.element_size())
    starts = word, grad.storage_offset(), x.storage_offset()
    aligned = all(n * x.element_size() % 16 == 0 for n in starts)  # else pointers fill registers
    # Launching the second kernel before the first one ends needs Hopper.
    dependent = torch.cuda.get_device_capability(x.device)[0] >= 9
    shares = torch.empty((programs, columns), dtype=torch.float32, device=x.device)
    rms_norm_backward_rows[(programs,)](
        grad,
        x,
        weight,
        dx,
        shares,
        grad.stride(0) // word,
        x.stride(0) // word,
        rows,
        columns // word,
        eps,
        WORD=word,
        ROWS=together,
        BLOCK=block,
        AHEAD=AHEAD,
        DEPENDENT=dependent,
        num_warps=warps,
        maxnreg=min(65536 // (32 * warps * resident), 255) if aligned else None,
    )
    # All loads of a program are in flight together: 32 or 128 bytes of each share.
    together = 32 if columns >= 2048 else 8
    sum_of_shares[(triton.cdiv(columns, together),)](
        shares,
        dweight,
        programs,
        columns // word,
        WORD=word,
        ROWS=min(triton.next_power_of_2(programs), 8192 // together),
        COLUMNS=together,
        DEPENDENT=dependent,
        num_warps=8,
        launch_pdl=dependent,
    )
    return dx, dweight
