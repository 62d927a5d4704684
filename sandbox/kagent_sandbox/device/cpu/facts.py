"""Facts about the CPU, as far as figures depend on them. Needs no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.importing import import_file
from kagent_sandbox.process.cores import usable_cores

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@functools.cache
def cpu_facts() -> DeviceFacts:
    """Name, cores, caches and the versions that decide what code is generated."""
    name, flags = _model()
    units = usable_cores()
    compiler = _compiler()
    key = f"{name} [{flags}] x{units}, {compiler}, torch {_torch_version()}"
    return DeviceFacts(
        kind="cpu",
        name=name,
        target="cpu",
        key=key,
        memory_bytes=available_bytes(),
        l2_bytes=_last_level_cache_bytes(),
        units=units,
        theoretical_gb_per_s=0.0,
    )


def _model() -> tuple[str, str]:
    """Model name, and a short hash of the instruction sets (a hypervisor may hide some)."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    words = " ".join(sorted(flags.split()))
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, hashlib.sha256(words.encode()).hexdigest()[:8]


def _compiler() -> str:
    try:
        run = subprocess.run(
            ["g++", "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "no g++"
    return f"g++ {run.stdout.strip()}"


def _torch_version() -> str:
    """`torch.__version__`, without the seconds that a process takes to import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    return str(import_file(Path(spec.origin).with_name("version.py"), "version").__version__)


def available_bytes() -> int:
    """Return the host's memory that is available now, within the control group's limit."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
            break
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    return available if limit == "max" else _room(available, int(limit), used, stat)


def _room(available: int, limit: int, used: int, stat: dict[str, str]) -> int:
    """Bytes within a control group's limit. Files that nobody reads lately make room when asked."""
    return max(0, min(available, limit - used + int(stat.get("inactive_file", 0))))


def _last_level_cache_bytes() -> int:
    """Size of the largest cache in the hierarchy of core 0; 32 MiB where the host does not say."""
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text))
    return max(sizes, default=32 << 20)
