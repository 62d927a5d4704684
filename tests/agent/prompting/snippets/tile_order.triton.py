"""entry: order(x: float32[10,7]) -> float32[10,7]
expect: torch.tensor([[(m // 4) * 28 + n * min(4, 10 - m // 4 * 4) + m % 4 for n in range(7)]
    for m in range(10)], device=x.device).double()
"""

import torch
import triton
import triton.language as tl


# SNIPPET


def order(x):
    y = torch.empty_like(x)
    show_order[(x.numel(),)](y, x.shape[0], x.shape[1], GROUP=4)
    return y
