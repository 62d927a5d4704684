"""Operations that a task allows, in the form that says which bytes they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from kagent_sandbox.builder import policy
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace.fills_and_copies import LAYOUT, constant
from kagent_sandbox.builder.trace.meta import Args, Kwargs, run_on_meta, schema_of, wrap_all
from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor, dtype_name
from kagent_sandbox.data.operation_schema import is_write
from kagent_sandbox.data.plan import TorchOp


def in_place(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Record an in-place or `out=` form, which writes the tensors that it names."""
    schema = schema_of(func)
    given = dict(zip((a.name for a in schema.arguments if not a.kwarg_only), args, strict=False))
    given |= kwargs
    named = [given[a.name] for a in schema.arguments if is_write(a) and a.name in given]
    before = [t.shape for t in named]
    run_on_meta(func, args, kwargs)
    for tensor, shape in zip(named, before, strict=True):
        if tensor.meta.shape != shape:
            recorder.refuse(
                PolicyError(
                    f"out= of {policy.base_name(func.name())} has shape {tuple(shape)}, the result "
                    f"{tuple(tensor.meta.shape)}",
                    "allocate it with the result's shape",
                )
            )
    outs = {a.name for a in schema.arguments if a.is_out}
    rest = {k: v for k, v in kwargs.items() if k not in outs}
    _add(recorder, func, args, rest, named)
    return named[0] if len(named) == 1 else tuple(named)


def functional(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A functional operation becomes its `out=` overload into new buffers."""
    overload = _out_overload(func)
    if overload is None:
        recorder.refuse(
            PolicyError(
                f"torch operation {policy.base_name(func.name())!r} has no out= form",
                "compute it in a kernel",
            )
        )
    results = wrap_all(recorder, run_on_meta(func, args, kwargs))
    written = [t for t in tree_flatten(results)[0] if isinstance(t, SymbolicTensor)]
    _add(recorder, overload, args, kwargs, written)
    return results


def _out_overload(func: Any) -> Any:
    wanted = [(a.name, str(a.type)) for a in schema_of(func).arguments if a.name not in LAYOUT]
    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = schema_of(overload).arguments
        outs = [a for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in LAYOUT]
        if rest == wanted and len(outs) == len(schema_of(func).returns):
            return overload
    return None


def _add(
    recorder: Recorder, func: Any, args: Args, kwargs: Kwargs, writes: Sequence[SymbolicTensor]
) -> None:
    refs = tuple(recorder.check_write(recorder.tensor(t)) for t in writes)
    kept = {k: _operand(recorder, v) for k, v in kwargs.items() if k not in LAYOUT}
    recorder.add(TorchOp(func.name(), tuple(_operand(recorder, a) for a in args), kept, refs))


def _operand(recorder: Recorder, value: Any) -> object:
    if isinstance(value, SymbolicTensor):
        return recorder.tensor(value)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return recorder.tensor(constant(recorder, value))
        return value.item()
    if isinstance(value, torch.dtype):
        return f"dtype:{dtype_name(value)}"
    if isinstance(value, list | tuple):
        return tuple(_operand(recorder, v) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return recorder.refuse(
        PolicyError(f"an argument of type {type(value).__name__}", "compute it in a kernel")
    )
