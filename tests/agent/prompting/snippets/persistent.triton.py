"""entry: softmax(x: float32[9,1000]) -> float32[9,1000]
expect: torch.softmax(x, 1)
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def softmax(x):
    y = torch.empty_like(x)
    softmax_persistent[(4,)](x, y, x.shape[0], x.shape[1], BLOCK=1024, STAGES=3)
    return y
