"""Branching on a value.

entry: scale(x: bool[1]) -> bool[1]
refused: POLICY: choose by shape
"""
import torch


def scale(x):
    if x:  # HERE
        return torch.zeros_like(x)
    return x
