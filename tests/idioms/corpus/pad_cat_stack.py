"""Padding and joining are fills and copies into parts.

entry: join(x: float32[4,6], y: float32[2,6]) -> float32[6,6], float32[2,4,6], float32[4,8]
ops: alloc copy copy alloc copy copy alloc fill copy
"""
import torch
import torch.nn.functional as F


def join(x, y):
    return torch.cat([x, y], dim=0), torch.stack((x, x)), F.pad(x, (1, 1), value=-1.0)
