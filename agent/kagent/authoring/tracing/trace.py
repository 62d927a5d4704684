"""Runs an operation on symbolic tensors: what follows of a task without a single value.

Sizes of the example become symbols, and torch notes what the function demands of them. From that
follow the dimensions, the shapes as formulas, the cost, and the operation's own code.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from kagent_sandbox.data.formula import evaluate
from sympy.printing.precedence import precedence
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, ToFloat, TruncToInt
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.flop_counter import flop_registry

from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.dropout import LEFT_OUT, WithoutDropout
from kagent.authoring.tracing.fixed_sizes import fixed_sizes
from kagent.authoring.tracing.graph import BY_INDEX, is_written, quiet, results_of
from kagent.authoring.tracing.list_writes import CountedListWrites, lists_written
from kagent.authoring.tracing.operation import Operation
from kagent.authoring.tracing.recurrent import OneOperation, unrolled_never
from kagent.authoring.tracing.source_file import place_of

Axis = tuple[int, int]
"""A tensor of the example call by its number, and a dimension of it."""

_MOST_FORMULA = 300
"""Characters of a formula of costs. A longer one is replaced by its largest part."""
_SPARE = "NKPQRSTUVXYZ"
_LETTERS = {1: "N", 2: "MN", 3: "BMN", 4: "BCHW", 5: "BCDHW"}
_CONVOLVED = {3: "BCL"}
_MULTIPLIED = {2: "MK", 3: "BMK"}

SCANS = frozenset(
    {
        torch.ops.aten.cumsum.default,
        torch.ops.aten.cumprod.default,
        torch.ops.aten.logcumsumexp.default,
    }
)
"""Operations each of whose results unites all elements up to its place."""


@dataclass(frozen=True, slots=True)
class TracedResult:
    """One result, or what an argument holds after the call. `shape` has numbers and formulas."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


@dataclass
class TracedOperation:
    """An operation with symbolic sizes.

    Attributes:
        operation: The operation.
        graph: Its operations of torch, in order.
        dims: Its dimensions with their sizes in the example.
        shapes: Shape of each tensor of the example call: numbers and formulas.
        used: Numbers of the tensors that results depend on.
        results: Its results.
        written: Numbers of the tensors that it writes.
        products: Formula: operations of matrix products and convolutions.
        elements: Formula: elements that all other operations compute.
        gathers: Whether it reads by index: it may read less than its inputs.
        notes: What was changed, and which sizes stay and why, a line each.
    """

    operation: Operation
    graph: GraphModule
    dims: dict[str, int]
    shapes: tuple[tuple[int | str, ...], ...]
    used: tuple[int, ...]
    results: tuple[TracedResult, ...]
    written: tuple[int, ...]
    products: str
    elements: str
    gathers: bool
    notes: tuple[str, ...]
    _symbols: dict[sympy.Symbol, sympy.Expr] = field(repr=False, default_factory=dict)
    _guards: tuple[Any, ...] = field(repr=False, default=())
    _known: dict[tuple[int, ...], bool] = field(repr=False, default_factory=dict)
    _env: Any = field(repr=False, default=None)
    _named: dict[sympy.Symbol, sympy.Symbol] = field(repr=False, default_factory=dict)

    @property
    def compared(self) -> tuple[TracedResult, ...]:
        """Outputs of a call: the results, then the tensors that it writes."""
        named = [(self.operation.examples[i], self.shapes[i]) for i in self.written]
        return (*self.results, *(TracedResult(e.name, shape, e.dtype) for e, shape in named))

    @functools.cached_property
    def longest_chain(self) -> int:
        """Number of operations that follow each other from an input to a result, at most."""
        length: dict[Node, int] = {}
        for node in self.graph.graph.nodes:
            before = max((length[n] for n in node.all_input_nodes), default=0)
            length[node] = before + (node.op == "call_function")
        return max(length.values(), default=0)

    def text(self, value: Any) -> str:
        """A size as Python code over the dimensions' names."""
        node = getattr(value, "node", None)
        if node is None:
            return repr(value)
        return _printed(_whole(self._env.simplify(node.expr)).xreplace(self._named))

    def sizes(self, shape: Sequence[int | str], dims: Mapping[str, int]) -> tuple[int, ...]:
        """A shape's sizes."""
        return tuple(s if isinstance(s, int) else int(evaluate(s, dims)) for s in shape)

    def count(self, dims: Mapping[str, int]) -> float:
        """Elements of all arguments and results."""
        shapes = [self.shapes[i] for i in self.used] + [r.shape for r in self.results]
        return float(sum(math.prod(self.sizes(s, dims)) for s in shapes))

    def scanned(self, dims: Mapping[str, int]) -> int:
        """Length of the longest dimension along which sums or products accumulate; 1 for none."""
        lengths = [1]
        for node in self.graph.graph.nodes:
            if node.target in SCANS and node.meta["val"].dim():
                size = node.meta["val"].shape[node.args[1]]
                lengths.append(int(evaluate(self.text(size), dims)))
        return max(lengths)

    def work(self, dims: Mapping[str, int]) -> float:
        """Operations of a call."""
        return evaluate(self.products, dims) + evaluate(self.elements, dims)

    def fits(self, dims: Mapping[str, int]) -> bool:
        """Whether the operation takes such sizes, and does there what its code says."""
        key = tuple(dims[n] for n in self.dims)
        if key not in self._known:
            self._known[key] = self._holds(dims) and self._runs(dims)
        return self._known[key]

    def _holds(self, dims: Mapping[str, int]) -> bool:
        """Whether the demands on sizes hold, that torch noted. That a size differs from another
        one, or from 1, is none: the function did not ask for it.
        """
        roots = {s: sympy.Integer(dims[str(n)]) for s, n in self._named.items()}
        values = {s: e.xreplace(roots) for s, e in self._symbols.items()}
        if not all(v.is_integer and v > 0 for v in values.values()):
            return False
        for guard in self._guards:
            if (
                not isinstance(guard, sympy.Ne)
                and guard.xreplace({**values, **roots}) == sympy.false
            ):
                return False
        return True

    def works(self, dims: Mapping[str, int]) -> bool:
        """Whether the function itself runs on real tensors of such sizes, on the CPU: numbers from
        0 to 1, and zeros for what are no floating-point numbers.
        """
        tensors = []
        for shape, example in zip(self.shapes, self.operation.examples, strict=True):
            sizes, dtype = self.sizes(shape, dims), example.dtype
            plain = dtype.is_floating_point and dtype.itemsize > 1
            tensors.append((torch.rand if plain else torch.zeros)(sizes, dtype=dtype))
        try:
            with torch.no_grad():
                run(self.operation, tensors)
        except Exception:  # noqa: BLE001 - whatever a user's function does with odd sizes
            return False
        return True

    def axes(self, name: str) -> list[Axis]:
        """The tensors' dimensions that have this size."""
        return [(i, d) for i in self.used for d, n in enumerate(self.shapes[i]) if n == name]

    def _runs(self, dims: Mapping[str, int]) -> bool:
        """Whether the function itself runs, with results as declared."""
        found = results_at(self.operation, [self.sizes(s, dims) for s in self.shapes])
        return found == [self.sizes(r.shape, dims) for r in self.results]


def results_at(
    operation: Operation, shapes: Iterable[Sequence[int]]
) -> list[tuple[int, ...]] | None:
    """Shapes of the results that an operation has of tensors of such shapes, found on tensors
    without memory; None where it does not take them.
    """
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with quiet(), fake, OneOperation(), torch.no_grad():
            tensors = [
                torch.empty(tuple(s), dtype=e.dtype)
                for s, e in zip(shapes, operation.examples, strict=True)
            ]
            found, _ = run(operation, tensors)
    except Exception:  # noqa: BLE001 - whatever a user's function does with odd sizes
        return None
    return [tuple(f.shape) for f in found]


def trace(
    operation: Operation,
    axes: Iterable[Axis],
    names: Mapping[Axis, str] | None = None,
    equal: Iterable[tuple[Axis, Axis]] = (),
) -> TracedOperation:
    """Run an operation with symbols for sizes.

    Args:
        operation: The operation.
        axes: The dimensions that may vary. Others are as in the example.
        names: Names that the user gave to some of them.
        equal: Pairs of dimensions that have one size, as they do in the example.

    Raises:
        AuthoringError: It cannot be run so, or does what no task can say.
    """
    free = set(axes)
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    fakes: list[torch.Tensor] = []
    of_lists: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for i, example in enumerate(operation.examples):
        like = of_lists.get((example.list_name, example.shape))
        if example.list_name and like is not None:  # a list's equal tensors: layers' caches
            with mode:
                fakes.append(torch.empty(like.shape, dtype=example.dtype))
            continue
        dynamic = [
            DimDynamic.DYNAMIC if (i, d) in free and n > 1 else DimDynamic.STATIC
            for d, n in enumerate(example.shape)
        ]
        meta = mode.from_tensor(
            torch.empty(example.shape, dtype=example.dtype, device="meta"),
            source=ConstantSource(f"argument{i}"),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
        )
        with mode:
            fakes.append(torch.empty(meta.shape, dtype=example.dtype))
        of_lists[example.list_name, example.shape] = fakes[-1]
    for (i, d), (j, e) in equal:
        torch._check(fakes[i].shape[d] == fakes[j].shape[e])  # type: ignore[no-untyped-call] # noqa: SLF001
    written: list[int] = []

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, written[:] = run(operation, tensors)
        return tuple(results)

    def record(*, pre_dispatch: bool) -> GraphModule:
        found: GraphModule = make_fx(
            call, tracing_mode="symbolic", pre_dispatch=pre_dispatch, _allow_non_fake_inputs=True
        )(*fakes)
        return found

    backward = operation.name.endswith("_backward")
    try:
        with torch.no_grad(), unrolled_never(), quiet():
            graph = record(pre_dispatch=not backward)  # operations as they were written
            if not backward and _hides_values(graph):
                graph = record(pre_dispatch=False)
        _require_no_earlier_call(operation, graph)
        with WithoutDropout() as dropout, quiet():
            products, elements = _costs(operation, mode, fakes)
    except AuthoringError:
        raise
    except Exception as e:
        raise AuthoringError(
            f"{operation.origin} does not run on symbolic tensors{place_of(e)}: {_words(e)}"
        ) from e
    notes = [*([LEFT_OUT] if dropout.found else []), *_cleaned(graph)]
    notes = list(dict.fromkeys([*notes, *fixed_sizes(operation, env, fakes)]))
    return _described(
        operation, graph, env, fakes, tuple(written), products, elements, names or {}, notes
    )


def _words(error: Exception) -> str:
    """Words on why a function does not run on symbolic tensors, and on what to do."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, GuardOnDataDependentSymNode | DataDependentOutputException):
        return BY_VALUE
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{error.func} gives tensors whose sizes depend on a tensor's values: write what it "
            "computes with operations whose results have sizes of their arguments'"
        )
    if "sparse" in text.lower() or "compressed tensor" in text:
        return (
            "it makes a sparse tensor, which a task cannot have: compute with its indices and "
            f"values, each a dense tensor ({text})"
        )
    if (function := re.search(r"HigherOrderOperator (\w+)", text)) is not None:
        return (
            f"it calls {function[1]}, which takes functions: write what it computes with other "
            "operations of torch"
        )
    if _in_triton(error):
        return (
            "it calls a Triton kernel, which needs numbers on a GPU: name a function that computes "
            "the same with operations of torch; the kernel can be a seed (docs/candidates.md)"
        )
    if "numpy" in text:
        return f"it leaves torch: write it with operations of torch ({text})"
    if "does not require grad" in text:
        return (
            "it computes a gradient where gradients are off: let it do so under "
            "`with torch.enable_grad():`, or name the function itself with --backward"
        )
    if isinstance(error, AssertionError):
        return (
            f"an assertion failed ({text or 'without words'}): it must hold for the example's "
            "arguments on a CPU, where tasks are made"
        )
    return text


def _in_triton(error: BaseException) -> bool:
    """Whether Triton raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("/triton/" in Path(f.filename).as_posix() for f in frames)


def _hides_values(graph: GraphModule) -> bool:
    """Whether a graph takes what it computes for constants, as it does inside of torch.func.vmap
    and grad where operations are recorded as they were written.
    """
    nodes = (n for n in graph.graph.nodes if n.op == "get_attr" and n.users)
    constants = [getattr(graph, str(n.target)) for n in nodes]
    tensors = (c for c in constants if isinstance(c, torch.Tensor))
    return any(isinstance(t, FakeTensor) or is_functorch_wrapped_tensor(t) for t in tensors)


def _require_no_earlier_call(operation: Operation, graph: GraphModule) -> None:
    if _hides_values(graph):
        raise AuthoringError(
            f"{operation.origin} goes on with what an earlier call of it kept, such as a cache: "
            "let it take that as an argument, and return or write it"
        )


def run(
    operation: Operation, tensors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int]]:
    """Call an operation.

    Returns:
        Its results, and the numbers of the tensors that it wrote. A tensor that it wrote and
        returned is no result.

    Raises:
        AuthoringError: There are neither.
    """
    versions = [t._version for t in tensors]  # noqa: SLF001 - the one way to see a write
    with WithoutDropout(), CountedListWrites():
        value = operation.call(*tensors)
    written = [i for i, t in enumerate(tensors) if t._version != versions[i]]  # noqa: SLF001
    results = [x for x in _tensors_in(value) if not any(x is tensors[i] for i in written)]
    results = [torch.view_as_real(x) if x.is_complex() else x for x in results]
    if not results and not written:
        kind = "None" if value is None else type(value).__name__
        made = ". If it makes the module: name what it gives, as in `m = make()`"
        raise AuthoringError(
            f"it returns no tensor, and writes none of its arguments: it gives {kind}, where a "
            "tensor was expected, or a tuple, list, dict or dataclass of tensors"
            f"{made if isinstance(value, torch.nn.Module) else ''}"
        )
    return results, written


def _tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of a result: also those in dataclasses, field by field."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # a class of its own, which torch does not know
            found += _tensors_in(dict(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for each in dataclasses.fields(leaf):
                found += _tensors_in(getattr(leaf, each.name))
    return found


class _Costs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operations of products, and elements that all other operations compute.

    torch's FlopCounterMode follows modules with hooks, which gradients inside of it do not bear.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Any = 0
        self.elements: Any = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count its results."""
        out = func(*args, **(kwargs or {}))
        # Attention on a CPU is an operation of its own, of which torch counts nothing.
        name = func.overloadpacket.__name__.replace("_for_cpu", "")
        count = flop_registry.get(getattr(torch.ops.aten, name, func.overloadpacket))
        if count is not None:
            self.products = self.products + count(*args, **(kwargs or {}), out_val=out)
        elif not (func.is_view or func.overloadpacket.__name__ in _NO_WORK):
            results = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            lists = list(lists_written(func, args, kwargs or {}))
            if results or lists:  # else it is a question, such as that for a tensor's device
                # A reduction computes on what it reads; by index, that is no whole table.
                read = args[1:] if func.overloadpacket.__name__ in BY_INDEX else args
                tensors = [*results, *(t for t in read if isinstance(t, torch.Tensor))]
                counts = [t.numel() for t in tensors] + [sum(t.numel() for t in lists)]
                if isinstance(out, list):  # an operation on lists
                    counts.append(sum(t.numel() for t in results))
                self.elements = self.elements + max(counts, key=_hint)
        return out


_NO_WORK = frozenset({"empty", "clone", "_to_copy", "detach", "copy_", "zeros", "ones", "full"})


def _hint(value: Any) -> int:
    node = getattr(value, "node", None)
    return int(value if node is None else node.hint)


def _costs(operation: Operation, mode: FakeTensorMode, fakes: Sequence[Any]) -> tuple[Any, Any]:
    """Operations of products, and elements of the others."""
    costs, layers = _Costs(), OneOperation()
    # As make_fx runs it: torch's C++ code fixes the sizes of what it pads.
    with torch.no_grad(), enable_python_dispatcher(), mode, costs, layers:
        operation.call(*fakes)
    return costs.products + layers.products, costs.elements + layers.elements


def _cleaned(graph: GraphModule) -> list[str]:
    """Remove what has no effect on a result. Returns what else was changed."""
    notes = []
    aten = torch.ops.aten
    for node in reversed(graph.graph.nodes):
        if node.target in (_exit_autocast, _enter_autocast):  # where it is turned off: it is
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        # Inside of functions of torch: `WithoutDropout` sees outermost calls alone.
        dropout = node.target in (aten.dropout.default, aten.feature_dropout.default)
        if dropout and node.args[1] > 0 and node.args[2]:
            notes.append(LEFT_OUT)
        same = node.target is aten.to.dtype and node.args[0].meta["val"].dtype == node.args[1]
        if dropout or same or node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif _neutral(node) and not _written_later(node):
            _replace_by_input(node)
        elif _of_one(node) and not _written_later(node):
            notes.append(f"aten.{node.target.overloadpacket.__name__} over one element is left out")
            _replace_by_input(node)
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):  # the mode of gradients
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:  # noqa: SLF001
            graph.graph.erase_node(node)
    return list(dict.fromkeys(notes))


BY_VALUE = (
    "a size, a branch or a Python number depends on a tensor's values, as by .item(): pass the "
    "number as an argument of its own, or compute with the tensor"
)
"""Words on what symbolic tensors cannot be asked."""
_MOST_UNDER = 64
"""Largest denominator of a factor that a size is scaled by."""
_REDUCTIONS = frozenset({"max", "min", "amax", "amin", "sum", "mean", "logsumexp", "prod"})


def _neutral(node: Node) -> bool:
    """Whether a node adds zero, multiplies by one or takes the first power, as gradients do."""
    aten = torch.ops.aten
    neutral = {
        aten.pow.Tensor_Scalar: 1,
        aten.mul.Tensor: 1,
        aten.div.Tensor: 1,
        aten.add.Tensor: 0,
        aten.sub.Tensor: 0,
    }
    if node.target not in neutral or isinstance(node.args[1], Node):
        return False
    value, out = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(node.args[1] == neutral[node.target]) and value.dtype == out.dtype


def _written_later(node: Node) -> bool:
    """Whether its result, or what it reads, is written in place: then one is no other's copy."""
    return any(map(is_written, [node, *node.all_input_nodes]))


def _of_one(node: Node) -> bool:
    """Whether a node reduces dimensions of one element, whatever the other sizes, and keeps them:
    its result is its input. No kernel can show whether it did that.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or len(node.args) < 3:  # noqa: SLF001
        return False
    if target.overloadpacket.__name__ not in _REDUCTIONS or node.args[2] is not True:
        return False
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    dims = node.args[1] if isinstance(node.args[1], list) else [node.args[1]]
    if not dims or not all(type(d) is int and type(value.shape[d]) is int for d in dims):
        return False
    out = node.meta["val"]
    first = out[0] if isinstance(out, tuple | list) else out
    indices = isinstance(out, tuple | list) and any(
        u.target is operator.getitem and u.args[1] != 0 for u in node.users
    )
    return all(value.shape[d] == 1 for d in dims) and first.dtype == value.dtype and not indices


def _replace_by_input(node: Node) -> None:
    """Take an operation whose result is its input out of its graph."""
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            user.graph.erase_node(user)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _described(
    operation: Operation,
    graph: GraphModule,
    env: ShapeEnv,
    fakes: Sequence[torch.Tensor],
    written: tuple[int, ...],
    products: Any,
    elements: Any,
    names: Mapping[Axis, str],
    notes: Sequence[str],
) -> TracedOperation:
    def expression(value: Any) -> sympy.Expr:
        node = getattr(value, "node", None)
        if node is None:
            return sympy.Integer(value)
        return _shorter(_whole(env.simplify(node.expr)), env)

    sizes = [[expression(n) for n in f.shape] for f in fakes]
    symbols = {s: env.simplify(s) for s in env.backed_var_to_val if str(s).startswith("s")}
    outputs: list[Node] = list(pytree.tree_leaves(results_of(graph)))
    values = [n.meta["val"] for n in outputs]
    work = [expression(products), expression(elements)]
    hints = {s: sympy.Integer(v) for s, v in env.backed_var_to_val.items()}
    product_work, element_work = (float(w.xreplace(hints)) for w in work)
    letters = dict(_LETTERS)
    called = {
        n.target.overloadpacket.__name__
        for n in graph.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)  # noqa: SLF001 - torch's own name
    }
    if any("conv" in name or "pool" in name for name in called):
        letters |= _CONVOLVED
    elif product_work > element_work:
        letters |= _MULTIPLIED
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    used = tuple(i for i, n in enumerate(placeholders) if n.users or n in outputs)
    needed = {s for i in used for e in sizes[i] for s in e.free_symbols}
    rest = {s: hints[s] for each in sizes for e in each for s in e.free_symbols - needed}
    sizes = [[e.xreplace(rest) for e in each] for each in sizes]  # of what no result depends on
    symbols = {s: e.xreplace(rest) for s, e in symbols.items()}
    named = _names(operation, sizes, letters, names)
    there = {e for i in used for e in sizes[i]}
    lost = [str(n) for s, n in named.items() if s not in there]
    if lost:
        raise AuthoringError(f"no argument's size is {', '.join(lost)} itself")
    if not used:
        raise AuthoringError("no result depends on a tensor")

    def formulas(shape: Iterable[sympy.Expr]) -> tuple[int | str, ...]:
        return tuple(int(e) if e.is_number else _printed(e.xreplace(named)) for e in shape)

    dims = {str(n): int(hints[s]) for s, n in named.items()}
    shapes = tuple(formulas(s) for s in sizes)
    results = tuple(
        TracedResult(name, formulas(expression(n) for n in v.shape), v.dtype)
        for name, v in zip(_result_names(operation, len(values)), values, strict=True)
    )
    found = TracedOperation(
        operation,
        graph,
        dims,
        shapes,
        used,
        results,
        written,
        _cost(work[0].xreplace(named), dims),
        _cost(work[1].xreplace(named), dims),
        bool(called & BY_INDEX),
        tuple(notes),
        symbols,
        tuple(g.expr for g in env.guards),
        {},
        env,
        named,
    )
    for shape in (*shapes, *(r.shape for r in results)):
        if any(re.search(r"\bu\d", s) for s in shape if isinstance(s, str)):  # torch's name
            raise AuthoringError(f"{operation.origin} does not run on symbolic tensors: {BY_VALUE}")
        try:
            found.sizes(shape, dims)
        except ValueError as e:
            raise AuthoringError(f"a size is no formula of a task: {e}") from None
    return found


def _names(
    operation: Operation,
    sizes: Sequence[Sequence[sympy.Expr]],
    letters: Mapping[int, str],
    given: Mapping[Axis, str],
) -> dict[sympy.Symbol, sympy.Symbol]:
    """Names of the symbols that are left, in the order in which arguments have them."""
    found: dict[sympy.Symbol, str] = {}
    for (i, d), name in given.items():
        size = sizes[i][d]
        if size.is_Symbol and size not in found:
            found[size] = name
    taken = {e.name for e in operation.examples} | set(operation.numbers) | set(found.values())

    def fresh(wanted: str) -> str:
        names = itertools.chain([wanted], _SPARE, (f"{wanted}{i}" for i in itertools.count(2)))
        name = next(n for n in names if n not in taken)
        taken.add(name)
        return name

    for shape in sizes:
        usual = letters.get(len(shape), "")
        for d, size in enumerate(shape):
            for symbol in sorted(size.free_symbols, key=str):
                if symbol not in found:
                    found[symbol] = fresh(usual[d] if d < len(usual) else "N")
    order = {s: n for shape in sizes for e in shape for s in sorted(e.free_symbols, key=str)
             for n in [found[s]]}  # fmt: skip
    return {s: sympy.Symbol(n, integer=True, positive=True) for s, n in order.items()}


def _result_names(operation: Operation, count: int) -> list[str]:
    taken = {e.name for e in operation.examples} | set(operation.numbers)
    if count == 1:
        return [next(n for n in ("y", "out", "result", "result_0") if n not in taken)]
    if operation.name.endswith("_backward"):
        inputs = [e.name for e in operation.examples if e.dtype.is_floating_point][-count:]
        return [f"d{n}" for n in inputs]
    stem = "y" if not any(re.fullmatch(r"y\d+", n) for n in taken) else "result_"
    return [f"{stem}{i}" for i in range(count)]


def _cost(expression: sympy.Expr, dims: Mapping[str, int]) -> str:
    """A formula of costs, or a shorter one of about the same values."""
    text = _printed(sympy.expand(expression))
    value = float(expression.xreplace({s: dims[str(s)] for s in expression.free_symbols}))
    try:
        same = evaluate(text, dims) == value
    except ValueError:
        same = False
    if same and len(text) <= _MOST_FORMULA:
        return text
    return _between_corners(expression, dims)


def _between_corners(expression: sympy.Expr, dims: Mapping[str, int]) -> str:
    """A formula that has an expression's values where each dimension is 1 or as in the example, and
    is linear in each in between: of a product of all alone, small cases would cost nothing.
    """
    names = sorted((s for s in expression.free_symbols), key=str)
    found: dict[frozenset[sympy.Symbol], float] = {}
    terms = []
    for count in range(len(names) + 1):
        for large in itertools.combinations(names, count):
            at = {n: sympy.Integer(dims[str(n)] if n in large else 1) for n in names}
            below = sum(c for some, c in found.items() if some < set(large))
            rest = max(0.0, float(expression.xreplace(at))) - below
            found[frozenset(large)] = rest
            if rest:
                share = rest / math.prod(dims[str(n)] - 1 for n in large)
                terms.append(" * ".join([f"{share:.6g}", *(f"({n} - 1)" for n in large)]))
    return " + ".join(terms) or "0"


def _shorter(expression: sympy.Expr, env: ShapeEnv) -> sympy.Expr:
    """An equal size without quotients that leave no rest, or a known one: of `4 * (M // 4)`, where
    the function demands that it is M, of `M // (M // 4)` there, and of `(M * N + N - 1) // N`.
    """
    equals = [g.expr for g in env.guards if isinstance(g.expr, sympy.Eq)]
    demanded = {e.lhs for e in equals if not e.rhs}
    numbers = {e.lhs: e.rhs for e in equals if isinstance(e.lhs, FloorDiv) and e.rhs.is_Integer}
    expression = expression.replace(CleanDiv, FloorDiv).xreplace(numbers)
    for quotient in expression.atoms(FloorDiv):
        a, b = quotient.args
        times = sympy.expand(a).coeff(b) if b.is_Symbol else sympy.Integer(0)
        rest = sympy.expand(a - b * times)
        if Mod(a, b) in demanded:
            equal = a / b
        elif b.is_Symbol and rest in (0, b - 1, -1):  # each size is 1 at least
            equal = times - 1 if rest == -1 else times
        else:
            continue
        shorter = sympy.expand(expression.xreplace({quotient: equal}))
        if not any(p.exp.is_negative for p in shorter.atoms(sympy.Pow)) and not any(
            not n.is_Integer for n in shorter.atoms(sympy.Rational)
        ):
            expression = shorter
    return expression


def _whole(expression: sympy.Expr) -> sympy.Expr:
    """An equal size without floating-point numbers: of `trunc(1.5 * float(M))`, as of what is
    scaled, where the factor is exact.
    """
    for part in expression.atoms(TruncToInt):
        factor, scaled = part.args[0].as_coeff_Mul()
        over, under = float(factor).as_integer_ratio()
        if isinstance(scaled, ToFloat) and over > 0 and under <= _MOST_UNDER:
            size = over * scaled.args[0]
            expression = expression.xreplace({part: size if under == 1 else FloorDiv(size, under)})
    return expression


class _Printer(PythonPrinter):
    """Python text with differences written as such."""

    def _print_Add(self, expr: Any, order: str | None = None) -> str:  # noqa: ARG002, N802 - its name
        terms = sorted(expr.args, key=lambda t: (t.is_number, t.could_extract_minus_sign()))
        text: str = self.parenthesize(terms[0], precedence(expr))
        for term in terms[1:]:
            minus = term.could_extract_minus_sign()
            part = self.parenthesize(-term if minus else term, precedence(expr))
            text += f" {'-' if minus else '+'} {part}"
        return text


@functools.cache
def _printer() -> PythonPrinter:
    return _Printer()


def _printed(expression: sympy.Expr) -> str:
    text: str = _printer().doprint(expression)
    while text.startswith("(") and text.endswith(")") and _balanced(text[1:-1]):
        text = text[1:-1]
    return re.sub(r"(?<![*/])(\*\*|//|\*|(?<!/)/(?!/)|%)(?![*/])", r" \1 ", text).replace("  ", " ")


def _balanced(text: str) -> bool:
    depth = 0
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth < 0:
            return False
    return depth == 0
