"""A forgotten return.

entry: double(x: float32[4096]) -> float32[4096]
refused: INCORRECT_SHAPE: return the tensor
"""
import torch


def double(x):
    y = torch.empty_like(x)
