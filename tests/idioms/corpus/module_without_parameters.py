"""A module instance as the entry: it is callable, so it is traced.

entry: relu(x: float32[16,1024]) -> float32[16,1024]
ops: alloc launch
"""
import torch
import torch.nn as nn

import triton
import triton.language as tl


@triton.jit
def _relu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.maximum(tl.load(x_ptr + i, mask=i < n), 0.0), mask=i < n)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.cuda().contiguous()
        assert x.is_cuda and not x.requires_grad
        y = torch.empty_like(x, device="cuda")
        _relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y


relu = ModelNew()
