"""Reading a value.

entry: scale(x: float32[64]) -> float32[64]
refused: POLICY: pass the tensor itself and load it there
"""
import torch


def scale(x):
    y = torch.empty_like(x)
    n = x[0].item()  # HERE
    return y.fill_(n)
