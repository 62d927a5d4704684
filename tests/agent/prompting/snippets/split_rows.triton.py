"""entry: sums(x: float32[3,10001]) -> float32[3]
expect: x.sum(1)
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def sums(x):
    rows, n = x.shape
    per_part = 2048
    parts = triton.cdiv(n, per_part)
    part = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    partial_sums[(rows, parts)](x, part, n, per_part, TILE=512)
    merge[(rows,)](part, out, parts, PARTS=triton.next_power_of_2(parts))
    return out
