"""triton.reinterpret, libdevice, dtype views.

entry: tanh(x: float32[256]) -> float32[256]
ops: alloc launch
"""
import torch

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _tanh(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, libdevice.tanh(tl.load(x_ptr + i)))


def tanh(x):
    y = torch.empty_like(x)
    raw = x.view(torch.int32)
    _tanh[(1,)](triton.reinterpret(raw, tl.float32), y, BLOCK=256)
    return y
