"""entry: softmax(x: bfloat16[33,1000]) -> bfloat16[33,1000]
expect: torch.softmax(x, 1)
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def softmax(x):
    y = torch.empty_like(x)
    rows, n = x.shape
    softmax_short[(triton.cdiv(rows, 4),)](x, y, rows, n, ROWS=4, BLOCK=1024, num_warps=4)
    return y
