"""A device tensor made at import would be cached across calls.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: inside of the entry function
"""
import torch

scratch = torch.zeros(4096, device="cuda")  # HERE


def double(x):
    return scratch
