"""Facts about a GPU: name, driver, memory, bandwidth, and the key of its figures."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import cuda.bindings.driver as driver
import torch
import triton

from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.device.cuda.driver import GpuError, call, device_attribute
from kagent_sandbox.device.detect import gpu_uuid, target_name
from kagent_sandbox.errors import DeviceError


def gpu_facts(index: int) -> DeviceFacts:
    """Facts of a device.

    Raises:
        DeviceError: torch sees no such device.
    """
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise DeviceError(
            f"no NVIDIA GPU {index} is visible to torch {torch.__version__} "
            f"(built for CUDA {torch.version.cuda}); see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    properties = torch.cuda.get_device_properties(index)
    versions = f"driver {driver_version()}, torch {torch.__version__}, triton {triton.__version__}"
    return DeviceFacts(
        kind="gpu",
        name=properties.name,
        target=target_name(properties.major, properties.minor),
        key=f"{properties.name}, {versions}",
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        units=properties.multi_processor_count,
        theoretical_gb_per_s=theoretical_gb_per_s(index),
        unit=gpu_uuid(index),
    )


def theoretical_gb_per_s(index: int) -> float:
    """Memory clock × bus width × 2 (double data rate), in 10⁹ bytes/s; 0 where it is unknown."""
    try:
        clock_khz = device_attribute(index, "MEMORY_CLOCK_RATE")
        bus_bits = device_attribute(index, "GLOBAL_MEMORY_BUS_WIDTH")
    except GpuError:
        return 0.0
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9


def bus_id(index: int) -> str | None:
    """Return the device's bus address, for example "00000000:1B:00.0"; None if it is unknown."""
    try:
        device = call(driver.cuDeviceGet, index, doing="opening the device")
        text = call(driver.cuDeviceGetPCIBusId, 32, device, doing="asking where the device is")
    except GpuError:
        return None
    return bytes(text).split(b"\0")[0].decode("ascii")


def driver_version() -> str:
    """The kernel driver's version, for example "580.159"; "unknown" where nothing tells."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    if found is not None:
        return found[1]
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    lines = asked.stdout.split()
    return lines[0] if lines else "unknown"
