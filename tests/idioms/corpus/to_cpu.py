"""Copying to the host to look.

entry: scale(x: float32[64]) -> float32[64]
refused: POLICY: values
"""
import torch


def scale(x):
    host = x.cpu()  # HERE
    return host.cuda()
