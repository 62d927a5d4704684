"""Distributions of an example call's tensors, so that a task draws others like them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from kagent.authoring.tracing.devices import OnCPU, on_cpu_without_gpu
from kagent.authoring.tracing.graph import MOST_CONSTANT, ancestors, is_written, quiet

Kind: TypeAlias = Literal[
    "uniform", "normal", "integers", "chance", "lower", "upper", "counted", "code"
]
_CONVERSIONS = frozenset(
    {torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.view.default}  # noqa: SLF001 - torch's own name
)
_FILLED = {
    torch.ops.aten.zeros.default: 0.0,
    torch.ops.aten.zeros_like.default: 0.0,
    torch.ops.aten.ones.default: 1.0,
    torch.ops.aten.ones_like.default: 1.0,
    torch.ops.aten.full.default: None,
    torch.ops.aten.full_like.default: None,
}
"""Operations that make all elements one number: which, or None where it is their second argument.
"""
_UNSET = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default})
"""Operations that leave all elements as memory has them: results that a call is to write."""
_LIKE = {
    torch.ops.aten.rand_like.default: torch.ops.aten.rand.default,
    torch.ops.aten.randn_like.default: torch.ops.aten.randn.default,
    torch.ops.aten.randint_like.default: torch.ops.aten.randint.default,
    torch.ops.aten.randint_like.low_dtype: torch.ops.aten.randint.low,
}
_MOST_LOOKED_AT = 1 << 20
"""Elements of a tensor that are looked at."""
_UNIFORM_SPREAD = 0.3
"""A uniform distribution's deviation is 0.289 of its width; a normal one's, of a thousand values,
about 0.15."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A distribution.

    Attributes:
        kind: "uniform" from `a` to `b`; "normal" with mean `a` and deviation `b`; "integers" from
            `a` to below `b`; "chance", 1 with probability `a`, else 0; "lower" and "upper",
            matrices with `a` in that triangle and `b` elsewhere; "counted", `a` and `b` more for
            each further element; or "code" that was recorded.
        a: First number.
        b: Second number.
        graph: What was recorded, where `kind` is "code".
        node: The node of `graph` that is the tensor.
        least_step: Least difference of neighbours in a vector of whole numbers that was looked at:
            it is 0 where offsets have empty parts. None of all else.
    """

    kind: Kind
    a: float = 0.0
    b: float = 1.0
    graph: GraphModule | None = None
    node: Node | None = None
    least_step: int | None = None

    @classmethod
    def normal(cls, mean: float, deviation: float) -> Drawing:
        """A normal distribution."""
        return cls("normal", mean, deviation)

    @property
    def flags(self) -> bool:
        """Whether it is 0 or 1 everywhere, as masks and targets are: no multiple has a meaning."""
        if self.kind == "chance":
            return True
        node = self.node
        while node is not None and node.target in _CONVERSIONS:
            node = node.args[0]  # type: ignore[assignment]
        return node is not None and node.meta["val"].dtype == torch.bool

    def words(self) -> str:
        """The distribution in words."""
        a, b = f"{self.a:.4g}", f"{self.b:.4g}"
        return {
            "uniform": f"evenly from {a} to {b}",
            "normal": f"normal with mean {a} and deviation {b}",
            "integers": f"whole numbers from {self.a:.0f} to {self.b - 1:.0f}",
            "chance": f"1 with probability {a}, else 0",
            "lower": f"{a} in the lower triangle, {b} elsewhere",
            "upper": f"{a} in the upper triangle, {b} elsewhere",
            "counted": f"{a}, and {b} more for each further element",
            "code": "as the example's own code draws it",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tensor of the example call: what is known of it instead of its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    drawing: Drawing
    in_order: bool = True  # rows follow each other in memory, as in a task, with gaps or without


def observed(value: object, *, parameter: bool = False) -> Any:
    """The value with a `Drawn` for each of its tensors, by what they hold.

    Args:
        value: A tensor, or tuples, lists and dicts of tensors and others.
        parameter: Whether they belong to a module.

    Numbers that are all the same, such as a bias of zeros, are drawn around their value: else
    nothing shows that a kernel reads them. Arguments of zeros get no numbers below 0, and matrices
    of ones, which may be masks, stay.
    """

    def look(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        drawing = _look(leaf, parameter=parameter)
        return Drawn(tuple(leaf.shape), leaf.dtype, drawing, _in_order(leaf))

    return pytree.tree_map(look, value)


def _in_order(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    return strides == sorted(strides, reverse=True) and 0 not in strides


def _look(tensor: torch.Tensor, *, parameter: bool) -> Drawing:
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.numel():
        return Drawing.normal(0.0, 1.0)
    if tensor.is_complex():  # a task has its parts
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point() and tensor.itemsize == 1:  # of which torch computes little
        tensor = tensor.float()
    structure = _structure(tensor.detach())
    if structure is not None:
        return structure
    flat = tensor.detach().reshape(-1)[:_MOST_LOOKED_AT].cpu()
    if tensor.dtype == torch.bool:
        return Drawing("chance", round(float(flat.float().mean()), 3))
    if not tensor.dtype.is_floating_point:
        step = int(flat.long().diff().min()) if tensor.dim() == 1 and len(flat) > 1 else None
        return Drawing("integers", int(flat.min()), int(flat.max()) + 1, least_step=step)
    wide = flat.double()
    wide = wide[torch.isfinite(wide)]
    if not wide.numel():
        return Drawing.normal(0.0, 1.0)
    low, high = float(wide.min()), float(wide.max())
    if low == high:
        return _around(low, tensor.dim(), parameter=parameter)
    if bool(((wide == 0) | (wide == 1)).all()):
        return Drawing("chance", round(float(wide.mean()), 3))
    mean, deviation = float(wide.mean()), float(wide.std(correction=0))
    if low >= 0 or deviation > _UNIFORM_SPREAD * (high - low) * 0.9:
        return Drawing("uniform", _short(low), _short(high))
    mean = 0.0 if abs(mean) < 4 * deviation / wide.numel() ** 0.5 else mean
    return Drawing.normal(_short(mean), _short(deviation))


def _around(value: float, dims: int, *, parameter: bool = False) -> Drawing:
    """Numbers around the one that a tensor has everywhere."""
    if value == 1 and dims >= 2 and not parameter:  # may be a mask
        return Drawing("uniform", 1.0, 1.0)
    around = 0.5 * abs(value) or 0.1
    least = value - around if value or parameter else 0.0  # zeros may be sums of squares
    return Drawing("uniform", _short(least), _short(value + around))


def _structure(tensor: torch.Tensor) -> Drawing | None:
    """The pattern of a tensor that is a mask or counts; None if it is neither."""
    if tensor.dim() >= 2 and min(tensor.shape[-2:]) > 1:
        corners = tensor[..., -1, 0].flatten()[0], tensor[..., 0, -1].flatten()[0]
        low, high = (float(c) for c in corners)
        begin = tensor[..., :8, :8].flatten(0, -3) if tensor.dim() > 2 else tensor[None, :8, :8]
        if low != high and len(torch.unique(begin[:1])) <= 2:
            for lower in (True, False):
                inside = torch.ones(tensor.shape[-2:], dtype=torch.bool, device=tensor.device)
                inside = inside.tril() if lower else inside.triu()
                a, b = (low, high) if lower else (high, low)
                if bool((tensor == torch.where(inside, a, b)).all()):
                    return Drawing("lower" if lower else "upper", a, b)
    if tensor.numel() > 2 and tensor.dtype != torch.bool and tensor.numel() == tensor.shape[-1]:
        flat = tensor.flatten().double()
        step = float(flat[1] - flat[0])
        places = torch.arange(len(flat), device=flat.device)
        if step and bool((flat == flat[0] + step * places).all()):
            return Drawing("counted", float(flat[0]), step)
    return None


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def recorded(function: Callable[[], object]) -> Any:
    """Call a function without parameters. Its result, a tuple if it yields, has a `Drawn` for each
    tensor.

    The function runs without memory for its tensors: those of a benchmark may take gigabytes. Where
    that cannot be, it runs as it is.
    """
    form: list[Any] = []

    def given() -> object:
        value = function()
        return tuple(value) if isinstance(value, Iterator) else value

    def tensors() -> list[torch.Tensor]:
        value = given()
        leaves, spec = pytree.tree_flatten(value)
        form[:] = [leaves, spec]
        return [x for x in leaves if isinstance(x, torch.Tensor)]

    try:
        with quiet(), OnCPU():
            graph = make_fx(tensors, tracing_mode="fake", _allow_non_fake_inputs=True)()
    except Exception:  # noqa: BLE001 - whatever fake tensors cannot do
        with on_cpu_without_gpu():
            return observed(given())
    _drop_generators(graph)
    _drop_likes(graph)
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    nodes = iter([_in_the_end(n, output) for n in pytree.tree_leaves(output.args[0])])
    leaves, spec = form
    found = [
        Drawn(tuple(x.shape), x.dtype, _of_node(graph, next(nodes)), _in_order(x))
        if isinstance(x, torch.Tensor)
        else x
        for x in leaves
    ]
    return pytree.tree_unflatten(found, spec)


def _drop_generators(graph: GraphModule) -> None:
    """Let random operations that were given a torch.Generator draw as those without: a task has a
    generator of its own for each draw.
    """
    for node in graph.graph.nodes:
        if "generator" not in node.kwargs:
            continue
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "generator"}
        # randn.generator is randn.default with one, randint.low_generator is randint.low.
        overload = node.target._overloadname.removesuffix("generator").removesuffix("_")  # noqa: SLF001 - torch's own name
        node.target = getattr(node.target.overloadpacket, overload or "default")
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.graph.erase_node(node)


def _drop_likes(graph: GraphModule) -> None:
    """Let `rand_like` and its kin, which take no generator, be those that are given a shape."""
    for node in graph.graph.nodes:
        if node.target not in _LIKE:
            continue
        value = node.meta["val"]
        node.target = _LIKE[node.target]
        node.args = (*node.args[1:], list(value.shape))
        node.kwargs = {"dtype": value.dtype}


def drawn_by(drawing: Drawing) -> torch.Tensor:
    """A tensor as recorded code draws it, at the example's size."""
    assert drawing.graph is not None
    assert drawing.node is not None
    interpreter = Interpreter(drawing.graph)
    needed = ancestors(drawing.node)
    for node in drawing.graph.graph.nodes:
        if node in needed:
            interpreter.env[node] = interpreter.run_node(node)
    drawn: torch.Tensor = interpreter.env[drawing.node]
    return drawn


def by_values(drawing: Drawing) -> Drawing:
    """Replace recorded code that cannot be drawn at other sizes by the
    distribution of the values that it gives.
    """
    return _look(drawn_by(drawing), parameter=False)


def _in_the_end(node: Node, output: Node) -> Node:
    """A node with the values that its result has in the end, of complex numbers their parts: it
    may be written through a view.
    """
    aten = torch.ops.aten
    ways = [aten.clone.default] if is_written(node) else []
    for way in [*ways, *([aten.view_as_real.default] if node.meta["val"].is_complex() else [])]:
        value = node.meta["val"]
        with node.graph.inserting_before(output):
            node = node.graph.call_function(way, (node,))
        with value.fake_mode:
            node.meta["val"] = way(value)
    return node


def _of_node(graph: GraphModule, node: Node) -> Drawing:
    aten = torch.ops.aten
    if node.op == "call_function":
        if node.target is aten.rand.default:
            return Drawing("uniform", 0.0, 1.0)
        if node.target is aten.randn.default:
            return Drawing.normal(0.0, 1.0)
        if node.target is aten.randint.default:
            return Drawing("integers", 0, node.args[0])  # type: ignore[arg-type]
        if node.target is aten.randint.low:
            return Drawing("integers", node.args[0], node.args[1])  # type: ignore[arg-type]
    if node.target in _UNSET and not is_written(node):
        wide = node.meta["val"].is_floating_point()
        return Drawing.normal(0.0, 1.0) if wide else Drawing("integers", 0, 1)
    same = _value_everywhere(node)
    if same is not None:
        return _around(same, node.meta["val"].dim())
    drawing = Drawing("code", graph=graph, node=node)
    held = [getattr(graph, str(n.target)) for n in ancestors(node) if n.op == "get_attr"]
    number = node.meta["val"].is_floating_point() and node.meta["val"].numel() == 1
    # Made before, or of numbers of Python or numpy: one alone, or too many to write down.
    if node.op == "get_attr" or (held and number) or any(t.numel() > MOST_CONSTANT for t in held):
        return by_values(drawing)
    return drawing


def _value_everywhere(node: Node) -> float | None:
    """The number that `torch.zeros` and its kin make all of a tensor of floating-point numbers."""
    made = node
    while made.target in _CONVERSIONS:
        made = made.args[0]  # type: ignore[assignment]
    if made.target not in _FILLED or is_written(made) or not node.meta["val"].is_floating_point():
        return None
    value = _FILLED[made.target]
    value = made.args[1] if value is None else value  # type: ignore[assignment]
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
