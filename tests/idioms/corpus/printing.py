"""A print left in.

entry: scale(x: float32[64]) -> float32[64]
refused: POLICY: printing
"""
import torch


def scale(x):
    y = torch.empty_like(x)
    print("input", x)  # HERE
    return y
