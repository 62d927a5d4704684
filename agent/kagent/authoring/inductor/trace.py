"""A task's `eager`, traced for all of its shapes at once and written as kernels by Inductor.

Dimensions that differ between cases stay symbols; flags and dimensions with one value become
constants. What torch decides by comparing dimensions holds for some cases only: other cases get a
trace of their own.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import sympy
import torch
import torch.nn.functional as F
from kagent_sandbox.data.arguments import Argument
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.errors import KagentError
from torch._dynamo.source import ConstantSource
from torch._inductor import config, ir, sizevars
from torch._inductor.codegen.cpp import CppKernel
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import _config as shapes_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRangeError

from kagent.authoring.inductor import exact_quotients, index_widths, library_convolution
from kagent.authoring.inductor.decompositions import plain_loops
from kagent.authoring.inductor.join_dimensions import join_dimensions
from kagent.authoring.inductor.online_softmax import any_length, read_softmaxes_once

MOST_TRACES = 8
_DRAWS = 3  # runs' worth of hidden cases that are looked at
_NEAR_INT32 = 1 << 30
_torchs_index_dtype: Any = SIMDKernelFeatures.select_index_dtype
_AT_LEAST = "_stride_expr_ge_or_false"  # torch's own name, which torch 2.11 does not have
_torchs_at_least: Any = getattr(ir.Layout, _AT_LEAST, None)
_WRITE = torch.ops.aten.copy_.default  # what functionalize leaves of writing an argument
_HALF = ("bfloat16", "float16")
_SETTINGS = {
    "assert_indirect_indexing": False,
    "size_asserts": False,
    "benchmark_kernel": False,
    "implicit_fallbacks": True,
    "unroll_reductions_threshold": 32,  # a window of 3x3 or 3x3x3, each of which a thread sums up
    "layout_optimization": False,  # would decide by the channels
    "cpp.dynamic_threads": True,
    "cpp.simdlen": 1,  # plain loops, that g++ makes vectors of
    "cpp.descriptive_names": "original_aten",
    "cpp.enable_kernel_profile": False,
    "triton.descriptive_names": "original_aten",
    "triton.unique_kernel_names": True,
    "triton.mix_order_reduction": False,
    "triton.cooperative_reductions": False,
}


class NoSeed(Exception):  # noqa: N818 - a finding, not a fault
    """Nothing can be made of this task; the text says why."""


@dataclass(frozen=True)
class Traced:
    """Inductor's code for some cases of a task.

    Attributes:
        code: Its Python module.
        inputs: What the inputs of its `call` are, in order: a dimension's name or an argument's.
        symbols: Dimensions by the names that they have in the code.
        condition: Python expression over the dimensions that holds where the code does.
        dtype: The dtype of cases that it was traced in, such as "bfloat16".
    """

    code: str
    inputs: tuple[str, ...]
    symbols: Mapping[str, str]
    condition: str
    dtype: str


def install() -> None:
    """Change what Inductor and torch have no setting for. Never taken back."""
    # Sums on the CPU have wide accumulators instead (cpp.py).
    kernel: Any = CppKernel
    kernel.need_use_acc_helper = lambda *_: False
    library_convolution.install()
    exact_quotients.install()
    sizevars.join_dimensions = join_dimensions  # the same, without a search for patterns
    features: Any = SIMDKernelFeatures
    features.select_index_dtype = _index_dtype
    index_widths.install()
    if _torchs_at_least is not None:
        setattr(ir.Layout, _AT_LEAST, staticmethod(_at_least))
    attention: Any = F.scaled_dot_product_attention

    @functools.wraps(attention)
    def plain_flags(*args: Any, **flags: Any) -> Any:
        known = {k: bool(v) if isinstance(v, torch.SymBool) else v for k, v in flags.items()}
        return attention(*args, **known)

    F.scaled_dot_product_attention = plain_flags


def _index_dtype(features: Any) -> torch.dtype:
    """The dtype of a kernel's indices. In a product none runs over results and summands at once: 64
    bits, which take several times as long to divide, are for tensors that need them.
    """
    nodes = features.scheduler_nodes()
    if not any(getattr(n.node.data, "reduction_type", "") == "dot" for n in nodes):
        return cast("torch.dtype", _torchs_index_dtype(features))
    names = {name for n in nodes for name in (*n.get_buffer_names(), *n.used_buffer_names())}
    buffers = [V.graph.get_buffer(name) for name in sorted(names)]
    few = SIMDScheduling.can_use_32bit_indexing(features.numel, buffers)
    return torch.int32 if few else torch.int64


def _at_least(stride: Any, other: Any) -> bool:
    """Whether a stride is at least another one; by the example's sizes where torch cannot tell: of
    products of sums it asks for a remainder, which sympy writes as a fraction and cannot bound.
    """
    try:
        return bool(_torchs_at_least(stride, other))
    except ValueRangeError:
        hint = V.graph.sizevars.optimization_hint
        return bool(hint(stride) >= hint(other))


def trace(task: Task, kind: Kind, *, library: bool = False) -> list[Traced]:
    """Trace a task's `eager` until every case is covered.

    Args:
        task: The task.
        kind: The kind of device.
        library: Whether products of matrices that the task allows are left to torch.

    Raises:
        NoSeed: It cannot be traced.
    """
    cases = [*task.cases(kind).check, *task.cases(kind).bench]
    for draw in range(_DRAWS):
        for which in ("check", "bench"):
            cases += draw_hidden(task, kind, which, draw)
    with config.patch({"triton.native_matmul": not library}):  # else products are tl.dot in loops
        if task.allow:
            try:
                return _trace_all(task, kind, cases, task.allow)
            except NoSeed:  # torch goes too many ways, for one
                pass
        return _trace_all(task, kind, cases, ())


def _trace_all(task: Task, kind: Kind, cases: Sequence[Case], allow: Sequence[str]) -> list[Traced]:
    """Trace with some operations left to torch."""
    kinds = {c.inputs for c in cases}.union(*(g.inputs for g in task.cases(kind).hidden_check))
    finite = "nonfinite" not in kinds
    table = {**select_decomp_table(), **plain_loops(kind, allow, finite=finite)}
    varying = _varying(task, cases)
    dtype = next((c.dtype for c in cases if c.dtype in _HALF), cases[0].dtype)
    # The largest first: what Inductor decides by the sizes that it is shown is decided for those.
    left = sorted(cases, key=task.min_bytes, reverse=True)
    traces: list[Traced] = []
    while left:
        if len(traces) == MOST_TRACES:
            raise NoSeed(f"torch goes more than {MOST_TRACES} ways, by the cases' sizes and flags")
        traced, covers = _most_general(task, kind, left, dtype, varying, table)
        traces.append(traced)
        left = [c for c in left[1:] if not covers(c)]
    return traces


def _most_general(
    task: Task,
    kind: Kind,
    cases: Sequence[Case],
    dtype: str,
    varying: Mapping[str, set[int]],
    table: Mapping[Any, Callable[..., Any]],
) -> tuple[Traced, Callable[[Case], bool]]:
    """A trace that holds for the first case, and for as many others as can be."""
    case = cases[0]
    ones = [n for n in varying if case.dims[n] in (0, 1)]
    # Without ways of their own for sizes of 1 and strides that follow from them. Where torch needs
    # to know, with those; then with this case's sizes of 1 as constants.
    for general, constant in ((True, ()), (False, ()), (False, ones)):
        with shapes_config.patch(backed_size_oblivious=general):  # type: ignore[attr-defined]
            try:
                traced, covers = _trace(task, kind, cases, dtype, varying, table, constant)
            except NoSeed:
                if not general and (constant or not ones):
                    raise
            else:
                if not general or covers(case):
                    return traced, covers
    raise AssertionError("the last way returns or raises")


def _varying(task: Task, cases: Sequence[Case]) -> dict[str, set[int]]:
    """Dimensions that are whole numbers with several values, and these. Flags are none."""
    values = {name: {c.dims[name] for c in cases} for name in task.dims}
    return {
        name: {x for x in found if isinstance(x, int)}
        for name, found in values.items()
        if len(found - {0, 1}) + bool(found & {0, 1}) > 1 and all(type(x) is int for x in found)
    }


def _trace(
    task: Task,
    kind: Kind,
    cases: Sequence[Case],
    dtype: str,
    varying: Mapping[str, set[int]],
    table: Mapping[Any, Callable[..., Any]],
    constant: Sequence[str] = (),
) -> tuple[Traced, Callable[[Case], bool]]:
    """A trace with the sizes of the first case in mind, and whether it holds for another.

    Dimensions in `constant` keep the case's value, also if they vary.
    """
    case, reference = cases[0], task.reference()
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    dims: dict[str, Any] = dict(case.dims)
    symbols: dict[str, str] = {}
    for name, sizes in varying.items():
        if name in constant:
            continue
        # torch has its own ways with sizes of 0 and 1. What it writes for others holds there too,
        # or the check of the seed will tell.
        size, value = any(name in str(a.shape) for a in task.arguments), case.dims[name]
        assert isinstance(value, int)  # `_varying`
        hint = value if not size or value > 1 else min(sizes - {0, 1})
        source = ConstantSource(name)
        symbol = environment.create_symbol(
            hint,
            source,
            DimDynamic.DYNAMIC,
            positive=True if size else None,
            do_not_specialize_zero_one=not size,
        )
        dims[name] = environment.create_symintnode(symbol, hint=hint, source=source)
        symbols[str(symbol)] = name
    specs = {
        a.name: a for a in build_case(task, case.model_copy(update={"dtype": dtype})).arguments
    }
    shapes: dict[str, tuple[list[Any], torch.dtype]] = {}
    scalars: dict[str, Any] = {}
    for a in task.arguments:
        if a.shape is not None:
            element = getattr(torch, specs[a.name].dtype)  # type: ignore[union-attr]
            shapes[a.name] = [_size(s, dims) for s in a.shape], element
        else:
            scalars[a.name] = _scalar(a, dims)
    numbers = [dims[name] for name in symbols.values()]

    def function(*inputs: Any) -> Any:
        given = dict(zip(shapes, inputs[len(numbers) :], strict=True))
        results = reference.eager(**given, **scalars)
        if results is None:  # it writes its arguments
            return ()
        return results if isinstance(results, tuple | list) else (results,)

    try:
        # First what autograd does, of which functionalize knows nothing, and which needs a device
        # that is there.
        with mode, sdpa_kernel(SDPBackend.MATH):
            raw = make_fx(function, tracing_mode="symbolic")(*numbers, *_tensors(shapes, "cpu"))
        device = "cuda:0" if kind == "gpu" else "cpu"
        for node in raw.graph.nodes:
            if "device" in node.kwargs:
                node.update_kwarg("device", torch.device(device))
        raw.recompile()
        with mode:
            arguments = [*numbers, *_tensors(shapes, device)]
            functional = torch.func.functionalize(raw, remove="mutations")
            traced = make_fx(functional, decomposition_table=table, tracing_mode="symbolic")
            module = traced(*arguments)
        # Without weights that a module draws and nobody reads.
        module.graph.eliminate_dead_code(
            lambda node: node.op in ("placeholder", "output") or node.target is _WRITE
        )
        read_softmaxes_once(module)
        with mode:
            _give_results_plain_strides(module)
        with index_widths.wide_enough_for(symbols, cases):
            code = _generate(module, arguments, environment, mode)
    except KagentError:
        raise
    except Exception as e:
        raise NoSeed(_described(e)) from e

    fixed = {n: v for n, v in case.dims.items() if n not in symbols.values()}
    printer: Any = PythonPrinter
    # Whether 32 bits are enough to count elements is decided for all cases (`index_widths`).
    guards: list[Any] = [
        g.expr
        for g in environment.guards
        if not any(abs(i) > _NEAR_INT32 for i in g.expr.atoms(sympy.Integer))
    ]
    conditions = [
        _text(n, v) for n, v in fixed.items() if n in varying or type(v) is not int or v in (0, 1)
    ]
    conditions += dict.fromkeys(_renamed(printer().doprint(g), symbols) for g in guards)

    def covers(other: Case) -> bool:
        if any(other.dims[n] != v for n, v in fixed.items()):
            return False
        sizes = {s: sympy.Integer(int(cast("int", other.dims[n]))) for s, n in symbols.items()}
        return all(
            g.xreplace({x: sizes[str(x)] for x in g.free_symbols}) is sympy.true for g in guards
        )

    inputs = (*symbols.values(), *shapes)
    return Traced(code, inputs, symbols, " and ".join(conditions), dtype), covers


def _give_results_plain_strides(module: torch.fx.GraphModule) -> None:
    """Have strides of results be products of sizes, where they are those of a contiguous tensor:
    torch's hold the larger one of a size and 1, which kernels would compute and not simplify.
    """
    for result in module.graph.output_node().all_input_nodes:
        value = result.meta["val"]
        if isinstance(value, torch.Tensor) and value.is_contiguous():
            strides = [math.prod(value.shape[i + 1 :]) for i in range(value.dim())]
            result.meta["val"] = value.new_empty_strided(value.shape, strides)


def _described(error: Exception) -> str:
    """An error in one line; of one without words, the line of code that raised it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    if lines:
        return f"{name}: {lines[0]}"[:300]
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{name} in {Path(at.filename).name}, line {at.lineno}: {at.line}"[:300]


def _tensors(
    shapes: Mapping[str, tuple[list[Any], torch.dtype]], device: str
) -> list[torch.Tensor]:
    return [torch.empty(s, dtype=element, device=device) for s, element in shapes.values()]


def _generate(
    module: torch.fx.GraphModule, arguments: Sequence[Any], environment: ShapeEnv, mode: Any
) -> str:
    """Inductor's code for a graph."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001 - kernels get their names
            node.meta["original_aten"] = node.target
    with config.patch(_SETTINGS):
        graph = GraphLowering(module, example_inputs=arguments, shape_env=environment)
    with (
        DebugContext(),
        V.set_graph_handler(graph),
        V.set_fake_mode(mode),
        config.patch(_SETTINGS),
        any_length(),
    ):
        graph.run(*arguments)
        wrapper, _ = graph.codegen()
    if graph.constants:
        raise NoSeed("eager holds a tensor of constants")
    text: str = wrapper.value
    return text


def _size(size: int | str, dims: Mapping[str, Any]) -> Any:
    """A formula's value, where dimensions may be symbols; `evaluate` would ask for numbers."""
    if not isinstance(size, str):
        return size
    names = {
        **dims,
        "min": torch.sym_min,
        "max": torch.sym_max,
        "cdiv": lambda a, b: operator.floordiv(a + b - 1, b),
        "__builtins__": {},
    }
    return eval(size, names)  # noqa: S307 - loading the task found nothing but arithmetic in it


def _scalar(argument: Argument, dims: Mapping[str, Any]) -> Any:
    value = argument.value
    return _size(value, dims) if isinstance(value, str) else value


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name} == {value!r}"


def _renamed(text: str, symbols: Mapping[str, str]) -> str:
    for symbol, name in symbols.items():
        text = re.sub(rf"\b{symbol}\b", name, text)
    return text
