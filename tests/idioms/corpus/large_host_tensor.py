"""A large table computed on the host: too large to be a constant of the plan.

entry: table(x: float32[8]) -> float32[100000]
refused: RESOURCE_LIMIT: compute larger tables in a kernel
"""
import torch


def table(x):
    return torch.arange(100000, dtype=torch.float32).to(x.device)  # HERE
