"""Triton's own launches on a GPU, shown to a recorder: Triton 3.6 and 3.7."""

from __future__ import annotations

from typing import Any

import triton

from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.trace.triton import LoadedKernel, TritonLauncher
from kagent_sandbox.data.language import TRITON

_loaded: dict[int, LoadedKernel] = {}
"""Loaded binaries by the driver's handle of the function."""


def warm_up() -> None:
    """Have Triton build and load its interface to the driver, which takes a C compiler."""
    active: Any = triton.runtime.driver.active
    active.get_current_target()


def install() -> None:
    """Record each launch that Triton makes with the current recorder from now on, then make it."""
    active: Any = triton.runtime.driver.active
    load, launcher = active.utils.load_binary, active.launcher_cls

    def load_binary(name: str, binary: bytes, *rest: Any) -> Any:
        answer = load(name, binary, *rest)
        _loaded[answer[1]] = LoadedKernel(kernel_info(binary, name, TRITON.name), binary)
        return answer

    class TritonRecording:
        """Takes the place of CudaLauncher, and has one."""

        def __init__(self, src: Any, metadata: Any) -> None:
            self._launch = launcher(src, metadata)
            self._record = TritonLauncher(src, metadata)

        def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *rest: Any) -> None:
            self._record(x, y, z, stream, _loaded[function], *rest)
            self._launch(x, y, z, stream, function, *rest)

    active.utils.load_binary = load_binary
    active.launcher_cls = TritonRecording
