"""Cases of an imported definition: sizes that fit together, and those of its workloads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.errors import TaskError

from kagent.authoring.exchange import Workload
from kagent.authoring.flashinfer_inputs import Inputs, Size

Dims = dict[str, int]
MOST_BYTES = 16e9
"""Bytes of inputs and results of a benchmark case."""
LARGE, HUGE = 5e7, 2.5e8
"""Elements of the smallest case from which on fewer cases are checked: a CPU takes seconds for one
reference.
"""
_BENCH = 5
SPARE = 3
"""Places of a cache that no sequence uses."""


@dataclass(frozen=True, slots=True)
class Point:
    """Sizes in the words of a model: sequences, and tokens of each."""

    sequences: int
    queries: int
    keys: int
    heads: int = 4


CHECK = {
    "one": Point(1, 1, 2),
    "small": Point(3, 7, 23),
    "odd": Point(2, 17, 40, heads=7),
    "tiny": Point(4, 5, 19),
    "empty": Point(5, 6, 33),
}
USUAL = (
    *(Point(1, 1, 1024, 32), Point(16, 1, 1024, 32), Point(64, 1, 4096, 32)),
    *(Point(1, 1024, 1024, 32), Point(8, 1024, 2048, 32)),
)
"""Where there are no workloads: decoding, and prefilling."""


def elements(inputs: Inputs, dims: Mapping[str, float]) -> float:
    """Elements of all inputs and results."""
    return sum(n for n, _ in _tensors(inputs, dims))


def nbytes(inputs: Inputs, dims: Mapping[str, float]) -> float:
    """Bytes of all inputs and results."""
    return sum(n * size for n, size in _tensors(inputs, dims))


def _tensors(inputs: Inputs, dims: Mapping[str, float]) -> Iterable[tuple[int, int]]:
    for tensor in (*inputs.tensors.values(), *inputs.definition.outputs.values()):
        sizes = [inputs.value(s, dims) for s in inputs.shape(tensor)]
        yield math.prod(sizes), ITEMSIZE[tensor.dtype]


def at_point(inputs: Inputs, point: Point) -> Dims:
    """Dimensions of a point."""
    dims: Dims = {n: min(v, key=abs) for n, v in inputs.choices.items()}
    for dim in _ordered(inputs):
        dims[dim] = _size_at(inputs, dim, point, dims)
    return {dim: dims[dim] for dim in inputs.dims}


def _ordered(inputs: Inputs) -> list[str]:
    """Dimensions, those that others depend on first."""
    pools = _dims_of(inputs, (n.pool for n in inputs.numbers))
    queries = _dims_of(inputs, (s.total for s in inputs.sequences if s.queries))
    keys = _dims_of(inputs, (s.total for s in inputs.sequences if not s.queries))

    def place(dim: str) -> int:
        later = (dim in queries, dim in keys, dim in pools)
        return max((i for i, each in enumerate(later, 1) if each), default=0)

    return sorted((d for d in inputs.dims if d not in inputs.choices), key=place)


def _dims_of(inputs: Inputs, axes: Iterable[str]) -> set[Size]:
    return {inputs.sizes[a] for a in axes}


def _size_at(inputs: Inputs, dim: str, point: Point, dims: Mapping[str, int]) -> int:
    for s in inputs.sequences:
        if s.count == dim:
            return point.sequences
        if s.count == f"{dim} - 1":
            return point.sequences + 1
    for s in inputs.sequences:
        if inputs.sizes[s.total] == dim:
            if s.queries:
                return point.sequences * point.queries
            # Several pages of a sequence, so that full ones and the last one differ.
            each = math.ceil(point.keys / s.page_size) + (s.page_size > 1 and point.keys > 2)
            return _least_keys(inputs, dims, point.sequences * each)
    pooled = [n for n in inputs.numbers if inputs.sizes[n.pool] == dim]
    if pooled:
        return max(_places(inputs, n.name, n.per_place, dims) for n in pooled) + SPARE
    table = [n for n in inputs.numbers if len(inputs.tensors[n.name].shape or ()) == 2]
    if any(inputs.sizes[(inputs.tensors[n.name].shape or ("", ""))[1]] == dim for n in table):
        return math.ceil(point.keys / 16)
    if "head" in dim:
        return point.heads
    first = {inputs.sizes[t.shape[0]] for t in inputs.definition.outputs.values() if t.shape}
    if dim in first:
        several = bool(inputs.sequences or inputs.numbers) or _has_tokens(inputs)
        return point.sequences * (1 if several else point.queries)
    return max(2, point.queries)


def _has_tokens(inputs: Inputs) -> bool:
    """Whether results have a variable axis behind their first one: tokens of a sequence."""
    outputs = inputs.definition.outputs.values()
    return any(isinstance(s, str) for t in outputs for s in inputs.shape(t)[1:])


def _places(inputs: Inputs, name: str, per_place: int, dims: Mapping[str, int]) -> int:
    """Places that numbers point into if none of them is alike."""
    sizes = [inputs.value(s, dims) for s in inputs.shape(inputs.tensors[name])]
    return math.ceil((sizes[-1] if per_place > 1 else math.prod(sizes)) / per_place)


def _least_keys(inputs: Inputs, dims: Mapping[str, int], wanted: int) -> int:
    """As many pages or tokens as the queries of all sequences need at least."""
    keys = next((s for s in inputs.sequences if not s.queries), None)
    queries = inputs.queries
    if keys is None or queries is None:
        return wanted
    total = inputs.value(inputs.sizes[queries.total], dims)
    count = inputs.value(queries.count, dims)
    return max(wanted, total if keys.page_size == 1 else total // keys.page_size + count)


def fits(inputs: Inputs, dims: Mapping[str, int]) -> bool:
    """Whether inputs can be drawn for some dimensions, and the definition's conditions hold."""
    if not all(evaluate(c, dims) for c in inputs.conditions):
        return False
    for s in inputs.sequences:
        count, total = (inputs.value(x, dims) for x in (s.count, inputs.sizes[s.total]))
        if count < 1 or total < count:
            return False
        if not s.queries and total < _least_keys(inputs, dims, 0):
            return False
    return nbytes(inputs, dims) <= MOST_BYTES


def of_workloads(inputs: Inputs, workloads: Sequence[Workload]) -> list[Dims]:
    """Dimensions of the workloads that fit, the smallest first, each once."""
    found: dict[tuple[int, ...], Dims] = {}
    for workload in workloads:
        dims = _dims(inputs, workload)
        if dims is not None and fits(inputs, dims):
            found[tuple(dims.values())] = dims
    return sorted(found.values(), key=lambda d: (elements(inputs, d), tuple(d.values())))


def _dims(inputs: Inputs, workload: Workload) -> Dims | None:
    """A workload's dimensions; None if its axes contradict each other."""
    dims: dict[str, int] = {}
    for axis, value in workload.axes.items():
        size = inputs.sizes.get(axis)
        if isinstance(size, str) and size in inputs.dims:
            dims[size] = value
    for name, dim in inputs.scalars.items():
        if isinstance(dim, str):
            given = workload.inputs[name].value if name in workload.inputs else None
            dims[dim] = int(given or 0)
    if dims.keys() != inputs.dims.keys():
        return None
    for axis, value in workload.axes.items():
        if axis in inputs.sizes and inputs.value(inputs.sizes[axis], dims) != value:
            return None
    return {d: dims[d] for d in inputs.dims}


def spread(found: Sequence[Dims], count: int = _BENCH) -> list[Dims]:
    """Some of a list from its smallest to its largest, evenly."""
    if len(found) <= count:
        return list(found)
    return [found[round(i * (len(found) - 1) / (count - 1))] for i in range(count)]


def cases(inputs: Inputs, workloads: Sequence[Workload]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cases for GPUs and for CPUs.

    Returns:
        Each as in task.toml: check, bench, hidden_check and hidden_bench.

    Raises:
        TaskError: No sizes fit, or their tensors are too large.
    """
    points = {n: at_point(inputs, p) for n, p in CHECK.items()}
    if not inputs.sequences:
        del points["empty"]
    least = min(nbytes(inputs, d) for d in points.values())
    points = {n: d for n, d in points.items() if fits(inputs, d)}
    if "odd" not in points:
        conditions = "; ".join(inputs.conditions) or "none"
        raise TaskError(
            f"{inputs.definition.name}: no sizes fit: its smallest case has {least / 1e9:.3g} GB "
            f"of inputs and results ({MOST_BYTES / 1e9:g} at most); its conditions: {conditions}"
        )
    work = min(elements(inputs, d) for d in points.values())
    several = list(points) if work < HUGE else ["small", "tiny"]
    names = list(points) if work < LARGE else ["small", "tiny"] if work < HUGE else ["tiny"]
    found = of_workloads(inputs, workloads)
    usual = [d for d in (at_point(inputs, p) for p in USUAL) if fits(inputs, d)]
    bench = _each_once(spread(found) or usual)
    gpu = {
        "check": [_case(inputs, n, n, points[n]) for n in several],
        "bench": [_case(inputs, _name(d), "", d) for d in bench],
        "hidden_check": [_generator(inputs, points["odd"], 2, ["normal"])],
        "hidden_bench": [_hidden_bench(inputs, found, bench)],
    }
    cpu_bench = points["one" if work >= LARGE else "odd"]
    cpu = {
        "check": [_case(inputs, f"cpu_{n}", n, points[n]) for n in names if n in points],
        "bench": [_case(inputs, f"cpu_{_name(cpu_bench)}", "", cpu_bench)],
    }
    if work < LARGE:
        cpu["hidden_check"] = [_generator(inputs, points["odd"], 2, ["normal"])]
    return gpu, cpu


def _each_once(found: Sequence[Dims]) -> list[Dims]:
    return list({tuple(d.values()): d for d in found}.values())


def _case(inputs: Inputs, name: str, point: str, dims: Dims) -> dict[str, Any]:
    case: dict[str, Any] = {"name": name, "dtype": case_dtype(inputs)}
    if point == "empty":
        case["inputs"] = "empty"
    if point == "tiny":
        # float16 has no room for products of two such small numbers.
        dtypes = {t.dtype for t in inputs.tensors.values()}
        case["scale"] = 0.03 if dtypes & {"float16", "float8_e4m3fn", "float8_e5m2"} else 0.001
    return {**case, **dims}


def _name(dims: Dims) -> str:
    return (
        "_".join(f"{''.join(w[0] for w in n.split('_') if w)}{v}" for n, v in dims.items())
        or "only"
    )


def case_dtype(inputs: Inputs) -> str:
    """The dtype that stands for a definition: its first result's."""
    return next(iter(inputs.definition.outputs.values())).dtype


def _hidden_bench(inputs: Inputs, found: Sequence[Dims], bench: Sequence[Dims]) -> dict[str, Any]:
    others = [d for d in found if d not in bench]
    sizes = [n for n in inputs.dims if n not in inputs.choices]
    if len(sizes) == 1 and others:  # of several dimensions, each draws by itself
        values = [d[sizes[0]] for d in spread(others, 8)]
        dims: dict[str, Any] = {sizes[0]: values, **inputs.choices}
        return {"count": min(3, len(values)), "dtype": [case_dtype(inputs)], "dims": dims}
    return _generator(inputs, bench[len(bench) // 2], 2, ["normal"])


def _generator(inputs: Inputs, center: Dims, count: int, kinds: list[str]) -> dict[str, Any]:
    """Draws sizes around a case's, in ranges of which every choice fits together."""
    low: Dims = {}
    high: Dims = {}
    for dim in _ordered(inputs):
        low[dim], high[dim] = _range(inputs, dim, center[dim], high)
    dims: dict[str, Any] = {}
    for dim in inputs.dims:
        if dim in inputs.choices:
            dims[dim] = inputs.choices[dim]
        elif low[dim] == high[dim]:
            dims[dim] = [low[dim]]
        else:
            dims[dim] = {"min": low[dim], "max": high[dim]}
    return {"count": count, "dtype": [case_dtype(inputs)], "inputs": kinds, "dims": dims}


def _range(inputs: Inputs, dim: str, center: int, high: Mapping[str, int]) -> tuple[int, int]:
    for s in inputs.sequences:
        if s.count == f"{dim} - 1":
            return max(2, center // 2), center
    for s in inputs.sequences:
        if inputs.sizes[s.total] == dim and dim != s.count:
            count = inputs.value(s.count, high)
            least = count if s.queries else _least_keys(inputs, high, count)
            return max(least, center), 2 * max(least, center)
    pooled = [n for n in inputs.numbers if inputs.sizes[n.pool] == dim]
    if pooled:
        need = max(_places(inputs, n.name, n.per_place, high) for n in pooled) + SPARE
        return need, 2 * need
    first = {inputs.sizes[t.shape[0]] for t in inputs.definition.outputs.values() if t.shape}
    if dim in first or any(s.count == dim for s in inputs.sequences):
        return max(1, center // 2), center
    return center, center
