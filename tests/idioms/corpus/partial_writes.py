"""Writes to parts: setitem, fill_ on a view, copy_ with broadcasting.

entry: parts(x: float32[4,6]) -> float32[8,6]
ops: alloc copy fill copy fill
check: plan.ops[2].tensor.offset == 24 and plan.ops[2].tensor.shape == (2, 6)
"""
import torch


def parts(x):
    y = torch.empty((8, 6), device=x.device)
    y[:4] = x
    y[4:6] = 0
    y[6:8].copy_(x[0])
    y[:, 0].fill_(float("-inf"))
    return y
