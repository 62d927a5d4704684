"""entry: scaled(x: float32[9,20000]) -> float32[9,20000]
expect: x * 2
"""

import torch
import triton
import triton.language as tl


@triton.jit
def whole_row(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n)
    tl.store(y_ptr + row * n + i, x * 2, mask=i < n)


@triton.jit
def in_tiles(x_ptr, y_ptr, n, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, n, TILE):
        i = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + row * n + i, mask=i < n)
        tl.store(y_ptr + row * n + i, x * 2, mask=i < n)


# SNIPPET
