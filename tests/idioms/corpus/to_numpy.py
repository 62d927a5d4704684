"""Through numpy.

entry: scale(x: float32[64]) -> float32[64]
refused: POLICY: values
"""
import numpy as np


def scale(x):
    return np.asarray(x)  # HERE
