"""C++ to shared objects through g++: see `runtime.cpp`. No compiler is a `ToolchainError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kagent_sandbox.errors import ToolchainError
from kagent_sandbox.runtime import cpp
from kagent_sandbox.runtime.errors import KernelUnavailable


def compile_cpp(
    name: str,
    source: str,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
    *,
    folder: Path | None = None,
) -> bytes:
    """See `runtime.cpp.compile_cpp`.

    Raises:
        CompileError: The source or an option was refused.
        ToolchainError: There is no g++.
    """
    try:
        return cpp.compile_cpp(name, source, options, defines, folder=folder)
    except KernelUnavailable as e:
        raise ToolchainError(str(e)) from None


def compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        ToolchainError: There is none.
    """
    try:
        return cpp.compiler()
    except KernelUnavailable as e:
        raise ToolchainError(str(e)) from None
