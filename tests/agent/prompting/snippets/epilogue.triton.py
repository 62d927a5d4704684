"""entry: states(x: float16[70,64], w: float16[100,64]) -> float32[2,70], float32[2,70]
expect: (lambda z: (torch.stack([z[:, :64].amax(1), z[:, 64:].amax(1)]), torch.stack([
    torch.exp(z[:, :64] - z[:, :64].amax(1, True)).sum(1),
    torch.exp(z[:, 64:] - z[:, 64:].amax(1, True)).sum(1)])))(x @ w.T)
error: 1000
"""

import torch
import triton
import triton.language as tl


# SNIPPET


def states(x, w):
    peak = torch.empty(2, x.shape[0], dtype=torch.float32, device=x.device)
    total = torch.empty_like(peak)
    product_lse[(2, 2)](x, w, peak, total, x.shape[0], w.shape[0], 64, BT=64, BV=64, BK=32)
    return peak, total
