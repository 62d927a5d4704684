"""torch.set_default_device and `with torch.device(...)`.

entry: zeros(x: float32[8]) -> float32[8], float32[4]
ops: alloc fill alloc fill
"""
import torch


def zeros(x):
    with torch.device("cuda"):
        y = torch.zeros(8)
    torch.set_default_device("cuda")
    z = torch.ones(4)
    torch.set_default_device("cpu")
    return y, z
