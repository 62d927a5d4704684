"""Regions of a model's graphs, replaced by a library's operators; a part of the patch's own file.

The outermost module's forward is captured: Dynamo and AOTAutograd make a graph of ATen operations
of it, with both directions. In it, operations that are connected as those of a region become one
operator. The rest runs operation by operation, or is compiled by Inductor, also where nothing is
replaced, so that two configurations differ in the region alone. What the program itself gives to
torch.compile stays Inductor's, with the regions replaced. It needs torch and nothing else.
"""

# ruff: noqa: SLF001 - torch names what a compiler needs with underscores

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch.partitioners import default_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_leaves

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


# -- regions as operators --------------------------------------------------------------------------

_operators = torch.library.Library("kernel_regions", "FRAGMENT")  # type: ignore[no-untyped-call]
_known: dict[Callable[..., Any], _Operator] = {}  # by a region's function


class _Operator:
    """A region as an operator of torch: no compiler looks into it.

    Args:
        region: The region. Its call is set when it is enabled.
    """

    def __init__(self, region: Pattern) -> None:
        self.region = region
        self.call: Callable[..., Any] = region.call(region.function)
        namespace = torch.ops.kernel_regions
        names = (f"region_{i}" for i in itertools.count())
        name = next(n for n in names if not hasattr(namespace, n))
        inputs = ", ".join(f"Tensor {n.name}" for n in region.inputs)
        schema = f"{name}({inputs}) -> {'Tensor[]' if region.several else 'Tensor'}"
        _operators.define(schema)  # type: ignore[no-untyped-call]

        def run(*tensors: torch.Tensor) -> Any:
            return self._run(tensors)

        run.__name__ = run.__qualname__ = name
        self.run: Callable[..., Any] = run
        _operators.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        shapes = region.call(region.function)
        torch.library.register_fake(
            f"kernel_regions::{name}",
            lambda *tensors: self._each(shapes(*tensors), _empty),
            lib=_operators,
        )
        self.overload: torch._ops.OpOverload = getattr(namespace, name).default

    def _run(self, tensors: Sequence[torch.Tensor]) -> Any:
        taken = {t.untyped_storage()._cdata for t in tensors}

        def own(result: torch.Tensor) -> torch.Tensor:
            """As it was promised: contiguous, and in memory that nothing else has."""
            result = result.contiguous()
            if result.untyped_storage()._cdata in taken:
                result = result.clone()
            taken.add(result.untyped_storage()._cdata)
            return result

        return self._each(self.call(*tensors), own)

    def _each(self, results: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return [function(r) for r in results] if self.region.several else function(results)


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


# -- graphs of a program ---------------------------------------------------------------------------

_Rest: TypeAlias = Literal["operations", "inductor"]
"""The rest of a graph: operation by operation as it was captured, or compiled by Inductor."""
_Setting: TypeAlias = "tuple[_Rest, tuple[Callable[..., Any], ...]] | None"
"""The rest, and the replaced regions' functions; None: the program as it is."""

SHAPES = 8
"""Signatures of arguments that a module is captured for; with further ones it runs as it is."""
GRAPHS: list[str] = []
"""Descriptions of graphs that are captured of modules."""
COMPILED: list[str] = []
"""Descriptions of graphs that the program itself gives to torch.compile."""
NOTES: list[str] = []
"""Calls that run as they are, and why."""
_setting: _Setting = None
_prepared: list[_Setting] = []  # graphs are compiled for each of them
_captured: weakref.WeakKeyDictionary[torch.nn.Module, _Captured] = weakref.WeakKeyDictionary()
_call = torch.nn.Module.__call__
_inductor = torch._TorchCompileInductorWrapper
_inductors_call = _inductor.__call__


class _Replace(CustomGraphPass):
    """Replaces regions in a graph of ATen operations.

    Args:
        functions: The regions'.
        described: Gets a description of the graph.
        decompose: Whether other operations become those that Inductor knows.
    """

    def __init__(
        self, functions: Sequence[Callable[..., Any]], described: list[str], *, decompose: bool
    ) -> None:
        regions = [_known[f] for f in functions]
        # The largest first: a region may be a part of another.
        self._regions = sorted(regions, key=lambda r: -len(r.region.operations))
        self._described, self._decompose = described, decompose

    def uuid(self) -> None:
        """Keep such graphs out of Inductor's cache: operators have other names elsewhere."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        _undetach(graph)
        self._described.append(_description(graph))
        for found in self._regions:
            substitute(graph, found.region, found.overload)
        graph.lint()
        if self._decompose:
            _decompose(graph)


def _description(graph: torch.fx.Graph) -> str:
    names = [str(n.target).removeprefix("aten.") for n in graph.nodes if _is_operation(n)]
    trains = any(n.name.startswith("tangents") for n in graph.nodes)
    more = ", ..." if len(names) > 8 else ""
    direction = "training" if trains else "inference"
    return f"{direction} of {len(names)} operations ({', '.join(names[:8])}{more})"


def _undetach(graph: torch.fx.Graph) -> None:
    """Give each tensor one name: detached ones are copies in name alone."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            source = node.args[0]
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)


def _flat(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy whose arguments and results are flat."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _decompose(graph: torch.fx.Graph) -> None:
    """Take operations apart as Inductor wants them. Placeholders stay the same nodes."""
    owner = graph.owning_module
    assert owner is not None
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    values = [n.meta["val"] for n in inputs]
    run = torch.fx.Interpreter(torch.fx.GraphModule(owner, _flat(graph))).run
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        made = make_fx(run, decomposition_table=select_decomp_table())(*values)
    made.graph.eliminate_dead_code()
    meta: dict[str, Any] = {}
    for node in reversed(list(graph.nodes)):
        if node.op == "output":
            meta = node.meta
        if node.op != "placeholder":
            graph.erase_node(node)
    for node in made.graph.nodes:
        if node.op == "get_attr":  # a constant
            setattr(owner, f"decomposed_{node.target}", getattr(made, node.target))
            node.target = f"decomposed_{node.target}"
    known = [n for n in made.graph.nodes if n.op == "placeholder"]
    results = graph.graph_copy(made.graph, dict(zip(known, inputs, strict=True)))
    graph.output(results).meta = meta


def _boxed(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """The graph, operation by operation; what has been read is freed."""
    calls = {o.overload: o.run for o in _known.values()}
    for node in module.graph.nodes:  # torch's dispatcher takes its time
        node.target = calls.get(node.target, node.target)
    module.graph.set_codegen(_BoxedCodeGen())
    forward = torch.fx.GraphModule(module, module.graph).forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined] # it gets a list, and empties it
    return run


def _by_operations(replace: _Replace) -> Callable[..., Any]:
    """Return a backend for torch.compile that runs graphs operation by operation."""

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        replace(joint.graph)
        joint.recompile()
        return default_partition(joint, *args, **kwargs)

    def inference(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        replace(module.graph)
        return _boxed(module, inputs)

    compilers = {"fw_compiler": _boxed, "inference_compiler": inference, "bw_compiler": _boxed}
    return aot_autograd(**compilers, partition_fn=partition)


class _Graph:
    """A graph of Dynamo's, compiled for every setting that there can be."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        inputs: Any,
        compiled: Callable[[torch.fx.GraphModule, Any, _Setting, list[str]], Callable[..., Any]],
        descriptions: list[str],
    ) -> None:
        settings = dict.fromkeys([_setting, *_prepared])
        seen: list[str] = []  # by each of them
        self._compiled = {s: compiled(_copy(module), inputs, s, seen) for s in settings}
        descriptions += dict.fromkeys(seen)

    def __call__(self, *args: Any) -> Any:
        return self._compiled[_setting](*args)


def _copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of Dynamo's graph, with what later stages read of it. A compiler takes it over."""
    copy = torch.fx.GraphModule(module, _flat(module.graph))
    copy.meta.update(module.meta)
    if hasattr(module, "_param_name_to_source"):
        copy._param_name_to_source = module._param_name_to_source
    for old, new in zip(module.graph.nodes, copy.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copy


def _compiled(
    module: torch.fx.GraphModule, inputs: Any, setting: _Setting, described: list[str]
) -> Callable[..., Any]:
    """Compile a graph of what the program itself does not compile."""
    if setting is None:
        return module.forward
    rest, functions = setting
    replace = _Replace(functions, described, decompose=rest == "inductor")
    if rest == "operations":
        return _by_operations(replace)(module, inputs)  # type: ignore[no-any-return]
    # Random numbers are eager's: the program's own.
    return _by_inductor(module, inputs, replace, {"fallback_random": True})


def _by_inductor(
    module: torch.fx.GraphModule, inputs: Any, replace: _Replace, config: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph as Inductor does, but regions are replaced before it takes them apart."""
    patches = {**config, "joint_custom_pre_pass": replace}
    return compile_fx(  # type: ignore[return-value]
        module, inputs, config_patches=patches, decompositions={}
    )


def backend(module: torch.fx.GraphModule, inputs: Any) -> _Graph:
    """For torch.compile: captures graphs, and replaces regions in them."""
    return _Graph(module, inputs, _compiled, GRAPHS)


def _instead_of_inductor(
    self: Any, module: torch.fx.GraphModule, inputs: Any, **more: Any
) -> Callable[..., Any]:
    """In the place of Inductor's backend: replace regions in what the program compiles."""

    def compiled(
        copy: torch.fx.GraphModule, inputs: Any, setting: _Setting, described: list[str]
    ) -> Callable[..., Any]:
        if setting is None:
            return _inductors_call(self, copy, inputs, **more)  # type: ignore[no-any-return, no-untyped-call]
        replace = _Replace(setting[1], described, decompose=True)
        config = {**self.config, **(more.get("config_patches") or {})}
        return _by_inductor(copy, inputs, replace, config)

    return _Graph(module, inputs, compiled, COMPILED)


def prepare(settings: Sequence[tuple[_Rest, Sequence[Pattern]] | None]) -> None:
    """Compile what comes for all of these settings, between which `capture` and `release` switch.

    What torch.compile has compiled so far is forgotten.
    """
    _prepared[:] = [_key(s) for s in settings]
    _forget()
    _inductor.__call__ = _instead_of_inductor  # type: ignore[method-assign, assignment]


def capture(
    sites: Mapping[str, tuple[Pattern, Callable[..., Any]]], rest: _Rest = "operations"
) -> None:
    """Capture modules' forward from here on, and replace regions in it and in compiled code."""
    global _setting
    wanted = rest, tuple(region for region, _ in sites.values())
    if _key(wanted) not in _prepared:
        prepare([wanted])
    _setting = _key(wanted)
    for region, call in sites.values():
        _known[region.function].call = call
    torch.nn.Module.__call__ = _outermost  # type: ignore[method-assign]


def release() -> None:
    """Run modules as they are."""
    global _setting
    _setting = None
    torch.nn.Module.__call__ = _call  # type: ignore[method-assign]
    if None not in _prepared:
        _inductor.__call__ = _inductors_call  # type: ignore[method-assign]
        if _prepared:
            _forget()
        _prepared.clear()


def _forget() -> None:
    torch._dynamo.reset()
    _captured.clear()


def _key(setting: tuple[_Rest, Sequence[Pattern]] | None) -> _Setting:
    if setting is None:
        return None
    for region in setting[1]:
        if region.function not in _known:
            _known[region.function] = _Operator(region)
    return setting[0], tuple(region.function for region in setting[1])


class _Captured:
    """A module's forward, captured once for each signature of its arguments."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.forward = torch.compile(module.forward, backend=backend, dynamic=False)
        self._name = type(module).__name__
        self._signatures: set[Hashable] = set()

    def knows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether it is captured for such arguments; said once where it is not."""
        signature = tuple(map(_signature, tree_leaves((args, kwargs)))), torch.is_grad_enabled()
        if signature in self._signatures:
            return True
        if len(self._signatures) < SHAPES:
            self._signatures.add(signature)
            return True
        note = (
            f"{self._name} was called with more than {SHAPES} kinds of arguments (shapes, dtypes "
            f"or values): calls with further ones run without the library's kernels"
        )
        if note not in NOTES:
            NOTES.append(note)
            warnings.warn(note, stacklevel=4)
        return False


def _signature(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if isinstance(leaf, bool | int | float | str):
        return leaf
    return type(leaf).__qualname__


def _outermost(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _call(self, *args, **kwargs)
    compiled = isinstance(self, OptimizedModule) or self._compiled_call_impl is not None
    if not compiled and self not in _captured:
        _captured[self] = _Captured(self)
    torch.nn.Module.__call__ = _call  # type: ignore[method-assign] # of all modules in it
    own = vars(self).get("forward")
    if not compiled and _captured[self].knows(args, kwargs):
        vars(self)["forward"] = _captured[self].forward
    try:
        return _call(self, *args, **kwargs)
    finally:
        torch.nn.Module.__call__ = _outermost  # type: ignore[method-assign]
        if own is not None:
            vars(self)["forward"] = own
        else:
            vars(self).pop("forward", None)
