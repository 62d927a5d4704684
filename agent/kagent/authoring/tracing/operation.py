"""Source of a task: a function over named tensors, and an example of a call."""

from __future__ import annotations

import builtins
import copy
import importlib.util
import inspect
import io
import keyword
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.errors import UserError
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from kagent.authoring.tracing.autocast import autocast_kept, autocast_refused
from kagent.authoring.tracing.devices import OnCPU, on_cpu_without_gpu
from kagent.authoring.tracing.drawing import Drawing, Drawn, observed, recorded
from kagent.authoring.tracing.dropout import LEFT_OUT

_TAKEN = frozenset({"case", "generator", "device", "dtype", "torch", "aten", "math", "wide"})
"""Names with a meaning of their own in a reference.py that is written."""
_IN_PARTS = "complex numbers are real ones there, with a last dimension of 2 (view_as_real)"
_LEAST_NAME = 2
_MOST_WORDS = 200
"""Characters of what an error says that are told."""


@dataclass(frozen=True, slots=True)
class Example:
    """One tensor of the example call.

    Attributes:
        name: Name of the argument.
        shape: Sizes in the example.
        dtype: Its dtype.
        drawing: How such tensors are drawn.
        parameter: Whether it belongs to a module: its parameter or buffer.
        list_name: Name of the argument, where that holds several tensors: those of equal shape have
            equal dimensions.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    drawing: Drawing
    parameter: bool = False
    list_name: str = ""


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


def load_module(path: Path) -> ModuleType:
    """Import a user's Python file.

    Raises:
        UserError: It cannot be imported.
    """
    if path.is_dir():
        raise UserError(f"{path}: a folder, where a Python file was expected")
    if not path.is_file():
        raise UserError(f"{path}: no such file: expected a Python file")
    folder = path.parent.resolve()
    package: list[str] = []  # which its relative imports are of
    root = folder
    while (root / "__init__.py").is_file():
        package.insert(0, root.name)
        root = root.parent
    name = ".".join([*package, f"kagent_source_{path.stem}"])
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    places = list(dict.fromkeys([str(folder), str(root)]))
    sys.path[:0] = places  # as `python FILE` has it
    try:
        with on_cpu_without_gpu(), autocast_kept():
            spec.loader.exec_module(module)
    except ModuleNotFoundError as e:
        text = f"install {e.name} for {sys.executable}, or import it where it is needed alone"
        raise UserError(f"{path}: {type(e).__name__}: {_first_line(e)}: {text}") from e
    except SyntaxError as e:
        raise UserError(_syntax_fault(e, path)) from e
    except (Exception, SystemExit) as e:  # whatever a user's file raises becomes one line
        raise UserError(f"{path}: {type(e).__name__}: {_first_line(e)}") from e
    finally:
        for place in places:
            sys.path.remove(place)
    return module


def named(module: ModuleType, name: str, path: Path) -> Any:
    """Find the definition of a name in a file, or of one with dots, as `RMSNorm.example`.

    Raises:
        UserError: It defines no such name.
    """
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        known = [
            n
            for n, v in vars(module).items()
            if callable(v) and not n.startswith("_") and not _imported(v, module)
        ]
        text = f"{path}: defines no {name!r}; there are {', '.join(known) or 'none'}"
        raise UserError(text) from None


def _imported(value: object, module: ModuleType) -> bool:
    """Whether a function or class is another file's."""
    defined = inspect.isclass(value) or inspect.isroutine(value)
    return defined and getattr(value, "__module__", None) != module.__name__


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
    written = name or _own_name(target)
    name = identifier(written, lower=True)
    if inspect.ismethod(target) and isinstance(target.__self__, nn.Module):
        target = _Method(target)
    if isinstance(target, torch.jit.ScriptModule):
        raise UserError(f"{_own_name(target)} is a scripted module: name the module it is made of")
    if not callable(target):
        raise UserError(f"{written} is {type(target).__name__}, expected a function or nn.Module")
    code = inspect.unwrap(target)
    if inspect.iscoroutinefunction(code) or inspect.isgeneratorfunction(code):
        raise UserError(
            f"{written} is async or yields, expected a function that returns its results"
        )
    given = _called(inputs) if callable(inputs) else observed(inputs)
    args, kwargs = _split(given)
    names, notes, forms = _argument_names(target, args, kwargs), [], []
    examples: list[Example] = []
    numbers: dict[str, int | float | bool] = {}
    taken = set(_TAKEN)
    for argument_name, value in zip(names, (*args, *kwargs.values()), strict=True):
        leaves, form = pytree.tree_flatten_with_path(value)
        places: list[object] = []
        for i, (path, leaf) in enumerate(leaves):
            keys = [k.key for k in path if isinstance(k, pytree.MappingKey)]
            label = "_".join([argument_name, *map(str, keys)] if keys else [argument_name, str(i)])
            label = argument_name if len(leaves) == 1 else label
            if isinstance(leaf, Drawn):
                label = _unique(identifier(label), taken)
                several = argument_name if len(leaves) > 1 else ""
                shape, dtype = in_parts(leaf.shape, leaf.dtype)
                examples.append(Example(label, shape, dtype, leaf.drawing, list_name=several))
                places.append(leaf)
                notes += [f"{label}: {_IN_PARTS}"] if leaf.dtype.is_complex else []
            else:
                if isinstance(leaf, bool | int | float):
                    numbers[_unique(identifier(label), taken)] = leaf
                elif leaf is not None:
                    notes.append(f"{argument_name} = {leaf!r} is part of the operation")
                places.append(leaf)
        forms.append((places, form))
    count = len(args)

    def rebuild(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as the target takes them."""
        rest = iter(tensors)
        values = [
            pytree.tree_unflatten(
                [_as(p.dtype, next(rest)) if isinstance(p, Drawn) else p for p in places], f
            )
            for places, f in forms
        ]
        return values[:count], dict(zip(kwargs, values[count:], strict=True))

    inputs_count = len(examples)
    if isinstance(target, nn.Module):
        registered = {path for path, _ in target.named_buffers()}
        target, more = _prepared(target, own=own)
        notes += more
        state = {**dict(target.named_parameters()), **dict(target.named_buffers())}
        for path, tensor in state.items():
            own_path = path.replace("_orig_mod.", "")  # of a compiled module
            label = _unique(identifier(own_path.replace(".", "_")), taken)
            seen = observed(tensor.detach(), parameter=True)
            assert isinstance(seen, Drawn)
            shape, dtype = in_parts(seen.shape, seen.dtype)
            examples.append(Example(label, shape, dtype, seen.drawing, parameter=True))
            notes += [f"{label}: {_IN_PARTS}"] if seen.dtype.is_complex else []
        module, dtypes = target, {path: t.dtype for path, t in state.items()}

        def call(*tensors: torch.Tensor) -> object:
            a, k = rebuild(tensors[:inputs_count])
            own = zip(dtypes.items(), tensors[inputs_count:], strict=True)
            given = {path: _as(dtype, t) for (path, dtype), t in own}
            values = dict(given)
            with _as_before(module):
                result = functional_call(module, values, tuple(a), k)
            for path, tensor in given.items():
                new = values[path]  # where the module put another tensor in a buffer's place
                if new is tensor or new is None or path not in registered or tensor.requires_grad:
                    continue
                if new.shape == tensor.shape:
                    tensor.copy_(new)
            return result

    else:

        def call(*tensors: torch.Tensor) -> object:
            a, k = rebuild(tensors)
            return target(*a, **k)

    if not examples:
        kinds = dict.fromkeys(type(leaf).__name__ for leaf in pytree.tree_leaves((args, kwargs)))
        raise UserError(
            f"the example's arguments are {', '.join(kinds) or 'none'}, expected a tensor, or a "
            "tuple, list or dict with tensors (torch.from_numpy makes one of an array)"
        )
    for example in examples:
        if str(example.dtype).removeprefix("torch.") not in ITEMSIZE:
            known = ", ".join(ITEMSIZE)
            raise UserError(f"{example.name} is {example.dtype}, expected one of {known}")

    def plain_call(*tensors: torch.Tensor) -> object:
        with _plainly():
            return call(*tensors)

    text = _summary(target, name)
    operation = Operation(
        name, text, origin or name, plain_call, tuple(examples), numbers, tuple(notes)
    )
    return _gradient(operation) if backward else operation


def in_parts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor as a task has it: a complex one with its parts."""
    return ((*shape, 2), dtype.to_real()) if dtype.is_complex else (shape, dtype)


def _as(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """An argument as the target takes it."""
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


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
            f"{_first_line(e)}): name an instance of it, as in `norm = {cls.__name__}(...)`, that "
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
            f"{_own_name(inputs)}(){place_of(e)} raised {type(e).__name__}: {_first_line(e)}. It "
            "is called without arguments, maybe without a GPU, and returns the example's arguments"
        ) from None


def place_of(error: BaseException) -> str:
    """Place in a user's file where it was raised: ` (norm.py, line 7)`; "" if nowhere there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if is_users_file(f.filename)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def is_users_file(filename: str) -> bool:
    """Whether it is the file that an operation was read from."""
    return "kagent_source_" in (_module_of(filename) or "")


def _module_of(filename: str) -> str | None:
    return next(
        (n for n, m in list(sys.modules.items()) if getattr(m, "__file__", None) == filename), None
    )


def _own_name(target: object) -> str:
    own = getattr(target, "__name__", type(target).__name__)
    return "operation" if own == "<lambda>" else str(own)


def _split(given: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def _argument_names(target: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> list[str]:
    """Names of the target's parameters, of positional arguments first.

    Raises:
        UserError: The target does not take so many.
    """
    function = target.forward if isinstance(target, nn.Module) else target
    if isinstance(function, torch.jit.ScriptFunction):
        schema: Any = function.schema
        return [a.name for a in schema.arguments][: len(args)] + list(kwargs)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return [f"x{i}" for i in range(len(args))] + list(kwargs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        raise UserError(f"{_own_name(target)}{signature}: {e} in the example call") from None
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(len(args) - len(names))]
        else:
            names.append(parameter.name)
    return names[: len(args)] + list(kwargs)


def identifier(text: str, *, lower: bool = False) -> str:
    """A name that Python takes, close to a text; in lower case with underscores if asked."""
    if lower:
        text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text).lower()
    text = re.sub(r"\W+", "_", text).strip("_")
    text = re.sub("__+", "_", text) or "x"
    if text[0].isdigit():
        text = f"n{text}"
    taken = keyword.iskeyword(text) or (lower and hasattr(builtins, text))
    return f"{text}_" if taken else text


def _unique(name: str, taken: set[str]) -> str:
    """The name, or the name with a number; it is taken from now on."""
    found, i = name, 1
    while found in taken or keyword.iskeyword(found):
        i += 1
        found = f"{name}_{i}"
    taken.add(found)
    return found


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
    taken = {e.name for e in forward.examples} | _TAKEN
    gradients = []
    for i in smooth:
        label = _unique("grad" if len(smooth) == 1 else f"grad_{i}", taken)
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


def _syntax_fault(error: SyntaxError, path: Path) -> str:
    """'bad.py, line 21: invalid syntax: def f(x': of the file, or of one that it imports."""
    own = error.filename is None or Path(error.filename).resolve() == path.resolve()
    file = path if own else error.filename
    line = f", line {error.lineno}" if error.lineno else ""
    source = " ".join((error.text or "").split())
    shown = f": {source[:_MOST_WORDS]}" if source else ""
    return f"{file}{line}: {error.msg}{shown}"


def _first_line(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return line if len(line) <= _MOST_WORDS else f"{line[:_MOST_WORDS]} [...]"
