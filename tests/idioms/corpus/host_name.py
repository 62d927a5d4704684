"""A kernel chosen by the machine's name.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: asks for the host's name (socket.gethostname)
"""
import platform
import socket

import torch


def double(x):
    assert platform.machine()
    return torch.empty_like(x) if "gpu" in socket.gethostname() else torch.zeros_like(x)  # HERE
