"""A module that owns weights: they would be random; the task passes them as arguments.

entry: linear(x: float32[16,64]) -> float32[16,32]
refused: POLICY: weights are arguments
"""
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32)  # HERE

    def forward(self, x):
        return self.linear(x)


linear = ModelNew()
