"""A result whose shape depends on values.

entry: compact(x: float32[64]) -> int64[64,1]
refused: POLICY: values
"""
import torch


def compact(x):
    return torch.nonzero(x)  # HERE
