"""entry: scaled(x: float32[9,1000], target: int64[9]) -> float32[9,1000]
expect: x / (target != -100).sum()
interpret: no; it has no inline assembler
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def scaled(x, target):
    y = torch.empty_like(x)
    count = torch.empty((), dtype=torch.float32, device=x.device)
    count_kept[(1,)](target, count, x.shape[0], -100, BLOCK=256)
    scale_rows[(x.shape[0],)](x, count, y, x.shape[1], BLOCK=1024, launch_pdl=True)
    return y
