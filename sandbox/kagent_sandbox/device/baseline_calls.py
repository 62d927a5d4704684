"""A baseline as something to call: torch eager, a torch.compile mode, or an expert library, on
inputs of its own seed.

Plain data and torch only: it is used by the trusted process that measures baselines and, before it
locks itself, by the launcher of the final race, where neither pydantic nor the task is at hand. The
agent only reads what was measured, and does not wait for torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.race import COMPILE_MODES, EAGER
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.importing import import_file

if TYPE_CHECKING:
    import torch

SAMPLES = 30
"""Samples of one baseline on one case, where they do not take too long."""
AHEAD = "--ahead"
"""Argument of the process that measures baselines: it imports the compiler before it is asked."""
_modules = itertools.count()


class BaselineUnavailableError(Exception):
    """The baseline does not exist here: an expert library that cannot be imported."""


class ContextLostError(Exception):
    """The baseline has ended the device's context: nothing runs in this process any more."""


@dataclass(frozen=True, slots=True)
class BaselineCall:
    """One baseline on one case. JSON-able through `kagent_sandbox.data.records`."""

    name: str  # "eager", "compile", "compile max-autotune", or an expert's name
    reference: str  # path of reference.py
    case: Mapping[str, str | int | float | bool]  # the case's fields but for its dimensions
    dims: Mapping[str, Value]
    scalars: Mapping[str, Value | None]  # arguments of the entry that are no tensors
    seed: int
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # where not contiguous


@dataclass(frozen=True, slots=True)
class MeasuredBaseline:
    """Times of one baseline on one case."""

    us: float
    captured: bool = False  # replayed as a graph rather than called
    peak_bytes: int = 0  # of device memory, where that is the device's own


@dataclass(frozen=True, slots=True)
class ReadyBaseline:
    """Outcome of making a baseline ready for a race.

    Attributes:
        captured: Whether it is replayed as a graph rather than called.
        failed: Why it does not run; "" if it does.
        lacked: Whether all that it lacked may be memory that others hold.
        faulted: Whether the device's context is lost by it.
    """

    captured: bool = False
    failed: str = ""
    lacked: bool = False
    faulted: bool = False


def make_inputs(
    call: BaselineCall, device: torch.device, module: ModuleType, *, drawn: bool = True
) -> dict[str, object]:
    """All arguments of the entry function, the tensors drawn from the call's seed; or memory of
    their shapes, for which nothing runs on the device.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(call.seed)
    case = SimpleNamespace(**call.case, **call.dims, dims=dict(call.dims))
    tensors: dict[str, torch.Tensor]
    if drawn:
        tensors = module.inputs(case, generator, device)
    else:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            shapes = module.inputs(case, generator, device)
        tensors = {n: _memory(t, call.strides.get(n, t.stride())) for n, t in shapes.items()}
    arguments: dict[str, object] = {
        n: list(v) if isinstance(v, tuple) else v for n, v in call.scalars.items()
    }
    for name, tensor in tensors.items():
        strides = call.strides.get(name)
        if strides is not None and strides != tensor.stride():
            strided = torch.empty_strided(
                tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
            )
            arguments[name] = strided.copy_(tensor)
        else:
            arguments[name] = tensor
    return arguments


def _memory(like: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device)


def drawer(call: BaselineCall, device: torch.device) -> Callable[[int], Mapping[str, object]]:
    """Returns the arguments of a call, drawn anew for each turn, the same for all that ask for one
    turn after the other.
    """
    module = _import(call.reference)

    @functools.lru_cache(maxsize=1)
    def draw(turn: int) -> Mapping[str, object]:
        seed = (call.seed + 1_000_003 * turn) % 2**31
        return make_inputs(replace(call, seed=seed), device, module)

    return draw


def make_call(
    call: BaselineCall, device: torch.device, *, drawn: bool = True
) -> functools.partial[object]:
    """The baseline bound to its inputs (`make_inputs`). Nothing is compiled before the first call.

    Each call imports reference.py anew: functions of other calls share no code object with it, so
    that torch.compile keeps their variants apart and none is compiled again later.

    Raises:
        BaselineUnavailableError: There is no such expert here.
    """
    module = _import(call.reference)
    function = _function(call.name, module)
    return functools.partial(function, **make_inputs(call, device, module, drawn=drawn))


def _function(name: str, module: ModuleType) -> Callable[..., object]:
    if name == EAGER:
        return module.eager  # type: ignore[no-any-return]
    if name in COMPILE_MODES:
        if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            return module.eager  # type: ignore[no-any-return] # what torch.compile would return
        import torch

        compiler_cache.keep_headers()
        compiled: Callable[..., object] = torch.compile(
            module.eager, dynamic=False, mode=COMPILE_MODES[name]
        )
        return compiled
    experts: Mapping[str, Callable[..., object]] = module.experts()
    if name not in experts:
        raise BaselineUnavailableError(f"{name} cannot be imported here")
    return experts[name]


def all_names(reference: str, modes: Sequence[str]) -> list[str]:
    """All baselines that can be tried here: eager, torch.compile in these modes, experts that can
    be imported.
    """
    return [EAGER, *modes, *sorted(_import(reference).experts())]


def _import(path: str) -> ModuleType:
    return import_file(Path(path), f"kagent_baseline_{next(_modules)}_{Path(path).parent.name}")


def forget_compiled() -> None:
    """Drop what torch.compile holds, between cases."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it takes seconds
        return
    import torch

    with contextlib.suppress(AttributeError):
        torch.compiler.reset()
