"""Code that names a GPU runs on the CPU: a task makes its tensors on any device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_GPU = re.compile(r"cuda(:\d+)?")


class OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU where a function names a GPU, and leaves there what it moves."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with the CPU for a GPU."""
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        given = {k: _cpu_for_gpu(v) for k, v in (kwargs or {}).items()}
        if func in _device_constructors() and given.get("device") is None:
            given["device"] = torch.device("cpu")  # a file may have set another default
        return func(*map(_cpu_for_gpu, args), **given)


def on_cpu_without_gpu() -> AbstractContextManager[object]:
    """For code that may need the GPU that it names: `OnCPU` on machines that have none."""
    return nullcontext() if torch.cuda.is_available() else OnCPU()


def _cpu_for_gpu(value: Any) -> Any:
    name = str(value) if isinstance(value, str | torch.device) else ""
    return torch.device("cpu") if _GPU.fullmatch(name) else value
