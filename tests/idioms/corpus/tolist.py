"""Reading all values.

entry: scale(x: int64[64]) -> float32[64]
refused: POLICY: values
"""
import torch


def scale(x):
    lengths = x.tolist()  # HERE
    return torch.empty(len(lengths), device=x.device)
