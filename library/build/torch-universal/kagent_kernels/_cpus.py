"""The name of this machine's CPU, and how much of the architecture it has. Needs no torch, which
takes seconds to import.
"""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_LEVELS = {  # of the x86-64 psABI, by the names that Linux gives to the flags
    "v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


def this_cpu() -> tuple[str, str]:
    """Return the model and the capability of this machine's CPU: "AMD EPYC 9B14", "x86_64-v4"."""
    fields = _cpuinfo(_CPUINFO)
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, cpu_capability(platform.machine(), fields.get("flags", ""))


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
