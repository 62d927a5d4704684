"""Operations from KernelBench's files: `Model`, `get_inputs` and `get_init_inputs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from kagent_sandbox.errors import UserError
from torch import nn
from torch.overrides import TorchFunctionMode

from kagent.authoring.tracing.operation import Operation, make_operation
from kagent.authoring.tracing.source_file import load_module, named


def read_problem(path: Path) -> Operation:
    """The operation of a file.

    Its number in the suite, as in `23_Softmax.py`, is no part of the task's name.

    Raises:
        UserError: It cannot be imported, or its model cannot be made.
    """
    with torch.random.fork_rng(), _Sparing():
        torch.manual_seed(0)
        module = load_module(path)
        model, inputs = (named(module, n, path) for n in ("Model", "get_inputs"))
        try:
            given: Any = getattr(module, "get_init_inputs", list)()
            if len(given) == 2 and isinstance(given[0], list) and isinstance(given[1], dict):
                made = model(*given[0], **given[1])
            else:
                made = model(*given)
        except Exception as e:  # whatever a model raises becomes one line
            text = " ".join(str(e).split())[:200]
            raise UserError(f"{path}: Model: {type(e).__name__}: {text}") from e
    if not isinstance(made, nn.Module):
        raise UserError(f"{path}: Model is no nn.Module")
    name = re.sub(r"^\d+_", "", path.stem).strip("_")
    return make_operation(made, inputs, name=name, origin=path.name, own=True)


_MOST_FILLED = 1 << 20
"""Elements of a parameter that are initialised: more are not looked at."""
_FILLS = frozenset({"uniform_", "normal_", "random_", "trunc_normal_", "erfinv_", "fill_"})


class _Sparing(TorchFunctionMode):
    """Initialises the beginning of large tensors only. A problem's weights take gigabytes, and
    nothing computes with them: the task draws others like them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if args and name in _FILLS and args[0].numel() > _MOST_FILLED and args[0].is_contiguous():
            func(args[0].detach().view(-1)[:_MOST_FILLED], *args[1:], **kwargs)
            return args[0]
        if func in (torch.randn, torch.rand) and not kwargs:
            made = torch.empty(*args)
            return made.normal_() if func is torch.randn else made.uniform_()
        if args and func is nn.init.orthogonal_:  # takes minutes on a large matrix
            return nn.init.normal_(args[0], std=args[0].shape[-1] ** -0.5)
        return func(*args, **kwargs)
