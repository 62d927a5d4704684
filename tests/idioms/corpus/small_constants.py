"""Small tensors made from Python values, on the device or on the host first.

entry: table(x: float32[8]) -> float32[4], int32[8], float32[], int64[3]
ops: alloc const alloc const alloc fill alloc const
check: plan.ops[1].data == b"\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@\x00\x00@@"
"""
import torch


def table(x):
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0], device=x.device)
    index = torch.arange(8, dtype=torch.int32, device="cuda")
    one = torch.tensor(1.0, device="cuda")
    offsets = torch.tensor([0, 5, 9]).cuda()
    return weights, index, one, offsets
