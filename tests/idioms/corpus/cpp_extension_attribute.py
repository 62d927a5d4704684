"""The same through the module.

entry: relu(x: float32[16,1024]) -> float32[16,1024]
refused: POLICY: cuda_kernel(name, source)
"""
import torch
import torch.utils.cpp_extension


def relu(x):
    ext = torch.utils.cpp_extension.load(name="relu", sources=["relu.cu"])  # HERE
    return ext.relu(x)
