"""Regions of a model's graphs, replaced by a library's operators; a part of the patch's own file.

The outermost module's forward is captured: Dynamo and AOTAutograd make graphs of ATen operations of
it, one of the forward and one of the backward direction. In them, operations that are connected as
those of a region become one call. What is left runs as it was captured, also where nothing is
replaced, so that two configurations differ in the region alone. It needs torch and nothing else.
"""

# ruff: noqa: SLF001 - torch names what a compiler needs with underscores

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch.partitioners import default_partition
from torch.fx.graph import _BoxedCodeGen

_PLACES = {"device", "layout", "pin_memory"}  # arguments that follow the tensors'


class Pattern:
    """A function of tensors that calls ATen operations, as a graph that is searched for.

    Args:
        name: Of the site.
        function: Its operations. Parameters may be keyword-only.

    Raises:
        ValueError: It does something else.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        try:
            graph = torch.fx.symbolic_trace(function).graph
        except Exception as e:  # noqa: BLE001 - whatever a library's function raises
            raise ValueError(f"{name}: its operations cannot be followed: {e}") from None
        graph.eliminate_dead_code()
        nodes = list(graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        self.operations = [n for n in nodes if _is_operation(n)]
        results = nodes[-1].args[0]
        self.several = isinstance(results, tuple | list)
        self.results = list(results) if self.several else [results]
        inner = {*self.operations, *(n for n in nodes if _is_part(n))}
        if not self.operations or any(n not in inner for n in self.results):
            raise ValueError(f"{name}: expected a function that returns results of ATen operations")
        self.ends = [n for n in self.operations if not _users(n) & set(self.operations)]
        strange = [n for n in nodes if n.op in ("call_function", "call_module") and n not in inner]
        for node in strange:  # sizes are fine: arithmetic of Python's
            if getattr(node.target, "__module__", "") not in ("_operator", "builtins", "math"):
                raise ValueError(f"{name}: {node.target} is no ATen operation")

    def call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of positional tensors in the place of the operations."""
        names = [n.name for n in self.inputs]

        def region(*tensors: torch.Tensor) -> Any:
            return function(**dict(zip(names, tensors, strict=True)))

        return region


def _is_operation(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def _is_part(node: torch.fx.Node) -> bool:
    """One of several results of an operation."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], torch.fx.Node)
        and _is_operation(node.args[0])
    )


def _users(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Operations that read it, also by one of its parts."""
    return {u for n in node.users for u in (_users(n) if _is_part(n) else (n,))}


class _Match:
    """A region's nodes, and a graph's in their places."""

    def __init__(self) -> None:
        self.bound: dict[torch.fx.Node, torch.fx.Node] = {}
        self.sizes: list[tuple[torch.fx.Node, Any]] = []  # expressions, and what is there

    def copy(self) -> _Match:
        other = _Match()
        other.bound, other.sizes = dict(self.bound), list(self.sizes)
        return other

    def unify(self, wanted: Any, given: Any) -> bool:
        if isinstance(wanted, torch.fx.Node):
            return self._unify_node(wanted, given)
        if isinstance(wanted, list | tuple):
            return (
                isinstance(given, list | tuple)
                and len(wanted) == len(given)
                and all(map(self.unify, wanted, given))
            )
        return (
            not isinstance(given, torch.fx.Node)
            and type(wanted) is type(given)
            and (
                wanted == given or (wanted != wanted and given != given)  # NaN is the same
            )
        )

    def _unify_node(self, wanted: torch.fx.Node, given: Any) -> bool:
        if wanted in self.bound:
            return self.bound[wanted] is given
        if not (wanted.op == "placeholder" or _is_operation(wanted) or _is_part(wanted)):
            self.sizes.append((wanted, given))
            return True
        if not isinstance(given, torch.fx.Node):
            return False
        if wanted.op == "placeholder":
            if not isinstance(given.meta.get("val"), torch.Tensor):
                return False
        elif given.target is not wanted.target or given in self.bound.values():
            return False
        self.bound[wanted] = given
        if wanted.op == "placeholder":
            return True
        if _is_part(wanted):
            return wanted.args[1] == given.args[1] and self.unify(wanted.args[0], given.args[0])
        there = _arguments(given)
        return all(self.unify(v, there[k]) for k, v in _arguments(wanted).items())

    def same_sizes(self) -> bool:
        """Whether sizes that the region computes from its inputs are those of the graph."""
        known: dict[Any, Any] = {}

        def value(node: Any) -> Any:
            if not isinstance(node, torch.fx.Node):
                return node
            if node in self.bound:
                return self.bound[node].meta["val"]
            if node not in known:
                args = torch.fx.node.map_arg(node.args, value)
                if node.op == "call_method":
                    known[node] = getattr(args[0], str(node.target))(*args[1:])
                else:
                    assert callable(node.target)
                    known[node] = node.target(*args)
            return known[node]

        for wanted, given in self.sizes:
            there = given.meta.get("val") if isinstance(given, torch.fx.Node) else given
            found = value(wanted)
            if isinstance(found, torch.Size):
                found, there = tuple(found), tuple(there or ())
            if not isinstance(found, torch.device) and found != there:
                return False
        return True


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """All arguments by name, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    found: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name in _PLACES:
            continue
        default = argument.default_value if argument.has_default_value() else None
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, default)
        whole = "float" in str(argument.type) and type(given) is int
        found[argument.name] = float(given) if whole else given  # type: ignore[arg-type]
    return found


def matches(graph: torch.fx.Graph, region: Pattern) -> Iterator[dict[torch.fx.Node, torch.fx.Node]]:
    """Find the region's places in a graph that does not change meanwhile; they may overlap."""
    nodes = list(graph.nodes)

    def search(ends: Sequence[torch.fx.Node], so_far: _Match) -> Iterator[_Match]:
        if not ends:
            yield so_far
            return
        for node in nodes:
            if node.target is ends[0].target:
                found = so_far.copy()
                if found.unify(ends[0], node):
                    yield from search(ends[1:], found)

    for found in search(region.ends, _Match()):
        for wanted in region.results:  # parts that nothing in the region reads
            _bind_part(found, wanted)
        if found.same_sizes() and _can_be_one(found.bound, region):
            yield found.bound


def _bind_part(found: _Match, wanted: torch.fx.Node) -> None:
    if wanted in found.bound or not _is_part(wanted):
        return
    whole = found.bound[wanted.args[0]]  # type: ignore[index]
    for user in whole.users:
        if user.target is operator.getitem and user.args[1] == wanted.args[1]:
            found.bound[wanted] = user


def _can_be_one(bound: Mapping[torch.fx.Node, torch.fx.Node], region: Pattern) -> bool:
    """Whether nothing else reads what the region keeps to itself, nor lies between its ends."""
    inputs = {bound[n] for n in region.inputs if n in bound}
    inside = set(bound.values()) - inputs
    results = {bound[n] for n in region.results if n in bound}
    if len(inputs) < len(set(region.inputs)) and any(n not in bound for n in region.inputs):
        return False
    for node in inside - results:
        for user in node.users:
            unread = user.target is operator.getitem and not user.users
            if user not in inside and not unread:
                return False
    if not all(_contiguous(n) for n in results):  # as the operator's own results are
        return False
    seen: set[torch.fx.Node] = set()
    waiting = [u for n in inside for u in n.users if u not in inside]
    while waiting:
        node = waiting.pop()
        if node in inputs or node in inside:
            return False
        if node not in seen:
            seen.add(node)
            waiting += node.users
    return True


def _contiguous(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def substitute(graph: torch.fx.Graph, region: Pattern, call: Callable[..., Any]) -> int:
    """Put calls in the places of a region.

    Args:
        graph: Is changed.
        region: The region.
        call: Gets the region's inputs, and returns its results.

    Returns:
        Places that were replaced.
    """
    count = 0
    while (bound := next(matches(graph, region), None)) is not None:
        inputs = [bound[n] for n in region.inputs]
        inside = set(bound.values()) - set(inputs)
        last = max(inside)
        with graph.inserting_after(last):
            new = graph.call_function(call, tuple(inputs))
        after = new
        for i, wanted in enumerate(region.results):
            if wanted not in bound:
                continue
            result = new
            if region.several:
                with graph.inserting_after(after):
                    result = after = graph.call_function(operator.getitem, (new, i))
            result.meta["val"] = bound[wanted].meta["val"]
            bound[wanted].replace_all_uses_with(result)
        for node in reversed(list(graph.nodes)):
            unread = _is_part(node) and node.args[0] in inside
            if (node in inside or unread) and not node.users:
                graph.erase_node(node)
        _sort(graph)
        count += 1
    return count


def _sort(graph: torch.fx.Graph) -> None:
    """Order nodes after what they read, and otherwise as they are: random numbers stay."""
    done: set[torch.fx.Node] = set()
    waiting: list[torch.fx.Node] = []
    order: list[torch.fx.Node] = []
    for node in list(graph.nodes):
        waiting.append(node)
        ready = [node]
        while ready:
            ready = [n for n in waiting if done.issuperset(n.all_input_nodes)][:1]
            for n in ready:
                done.add(n)
                order.append(n)
                waiting.remove(n)
    for before, node in itertools.pairwise(order):
        before.append(node)


# -- graphs of a program ---------------------------------------------------------------------------

GRAPHS: list[str] = []
"""Descriptions of the captured graphs."""
_active: dict[str, tuple[Pattern, Callable[..., Any]]] = {}  # by site
_compiled: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
_call = torch.nn.Module.__call__


class _Captured:
    """A graph, with what is replaced now."""

    def __init__(self, module: torch.fx.GraphModule, direction: str) -> None:
        self._boxed_call = True  # for torch: it gets a list of arguments, and empties it
        self._module = module
        self._variants: dict[tuple[str, ...], Callable[..., Any]] = {}
        names = [n.target for n in module.graph.nodes if n.op == "call_function"]
        names = [n for n in names if isinstance(n, torch._ops.OpOverload)]
        first = ", ".join(str(n).removeprefix("aten.") for n in names[:8])
        more = ", ..." if len(names) > 8 else ""
        GRAPHS.append(f"{direction} of {len(names)} operations ({first}{more})")

    def __call__(self, args: list[Any]) -> Any:
        wanted = tuple(_active)
        if wanted not in self._variants:
            self._variants[wanted] = self._variant()
        return self._variants[wanted](args)

    def _variant(self) -> Callable[..., Any]:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self._module.graph, {}))
        # The largest first: a region may be a part of another.
        ordered = sorted(_active.items(), key=lambda item: -len(item[1][0].operations))
        for site, (region, _) in ordered:
            substitute(graph, region, _calling(site))
        graph.lint()
        graph.set_codegen(_BoxedCodeGen())  # what has been read is freed
        return torch.fx.GraphModule(self._module, graph).forward


def _calling(site: str) -> Callable[..., Any]:
    """The call of a site, as it is when the graph runs."""

    def kernel(*tensors: torch.Tensor) -> Any:
        return _active[site][1](*tensors)

    name = "kernel_" + "".join(c if c.isalnum() else "_" for c in site)
    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def _partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Split forward from backward where each tensor is known by one name: detached ones are
    copies in name alone.
    """
    _undetach(joint.graph)
    joint.recompile()
    return default_partition(joint, *args, **kwargs)


def _undetach(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            source = node.args[0]
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)


def _inference(module: torch.fx.GraphModule, _inputs: Any) -> _Captured:
    _undetach(module.graph)
    return _Captured(module, "inference")


backend = aot_autograd(
    fw_compiler=lambda module, _: _Captured(module, "forward"),
    bw_compiler=lambda module, _: _Captured(module, "backward"),
    inference_compiler=_inference,
    partition_fn=_partition,
)
"""For torch.compile: captures graphs, and replaces regions in them."""


def capture(sites: Mapping[str, tuple[Pattern, Callable[..., Any]]]) -> None:
    """Capture modules' forward from here on, and replace regions in it."""
    _active.clear()
    _active.update(sites)
    torch.nn.Module.__call__ = _outermost  # type: ignore[method-assign]


def release() -> None:
    """Run modules as they are."""
    _active.clear()
    torch.nn.Module.__call__ = _call  # type: ignore[method-assign]


def _outermost(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if isinstance(self, OptimizedModule) or torch.compiler.is_compiling():
        return _call(self, *args, **kwargs)
    if self not in _compiled:
        _compiled[self] = torch.compile(self.forward, backend=backend, dynamic=False)
    own = vars(self).get("forward")
    torch.nn.Module.__call__ = _call  # type: ignore[method-assign] # of all modules in it
    vars(self)["forward"] = _compiled[self]
    try:
        return _call(self, *args, **kwargs)
    finally:
        torch.nn.Module.__call__ = _outermost  # type: ignore[method-assign]
        if own is None:
            del vars(self)["forward"]
        else:
            vars(self)["forward"] = own
