"""Arithmetic on tensors in host code.

entry: gelu(x: float32[64,64]) -> float32[64,64]
refused: POLICY: 'mul'
"""


def gelu(x):
    return 0.5 * x  # HERE
