"""C++ to shared objects through g++: see `runtime.cpp`. No compiler is a `ToolchainError`.

A `builder.compile.kernels.Compiler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kagent_sandbox.builder.binary.inspect import cpp_parameters
from kagent_sandbox.data.plan import KernelInfo
from kagent_sandbox.errors import ToolchainError
from kagent_sandbox.runtime import cpp
from kagent_sandbox.runtime.errors import KernelUnavailable
from kagent_sandbox.runtime.source import Source

if TYPE_CHECKING:
    from kagent_sandbox.runtime.arguments import Parameter


def compile_source(source: Source, target: str) -> tuple[bytes, str]:  # noqa: ARG001 - this machine
    """See `Compiler`."""
    binary = compile_cpp(source.name, source.text, source.options, dict(source.defines))
    return binary, source.name


def parameters(source: Source, binary: bytes, info: KernelInfo) -> tuple[Parameter, ...]:  # noqa: ARG001
    """See `Compiler`. The binary says what they are."""
    from kagent_sandbox.runtime.arguments import Parameter  # imports torch

    types = zip(info.param_bytes, cpp_parameters(binary), strict=True)
    return tuple(Parameter(nbytes, type_, type_ is None) for nbytes, type_ in types)


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
