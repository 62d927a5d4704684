"""CUDA C++ to cubins through NVRTC: see `runtime.nvrtc`. What is missing is a `ToolchainError`.

A `builder.compile.kernels.Compiler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kagent_sandbox.builder.compile import ptx, remarks
from kagent_sandbox.builder.compile.variables import used_variables
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.data.language import CUDA
from kagent_sandbox.data.plan import KernelInfo
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.errors import INSTALL_CUDA, ToolchainError
from kagent_sandbox.runtime import cutlass, headers, nvrtc
from kagent_sandbox.runtime.errors import (
    CompileError,
    HeadersMissing,
    KernelUnavailable,
    ToolkitMissing,
)
from kagent_sandbox.runtime.source import Source

if TYPE_CHECKING:
    from kagent_sandbox.runtime.arguments import Parameter


def compile_source(source: Source, target: str) -> tuple[bytes, str]:
    """See `Compiler`. Keeps the PTX, too, where somebody wants it, and what the
    compiler remarks.

    Raises:
        BuildRejected: The module has variables.
    """
    built = compile_cuda(source.name, source.text, target, source.options, dict(source.defines))
    if names := used_variables(built.ptx):
        raise BuildRejected(
            Stage.BUILD,
            Status.POLICY,
            f"kernel {source.name} uses the __device__ variable {names[0]:.80}: calls on two "
            "streams at once would share it: pass counters that host code makes with torch.zeros, "
            "and workspaces from torch.empty; tables may be __constant__",
        )
    ptx.keep(built.cubin, built.symbol, CUDA.name, built.ptx)
    remarks.keep(source.name, remarks.of_cuda(built.log, source.text))
    return built.cubin, built.symbol


def parameters(source: Source, binary: bytes, info: KernelInfo) -> tuple[Parameter, ...]:  # noqa: ARG001
    """See `Compiler`. The source says what they are, and the binary how large."""
    from kagent_sandbox.runtime.cuda_parameters import cuda_parameters  # imports torch

    return cuda_parameters(source.name, source.text, info.param_bytes)


def compile_cuda(
    name: str,
    source: str,
    target: str,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
) -> nvrtc.CudaBinary:
    """See `runtime.nvrtc.compile_cuda`.

    Raises:
        CompileError: The source or an option was refused, or it includes headers of CUTLASS and
            they are not installed.
        ToolchainError: NVRTC or the toolkit's headers are missing or too old.
    """
    try:
        return nvrtc.compile_cuda(name, source, target, options, defines)
    except HeadersMissing as e:  # optional: the machine is fine without, this kernel is not
        raise CompileError(name, f"{cutlass.included_in(source)}: {e}") from None
    except KernelUnavailable as e:
        raise _as_toolchain_error(e) from None


def look_for_toolkit() -> None:
    """Return if NVRTC and its headers are here.

    Raises:
        ToolchainError: They are not; the text says what to install.
    """
    try:
        nvrtc.nvrtc_version()
        headers.include_dirs()
    except KernelUnavailable as e:
        raise _as_toolchain_error(e) from None


def _as_toolchain_error(error: KernelUnavailable) -> ToolchainError:
    """The runtime's text names packages, since libraries carry it; here an extra has them all."""
    if isinstance(error, ToolkitMissing):
        return ToolchainError(f"{error.what}: {INSTALL_CUDA}")
    return ToolchainError(str(error))
