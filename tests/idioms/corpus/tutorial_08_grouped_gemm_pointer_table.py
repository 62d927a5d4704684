"""Triton's tutorial 08 builds a table of addresses on the host: addresses do not exist while tracing.

entry: pointers(x: float16[64,64]) -> int64[1]
refused: POLICY: pass the tensor
"""
import torch


def pointers(x):
    addresses = [x.data_ptr()]
    return torch.tensor(addresses, device="cuda", dtype=torch.int64)  # HERE
