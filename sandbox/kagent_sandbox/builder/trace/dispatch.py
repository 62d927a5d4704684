"""Dispatch of torch operations on symbolic tensors to steps of the plan.

Every operation that reaches torch's dispatcher while host code runs comes here: allocations, views,
copies, fills and small constants always pass; others only where the task allows them, in their
`out=` or in-place form, so that the plan says which bytes they write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kagent_sandbox.builder import policy
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace import fills_and_copies as contents
from kagent_sandbox.builder.trace import torch_ops
from kagent_sandbox.builder.trace.fills_and_copies import constant
from kagent_sandbox.builder.trace.meta import run_on_meta, schema_of, wrap_all
from kagent_sandbox.builder.trace.recorder import Recorder, current_recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.data.operation_schema import is_write

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach", "lift"})
"""Operations that make views, though their schema does not say so."""
_MOST_HOST_BYTES = 64 << 20  # of a tensor with real values, which only serves to make constants


class BelowAutograd(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operation below autograd, factories included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (1.5 s) to disable it around each operation


class TraceDispatch(BelowAutograd):  # type: ignore[no-untyped-call]
    """Hands every operation of `device` to `handle`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return handle(func, args, kwargs or {}, self.device)


class Factories(TorchFunctionMode):
    """`torch.tensor` and its kin work below the dispatcher: here they become constants."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda and self.device.type == "cuda":
            return args[0].to(self.device)
        if func not in FROM_VALUES:
            return func(*args, **kwargs)
        if args and isinstance(args[0], SymbolicTensor):
            if func is torch.tensor:
                return args[0].clone()
            return args[0].to(dtype=kwargs.get("dtype") or args[0].dtype)
        if not _asks(kwargs, self.device) or current_recorder() is None:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        return constant(_recorder(), func(*args, **kwargs))


FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Functions that make a tensor of Python's values without the dispatcher."""


def _recorder() -> Recorder:
    recorder = current_recorder()
    if recorder is None:
        raise PolicyError(
            "a device tensor is made while the file is imported",
            "make it inside of the entry function, so that every call pays for it",
        )
    return recorder


def _asks(kwargs: Kwargs, device: torch.device) -> bool:
    """Whether a factory call asks for the target's device."""
    wanted = kwargs.get("device")
    if wanted is None:
        return device.type == "cpu"
    return torch.device(wanted).type in {
        device.type,
        "meta",
    }  # meta: derived from a symbolic tensor


def handle(func: Any, args: Args, kwargs: Kwargs, device: torch.device) -> Any:
    """Record one operation, run it on real host values, or refuse it."""
    name = policy.base_name(func.name())
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    symbolic = any(isinstance(t, SymbolicTensor) for t in tensors)
    recorder = current_recorder()
    if name in policy.RANDOM:
        return _refuse(
            recorder,
            PolicyError(
                f"torch.{name} draws random numbers",
                "results must follow from the arguments alone; weights are arguments of the "
                "task's function",
            ),
        )
    _refuse_other_devices(recorder, kwargs, device)
    if not symbolic:
        real = bool(tensors) and not _moves(kwargs, device)
        if real or (recorder is None and not _moves(kwargs, device)):
            return _on_host(func, args, kwargs)
        if not tensors and not _asks(kwargs, device):
            return _on_host(func, args, kwargs)
    recorder = _recorder()
    for tensor in tensors:
        if isinstance(tensor, SymbolicTensor):
            recorder.refuse_older(tensor)
    if name in policy.READS:
        recorder.refuse(policy.reads_value(f"torch.{name}"))
    if name in policy.METADATA_IN_PLACE:
        recorder.refuse(
            PolicyError(
                f"{name} changes a tensor's shape in place",
                f"use the view: y = x.{name.rstrip('_')}(...)",
            )
        )
    return record(recorder, func, name, args, kwargs)


def _refuse_other_devices(recorder: Recorder | None, kwargs: Kwargs, device: torch.device) -> None:
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted).type not in {device.type, "cpu", "meta"}:
        _refuse(
            recorder,
            PolicyError(
                f"a tensor is wanted on {wanted}, and this candidate is built for {device}",
                "allocate with device=x.device",
            ),
        )


def _refuse(recorder: Recorder | None, error: PolicyError) -> Any:
    if recorder is not None:
        recorder.refuse(error)
    raise error


def _moves(kwargs: Kwargs, device: torch.device) -> bool:
    wanted = kwargs.get("device")
    return wanted is not None and device.type != "cpu" and torch.device(wanted).type == device.type


def _on_host(func: Any, args: Args, kwargs: Kwargs) -> Any:
    result = func(*args, **kwargs)
    for t in tree_flatten(result)[0]:
        if isinstance(t, torch.Tensor) and t.nbytes > _MOST_HOST_BYTES:
            raise PolicyError(
                f"host code makes a tensor of {t.nbytes >> 20} MiB on the CPU",
                "allocate on x.device; real values serve only for small constants",
            )
    return result


# -- recording -----------------------------------------------------------------------------------


def record(recorder: Recorder, func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    """Record one operation on symbolic tensors; what it returns."""
    if name in policy.ALLOCATE:
        return recorder.wrap(run_on_meta(func, args, kwargs))
    if name in policy.FILL:
        return contents.fill(recorder, func, name, args, kwargs)
    if name in policy.CONSTANT:
        host = {k: v for k, v in kwargs.items() if k not in contents.LAYOUT}
        return constant(recorder, func(*args, **host, device="cpu"))
    special = contents.COPIES.get(name)
    if special is not None:
        return special(recorder, func, args, kwargs)
    schema = schema_of(func)
    writes = any(map(is_write, schema.arguments))
    views = any(r.alias_info is not None for r in schema.returns) or name in VIEWS
    if views and not writes and func.namespace in {"aten", "prims"}:
        return wrap_all(recorder, run_on_meta(func, args, kwargs))
    if not any("Tensor" in str(r.type) for r in schema.returns) and not writes:
        return run_on_meta(func, args, kwargs)
    if name == "record_stream":
        return None
    if func.namespace != "aten":
        recorder.refuse(
            PolicyError(
                f"custom operator {func.namespace}::{name}",
                "call the Python function directly, without registering it with torch.library",
            )
        )
    if not policy.allows(recorder.allow, name):
        recorder.refuse(policy.forbidden(name, recorder.allow))
    if writes:
        return torch_ops.in_place(recorder, func, args, kwargs)
    return torch_ops.functional(recorder, func, args, kwargs)
