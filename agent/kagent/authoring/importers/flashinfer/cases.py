"""Cases of an imported definition: sizes that fit together, and those of its workloads."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check.shape_gaps import FEW

from kagent.authoring.importers.flashinfer.exchange import Workload
from kagent.authoring.importers.flashinfer.inputs import Inputs, Sequences, Size

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
class SequenceSizes:
    """Sizes in the words of a model: sequences, and tokens of each."""

    sequences: int
    queries: int
    keys: int
    heads: int = 4


CHECK = {
    "one": SequenceSizes(1, 1, 2),
    "small": SequenceSizes(3, 7, 23),
    "odd": SequenceSizes(2, 17, 40, heads=7),
    "tiny": SequenceSizes(4, 5, 19),
    "empty": SequenceSizes(5, 6, 33),
}
USUAL = (
    *(
        SequenceSizes(1, 1, 1024, 32),
        SequenceSizes(16, 1, 1024, 32),
        SequenceSizes(64, 1, 4096, 32),
    ),
    *(SequenceSizes(1, 1024, 1024, 32), SequenceSizes(8, 1024, 2048, 32)),
)
"""Sizes for definitions without workloads: decoding, and prefilling."""


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


def at_point(inputs: Inputs, point: SequenceSizes) -> Dims:
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


def _size_at(inputs: Inputs, dim: str, point: SequenceSizes, dims: Mapping[str, int]) -> int:
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
    """Number of pages or tokens: as wanted, or as many as the queries of all sequences need."""
    keys = next((s for s in inputs.sequences if not s.queries), None)
    return wanted if keys is None else max(wanted, inputs.value(_needed(inputs, keys), dims))


def _needed(inputs: Inputs, sequences: Sequences) -> str:
    """Formula: elements that sequences need at least, one each, and keys for all queries."""
    queries = inputs.queries
    if sequences.queries or queries is None:
        return f"{sequences.count}"
    total = f"({inputs.sizes[queries.total]})"
    if sequences.page_size == 1:
        return f"max({sequences.count}, {total})"
    return f"{total} // {sequences.page_size} + {queries.count}"


def constraints(inputs: Inputs) -> list[str]:
    """Conditions of every case: the definition's, and those that drawing its inputs needs."""
    needs = (f"{inputs.sizes[s.total]} >= {_needed(inputs, s)}" for s in inputs.sequences)
    found = [*inputs.conditions, *needs]
    written = {a for t in inputs.definition.outputs.values() for a in t.shape or ()}
    for n in inputs.numbers:
        if n.pool in written:  # no place is written twice
            shape = inputs.shape(inputs.tensors[n.name])
            places = " * ".join(f"({s})" for s in shape) or "1"
            found.append(f"({inputs.sizes[n.pool]}) * {n.per_place} >= {places}")
    return [c for c in dict.fromkeys(found) if any(re.search(rf"\b{d}\b", c) for d in inputs.dims)]


def fits(inputs: Inputs, dims: Mapping[str, int]) -> bool:
    """Whether the constraints hold, and the tensors are not too large."""
    held = all(evaluate(c, dims) for c in constraints(inputs))
    some = all(inputs.value(s.count, dims) >= 1 for s in inputs.sequences)
    return held and some and nbytes(inputs, dims) <= MOST_BYTES


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


@dataclass(frozen=True, slots=True)
class DefinitionCases:
    """Cases of a definition, as task.toml has them.

    Attributes:
        gpu: check, bench, hidden_check and hidden_bench for GPUs.
        cpu: The same for CPUs.
        constraints: Formulas that hold in all of them.
    """

    gpu: dict[str, Any]
    cpu: dict[str, Any]
    constraints: list[str]


def choose_cases(inputs: Inputs, workloads: Sequence[Workload]) -> DefinitionCases:
    """Choose cases.

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
    sizes = {
        "gpu": [*(points[n] for n in several), *bench],
        "cpu": [points[n] for n in (*names, "one" if work >= LARGE else "odd") if n in points],
    }
    gpu = {
        "check": [_case(inputs, n, n, points[n]) for n in several],
        "bench": [_case(inputs, _name(d), "", d) for d in bench],
        "hidden_check": [_between(inputs, sizes["gpu"])],
        "hidden_bench": [_hidden_bench(inputs, found, bench, sizes["gpu"])],
    }
    cpu_bench = sizes["cpu"][-1]
    cpu = {
        "check": [_case(inputs, f"cpu_{n}", n, points[n]) for n in names if n in points],
        "bench": [_case(inputs, f"cpu_{_name(cpu_bench)}", "", cpu_bench)],
    }
    if work < LARGE:
        cpu["hidden_check"] = [_between(inputs, sizes["cpu"])]
    every = [*sizes["gpu"], *sizes["cpu"]]
    return DefinitionCases(gpu, cpu, [*constraints(inputs), *_score_limit(inputs, every)])


def _score_limit(inputs: Inputs, found: Sequence[Dims]) -> list[str]:
    """A constraint: queries times keys of a sequence are on average no more than in the cases.

    References hold all scores of a sequence in memory. Many queries of one case and many keys of
    another would be more than any device has.
    """
    queries = inputs.queries
    keys = next((s for s in inputs.sequences if not s.queries), None)
    if queries is None or keys is None:
        return []
    scores = f"({inputs.sizes[queries.total]}) * ({inputs.sizes[keys.total]})"
    count = f"({queries.count}) ** 2"
    most = max(math.ceil(evaluate(f"{scores} / {count}", d)) for d in found)
    return [f"{scores} <= {most} * {count}"]


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


def _hidden_bench(
    inputs: Inputs, found: Sequence[Dims], bench: Sequence[Dims], shown: Sequence[Dims]
) -> dict[str, Any]:
    others = [d for d in found if d not in bench]
    sizes = [n for n in inputs.dims if n not in inputs.choices]
    if len(sizes) == 1 and others:  # of several dimensions, each draws by itself
        values = [d[sizes[0]] for d in spread(others, 8)]
        dims: dict[str, Any] = {sizes[0]: values, **inputs.choices}
        return {"count": min(3, len(values)), "dtype": [case_dtype(inputs)], "dims": dims}
    return _generator(inputs, shown, bench[len(bench) // 2])


def _between(inputs: Inputs, shown: Sequence[Dims]) -> dict[str, Any]:
    """Draws sizes from the least to the largest of the visible cases, no more in all than in one of
    them: every call that an export hands to a kernel then lies near cases that a run may draw.
    """
    found = _generator(inputs, shown)
    ranged = [n for n, values in found["dims"].items() if isinstance(values, dict)]
    if len(ranged) > 1:
        found["cost"] = " * ".join(ranged)
        products = [math.prod(d[n] for n in ranged) for d in shown]
        found["least"], found["most"] = min(products), max(products)
    return found


def _generator(inputs: Inputs, shown: Sequence[Dims], center: Dims | None = None) -> dict[str, Any]:
    """Draws sizes within those of the visible cases; near `center`, if there is one. A dimension of
    few sizes keeps to them: an export has a kernel for no others.
    """
    dims: dict[str, Any] = {}
    for dim in inputs.dims:
        values = sorted({d[dim] for d in shown})
        if dim in inputs.choices:
            dims[dim] = inputs.choices[dim]
        elif len(values) <= FEW:
            dims[dim] = values if center is None else [center[dim]]
        else:
            low, high = values[0], values[-1]
            if center is not None:
                low, high = max(low, center[dim] // 2), center[dim]
            dims[dim] = {"min": low, "max": high}
    kinds = {"dtype": [case_dtype(inputs)], "inputs": ["normal"]}
    return {"count": 2, **kinds, "dims": dims}
