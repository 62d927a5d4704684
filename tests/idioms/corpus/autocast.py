"""Autocast changes the dtype of operations behind the program's back.

entry: product(a: float32[64,64], b: float32[64,64]) -> float16[64,64]
allow: aten::mm
refused: POLICY: .to(dtype)
"""
import torch


def product(a, b):
    with torch.autocast("cuda", dtype=torch.float16):  # HERE
        return a @ b
