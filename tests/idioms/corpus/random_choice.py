"""A block size drawn by lot, through the standard library's own code.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: draws random numbers (random.choice)
"""
import functools
import random

import torch


@functools.lru_cache
def block():
    return random.choice([128, 256])  # HERE


def double(x):
    return torch.empty(block(), device=x.device)
