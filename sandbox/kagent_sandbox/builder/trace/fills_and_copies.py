"""Operations that fill tensors without a kernel: fills, small constants and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kagent_sandbox.builder import policy
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace.meta import Args, Kwargs, run_on_meta
from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.data.plan import MAX_CONST_BYTES, Const, Copy, Fill
from kagent_sandbox.data.verdict import Status

LAYOUT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that say where and how a result lies, which its buffer already says."""


def fill(recorder: Recorder, func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """zeros, ones, full, fill_ and kin: an allocation where the form makes one, and a fill."""
    known = policy.FILL[name]
    if known is not None:
        value: Any = known
    elif name == "scalar_tensor":
        value = args[0]
    else:
        value = args[1] if len(args) > 1 else kwargs.get("fill_value", kwargs.get("value"))
    if name.endswith("_"):
        target = args[0]
        if isinstance(value, SymbolicTensor):
            return _copy_(recorder, func, (target, value), {})
    else:
        target = recorder.wrap(run_on_meta(func, args, kwargs))
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, complex):
        recorder.refuse(PolicyError("a complex fill", "use real numbers"))
    ref = recorder.check_write(recorder.tensor(target))
    if ref.numel:
        recorder.add(Fill(ref, value))
    return target


def constant(recorder: Recorder, values: torch.Tensor) -> SymbolicTensor:
    """A new buffer with the values of a small host tensor."""
    values = values.detach().contiguous()
    result = recorder.wrap(torch.empty_like(values, device="meta"))
    _write(recorder, result, values)
    return result


def _write(recorder: Recorder, target: SymbolicTensor, values: torch.Tensor) -> None:
    if values.nbytes > MAX_CONST_BYTES:
        recorder.refuse(
            PolicyError(
                f"a constant tensor of {values.nbytes} bytes made from host values",
                f"at most {MAX_CONST_BYTES} bytes; compute larger tables in a kernel",
                status=Status.RESOURCE_LIMIT,
            )
        )
    if not values.numel():
        return
    if values.dtype == torch.int64 and any(
        recorder.is_address(v) for v in values.flatten().tolist()
    ):
        recorder.refuse(
            PolicyError(
                "a table of addresses (data_ptr()) is made on the host",
                "addresses exist only when the plan runs: pass the tensor itself to the kernel",
            )
        )
    ref = recorder.check_write(recorder.tensor(target))
    if values.numel() == 1:
        recorder.add(Fill(ref, values.item()))
        return
    data = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if target.meta.is_contiguous():
        recorder.add(Const(ref, data))
    else:
        staged = recorder.wrap(torch.empty_like(values, device="meta").contiguous())
        recorder.add(Const(recorder.tensor(staged), data))
        recorder.add(Copy(recorder.tensor(staged), ref))


# -- copies --------------------------------------------------------------------------------------


def _copy(recorder: Recorder, source: torch.Tensor, target: SymbolicTensor) -> None:
    if isinstance(source, SymbolicTensor):
        ref = recorder.check_write(recorder.tensor(target))
        if ref.numel:
            recorder.add(Copy(recorder.tensor(source), ref))
    else:
        _write(recorder, target, source.to(target.dtype).expand(target.shape))


def _clone(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """clone, to, contiguous: a new tensor with the same values."""
    source = args[0]
    if not isinstance(source, SymbolicTensor):
        return constant(recorder, source.to(kwargs.get("dtype") or source.dtype))
    kwargs = {k: v for k, v in kwargs.items() if k not in {"device", "non_blocking", "pin_memory"}}
    result = recorder.wrap(func(source.meta, *args[1:], **kwargs))
    _copy(recorder, source, result)
    return result


def _copy_(recorder: Recorder, _func: Any, args: Args, _kwargs: Kwargs) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, SymbolicTensor):
        recorder.refuse(policy.reads_value("copy to a host tensor"))
    source.expand(target.shape)  # raises torch's own message when the shapes do not fit
    _copy(recorder, source, target)
    return target


def _cat(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Concatenation is an allocation and a copy into each part."""
    parts: Sequence[torch.Tensor] = args[0]
    result = recorder.wrap(run_on_meta(func, args, kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    start = 0
    for part in parts:
        if part.dim() == 1 and not part.numel():
            continue  # torch skips the legacy empty tensor of any shape
        size = part.shape[dim]
        _copy(recorder, part, recorder.wrap(result.meta.narrow(dim, start, size)))
        start += size
    return result


def _stack(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    result = recorder.wrap(run_on_meta(func, args, kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, part in enumerate(args[0]):
        _copy(recorder, part, recorder.wrap(result.meta.select(dim, i)))
    return result


def _pad(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Padding with a constant is a fill and a copy into the inside."""
    source, pad = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    result = recorder.wrap(run_on_meta(func, args, kwargs))
    recorder.add(Fill(recorder.tensor(result), value))
    inside, taken = result.meta, source.meta
    for i in range(len(pad) // 2):
        dim, low, high = -1 - i, pad[2 * i], pad[2 * i + 1]
        taken = taken.narrow(dim, max(0, -low), taken.shape[dim] + min(0, low) + min(0, high))
        inside = inside.narrow(dim, max(0, low), taken.shape[dim])
    _copy(recorder, recorder.wrap(taken), recorder.wrap(inside))
    return result


COPIES: dict[str, Callable[[Recorder, Any, Args, Kwargs], Any]] = {
    "clone": _clone,
    "_to_copy": _clone,
    "contiguous": _clone,
    "copy_": _copy_,
    "_copy_from": _copy_,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
}
