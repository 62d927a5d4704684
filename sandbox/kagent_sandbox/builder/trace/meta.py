"""Shapes, strides and dtypes of results, from torch's own rules on `meta` tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map

from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def schema_of(func: Any) -> torch.FunctionSchema:
    """Declared arguments and returns of an operation, with what they alias and write."""
    schema: torch.FunctionSchema = func._schema  # noqa: SLF001 - torch offers no public way
    return schema


def run_on_meta(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Shapes, strides and dtypes of the result, from torch's own rules."""

    def unwrap(value: Any) -> Any:
        if isinstance(value, SymbolicTensor):
            return value.meta
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
            return value.to("meta")
        return value

    kwargs = dict(kwargs)
    if kwargs.get("device") is not None or _is_factory(func):
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    name = func.name().partition(".")[0]
    if name.endswith("_like"):
        return _strided_like(result, unwrap(args[0]), kwargs.get("memory_format"))
    if name == "aten::convolution":
        return _as_convolved(result, [unwrap(a) for a in args[:2]])
    return result


def _strided_like(
    result: torch.Tensor, like: torch.Tensor, memory_format: torch.memory_format | None
) -> torch.Tensor:
    """Give the result of `empty_like` the strides that it has on a real device: a dense tensor's
    are kept, also of dimensions of size 1, which torch normalises on `meta`.
    """
    if memory_format not in (None, torch.preserve_format) or result.shape != like.shape:
        return result
    longer = [
        (a, b) for n, a, b in zip(like.shape, like.stride(), result.stride(), strict=True) if n > 1
    ]
    if any(a != b for a, b in longer):
        return result
    return result.as_strided(like.shape, like.stride())


def _as_convolved(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the result of a convolution channels last where an operand has them, as it has by cuDNN
    and by oneDNN. On `meta` versions of torch differ.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim())
    if channels_last is None or len(operands) < 2:
        return result
    if result.dtype == torch.float64:  # neither has them in this one
        return result.contiguous()
    if any(suggest_memory_format(t) == channels_last for t in operands):
        return result.contiguous(memory_format=channels_last)
    return result.contiguous()


def _is_factory(func: Any) -> bool:
    arguments = schema_of(func).arguments
    return any(a.name == "device" for a in arguments) and not any(
        "Tensor" in str(a.type) for a in arguments
    )


def wrap_all(recorder: Recorder, value: Any) -> Any:
    """Make the tensors of a result symbolic: views of known storages, or allocations."""
    return tree_map(lambda t: recorder.wrap(t) if isinstance(t, torch.Tensor) else t, value)
