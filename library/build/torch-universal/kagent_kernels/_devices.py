"""Names of devices, and the properties that must agree for another device's measurements to stand
in.

The exporter names devices with the same functions when it writes a library's tables.
"""

from __future__ import annotations

import functools

import torch

from . import _cpus


@functools.cache
def device_name(device: torch.device) -> str:
    """Model of a device: "NVIDIA H100 80GB HBM3", "AMD EPYC 9B14"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpus.this_cpu()[0] if device.type == "cpu" else device.type


@functools.cache
def capability(device: torch.device) -> str:
    """Name the code of a device: "sm_90", "gfx942", "x86_64-v4", "aarch64"; else its type."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return _cpus.this_cpu()[1] if device.type == "cpu" else device.type


def kind(device: torch.device) -> str:
    """Name the kind of a device in tables: "cpu", "gpu" (of CUDA); of others their type, which no
    table has.
    """
    return {"cpu": "cpu", "cuda": "gpu"}.get(device.type, device.type)
