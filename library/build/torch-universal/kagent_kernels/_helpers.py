"""Helpers for operators' own functions: dispatch, casts, shapes, gradients of references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

_PORTFOLIO = Path(__file__).parent / "portfolio"
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that know of no other library."""

_TRACED = {"torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor"}


def available(task: str) -> bool:
    """Whether the library has kernels of a task."""
    return (_PORTFOLIO / f"{task}.json").is_file()


def plain(*tensors: torch.Tensor) -> bool:
    """Whether all are dense tensors of torch's own type, or what stands for one while it is traced.

    Subclasses (of DTensor's kind) know torch's operators, not this library's; and torch's have
    derivatives in forward mode and of any order, so that none are plain where these, or gradients
    of torch.func, are asked for.
    """
    if forward_ad._current_level >= 0 or _differentiated_by_torch_func():  # noqa: SLF001
        return False
    for tensor in tensors:
        kind = type(tensor)
        if kind not in PLAIN and kind.__module__ not in _TRACED:
            return False
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
    return True


def _differentiated_by_torch_func() -> bool:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():  # noqa: SLF001
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()  # noqa: SLF001
    return any(each.key() == torch._C._functorch.TransformType.Grad for each in stack)  # noqa: SLF001


def holds(*conditions: bool | torch.SymBool) -> bool:
    """Whether all conditions on a call's sizes hold.

    While a program is traced, sizes may be symbols. An exported program is for all of their values:
    there, what holds for some of them does.
    """
    for condition in conditions:
        if isinstance(condition, torch.SymBool):
            # Below torch.compile or export it is imported already; by itself it takes a second.
            from torch.fx.experimental import symbolic_shapes

            if torch.compiler.is_exporting():
                never = torch.sym_not(condition)  # type: ignore[no-untyped-call]
                fails = symbolic_shapes.statically_known_true(never)
            else:
                fails = not symbolic_shapes.guard_or_true(condition)
        else:
            fails = not condition
        if fails:
            return False
    return True


def rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape to a matrix whose columns are the last dimension. A scalar becomes a single row."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.reshape(1, x.numel())


def vmap_rows(op: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, int]]:
    """A rule for torch.vmap: of an operator of one matrix that takes every row for itself."""

    def rule(_: object, in_dims: tuple[int], x: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        return op(x.flatten(0, 1)).view(x.shape), 0

    return rule


def check_classes(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Refuse targets that kernels would write out of bounds for. On a GPU that is not looked at.

    Raises:
        IndexError: A target is neither one of the classes nor `ignore_index`.
    """
    if target.device.type != "cpu" or target.numel() == 0:
        return
    low, high = (t.item() for t in torch.aminmax(target))
    if low >= 0 and high < classes:
        return
    low, high = (t.item() for t in torch.aminmax(target.where(target != ignore_index, 0)))
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise IndexError(f"target {wrong} is out of range: there are {classes} classes")


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Whether a call with them is to be differentiated."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast casts a tensor to on its device. None where it is off or the
    tensor is not for it (float64 and whole numbers are not).
    """
    if not torch._C._is_any_autocast_enabled():  # noqa: SLF001 - soon said, and mostly the answer
        return None
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return torch.get_autocast_dtype(device)


def with_autograd(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a reference that takes gradients itself; below an operator they are switched off.

    Tensors are passed detached, and what comes back is, in memory of its own.
    """
    key = torch._C.DispatchKey.AutogradFunctionality  # noqa: SLF001
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():  # noqa: SLF001
        result = function(*map(_detached, args), **{k: _detached(v) for k, v in kwargs.items()})
    if result is None:  # it only writes to its arguments
        return None
    taken = {_memory(a) for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
    results = result if isinstance(result, tuple | list) else (result,)
    found = tuple(r.clone() if _memory(r) in taken else r for r in map(_detached, results))
    return found if isinstance(result, tuple | list) else found[0]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _memory(tensor: torch.Tensor) -> object:
    """A tensor's memory, as a number that fake tensors have, too."""
    return tensor.untyped_storage()._cdata  # noqa: SLF001
