"""Source of a task: a function over named tensors, and an example of a call."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.errors import UserError
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from kagent.authoring.tracing.autocast import autocast_refused
from kagent.authoring.tracing.devices import OnCPU, on_cpu_without_gpu
from kagent.authoring.tracing.drawing import Drawing, observed, recorded
from kagent.authoring.tracing.dropout import LEFT_OUT
from kagent.authoring.tracing.example_call import (
    TAKEN,
    Example,
    ExampleCall,
    as_taken,
    identifier,
    own_name,
    unique,
)
from kagent.authoring.tracing.source_file import first_line, place_of

_LEAST_NAME = 2


@dataclass(frozen=True)
class Operation:
    """A function over tensors, with an example of a call.

    Attributes:
        name: Name of the task and of the function that candidates define.
        summary: One line.
        origin: Where it comes from, as a person would say it.
        call: The function. It takes the tensors of `examples` in order.
        examples: The tensors of the example call.
        numbers: Its plain numbers and flags by name. `call` knows their values.
        notes: What the user should know about it, a line each.
    """

    name: str
    summary: str
    origin: str
    call: Callable[..., object]
    examples: tuple[Example, ...]
    numbers: Mapping[str, int | float | bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make_operation(
    target: Any,
    inputs: object,
    *,
    name: str | None = None,
    origin: str = "",
    backward: bool = False,
    own: bool = False,
) -> Operation:
    """Make an operation of a function or module and example inputs.

    Args:
        target: A function over tensors, an nn.Module, or its class if it needs no arguments.
        inputs: Its example arguments: a tensor, a tuple or list of arguments, a dict of them by
            name; or a function without parameters that returns such. What a function draws, the
            task draws in the same way.
        name: Name of the task; by default the target's own.
        origin: Where the target comes from.
        backward: Whether the operation is the gradient: its arguments begin with the gradients of
            the results, its results are the gradients of the floating-point arguments.
        own: Whether a module may be changed. Else a copy is; functions that the module holds, such
            as lambdas, would go on to use the parameters of the original.

    Raises:
        UserError: The target or the inputs cannot be used; the text says why.
    """
    if inspect.isclass(target):
        target = _instance(target)
    if inspect.ismethod(target) and target.__name__ == "forward":
        target = target.__self__
    if isinstance(target, OptimizedModule):
        target = target._orig_mod  # noqa: SLF001 - torch's own name
    written = name or own_name(target)
    name = identifier(written, lower=True)
    if inspect.ismethod(target) and isinstance(target.__self__, nn.Module):
        target = _Method(target)
    _refuse_uncallable(target, written)
    given = _called(inputs) if callable(inputs) else observed(inputs)
    example = ExampleCall.of(target, given)
    if isinstance(target, nn.Module):
        buffers = {path for path, _ in target.named_buffers()}  # plain attributes are so later
        target, notes = _prepared(target, own=own)
        example.notes += notes
        call = _module_call(target, example, buffers)
    else:
        call = _function_call(target, example)
    example.refuse_odd()

    def plain_call(*tensors: torch.Tensor) -> object:
        with _plainly():
            return call(*tensors)

    operation = Operation(
        name,
        _summary(target, name),
        origin or name,
        plain_call,
        tuple(example.examples),
        example.numbers,
        tuple(example.notes),
    )
    return _gradient(operation) if backward else operation


def _refuse_uncallable(target: Any, written: str) -> None:
    """Make sure that a target is a function or module that returns its results.

    Raises:
        UserError: It is not.
    """
    if isinstance(target, torch.jit.ScriptModule):
        raise UserError(f"{own_name(target)} is a scripted module: name the module it is made of")
    if not callable(target):
        raise UserError(f"{written} is {type(target).__name__}, expected a function or nn.Module")
    code = inspect.unwrap(target)
    if inspect.iscoroutinefunction(code) or inspect.isgeneratorfunction(code):
        raise UserError(
            f"{written} is async or yields, expected a function that returns its results"
        )


def _function_call(target: Any, example: ExampleCall) -> Callable[..., object]:
    """A call of a function with the example's tensors, in order."""

    def call(*tensors: torch.Tensor) -> object:
        args, kwargs = example.arguments(tensors)
        return target(*args, **kwargs)

    return call


def _module_call(
    module: nn.Module, example: ExampleCall, written: set[str]
) -> Callable[..., object]:
    """A call of a module with the example's tensors, in order, and then its parameters and buffers,
    which are added to the example. A buffer that may be `written` is, where the module puts another
    tensor in its place.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    dtypes = {path: t.dtype for path, t in state.items()}
    count = len(example.examples)
    example.add_state(state)

    def call(*tensors: torch.Tensor) -> object:
        args, kwargs = example.arguments(tensors[:count])
        own = zip(dtypes.items(), tensors[count:], strict=True)
        given = {path: as_taken(dtype, t) for (path, dtype), t in own}
        values = dict(given)
        with _as_before(module):
            result = functional_call(module, values, tuple(args), kwargs)
        for path, tensor in given.items():
            new = values[path]  # where the module put another tensor in a buffer's place
            if new is tensor or new is None or path not in written or tensor.requires_grad:
                continue
            if new.shape == tensor.shape:
                tensor.copy_(new)
        return result

    return call


class _Method(nn.Module):  # its module's parameters are arguments, whose names begin with no more
    def __init__(self, method: Any) -> None:
        super().__init__()
        self._, self.forward = method.__self__, method


@contextmanager
def _plainly() -> Iterator[None]:
    """Call functions as they are written: compiled ones as they were before, on the CPU, and with
    nothing printed, as they are called a hundred times.
    """
    with (
        OnCPU(),
        autocast_refused(),
        torch.compiler.set_stance("force_eager"),
        dynamo_config.patch(error_on_nested_fx_trace=False),  # type: ignore[no-untyped-call, unused-ignore]
        redirect_stdout(io.StringIO()),
    ):
        yield


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Take back what a call changes in a module, such as a cache that it fills: a task's calls do
    not depend on earlier ones.
    """
    held = [v for m in module.modules() for v in (vars(m), *vars(m).values())]
    before = [(v, copy.copy(v)) for v in held if isinstance(v, dict | list)]
    try:
        yield
    finally:
        for value, content in before:
            value.clear()
            value.update(content) if isinstance(value, dict) else value.extend(content)


def _instance(cls: type) -> object:
    if not issubclass(cls, nn.Module):
        raise UserError(
            f"{cls.__name__} is a class and no nn.Module: name a function, or an instance of it "
            "that can be called"
        )
    try:
        with on_cpu_without_gpu():
            return cls()
    except Exception as e:  # noqa: BLE001 - whatever a user's class raises becomes one line
        raise UserError(
            f"{cls.__name__} cannot be made without arguments{place_of(e)} ({type(e).__name__}: "
            f"{first_line(e)}): name an instance of it, as in `norm = {cls.__name__}(...)`, that "
            "can be made on a CPU"
        ) from None


def _called(inputs: Callable[..., object]) -> Any:
    """Example arguments that a user's function returns.

    Raises:
        UserError: It raises something, or takes arguments itself.
    """
    try:
        return recorded(inputs)
    except (Exception, SystemExit) as e:  # noqa: BLE001 - whatever a user's function raises
        raise UserError(
            f"{own_name(inputs)}(){place_of(e)} raised {type(e).__name__}: {first_line(e)}. It "
            "is called without arguments, maybe without a GPU, and returns the example's arguments"
        ) from None


def _summary(target: object, name: str) -> str:
    # A class without a docstring of its own would get its base's.
    owner = type(target) if isinstance(target, nn.Module) else target
    text = inspect.cleandoc(vars(owner).get("__doc__") or "") if isinstance(owner, type) else ""
    if not isinstance(owner, type):
        text = inspect.getdoc(owner) or ""
    elif owner.__module__.startswith("torch."):
        text = ""
    line = text.split("\n\n")[0].replace("\n", " ").strip()
    plain = len(line) > _LEAST_NAME and len(line) <= 120
    return line.rstrip(".") if plain else name.replace("_", " ").capitalize()


def _prepared(module: nn.Module, *, own: bool) -> tuple[nn.Module, list[str]]:
    """A module, or a copy, whose results depend on its arguments alone, and what was changed."""
    lazy = [path for path, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise UserError(
            f"{lazy[0]} has no size before the module's first call: call the module once in the "
            "file, and name that instance"
        )
    tensors = [*module.parameters(), *module.buffers()]  # shared: they may take gigabytes
    module = module if own else copy.deepcopy(module, {id(t): t for t in tensors})
    notes = []
    for path, each in module.named_modules():
        for label, value in list(vars(each).items()):
            if isinstance(value, torch.Tensor):  # a plain attribute is a buffer, too
                delattr(each, label)
                each.register_buffer(label, value)
        if isinstance(each, nn.modules.batchnorm._NormBase) and (  # noqa: SLF001 - the base
            each.training and each.running_mean is not None
        ):
            each.running_mean = each.running_var = each.num_batches_tracked = None
            each.track_running_stats = False
            notes.append(
                f"{path or 'it'}: normalises by the batch; running statistics are left out"
            )
        if isinstance(each, nn.modules.dropout._DropoutNd) and (  # noqa: SLF001 - the base
            each.training and each.p > 0
        ):
            each.p = 0.0
            notes.append(f"{path or 'it'}: {LEFT_OUT}")
        if isinstance(each, nn.RNNBase | nn.MultiheadAttention) and each.training and each.dropout:
            each.dropout = 0.0
            notes.append(f"{path or 'it'}: {LEFT_OUT}")
    return module, notes


def _gradient(forward: Operation) -> Operation:
    """The operation's gradient.

    Raises:
        UserError: No result depends on a floating-point argument.
    """
    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in forward.examples]
        results = pytree.tree_leaves(forward.call(*fakes))
    smooth = [
        i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.is_floating_point()
    ]
    inputs = [i for i, e in enumerate(forward.examples) if e.dtype.is_floating_point]
    if not smooth or not inputs:
        raise UserError(f"{forward.name}: no floating-point result, or argument: no gradient")
    taken = {e.name for e in forward.examples} | TAKEN
    gradients = []
    for i in smooth:
        label = unique("grad" if len(smooth) == 1 else f"grad_{i}", taken)
        drawing = Drawing.normal(0.0, 1.0)
        gradients.append(Example(label, tuple(results[i].shape), results[i].dtype, drawing))

    def call(*tensors: torch.Tensor) -> object:
        outer, rest = tensors[: len(smooth)], list(tensors[len(smooth) :])
        with torch.enable_grad():
            for i in inputs:
                rest[i] = rest[i].detach().requires_grad_()
            found = pytree.tree_leaves(forward.call(*rest))
            wanted = [rest[i] for i in inputs]
            pairs = [
                (found[i], g) for i, g in zip(smooth, outer, strict=True) if found[i].requires_grad
            ]
            return torch.autograd.grad(
                [f for f, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
            )

    return Operation(
        f"{forward.name}_backward",
        f"Gradient of: {forward.summary}",
        f"the gradient of {forward.origin}",
        call,
        (*gradients, *forward.examples),
        forward.numbers,
        forward.notes,
    )
