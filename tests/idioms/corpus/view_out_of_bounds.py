"""as_strided past the end of its buffer: torch refuses it on values, not on meta tensors.

entry: double(x: float32[4096]) -> float32[4096]
refused: RUNTIME_ERROR: a view of shape [128, 33] and strides [32, 1] from element 0 needs 16388 bytes
"""
import torch


def double(x):
    y = torch.empty_like(x)
    rows = torch.as_strided(y, (128, 33), (32, 1))  # HERE
    rows.zero_()
    return y
