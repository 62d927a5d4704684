"""entry: softmax(x: float32[9,1000], lse: float32[9]) -> float32[9,1000]
expect: torch.exp(x - lse[:, None])
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def softmax(x, lse):
    y = torch.empty_like(x)
    probabilities[(x.shape[0], triton.cdiv(x.shape[1], 256))](x, lse, y, x.shape[1], TILE=256)
    return y
