"""Readings from NVIDIA's management library: clocks, throttling, and other users of a GPU.

Through ctypes, since it comes with the driver and its Python bindings may not be installed. What a
GPU or a container does not tell is left out.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Protocol

from kagent_sandbox.device.interference import GpuReading, GpuWatch, Unwatched, Watch
from kagent_sandbox.process import process_tree

REASONS: Mapping[int, str] = {
    0x08: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Names of the bits of `nvmlClocksEventReasons`. Those of normal work are left out: idle, a clock
that was asked for, and the power limit, which matrix products run at (the clock's change shows it).
"""
BUSY_SHARE = 0.02  # of the GPU's time: what another process may use without a word
_SM_CLOCK = 1


class Nvml(Protocol):
    """The few questions that are asked of the library; None where it does not answer."""

    def sm_mhz(self) -> int | None:
        """Clock of the multiprocessors."""

    def reasons(self) -> int | None:
        """Bits of why the clocks are low."""

    def users(self) -> Mapping[int, int] | None:
        """Per cent of the GPU's time that each process used of late."""


def read_gpu(nvml: Nvml, own: Mapping[int, object] | set[int]) -> GpuReading:
    """One reading. `own` are this process and those under it.

    In a container the driver's numbers of processes are not those seen here. Then none of them can
    be told from our own, and nothing is said about others.
    """
    bits = nvml.reasons() or 0
    users = nvml.users() or {}
    known = any(pid in own for pid in users)
    others = {p: s / 100 for p, s in users.items() if p not in own and s / 100 > BUSY_SHARE}
    return GpuReading(
        float(nvml.sm_mhz() or 0),
        tuple(text for bit, text in REASONS.items() if bits & bit),
        others if known else {},
    )


def watch_gpu(bus_id: str) -> Watch:
    """Watch a GPU, at its PCI address, while times are taken. Without the library nothing is
    watched.
    """
    try:
        nvml = NvmlLibrary(bus_id)
    except (OSError, AttributeError):
        return Unwatched()

    def read() -> GpuReading:
        me = os.getpid()
        return read_gpu(nvml, {me, *process_tree.descendants(me)})

    return GpuWatch(read)


class _Sample(ctypes.Structure):
    """nvmlProcessUtilizationSample_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("at_us", ctypes.c_ulonglong),
        ("sm", ctypes.c_uint),
        ("memory", ctypes.c_uint),
        ("encoder", ctypes.c_uint),
        ("decoder", ctypes.c_uint),
    )


class NvmlLibrary:
    """The driver's own library, about one GPU."""

    def __init__(self, bus_id: str) -> None:
        """Load it.

        Raises:
            OSError: It is not there, or knows no such GPU.
        """
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._since_us = 0
        handle = ctypes.byref(self._device)
        find = self._nvml.nvmlDeviceGetHandleByPciBusId_v2
        if self._nvml.nvmlInit_v2() or find(bus_id.encode(), handle):
            raise OSError(f"NVML does not know a GPU at {bus_id}")

    def sm_mhz(self) -> int | None:
        """See `Nvml`."""
        mhz = ctypes.c_uint()
        failed = self._nvml.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(mhz))
        return None if failed else mhz.value

    def reasons(self) -> int | None:
        """See `Nvml`."""
        bits = ctypes.c_ulonglong()
        failed = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(
            self._device, ctypes.byref(bits)
        )
        return None if failed else bits.value

    def users(self) -> Mapping[int, int] | None:
        """See `Nvml`: since the last question."""
        count = ctypes.c_uint(64)
        samples = (_Sample * count.value)()
        failed = self._nvml.nvmlDeviceGetProcessUtilization(
            self._device, samples, ctypes.byref(count), ctypes.c_ulonglong(self._since_us)
        )
        if failed:
            return None
        found: dict[int, int] = {}
        for sample in samples[: count.value]:
            found[sample.pid] = max(found.get(sample.pid, 0), sample.sm)
            self._since_us = max(self._since_us, sample.at_us)
        return found
