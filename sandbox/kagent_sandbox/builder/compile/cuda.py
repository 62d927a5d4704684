"""CUDA C++ to cubins through NVRTC: see `runtime.nvrtc`. What is missing is a `ToolchainError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kagent_sandbox.errors import ToolchainError
from kagent_sandbox.runtime import headers, nvrtc
from kagent_sandbox.runtime.errors import KernelUnavailable


def compile_cuda(
    name: str,
    source: str,
    target: str,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
) -> nvrtc.CudaBinary:
    """See `runtime.nvrtc.compile_cuda`.

    Raises:
        CompileError: The source or an option was refused.
        ToolchainError: NVRTC or the toolkit's headers are missing or too old.
    """
    try:
        return nvrtc.compile_cuda(name, source, target, options, defines)
    except KernelUnavailable as e:
        raise ToolchainError(str(e)) from None


def include_dirs() -> tuple[str, ...]:
    """Folders for NVRTC to search, in order.

    Raises:
        ToolchainError: There is no toolkit; the text says what to install.
    """
    try:
        return headers.include_dirs()
    except KernelUnavailable as e:
        raise ToolchainError(str(e)) from None
