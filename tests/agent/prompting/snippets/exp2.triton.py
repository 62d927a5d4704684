"""entry: gelu_of(x: float32[1000]) -> float32[1000]
expect: torch.nn.functional.gelu(x, approximate="tanh")
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def gelu_of(x):
    y = torch.empty_like(x)
    gelu[(4,)](x, y, x.numel(), BLOCK=256)
    return y
