"""entry: triple(x: bfloat16[1000,1000]) -> bfloat16[1000,1000]
expect: x * 3
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def triple(x):
    y = torch.empty_like(x)
    scale[(132 * 4,)](x, y, x.numel(), 3.0, BLOCK=2048, STAGES=3)
    return y
