"""Several kernels in one file, chosen by shape through a cached table and a dataclass.

entry: double(x: float32[4096]) -> float32[4096]
ops: alloc launch
check: plan.kernels[0].name == "_double_large"
"""
import functools
from dataclasses import dataclass

import torch

import triton
import triton.language as tl


@dataclass(frozen=True)
class Settings:
    block: int
    large: bool


@functools.lru_cache(maxsize=None)
def settings(n: int, sm: int) -> Settings:
    return Settings(block=128 if n < 1000 else 1024, large=n >= 1000)


@triton.jit
def _double_small(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def _double_large(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def double(x):
    s = settings(x.numel(), torch.cuda.get_device_properties(0).multi_processor_count)
    y = torch.empty_like(x)
    kernel = _double_large if s.large else _double_small
    kernel[(triton.cdiv(x.numel(), s.block),)](x, y, x.numel(), BLOCK=s.block)
    return y
