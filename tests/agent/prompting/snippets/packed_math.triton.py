"""entry: peaks(x: bfloat16[9,1000]) -> float32[9]
expect: x.amax(1)
interpret: no; it has no inline assembler
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def peaks(x):
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    row_peaks[(x.shape[0],)](x, y, x.shape[1], BLOCK=256, PARTS=4)
    return y
