"""Detection of this machine's devices. Makes no context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from uuid import UUID

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable: the GPUs that the driver shows to a process, as it names them."""
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def gpu_target() -> str | None:
    """Return the target of this machine's first GPU; None where there is none."""
    if not has_gpu():
        return None
    driver = ctypes.CDLL("libcuda.so.1")  # initialised by has_gpu
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    return None if failed else target_name(major.value, minor.value)


def target_name(major: int, minor: int) -> str:
    """Name the target to compile for: from Hopper on with the architecture's own instructions
    (wgmma).
    """
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def gpu_uuid(index: int) -> str:
    """Identity of a GPU: its UUID, or that of its slice (MIG). Makes no context.

    The index in its place where the driver does not tell.
    """
    if not has_gpu():
        return str(index)
    driver = ctypes.CDLL("libcuda.so.1")  # initialised by has_gpu
    device, uuid = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(uuid, device):
        return str(index)
    return f"GPU-{UUID(bytes=bytes(uuid))}"


def has_gpu() -> bool:
    """Whether the driver knows an NVIDIA GPU that this process may use. Makes no context."""
    return gpu_count() > 0


@functools.cache
def gpu_count() -> int:
    """NVIDIA GPUs that this process may use. Makes no context."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def visible_gpus() -> list[str] | None:
    """The driver's names of the GPUs that it is told to show; None where it shows all."""
    shown = os.environ.get(VISIBLE)
    return None if shown is None else [v.strip() for v in shown.split(",") if v.strip()]


def gpu_alone(index: int) -> Mapping[str, str]:
    """Environment in which a process sees one GPU of those that this process may use, and no other.

    Args:
        index: Its number in this process.
    """
    shown = visible_gpus()
    return {VISIBLE: str(index) if shown is None else "".join(shown[index : index + 1])}
