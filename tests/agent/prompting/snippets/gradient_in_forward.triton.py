"""entry: ce(z: float32[9,1000], target: int64[9], count: float32[1]) -> float32[9], float32[9,1000]
expect: (lambda p, k: (
    torch.where(k, -torch.log_softmax(z, 1).gather(1, target[:, None])[:, 0], 0.0),
    (p - torch.nn.functional.one_hot(target, 1000)) * k[:, None] / count.clamp_min(1)
    ))(torch.softmax(z, 1), target != 3)
"""

import torch
import triton
import triton.language as tl


# SNIPPET


def ce(z, target, count):
    rows, n = z.shape
    loss = torch.empty(rows, dtype=torch.float32, device=z.device)
    grad = torch.empty_like(z)
    loss_and_gradient[(rows,)](z, target, count, loss, grad, n, 3, BLOCK=1024)
    return loss, grad
