"""The sums of `compare` on a GPU: two passes of Triton kernels over the result and its reference.

Composed of torch's operations the same sums read and write several times as much: for results of
gigabytes that took longer than timing the kernel which made them. Everything is in float64.

For one thread: while a kernel is compiled, the environment says where Triton keeps it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kagent_sandbox.cache import cache_folder

_SPAN = tl.constexpr(16_384)  # elements of a row that one program reads
_BLOCK = tl.constexpr(1024)
# Else they would be compiled again for sizes of 1, and for those that 16 divides.
_SIZES = ["width", "spans", "row_stride", "out_row_stride"]


@triton.jit(do_not_specialize=_SIZES)
def _reference_kernel(ref, sums, width, spans, row_stride, stride):
    """Sums over a span of a row, of finite elements: sum of squares, of magnitudes, largest
    magnitude.
    """
    program = tl.program_id(0).to(tl.int64)
    row, start = program // spans, program % spans * _SPAN
    stop = tl.minimum(width, start + _SPAN)
    square = tl.zeros([_BLOCK], tl.float64)
    total = tl.zeros([_BLOCK], tl.float64)
    largest = tl.zeros([_BLOCK], tl.float64)
    for at in range(start, stop, _BLOCK):
        i = at + tl.arange(0, _BLOCK)
        r = tl.load(ref + row * row_stride + i * stride, mask=i < stop, other=0).to(tl.float64)
        magnitude = tl.abs(r)
        magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
        square += magnitude * magnitude
        total += magnitude
        largest = tl.maximum(largest, magnitude)
    tl.store(sums + program * 3, tl.sum(square))
    tl.store(sums + program * 3 + 1, tl.sum(total))
    tl.store(sums + program * 3 + 2, tl.max(largest))


@triton.jit(do_not_specialize=_SIZES)
def _difference_kernel(
    out,
    ref,
    means,
    sums,
    width,
    spans,
    out_row_stride,
    out_stride,
    row_stride,
    stride,
):
    """Sums over a span of a row: difference times reference, squares of the difference, and its
    largest share of the reference's magnitude plus the row's mean.
    """
    program = tl.program_id(0).to(tl.int64)
    row, start = program // spans, program % spans * _SPAN
    stop = tl.minimum(width, start + _SPAN)
    mean = tl.load(means + row)
    dot = tl.zeros([_BLOCK], tl.float64)
    square = tl.zeros([_BLOCK], tl.float64)
    worst = tl.zeros([_BLOCK], tl.float64)
    for at in range(start, stop, _BLOCK):
        i = at + tl.arange(0, _BLOCK)
        inside = i < stop
        r = tl.load(ref + row * row_stride + i * stride, mask=inside, other=0).to(tl.float64)
        o = tl.load(out + row * out_row_stride + i * out_stride, mask=inside, other=0)
        o = o.to(tl.float64)
        finite = tl.abs(r) < float("inf")
        same = (o == r) | ((o != o) & (r != r))
        # A NaN or infinity where it should be is no error; anywhere else it is an infinite one.
        d = tl.where(finite, tl.abs(o - r), tl.where(same, 0.0, float("inf")))
        d = tl.where(d == d, d, float("inf"))
        r = tl.where(finite, r, 0.0)
        dot += tl.where(o < r, -d, d) * r
        square += d * d
        worst = tl.maximum(worst, d / (tl.abs(r) + mean))
    tl.store(sums + program * 3, tl.sum(dot))
    tl.store(sums + program * 3 + 1, tl.sum(square))
    tl.store(sums + program * 3 + 2, tl.max(worst))


def reference_sums(ref: torch.Tensor) -> torch.Tensor:
    """Return sums over each row of `ref` [rows, width], of finite elements: sum of squares, mean
    magnitude and largest magnitude. float64 [3, rows].
    """
    found = _by_row(_reference_kernel, (ref,), ref.shape, ref.stride())
    found[1] /= ref.shape[1]
    return found


def difference_sums(out: torch.Tensor, ref: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Return for each row of `out` and `ref` [rows, width]: <out - ref, ref>, |out - ref|², and the
    largest |out - ref| / (|ref| + the row's entry of `means`). float64 [3, rows]; infinite or NaN
    where a NaN or infinity is in the wrong place.
    """
    strides = (*out.stride(), *ref.stride())
    return _by_row(_difference_kernel, (out, ref, means), ref.shape, strides)


def _by_row(
    kernel: Any,
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Two sums and a largest value of each row, from those of its spans. float64 [3, rows]."""
    (rows, width), device = shape, tensors[0].device
    spans = triton.cdiv(width, _SPAN.value)
    sums = torch.empty((rows, spans, 3), dtype=torch.float64, device=device)
    with _kept(device):
        kernel[(rows * spans,)](*tensors, sums, width, spans, *strides)
    return torch.stack([sums[:, :, 0].sum(1), sums[:, :, 1].sum(1), sums[:, :, 2].amax(1)])


@contextlib.contextmanager
def _kept(device: torch.device) -> Iterator[None]:
    """Launches on a device, of kernels that are kept in kagent's cache once they are compiled."""
    here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with here, triton.knobs.cache.scope():
        triton.knobs.cache.dir = _folder()
        yield


@functools.cache
def _folder() -> str:
    """Folder of compiled kernels; where it cannot be written, one that lasts as long as the
    process.
    """
    folder = cache_folder() / "triton"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return str(folder)
    made = tempfile.mkdtemp(prefix="kagent-triton-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
