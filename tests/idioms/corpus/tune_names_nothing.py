"""A tunable without a default.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: beside a plain default
"""
import torch

TUNE = {"BLOCK": [256, 512, 1024]}


def double(x):
    return torch.empty_like(x)
