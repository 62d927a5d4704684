"""One step of a loop, where a problem of KernelBench-Hard draws its inputs in `run`.

`run` makes a model and inputs, and calls the model, or a function that takes it, again and again.
The call that it makes most often is the operation; the last of those calls, with caches and states
that earlier ones filled, is its example.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.errors import TaskError
from torch import nn

from kagent.authoring.tracing.operation import Operation, make_operation


class _Step(nn.Module):
    """A function of a model and other arguments as a module."""

    def __init__(self, function: Callable[..., object], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, *given: Any, **named: Any) -> object:
        """Call the function with the model."""
        return self._function(self.model, *given, **named)


def step_of_run(
    path: Path, names: Mapping[str, Any], sizes: Mapping[str, int], name: str
) -> Operation:
    """Make an operation of the call that a problem's `run` makes most often.

    Args:
        path: Its reference.py.
        names: What that defines.
        sizes: Arguments of `run`, in order.
        name: Of the task.

    Raises:
        TaskError: `run` fails, or calls nothing with the model.
    """
    run, model = names["run"], names["Model"]
    calls: Counter[CodeType] = Counter()
    last: dict[CodeType, tuple[nn.Module, dict[str, Any]]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename != str(path) or not code.co_argcount:
            return
        first, *others = code.co_varnames[: code.co_argcount]
        owner = frame.f_locals[first]
        if isinstance(owner, model) and code in known:
            given = {n: frame.f_locals[n] for n in others}
            calls[code] += 1
            last[code] = owner, pytree.tree_map_only(torch.Tensor, _kept, given)

    functions = [v for v in names.values() if inspect.isfunction(v)]
    known = {f.__code__: f for f in (*functions, model.forward)}
    try:
        seed = {"seed": 0} if "seed" in inspect.signature(run).parameters else {}
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                run(*sizes.values(), **seed)
            finally:
                sys.setprofile(before)
    except Exception as e:  # whatever a problem's code raises becomes one line
        text = " ".join(str(e).split())[:200]
        raise TaskError(f"{path}: run: {type(e).__name__}: {text}") from e
    if not calls:
        raise TaskError(f"{path}: run: calls no function of the file with its model")
    ((code, count),) = calls.most_common(1)
    owner, given = last[code]
    owner = owner.cpu()
    is_method = code is model.forward.__code__
    step = owner if is_method else _Step(known[code], owner)
    called = f"Model.{code.co_name}" if is_method else code.co_name
    shape = ", ".join(f"{k} = {v}" for k, v in sizes.items())
    origin = f"the last of {count} calls of {called} in {path.parent.name}'s run, with {shape}"
    return make_operation(step, given, name=name, origin=origin, own=True)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()
