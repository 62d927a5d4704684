"""unsqueeze_ and its kin.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: y = x.unsqueeze(...)
"""
import torch


def double(x):
    y = torch.empty_like(x)
    y.unsqueeze_(0)  # HERE
    return y
