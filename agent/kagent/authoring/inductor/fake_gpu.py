"""An H100 that is not there: enough of one for Inductor to write code for it.

Never taken back: for a process of its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from kagent_sandbox.data.target import parse_target
from torch._dynamo.device_interface import get_interface_for_device
from torch._prims_common import is_contiguous_or_false
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGET = "sm_90a"


class _Driver:
    """The part of Triton's driver that Inductor calls."""

    def get_current_target(self) -> GPUTarget:
        target = parse_target(TARGET)
        return GPUTarget("cuda", target.capability, target.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


def install() -> None:
    """Have torch and Triton believe in one H100."""
    target = parse_target(TARGET)
    facts = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=target.major,
        minor=target.minor,
        multi_processor_count=target.multiprocessors,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=target.warp_size,
        regs_per_multiprocessor=target.registers_per_multiprocessor,
        total_memory=80 << 30,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=target.shared_per_block,
        shared_memory_per_multiprocessor=228 << 10,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
    driver.set_active(cast("Any", _Driver()))
    interface: Any = get_interface_for_device("cuda")
    for owner in (torch.cuda, interface, interface.Worker):
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "get_device_properties": lambda _=None: facts,
            "get_device_capability": lambda _=None: (target.major, target.minor),
            "get_compute_capability": lambda _=None: target.capability,
            "is_triton_capable": lambda _=None: True,
            "raise_if_triton_unavailable": lambda _=None: None,
            "synchronize": lambda _=None: None,
            "_lazy_init": lambda: None,
        }
        for name, answer in answers.items():
            if hasattr(owner, name):
                setattr(owner, name, answer if owner is torch.cuda else staticmethod(answer))
    torch.version.cuda = "13.0"
    if hasattr(fake_tensor, "init_gpu_context"):  # would start CUDA, which may have no driver
        fake_tensor.init_gpu_context = cast("Any", lambda _: None)
    tensor: Any = torch.Tensor
    tensor.contiguous = _contiguous


def _contiguous(
    x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """Return the tensor or a copy: in a decomposition, torch's own method asks the device first."""
    if memory_format == torch.contiguous_format and is_contiguous_or_false(x):
        return x
    return x.clone(memory_format=memory_format)
