"""A saved gradient times the gradient of a loss, in place, without the host knowing the factor."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_PROGRAMS_PER_UNIT = 4


@triton.jit
def _scale(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(start, n, step):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < n)
            y = x.to(tl.float32) * factor
            tl.store(x_ptr + at, y.to(x.dtype), mask=at < n)


def scale_(x: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place, in float32; where the factor is 1, nothing is touched.

    Args:
        x: Contiguous, on a GPU, of at most 32 bits an element.
        factor: One element on the same device.
    """
    units = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(triton.cdiv(x.numel(), _BLOCK), _PROGRAMS_PER_UNIT * units)
    with torch.cuda.device(x.device):
        _scale[(programs,)](x, factor, x.numel(), BLOCK=_BLOCK, num_warps=8)
    torch.autograd.graph.increment_version(x)
