"""The call of an example, taken apart: its tensors, its numbers, and the way back to arguments."""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.errors import UserError
from torch import nn

from kagent.authoring.tracing.drawing import Drawing, Drawn, observed

TAKEN = frozenset({"case", "generator", "device", "dtype", "torch", "aten", "math", "wide"})
"""Names with a meaning of their own in a reference.py that is written."""
_IN_PARTS = "complex numbers are real ones there, with a last dimension of 2 (view_as_real)"
_IN_ORDER = (
    "its dimensions lie in another order in the example's memory (a transposed or an expanded "
    "tensor); in the task's they follow each other. For that order, give the tensor as it lies in "
    "memory, and transpose it in the function"
)


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


@dataclass
class ExampleCall:
    """Arguments of a call, taken apart.

    Attributes:
        examples: The tensors, those of a module last.
        numbers: Plain numbers and flags by name.
        notes: What the user should know, a line each.
    """

    examples: list[Example] = field(default_factory=list)
    numbers: dict[str, int | float | bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _taken: set[str] = field(default_factory=lambda: set(TAKEN))
    _positional: list[_Argument] = field(default_factory=list)
    _by_name: dict[str, _Argument] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Any, given: object) -> ExampleCall:
        """Take apart a tensor, a tuple or list of arguments, or a dict of them by name.

        Raises:
            UserError: The target does not take so many.
        """
        call = cls()
        args, kwargs = _split(given)
        names = _argument_names(target, args, kwargs)
        pairs = zip(names[: len(args)], args, strict=True)
        call._positional += [call._argument(name, value) for name, value in pairs]
        call._by_name |= {key: call._argument(key, value) for key, value in kwargs.items()}
        return call

    def add_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Add a module's parameters and buffers, by their paths."""
        for path, tensor in state.items():
            own_path = path.replace("_orig_mod.", "")  # of a compiled module
            label = self._unique(own_path.replace(".", "_"))
            seen = observed(tensor.detach(), parameter=True)
            assert isinstance(seen, Drawn)
            self._add(label, seen, parameter=True)

    def refuse_odd(self) -> None:
        """Make sure that there are tensors, of dtypes that a task can have.

        Raises:
            UserError: There is none, or one of another dtype.
        """
        if not self.examples:
            arguments = (*self._positional, *self._by_name.values())
            leaves = [leaf for argument in arguments for leaf in argument.leaves]
            kinds = dict.fromkeys(type(leaf).__name__ for leaf in leaves)
            raise UserError(
                f"the example's arguments are {', '.join(kinds) or 'none'}, expected a tensor, or "
                "a tuple, list or dict with tensors (torch.from_numpy makes one of an array)"
            )
        for example in self.examples:
            if str(example.dtype).removeprefix("torch.") not in ITEMSIZE:
                known = ", ".join(ITEMSIZE)
                raise UserError(f"{example.name} is {example.dtype}, expected one of {known}")

    def arguments(self, tensors: Iterable[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as the target takes them, with these tensors in the places of the example's."""
        rest = iter(tensors)
        args = [argument.filled(rest) for argument in self._positional]
        return args, {key: argument.filled(rest) for key, argument in self._by_name.items()}

    def _argument(self, name: str, value: object) -> _Argument:
        found, form = pytree.tree_flatten_with_path(value)
        for i, (path, leaf) in enumerate(found):
            keys = [k.key for k in path if isinstance(k, pytree.MappingKey)]
            label = "_".join([name, *map(str, keys)] if keys else [name, str(i)])
            label = name if len(found) == 1 else label
            if isinstance(leaf, Drawn):
                self._add(self._unique(label), leaf, list_name=name if len(found) > 1 else "")
            elif isinstance(leaf, bool | int | float):
                self.numbers[self._unique(label)] = leaf
            elif leaf is not None:
                self.notes.append(f"{name} = {leaf!r} is part of the operation")
        return _Argument([leaf for _, leaf in found], form)

    def _add(
        self, label: str, drawn: Drawn, *, parameter: bool = False, list_name: str = ""
    ) -> None:
        shape, dtype = in_parts(drawn.shape, drawn.dtype)
        self.examples.append(Example(label, shape, dtype, drawn.drawing, parameter, list_name))
        if drawn.dtype.is_complex:
            self.notes.append(f"{label}: {_IN_PARTS}")
        if not drawn.in_order:
            self.notes.append(f"{label}: {_IN_ORDER}")

    def _unique(self, text: str) -> str:
        return unique(identifier(text), self._taken)


@dataclass(frozen=True)
class _Argument:
    """Tensors and other values of one argument, and how they make it up."""

    leaves: list[object]
    form: Any

    def filled(self, tensors: Iterator[torch.Tensor]) -> Any:
        values = [
            as_taken(leaf.dtype, next(tensors)) if isinstance(leaf, Drawn) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(values, self.form)


def in_parts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor as a task has it: a complex one with its parts."""
    return ((*shape, 2), dtype.to_real()) if dtype.is_complex else (shape, dtype)


def as_taken(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """An argument as the target takes it."""
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor


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


def unique(name: str, taken: set[str]) -> str:
    """The name, or the name with a number; it is taken from now on."""
    found, i = name, 1
    while found in taken or keyword.iskeyword(found):
        i += 1
        found = f"{name}_{i}"
    taken.add(found)
    return found


def own_name(target: object) -> str:
    """Name of a function, or of an object's type."""
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
        raise UserError(f"{own_name(target)}{signature}: {e} in the example call") from None
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(len(args) - len(names))]
        else:
            names.append(parameter.name)
    return names[: len(args)] + list(kwargs)
