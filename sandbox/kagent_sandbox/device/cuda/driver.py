"""The CUDA driver's calls, with errors as exceptions, and what each error says about the candidate.

Imports without a driver on the machine; the first call then raises `DeviceError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as driver

from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.interface import Blame
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.runtime.driver import description

_RESOURCE = {
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE",
}
# The context is unusable afterwards: the process ends.
_FAULT = {
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_UNKNOWN",
}
# Hardware, or the driver's own state: whatever a kernel does, it does not cause these.
_MACHINE = {
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_OPERATING_SYSTEM",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_MPS_SERVER_NOT_READY",
    "CUDA_ERROR_MPS_RPC_FAILURE",
}
# A kernel may cause these, and so may a neighbour, or a driver on a bad day.
_UNCLEAR = {
    "CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA_ERROR_UNKNOWN",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_NOT_READY",
    "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED",
}
_NAME = re.compile(r"CUDA_ERROR_\w+")


class GpuError(Exception):
    """The driver refused a call or reports a fault of an earlier kernel."""

    def __init__(self, name: str, text: str, doing: str) -> None:
        super().__init__(f"{name} ({text}) {doing}")
        self.name = name

    @property
    def status(self) -> Status:
        """Status that the error gives to the candidate at work."""
        if self.name in _RESOURCE:
            return Status.RESOURCE_LIMIT
        fault = self.name in _FAULT or self.name in _MACHINE
        return Status.GPU_FAULT if fault else Status.RUNTIME_ERROR

    @property
    def blame(self) -> Blame:
        """Whose failure it is: see `Blame`."""
        return blame_of(self.name)


def blame_of(text: str) -> Blame:
    """Whose failure an error is, by the first name of one that a text has."""
    found = _NAME.search(text)
    name = found[0] if found else ""
    if name in _MACHINE:
        return "machine"
    return "unclear" if name in _UNCLEAR else "kernel"


def call(function: Callable[..., tuple[Any, ...]], *args: object, doing: str) -> Any:
    """Call a function of `cuda.bindings.driver`; its results without the status.

    Args:
        function: Returns a tuple of status and results.
        args: What to pass.
        doing: Completes the error message, for example "launching softmax_kernel".

    Raises:
        GpuError: The driver reports an error.
        DeviceError: There is no driver.
    """
    try:
        status, *results = function(*args)
    except RuntimeError as e:  # the library cannot be found, or lacks the function
        raise DeviceError(f"the CUDA driver cannot be used: {e}") from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise GpuError(status.name, description(status), doing)
    return results[0] if len(results) == 1 else tuple(results)


def device_attribute(index: int, name: str) -> int:
    """A device attribute by the name that follows CU_DEVICE_ATTRIBUTE_.

    Raises:
        GpuError: The driver does not know it.
    """
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    device = call(driver.cuDeviceGet, index, doing="opening the device")
    return int(call(driver.cuDeviceGetAttribute, attribute, device, doing=f"reading {name}"))
