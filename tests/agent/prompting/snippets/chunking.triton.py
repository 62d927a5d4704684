"""entry: grads(x: float32[40,16], weight: float32[24,16]) -> float32[40,16], float32[24,16]
expect: (x @ weight.T @ weight, (x @ weight.T).T @ x)
allow: aten::mm aten::addmm
"""

import torch

# SNIPPET


def grads(x, weight):
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    logits = torch.empty(16, weight.shape[0], dtype=x.dtype, device=x.device)
    products(x, weight, logits, dx, dw, lambda z, start: None, 16)
    return dx, dw
