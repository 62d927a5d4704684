"""Python text of a recorded graph: one line per operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.graph import MOST_CONSTANT, ancestors

_KNOWN = frozenset({"aten", "prims", "quantized", "mkldnn"})
"""Namespaces of operations that each process with torch has."""
_DROPPED = frozenset({"pin_memory", "layout"})
_SKIPPED = frozenset({"_assert_scalar", "_assert_async", "sym_constrain_range_for_size"})
_RANDOM = {"rand", "randn", "randint", "randperm", "normal", "uniform_", "normal_", "bernoulli_"}
_RANDOM |= {"bernoulli", "rand_like", "randn_like", "randint_like", "random_", "exponential_"}
_RANDOM |= {"multinomial", "poisson", "binomial", "geometric_", "log_normal_", "cauchy_"}
_COUNTS: Mapping[str, Sequence[int]] = {
    "arange.default": (0,),
    "arange.start": (1,),
    "arange.start_step": (1,),
    "linspace.default": (2,),
    "logspace.default": (2,),
    "randperm.default": (0,),
    "eye.default": (0,),
    "eye.m": (0, 1),
    "slice.Tensor": (2, 3),
}
"""Arguments that are numbers of elements, by operation."""
_BOUNDS: Mapping[str, Sequence[int]] = {
    "randint.default": (0,),
    "randint.low": (0, 1),
    "random_.to": (1,),
    "random_.from": (1, 2),
    "clamp.default": (1, 2),
    "clamp_.default": (1, 2),
    "clamp_min.default": (1,),
    "clamp_max.default": (1,),
    "remainder.Scalar": (1,),
    "remainder_.Scalar": (1,),
    "fmod.Scalar": (1,),
    "full.default": (1,),
    "fill.Scalar": (1,),
    "fill_.Scalar": (1,),
    "masked_fill.Scalar": (2,),
    "masked_fill_.Scalar": (2,),
}
"""Arguments between which whole numbers lie, by operation."""
_CHOOSING = frozenset(
    {
        torch.ops.aten.where.Scalar,
        torch.ops.aten.where.ScalarSelf,
        torch.ops.aten.where.ScalarOther,
    }
)
"""Operations that choose from plain numbers."""
_PLAIN_RANDOM = frozenset({"rand", "randn", "randint", "randperm"})  # that take a generator


class CodeWriter:
    """Writes the lines of a graph."""

    def __init__(
        self,
        graph: GraphModule,
        *,
        names: Mapping[str, str],
        taken: set[str],
        size: Callable[[Any], str],
        sizes: Callable[[Sequence[int]], str] = lambda sizes: str(list(sizes)),
        count: Callable[[int], str] = str,
        bound: Callable[[int], str] = str,
        device: str,
        dtype: Callable[[torch.dtype], str],
        generator: str | None = None,
    ) -> None:
        """Prepare to write a graph.

        Args:
            graph: The graph.
            names: Names of its placeholders.
            taken: Names that lines must not use.
            size: Text of a SymInt, SymFloat or SymBool.
            sizes: Text of a list of plain whole numbers, which may be a shape.
            count: Text of a plain whole number that says how many elements a new tensor has.
            bound: Text of a plain whole number that others are drawn below, or held to.
            device: Text of the device on which tensors are made.
            dtype: Text of a dtype.
            generator: Text of the generator that random operations use; None where there must be
                none.
        """
        self._graph = graph
        self._names = dict(names)
        self._taken = set(taken) | set(names.values())
        self._size = size
        self._sizes = sizes
        self._count = count
        self._bound = bound
        self._device = device
        self._dtype = dtype
        self._generator = generator

    def lines(self, *wanted: Node) -> Iterator[str]:
        """Lines of all nodes, or of those that some nodes need.

        Raises:
            AuthoringError: Something cannot be written down.
        """
        needed = set().union(*map(ancestors, wanted)) if wanted else None
        for node in self._graph.graph.nodes:
            if needed is not None and node not in needed:
                continue
            if node.op in ("placeholder", "output") or isinstance(
                node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool
            ):
                continue
            text = self._line(node)
            if text is not None:
                self._names[node.name] = self._name(node.name)
                yield f"{self._names[node.name]} = {text}"

    def name_of(self, node: Node) -> str:
        """The variable that holds a node's value."""
        return self._value(node)

    def _name(self, name: str) -> str:
        found = name.lstrip("_") or "x"
        while found in self._taken:
            found += "_"
        self._taken.add(found)
        return found

    def _line(self, node: Node) -> str | None:
        if node.op == "get_attr":
            return self._constant(node)
        target: Any = node.target
        if target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - torch's own name
            if node.users:
                raise AuthoringError(f"{target} cannot be written down as an operation of torch")
            return None
        name = target.overloadpacket.__name__
        if name in _SKIPPED:
            return None
        args = [self._value(a) for a in node.args]
        full_name = f"{name}.{target._overloadname}"  # noqa: SLF001 - torch's own name
        for places, text_of in ((_COUNTS, self._count), (_BOUNDS, self._bound)):
            if places is _BOUNDS and not _is_whole(node):
                continue
            for place in places.get(full_name, ()):
                number = node.args[place] if place < len(node.args) else None
                if type(number) is int:
                    args[place] = text_of(number)
        if target is torch.ops.aten.view.dtype and node.meta["val"].dtype != _dtype_read(node):
            if self._other(_dtype_read(node)) is not None:
                raise AuthoringError(
                    f"it reinterprets bits (x.view({node.args[1]}) of {_dtype_read(node)}), which "
                    "a reference in float64 has not: pass the whole numbers as an argument"
                )
            args[1] = str(node.args[1])
        to = self._promoted_to(node)
        if to is not None:
            args = [
                text if _tensor_of(argument) is None else f"{text}.to({to})"
                for text, argument in zip(args, node.args, strict=True)
            ]
        kwargs = {k: self._value(v) for k, v in node.kwargs.items() if k not in _DROPPED}
        kwargs = {k: v for k, v in kwargs.items() if v != "None"}
        made = self._made_in(node)
        if made is not None:
            kwargs["dtype"] = made
        function = f"aten.{name}.{target._overloadname}"  # noqa: SLF001 - torch's own name
        chosen = self._chosen_in(node)
        if chosen is not None:  # numbers as tensors of that dtype
            args = [
                f"torch.full((), {text}, dtype={chosen}, device={self._device})"
                if isinstance(argument, int | float)
                else text
                for text, argument in zip(args, node.args, strict=True)
            ]
            function = "aten.where.self"
        if target.namespace not in _KNOWN:
            raise AuthoringError(
                f"it calls {target.namespace}::{name}, an operation that torch has not by itself: "
                "call the function that it runs, which torch.library.custom_op takes"
            )
        if target.namespace != "aten":
            function = f"torch.ops.{target.namespace}.{name}.{target._overloadname}"  # noqa: SLF001
        if name in _RANDOM:
            if self._generator is None:
                raise AuthoringError(
                    f"it draws random numbers (aten.{name}): pass them as an argument"
                )
            kwargs["generator"] = self._generator
            if name in _PLAIN_RANDOM:
                function = f"torch.{name}"
                kwargs.setdefault("device", self._device)
            elif name.endswith("_like"):
                raise AuthoringError(f"aten.{name} takes no generator")
        text = ", ".join([*args, *(f"{k}={v}" for k, v in kwargs.items())])
        return f"{function}({text})"

    def _promoted_to(self, node: Node) -> str | None:
        """Text of the dtype that an operation's whole numbers are made first, where torch would
        make them its default dtype and the text names another. None where they stay.
        """
        value, target = _tensor_of(node), node.target
        if value is None or not value.is_floating_point() or target in _CHOOSING:
            return None
        if any(t.is_floating_point() or t.is_complex() for t in _tensors_read(node)):
            return None
        if torch.Tag.pointwise not in target.tags:  # type: ignore[union-attr]
            return None
        return self._other(value.dtype)

    def _made_in(self, node: Node) -> str | None:
        """Text of the dtype of floating-point numbers that an operation makes of no tensor, where
        it names none and the text of torch's default is another. None where it stays.
        """
        value, target = _tensor_of(node), node.target
        if value is None or not value.is_floating_point() or _tensors_read(node):
            return None
        names = [a.name for a in target._schema.arguments]  # type: ignore[union-attr] # noqa: SLF001 - torch's own name
        if "dtype" not in names or node.kwargs.get("dtype") is not None:
            return None
        return self._other(value.dtype)

    def _chosen_in(self, node: Node) -> str | None:
        """Text of the dtype of plain numbers that a condition chooses from, as `_made_in`."""
        value = _tensor_of(node)
        if node.target not in _CHOOSING or value is None or not value.is_floating_point():
            return None
        if any(t.is_floating_point() for t in _tensors_read(node)):
            return None
        return self._other(value.dtype)

    def _other(self, dtype: torch.dtype) -> str | None:
        """The text of a dtype, where it is not that dtype's own."""
        text = self._dtype(dtype)
        return None if text == str(dtype) else text

    def _constant(self, node: Node) -> str:
        value = getattr(self._graph, str(node.target))
        if isinstance(value, torch.Generator):
            raise AuthoringError("it draws random numbers with a generator: pass the numbers")
        if not isinstance(value, torch.Tensor) or value.numel() > MOST_CONSTANT:
            shape = list(getattr(value, "shape", []))
            raise AuthoringError(
                f"it holds a tensor {shape} that is no argument: make it one, or a parameter or "
                "buffer of the module (nn.ModuleList holds modules, a plain list does not)"
            )
        made = f"dtype={self._dtype(value.dtype)}, device={self._device}"
        return f"torch.tensor({_numbers(value.tolist())}, {made})"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            symbol = value.meta.get("val")
            if isinstance(symbol, torch.SymInt | torch.SymFloat | torch.SymBool):
                return self._size(symbol)
            return self._names[value.name]
        if value is None or isinstance(value, bool | int | float):
            return _numbers(value)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self._size(value)
        if isinstance(value, torch.dtype):
            return self._dtype(value)
        if isinstance(value, torch.device):
            return self._device
        if isinstance(value, list | tuple):
            if value and all(type(v) is int for v in value):
                return self._sizes(value)
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, slice):
            return f"slice({value.start}, {value.stop}, {value.step})"
        if isinstance(value, str | torch.layout | torch.memory_format):
            return repr(value)
        raise AuthoringError(f"a constant {type(value).__name__} cannot be written down")


def _tensor_of(argument: Any) -> torch.Tensor | None:
    """The tensor that a node stands for."""
    value = argument.meta.get("val") if isinstance(argument, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_whole(node: Node) -> bool:
    """Whether a node is a tensor of whole numbers."""
    value = _tensor_of(node)
    return value is not None and not value.is_floating_point() and not value.is_complex()


def _dtype_read(node: Node) -> torch.dtype:
    """Dtype of the one tensor that an operation reads."""
    return _tensors_read(node)[0].dtype


def _tensors_read(node: Node) -> list[torch.Tensor]:
    """The tensors that an operation reads: sizes are none."""
    return [t for t in map(_tensor_of, node.all_input_nodes) if t is not None]


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_numbers, value))}]"
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f'float("{value}")'
    return repr(value)
