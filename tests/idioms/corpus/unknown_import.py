"""A library that is not there.

entry: double(x: float32[4096]) -> float32[4096]
refused: RUNTIME_ERROR: kagent_sandbox.lang
"""
import flash_attn_3  # HERE


def double(x):
    return flash_attn_3.double(x)
