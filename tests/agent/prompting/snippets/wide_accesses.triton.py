"""entry: double(x: bfloat16[64,1000]) -> bfloat16[64,1000]
expect: x * 2
loads: 16
"""

import math

import torch
import triton
import triton.language as tl

# SNIPPET


def double(x):
    y = torch.empty_like(x)
    word = math.gcd(x.shape[1], x.stride(0), 16 // x.element_size())
    double_rows[(x.shape[0],)](x, y, x.stride(0) // word, x.shape[1] // word, BLOCK=1024, WORD=word)
    return y
