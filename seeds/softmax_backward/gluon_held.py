"""Gradient of softmax with long rows held on chip: y in registers, grad in shared memory.

A program takes rows in turns. While it adds up grad · y, each piece of y passes from a ring in
shared memory into registers, and its place is refilled with a later piece; while it computes the
result, each piece of grad makes room for that of the next row. Copies by cp.async thus never pause,
and every element is read once: 65536 columns of bfloat16 are 256 KiB, more than either memory of an
SM. Each thread reads what it has copied.

Rows that are short, too long, or not aligned to 16 bytes are swept twice. Of short ones
triton_rows.py keeps several on an SM.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

PIECE_BYTES = 16384
WARPS = 16  # 64 of a thread's registers hold 128 KiB of y
AHEAD = 6  # pieces of y in the ring: 96 KiB beside 128 of grad
SHORTEST = 16384  # columns from which on rows are held
TUNE = {"AHEAD": [2, 3, 4, 6], "WARPS": [8, 16], "SHORTEST": [8192, 16384, 32768]}
MOST_PIECES = 8


@gluon.jit
def _copy(to, row_ptr, there, columns, lane, i: gl.constexpr, PIECES: gl.constexpr):
    """Begin to copy the i-th piece of a row; nothing of a row that is not there."""
    TILE: gl.constexpr = to.shape[0]
    inside = (lane < columns - i * TILE) & there if i == PIECES - 1 else (lane >= 0) & there
    async_copy.async_copy_global_to_shared(to, row_ptr + i * TILE + lane, mask=inside)
    async_copy.commit_group()


# `rows` only bounds a loop: it is not worth kernels of its own for 1 row and for multiples of 16.
# Strides and columns come in words of 16 bytes: copies are that wide only where the compiler can
# prove it, and it knows of a number no more than whether 16 divides it.
@gluon.jit(do_not_specialize=["rows"])
def softmax_backward_held(
    grad_ptr,
    y_ptr,
    dx_ptr,
    grad_words,
    y_words,
    rows,
    words,
    PIECES: gl.constexpr,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
):
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    width: gl.constexpr = 128 // dtype.primitive_bitwidth
    grad_stride = grad_words * width
    y_stride = y_words * width
    columns = words * width
    layout: gl.constexpr = gl.BlockedLayout([width], [32], [WARPS], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    grads = gl.allocate_shared_memory(dtype, [PIECES, TILE], shared)
    ring = gl.allocate_shared_memory(dtype, [AHEAD, TILE], shared)
    lane = gl.arange(0, TILE, layout=layout)
    first = gl.program_id(0).to(gl.int64)  # in 64 bits: rows * stride can exceed 32
    grad_row = grad_ptr + first * grad_stride
    y_row = y_ptr + first * y_stride
    for i in gl.static_range(AHEAD):
        _copy(ring.index(i), y_row, first < rows, columns, lane, i, PIECES)
    for i in gl.static_range(PIECES):
        _copy(grads.index(i), grad_row, first < rows, columns, lane, i, PIECES)
    step = gl.num_programs(0).to(gl.int64)
    slot = 0
    for row in range(first, rows, step):
        more = row + step < rows
        grad_row += step * grad_stride
        next_y = y_row + step * y_stride
        kept = ()
        sums = gl.zeros([TILE], gl.float32, layout=layout)
        for i in gl.static_range(PIECES):
            # Later than the i-th piece of grad are always PIECES - 1 copies, those of other pieces
            # of grad or of y; later than a piece of y that was copied in this loop AHEAD - 1.
            if i < AHEAD:
                async_copy.wait_group(PIECES - 1)
            else:
                async_copy.wait_group(AHEAD - 1)
            y = ring.index(slot).load(layout)
            grad = grads.index(i).load(layout)
            product = y.to(gl.float32) * grad.to(gl.float32)
            if i == PIECES - 1:
                product = gl.where(lane < columns - i * TILE, product, 0.0)
            sums += product
            # Read again behind a wait, which costs nothing: of the same value the compiler would
            # keep the converted numbers, too, and spill.
            async_copy.wait_group(PIECES - 1)
            kept = kept + (ring.index(slot).load(layout),)  # noqa: RUF005 - no unpacking in Gluon
            if i + AHEAD < PIECES:
                _copy(ring.index(slot), y_row, True, columns, lane, i + AHEAD, PIECES)
            else:
                _copy(ring.index(slot), next_y, more, columns, lane, i + AHEAD - PIECES, PIECES)
            slot = gl.where(slot == AHEAD - 1, 0, slot + 1)
        dot = gl.sum(sums, 0)
        dx_row = dx_ptr + row * columns
        for i in gl.static_range(PIECES):
            grad = grads.index(i).load(layout)
            _copy(grads.index(i), grad_row, more, columns, lane, i, PIECES)
            dx = (kept[i].to(gl.float32) * (grad.to(gl.float32) - dot)).to(dtype)
            if i == PIECES - 1:
                gl.store(dx_row + i * TILE + lane, dx, mask=lane < columns - i * TILE)
            else:
                gl.store(dx_row + i * TILE + lane, dx)
        y_row = next_y
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["rows"])
def softmax_backward_swept(
    grad_ptr, y_ptr, dx_ptr, grad_stride, y_stride, rows, columns, TILE: gl.constexpr
):
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    lane = gl.arange(0, TILE, layout=layout)
    first = gl.program_id(0).to(gl.int64)
    for row in range(first, rows, gl.num_programs(0)):
        grad_row = grad_ptr + row * grad_stride
        y_row = y_ptr + row * y_stride
        sums = gl.zeros([TILE], gl.float32, layout=layout)
        for start in range(0, columns, TILE):
            at = start + lane
            grad = gl.load(grad_row + at, mask=at < columns, other=0.0).to(gl.float32)
            sums += grad * gl.load(y_row + at, mask=at < columns, other=0.0).to(gl.float32)
        dot = gl.sum(sums, 0)
        for start in range(0, columns, TILE):
            at = start + lane
            grad = gl.load(grad_row + at, mask=at < columns, other=0.0).to(gl.float32)
            y = gl.load(y_row + at, mask=at < columns, other=0.0).to(gl.float32)
            dx = (y * (grad - dot)).to(dx_ptr.dtype.element_ty)
            gl.store(dx_ptr + row * columns + at, dx, mask=at < columns)


def softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    processors = torch.cuda.get_device_properties(y.device).multi_processor_count
    width = 16 // y.element_size()
    places = (columns, grad.stride(0), y.stride(0), grad.storage_offset(), y.storage_offset())
    aligned = all(n % width == 0 for n in places)
    tile = PIECE_BYTES // y.element_size()
    pieces = triton.cdiv(columns, tile)
    if aligned and columns >= SHORTEST and pieces <= MOST_PIECES:
        resident = 2 if pieces <= 3 else 1  # what registers and shared memory of an SM allow
        softmax_backward_held[(min(rows, processors * resident),)](
            grad,
            y,
            dx,
            grad.stride(0) // width,
            y.stride(0) // width,
            rows,
            columns // width,
            PIECES=pieces,
            TILE=tile,
            AHEAD=min(AHEAD, pieces),
            WARPS=WARPS,
            num_warps=WARPS,
        )
    else:
        tile = min(triton.next_power_of_2(columns), 4096)
        softmax_backward_swept[(min(rows, 8 * processors),)](
            grad,
            y,
            dx,
            grad.stride(0),
            y.stride(0),
            rows,
            columns,
            TILE=max(tile, 1024),
            num_warps=4,
        )
    return dx
