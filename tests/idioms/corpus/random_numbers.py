"""Random numbers in host code.

entry: noise(x: float32[64,64]) -> float32[64,64]
refused: POLICY: arguments alone
"""
import torch


def noise(x):
    return torch.randn(64, 64, device="cuda")  # HERE
