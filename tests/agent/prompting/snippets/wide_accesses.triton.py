"""entry: double(x: bfloat16[64,1000]) -> bfloat16[64,1000]
expect: x * 2
loads: 16
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def double(x):
    y = torch.empty_like(x)
    word = 16 // x.element_size()
    aligned = all(n % word == 0 for n in (x.shape[1], x.stride(0), x.storage_offset()))
    word = word if aligned else 1
    double_rows[(x.shape[0],)](x, y, x.stride(0) // word, x.shape[1] // word, BLOCK=1024, WORD=word)
    return y
