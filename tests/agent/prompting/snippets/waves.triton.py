"""entry: double(x: float32[4096,100]) -> float32[4096,100]
expect: x * 2
"""

import math

import torch
import triton
import triton.language as tl


# SNIPPET


@triton.jit
def double_rows(x_ptr, y_ptr, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (i < n)
    tl.store(y_ptr + row * n + i, tl.load(x_ptr + row * n + i, mask=inside) * 2, mask=inside)


def double(x):
    y = torch.empty_like(x)
    count = rows_per_program(x.shape[0], 132, 8)
    double_rows[(triton.cdiv(x.shape[0], count),)](
        x, y, x.shape[0], x.shape[1], ROWS=count, BLOCK=128
    )
    return y
