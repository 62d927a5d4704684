"""A clock that is read while the file is imported, by another name; the refusal is caught.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: reads a clock (time.time)
"""
from time import time as seed

import torch

try:
    BLOCK = 128 if seed() > 2e9 else 256  # HERE
except Exception:
    BLOCK = 256


def double(x):
    return torch.empty_like(x)
