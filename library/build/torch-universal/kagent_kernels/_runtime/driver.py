"""The CUDA driver, by its functions' names: errors become `LaunchError`."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from .errors import KernelUnavailable, LaunchError


@functools.cache
def driver() -> Any:
    """cuda-bindings' module.

    Raises:
        KernelUnavailable: It is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as e:
        raise KernelUnavailable(
            f"CUDA kernels cannot be launched here ({e}): install it with "
            "`pip install cuda-bindings`"
        ) from None


def call(function: str, *args: object, doing: str) -> Any:
    """Call a function of the driver; its results without the status.

    Args:
        function: Its name: cuLibraryLoadData.
        args: What to pass.
        doing: Completes the error message, for example "launching softmax_kernel".

    Raises:
        LaunchError: The driver reports an error.
        KernelUnavailable: There is no driver.
    """
    try:
        status, *results = getattr(driver(), function)(*args)
    except RuntimeError as e:  # the library cannot be found, or lacks the function
        raise KernelUnavailable(f"the CUDA driver cannot be used: {e}") from None
    if status:
        raise failure(status, doing)
    return results[0] if len(results) == 1 else tuple(results)


def failure(status: Any, doing: str) -> LaunchError:
    """A status other than success as an exception."""
    return LaunchError(status.name, description(status), doing)


def description(status: Any) -> str:
    """Return the driver's text for a status."""
    failed, text = driver().cuGetErrorString(status)
    known = not failed and isinstance(text, bytes)
    return text.decode(errors="replace") if known else "no description"


def make_current(index: int) -> None:
    """Enter the device's primary context, which torch uses too, where this thread is in none.

    Raises:
        LaunchError: There is no usable device.
    """
    if not int(call("cuCtxGetCurrent", doing="looking for a context")):
        device = call("cuDeviceGet", index, doing="opening the device")
        context = call("cuDevicePrimaryCtxRetain", device, doing="creating the context")
        call("cuCtxSetCurrent", context, doing="entering the context")
