"""Capturing a graph.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: the harness captures
"""
import torch


def double(x):
    g = torch.cuda.CUDAGraph()  # HERE
    return torch.empty_like(x)
