"""Conversions of dtype and layout.

entry: convert(x: bfloat16[64,64]) -> float32[64,64], float16[64,64]
ops: alloc copy alloc copy
"""
import torch


def convert(x):
    x = x.to(x.device).to("cuda").to(torch.bfloat16)
    return x.float(), x.to(device="cuda", dtype=torch.float16, non_blocking=True)
