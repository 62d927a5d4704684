"""Triton's tutorial 11: programmatic dependent launch is part of the plan.

entry: add(x: float32[4096], y: float32[4096]) -> float32[4096]
ops: alloc launch
check: plan.launches[0].pdl
"""
import torch

import triton
import triton.language as tl


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr, USE_GDC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if USE_GDC:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.load(y_ptr + i, mask=i < n)
    if USE_GDC:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + i, x + y, mask=i < n)


def add(x, y):
    out = torch.empty_like(x)
    n = out.numel()
    pdl = torch.cuda.get_device_capability()[0] >= 9
    grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
    _add[grid](x, y, out, n, BLOCK=1024, USE_GDC=pdl, launch_pdl=pdl)
    return out
