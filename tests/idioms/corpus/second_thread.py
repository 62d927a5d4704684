"""A second thread that launches.

entry: double(x: float32[4096]) -> float32[4096]
refused: POLICY: own thread
"""
import threading

import torch


def double(x):
    y = torch.empty_like(x)
    worker = threading.Thread(target=lambda: y.zero_())  # HERE
    worker.start()
    worker.join()
    return y
