"""Names of devices, and the properties that must agree for another device's measurements to stand
in.

The exporter names devices with the same functions when it writes a library's tables.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")
_LEVELS = {  # of the x86-64 psABI, by the names that Linux gives to the flags
    "v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


@functools.cache
def device_name(device: torch.device) -> str:
    """Model of a device: "NVIDIA H100 80GB HBM3", "AMD EPYC 9B14"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    fields = _cpuinfo(_CPUINFO)
    return fields.get("model name") or platform.processor() or platform.machine()


@functools.cache
def capability(device: torch.device) -> str:
    """Name the code of a device: "sm_90", "gfx942", "x86_64-v4", "aarch64"; else its type."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    if device.type != "cpu":
        return device.type
    fields = _cpuinfo(_CPUINFO)
    return cpu_capability(platform.machine(), fields.get("flags", ""))


def cpu_capability(machine: str, flags: str) -> str:
    """Architecture, and of x86-64 the level that its flags reach: x86_64, x86_64-v2, -v3, -v4."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if machine != "x86_64":
        return machine
    known, reached = set(flags.split()), machine
    for level, needed in _LEVELS.items():
        if not known.issuperset(needed.split()):
            break
        reached = f"{machine}-{level}"
    return reached


def kind(device: torch.device) -> str:
    """Name the kind of a device in tables: "cpu", "gpu" (of CUDA); of others their type, which no
    table has.
    """
    return {"cpu": "cpu", "cuda": "gpu"}.get(device.type, device.type)


def _cpuinfo(path: Path) -> dict[str, str]:
    """The first processor's fields."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text()
    except OSError:
        return fields
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    return fields
