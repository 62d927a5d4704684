"""What each torch operation on symbolic tensors becomes in the plan.

Every operation that reaches torch's dispatcher while host code runs comes here: allocations, views, copies,
fills and small constants always pass; others only where the task allows them, in their `out=` or in-place form, so
that the plan says which bytes they write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kagent_sandbox.build import policy
from kagent_sandbox.build.policy import PolicyError
from kagent_sandbox.build.symbolic import Recorder, SymbolicTensor, current_recorder, dtype_name
from kagent_sandbox.plan import MAX_CONST_BYTES, Const, Copy, Fill, TorchOp
from kagent_sandbox.verdict import Status

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach", "lift"})
_LAYOUT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_MOST_HOST_BYTES = 64 << 20  # of a tensor with real values, which only serves to make constants


class Dispatch(TorchDispatchMode):
    """Sees every operation below autograd, factories included."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        return handle(func, args, kwargs or {}, self.device)


class Factories(TorchFunctionMode):
    """`torch.tensor` and its kin build their values below the dispatcher: they become constants here."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _FROM_VALUES:
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


_FROM_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


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
    return torch.device(wanted).type == device.type


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
                "results must follow from the arguments alone; weights are arguments of the task's function",
            ),
        )
    if not symbolic:
        real = bool(tensors) and not _moves(kwargs, device)
        if real or recorder is None and not _moves(kwargs, device):
            return _on_host(func, args, kwargs)
        if not tensors and not _asks(kwargs, device):
            return _on_host(func, args, kwargs)
    recorder = _recorder()
    if name in policy.READS:
        recorder.refuse(policy.reads_value(f"torch.{name}"))
    if name in policy.METADATA_IN_PLACE:
        recorder.refuse(
            PolicyError(
                f"{name} changes a tensor's shape in place", f"use the view: y = x.{name.rstrip('_')}(...)"
            )
        )
    return _record(recorder, func, name, args, kwargs)


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


def _record(recorder: Recorder, func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
    if name in policy.ALLOCATE:
        return recorder.wrap(_run(func, args, kwargs))
    if name in policy.FILL:
        return _fill(recorder, func, name, args, kwargs)
    if name in policy.CONSTANT:
        host = {k: v for k, v in kwargs.items() if k not in _LAYOUT}
        return constant(recorder, func(*args, **host, device="cpu"))
    special = _COPIES.get(name)
    if special is not None:
        return special(recorder, func, args, kwargs)
    schema = func._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    views = any(r.alias_info is not None for r in schema.returns) or name in _VIEWS
    if views and not writes and func.namespace in {"aten", "prims"}:
        return _wrap_all(recorder, _run(func, args, kwargs))
    if not any("Tensor" in str(r.type) for r in schema.returns) and not writes:
        return _run(func, args, kwargs)
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
        return _in_place(recorder, func, args, kwargs)
    return _functional(recorder, func, args, kwargs)


def _run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Shapes, strides and dtypes of the result, from torch's own rules."""

    def unwrap(value: Any) -> Any:
        if isinstance(value, SymbolicTensor):
            return value._meta
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim():
            return value.to("meta")
        return value

    kwargs = dict(kwargs)
    if kwargs.get("device") is not None or _is_factory(func):
        kwargs["device"] = torch.device("meta")
    kwargs.pop("pin_memory", None)
    return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))


def _is_factory(func: Any) -> bool:
    arguments = func._schema.arguments
    return any(a.name == "device" for a in arguments) and not any(
        "Tensor" in str(a.type) for a in arguments
    )


def _wrap_all(recorder: Recorder, value: Any) -> Any:
    return tree_map(lambda t: recorder.wrap(t) if isinstance(t, torch.Tensor) else t, value)


def _fill(recorder: Recorder, func: Any, name: str, args: Args, kwargs: Kwargs) -> Any:
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
        target = recorder.wrap(_run(func, args, kwargs))
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
    ref = recorder.check_write(recorder.tensor(target))
    if values.numel() == 1:
        recorder.add(Fill(ref, values.item()))
        return
    data = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if target._meta.is_contiguous():
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
    result = recorder.wrap(func(source._meta, *args[1:], **kwargs))
    _copy(recorder, source, result)
    return result


def _copy_(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, SymbolicTensor):
        recorder.refuse(policy.reads_value("copy to a host tensor"))
    source.expand(target.shape)  # raises torch's own message when the shapes do not fit
    _copy(recorder, source, target)
    return target


def _cat(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Concatenation is an allocation and a copy into each part."""
    parts: Sequence[torch.Tensor] = args[0]
    result = recorder.wrap(_run(func, args, kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    start = 0
    for part in parts:
        if part.dim() == 1 and not part.numel():
            continue  # torch skips the legacy empty tensor of any shape
        size = part.shape[dim]
        _copy(recorder, part, recorder.wrap(result._meta.narrow(dim, start, size)))
        start += size
    return result


def _stack(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    result = recorder.wrap(_run(func, args, kwargs))
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    for i, part in enumerate(args[0]):
        _copy(recorder, part, recorder.wrap(result._meta.select(dim, i)))
    return result


def _pad(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Padding with a constant is a fill and a copy into the inside."""
    source, pad = args[0], list(args[1])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    result = recorder.wrap(_run(func, args, kwargs))
    recorder.add(Fill(recorder.tensor(result), value))
    inside, taken = result._meta, source._meta
    for i in range(len(pad) // 2):
        dim, low, high = -1 - i, pad[2 * i], pad[2 * i + 1]
        taken = taken.narrow(dim, max(0, -low), taken.shape[dim] + min(0, low) + min(0, high))
        inside = inside.narrow(dim, max(0, low), taken.shape[dim])
    _copy(recorder, recorder.wrap(taken), recorder.wrap(inside))
    return result


_COPIES: dict[str, Callable[[Recorder, Any, Args, Kwargs], Any]] = {
    "clone": _clone,
    "_to_copy": _clone,
    "contiguous": _clone,
    "copy_": _copy_,
    "_copy_from": _copy_,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
}


# -- operations that a task allows ---------------------------------------------------------------


def _in_place(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """In-place and `out=` forms write the tensors that they name."""
    schema = func._schema
    given = dict(zip((a.name for a in schema.arguments if not a.kwarg_only), args, strict=False))
    given |= kwargs
    named = [
        given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in given
    ]
    before = [t.shape for t in named]
    _run(func, args, kwargs)
    for tensor, shape in zip(named, before, strict=True):
        if tensor._meta.shape != shape:
            recorder.refuse(
                PolicyError(
                    f"out= of {policy.base_name(func.name())} has shape {tuple(shape)}, the result "
                    f"{tuple(tensor._meta.shape)}",
                    "allocate it with the result's shape",
                )
            )
    outs = {a.name for a in schema.arguments if a.is_out}
    rest = {k: v for k, v in kwargs.items() if k not in outs}
    _add(recorder, func, args, rest, named)
    return named[0] if len(named) == 1 else tuple(named)


def _functional(recorder: Recorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A functional operation becomes its `out=` overload into new buffers."""
    overload = _out_overload(func)
    if overload is None:
        recorder.refuse(
            PolicyError(
                f"torch operation {policy.base_name(func.name())!r} has no out= form",
                "compute it in a kernel",
            )
        )
    results = _wrap_all(recorder, _run(func, args, kwargs))
    written = [t for t in tree_flatten(results)[0] if isinstance(t, SymbolicTensor)]
    _add(recorder, overload, args, kwargs, written)
    return results


def _out_overload(func: Any) -> Any:
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in _LAYOUT]
    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [a for a in arguments if a.is_out]
        rest = [
            (a.name, str(a.type)) for a in arguments if not a.is_out and a.name not in _LAYOUT
        ]
        if rest == wanted and len(outs) == len(func._schema.returns):
            return overload
    return None


def _add(
    recorder: Recorder, func: Any, args: Args, kwargs: Kwargs, writes: Sequence[SymbolicTensor]
) -> None:
    refs = tuple(recorder.check_write(recorder.tensor(t)) for t in writes)
    kept = {k: _operand(recorder, v) for k, v in kwargs.items() if k not in _LAYOUT}
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
    recorder.refuse(
        PolicyError(f"an argument of type {type(value).__name__}", "compute it in a kernel")
    )
