"""A kernel chosen by the day.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: reads a clock (datetime.now)
"""
import datetime

import torch


def double(x):
    weekend = datetime.datetime.now().weekday() > 4  # HERE
    return torch.empty_like(x) if weekend else torch.zeros_like(x)
