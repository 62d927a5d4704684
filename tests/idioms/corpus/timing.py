"""Timing in host code.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: the harness measures
"""
import torch
import triton.testing


def double(x):
    triton.testing.do_bench(lambda: None)  # HERE
    return torch.empty_like(x)
