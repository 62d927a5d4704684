"""entry: add_norm(x: bfloat16[64,1000], r: bfloat16[64,1000]) -> bfloat16[64,1000]
expect: (lambda v: v * (v.square().mean(1, keepdim=True) + 1e-6).rsqrt())(x + r)
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def add_norm(x, r):
    y = torch.empty_like(x)
    add_normalise[(x.shape[0],)](
        x, r, y, x.shape[1], 1e-6, BLOCK=triton.next_power_of_2(x.shape[1])
    )
    return y
