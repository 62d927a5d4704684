"""A side stream.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: current stream
"""
import torch


def double(x):
    side = torch.cuda.Stream()  # HERE
    with torch.cuda.stream(side):
        return torch.empty_like(x)
