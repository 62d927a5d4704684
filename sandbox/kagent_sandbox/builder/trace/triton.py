"""Triton without a GPU: a driver for a target that is not here, and a launcher that records.

Works with Triton 3.6 and 3.7. Kernels go through Triton's own JIT (specialisation, binder,
compiler); only what touches the driver is replaced. Arguments are expanded exactly as Triton's
launcher expands them: run-time arguments in order, host tensor descriptors as a tensor map followed
by shape and strides, then two scratch pointers.
"""

# ruff: noqa: ARG002, SLF001 - signatures are Triton's, and some of what is replaced is private

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction

from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.compile import ptx, remarks
from kagent_sandbox.builder.compile.fork import SlowCompile, compile_ahead
from kagent_sandbox.builder.compile.kernels import over_limits
from kagent_sandbox.builder.compile.time_limit import compile_limit, too_slow
from kagent_sandbox.builder.configs import install_autotuner
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace.recorder import Recorder, current_recorder
from kagent_sandbox.builder.trace.torch_stubs import refuse
from kagent_sandbox.builder.trace.triton_args import expand
from kagent_sandbox.data.language import GLUON, TRITON, how_to_write
from kagent_sandbox.data.plan import KernelInfo, Null
from kagent_sandbox.data.target import Target
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.runtime.launches import Launching

_MOST_REASONS = 4  # of a pass that fails


@dataclass(frozen=True)
class LoadedKernel:
    """A stand-in for a CUfunction: the binary and its own description."""

    info: KernelInfo
    binary: bytes


class TritonLauncher:
    """Takes the place of triton.backends.nvidia.driver.CudaLauncher."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._signature: tuple[Any, ...] = tuple(src.signature.values())
        self._language = _language_of(src.fn)
        self._metadata = metadata
        self._descriptors: Sequence[Any] = getattr(metadata, "tensordesc_meta", None) or ()

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: object,
        function: LoadedKernel,
        packed_metadata: object,
        launch_metadata: object,
        enter_hook: object,
        exit_hook: object,
        *args: Any,
    ) -> None:
        """Record the launch that Triton's launcher would make."""
        recorder = _recorder()
        meta = self._metadata
        grid = tuple(_size(g) for g in (grid_x, grid_y, grid_z))
        if 0 in grid:
            return  # Triton launches nothing
        values = list(expand(recorder, self._signature, args, self._descriptors))
        scratch = self._scratch(meta.global_scratch_size, meta.global_scratch_align, grid)
        values.append(Null() if scratch is None else recorder.pointer(scratch))
        values.append(Null())  # profiler scratch: no profiler runs here
        ctas = meta.num_ctas
        launching = Launching(
            grid=(grid[0] * ctas, grid[1], grid[2]),
            block=(32 * meta.num_warps, 1, 1),
            shared=meta.shared,
            cluster=(ctas, 1, 1) if ctas > 1 else None,
            cooperative=bool(meta.launch_cooperative_grid),
            pdl=bool(meta.launch_pdl),
        )
        if over := over_limits(function.info, launching, recorder.target):
            recorder.refuse(PolicyError(*over, status=Status.RESOURCE_LIMIT))
        info = replace(function.info, language=self._language)
        recorder.launch(info, function.binary, values, launching)

    def _scratch(self, nbytes: int, align: int, grid: Sequence[int]) -> Any:
        if not nbytes:
            return None
        blocks = grid[0] * grid[1] * grid[2] * self._metadata.num_ctas
        tensor = _allocation._allocator.get()(blocks * nbytes, align, 0)
        if not isinstance(tensor, torch.Tensor):
            refuse(
                "triton's allocator returned no device tensor",
                "return torch.empty(size, device='cuda', dtype=torch.int8)",
            )
        return tensor


def _language_of(kernel: Any) -> str:
    """Name of the language of a `JITFunction`."""
    return GLUON.name if kernel.is_gluon() else TRITON.name


def _recorder() -> Recorder:
    recorder = current_recorder()
    if recorder is None:
        refuse("a kernel is launched while the file is imported", "launch from the entry function")
    return recorder


def _size(value: object) -> int:
    if isinstance(value, float):
        refuse(
            f"the grid holds the float {value}",
            "use triton.cdiv or // so that every size is an integer",
        )
    return int(value)  # type: ignore[call-overload, no-any-return]


# -- driver --------------------------------------------------------------------------------------


class Utils:
    """The part of Triton's compiled `cuda_utils` that host code may ask."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_device_properties(self, device: object = 0) -> dict[str, object]:
        """Return the device's properties as the tutorials read them."""
        t = self._target
        return {
            "max_shared_mem": t.shared_per_block,
            "max_num_regs": t.registers_per_multiprocessor,
            "multiprocessor_count": t.multiprocessors,
            "warpSize": t.warp_size,
            "sm_clock_rate": t.clock_khz,
            "mem_clock_rate": t.memory_clock_khz,
            "mem_bus_width": t.memory_bus_bits,
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: object
    ) -> tuple[object, LoadedKernel, int, int, int]:
        """(module, function, registers, spills, most threads per block) of a cubin."""
        info = kernel_info(binary, name, TRITON.name)
        threads = min(1024, self._target.registers_per_multiprocessor // max(1, info.registers))
        return object(), LoadedKernel(info, binary), info.registers, info.spill_bytes // 4, threads

    def cuOccupancyMaxActiveClusters(  # noqa: N802
        self, function: object, shared: int, ctas: int
    ) -> int:
        """An estimate: as many clusters as multiprocessors allow with one block each."""
        return self._target.multiprocessors // max(1, ctas)

    def set_printf_fifo_size(self, size: int) -> None:
        """Do nothing: nothing runs here."""


class Driver:
    """Just enough of a Triton driver to compile for a target that is not here."""

    launcher_cls = TritonLauncher

    def __init__(self, target: Target) -> None:
        self._target = target
        self.utils = Utils(target)

    def get_current_target(self) -> GPUTarget:
        """The architecture to compile for."""
        if self._target.is_cpu:
            refuse("a Triton kernel is launched on the CPU", f"write it with {how_to_write('cpu')}")
        return GPUTarget("cuda", self._target.capability, self._target.warp_size)

    def get_device_capability(self, device: object = 0) -> tuple[int, int]:
        """Compute capability."""
        return self._target.major, self._target.minor

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def set_current_device(self, device: object) -> None:
        """There is one."""

    def get_current_stream(self, device: object = None) -> int:
        """There is one."""
        return 0

    def get_device_interface(self) -> Any:
        """torch.cuda, with its stand-ins."""
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        """Return the device that tensors claim to be on."""
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        """Timing belongs to the harness."""
        refuse("a kernel is timed", "declare configurations; the harness measures them")

    def get_empty_cache_for_benchmark(self) -> Any:
        """Timing belongs to the harness."""
        refuse("a kernel is timed", "declare configurations; the harness measures them")

    def clear_cache(self, cache: object) -> None:
        """Do nothing: there is nothing to clear."""

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Only the real launcher's generator needs this."""
        return ty


def _compiled(compile_: Callable[[], Any]) -> Any:
    """A compile; where a pass of the compiler fails, its words with the lines of the file.

    Raises:
        RuntimeError: A pass failed.
    """
    try:
        return compile_()
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
        before = knobs.compilation.disable_line_info
        knobs.compilation.disable_line_info = False
        try:
            with remarks.heard() as printed:
                return compile_()
        except RuntimeError:
            said = remarks.of_triton(printed[0])[:_MOST_REASONS]
            raise error if not said else RuntimeError("\n".join([*said, str(error)])) from None
        finally:
            knobs.compilation.disable_line_info = before


def install(target: Target) -> None:
    """Make Triton compile for `target` and record its launches."""
    triton.runtime.driver.set_active(cast("Any", Driver(target)))
    knobs.compilation.disable_line_info = (
        True  # else a kernel moved down one line is another binary
    )
    knobs.nvidia.dump_ptxas_log = True  # for `remarks`
    install_autotuner()
    jit: Any = JITFunction
    original = jit._do_compile
    if getattr(original, "limited", False):
        return

    @functools.wraps(original)
    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        name, limit_s = self.fn.__name__, recorder.compile_limit_s if recorder else None
        with compile_limit(name, limit_s):
            if len(args) >= 6:  # key, signature, device, constexprs, options, attrs
                try:
                    said = compile_ahead(self, args[1], args[3], args[5], args[4])
                except SlowCompile:
                    raise too_slow(name, limit_s or 0.0) from None
                remarks.keep(name, said)
            with remarks.heard() as printed:
                kernel = _compiled(functools.partial(original, self, *args, **kwargs))
        remarks.keep(name, remarks.of_triton(printed[0]))
        if kernel is not None:
            ptx.keep(kernel.kernel, kernel.name, _language_of(self), kernel.asm.get("ptx", ""))
        return kernel

    limited.limited = True  # type: ignore[attr-defined]
    jit._do_compile = limited
