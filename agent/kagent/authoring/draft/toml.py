"""The text of a drafted task's task.toml."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from kagent.authoring.draft.draft import NORMAL, DraftCase, DraftGenerator, TaskDraft, plain
from kagent.authoring.draft.source_lines import quoted
from kagent.authoring.proofs import Proof
from kagent.authoring.tracing import traffic
from kagent.authoring.tracing.trace import TracedOperation

_LIBRARY = {
    "linear": ("aten::mm", "aten::addmm"),
    "matmul": ("aten::mm", "aten::bmm"),
    "mm": ("aten::mm",),
    "addmm": ("aten::mm", "aten::addmm"),
    "bmm": ("aten::bmm",),
    "baddbmm": ("aten::bmm", "aten::baddbmm"),
    "einsum": ("aten::mm", "aten::bmm"),
    "conv1d": ("aten::convolution",),
    "conv2d": ("aten::convolution",),
    "conv3d": ("aten::convolution",),
    "convolution": ("aten::convolution",),
    "conv_transpose1d": ("aten::convolution",),
    "conv_transpose2d": ("aten::convolution",),
    "conv_transpose3d": ("aten::convolution",),
}
"""Library calls that host code may make, by the function's operation."""
_VIEWS = frozenset({"view", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice"})


def task_toml(draft: TaskDraft) -> str:
    """The text of task.toml."""
    trace, operation = draft.trace, draft.trace.operation
    moved, index = _bytes(draft), ""
    if "min(" in moved:
        index = "; by index, half of its places"
    elif trace.gathers:
        index = "; an index may need less"
    lines = [
        f"name = {quoted(operation.name)}",
        f"summary = {quoted(operation.summary)}",
        f"entry = {quoted(operation.name)}",
        f"signature = {quoted(_signature(draft))}",
        f"bytes = {quoted(moved)}    # derived: every argument read once, every result written once"
        f"{index}",
        f"written = {quoted(_written(draft))}",
        f"flops = {quoted(_flops(draft))}    # derived from torch's operations",
    ]
    if draft.constraints:
        lines.append(f"constraints = [{', '.join(map(quoted, draft.constraints))}]")
    if draft.matrix:
        lines.append("matrix = true")
    if draft.undecided:
        lines.append("accept = true    # other indices, or numbers, are as right at times")
    allow = _allow(draft)
    if allow:
        lines.append(f"allow = [{', '.join(map(quoted, allow))}]")
    if draft.idle:
        lines += ["without_effect = [", *(f"  {_idle(p)}," for p in draft.idle), "]"]
    lines += [
        "",
        f"# Made from {operation.origin}.",
        *(f"# {note}" for note in (*operation.notes, *trace.notes, *draft.notes)),
        "",
        "[dims]",
        *(f"{n} = {quoted(_meaning(draft, n))}" for n in trace.dims),
    ]
    for i in trace.used:
        example = operation.examples[i]
        lines += ["", "[[arguments]]", f"name = {quoted(example.name)}"]
        lines.append(f"shape = {_shape(trace.shapes[i])}")
        if draft.declared(example.dtype) != "$dtype":
            lines.append(f"dtype = {quoted(plain(example.dtype))}")
        if i in trace.written:
            lines.append(f"writes = {{ {', '.join(_tolerance(draft, trace.shapes[i]))} }}")
    for name, value in operation.numbers.items():
        lines += ["", "[[arguments]]", f"name = {quoted(name)}"]
        lines.append(f"value = {json.dumps(value)}")
    for result in trace.results:
        lines += ["", "[[results]]", f"name = {quoted(result.name)}"]
        lines.append(f"shape = {_shape(result.shape)}")
        if draft.declared(result.dtype) != "$dtype":
            lines.append(f"dtype = {quoted(plain(result.dtype))}")
        lines += _tolerance(draft, result.shape)
    for kind, cases in (("gpu", draft.gpu), ("cpu", draft.cpu)):
        lines += ["", f"# {kind.upper()}"]
        for case in cases.check:
            lines += ["", f"[[{kind}.check]]", *_case(kind, case)]
        if cases.bench_words:
            lines += ["", f"# {cases.bench_words}"]
        for case in cases.bench:
            lines += ["", f"[[{kind}.bench]]", *_case(f"{kind}_bench", case)]
        for key, generators in (
            ("hidden_check", cases.hidden_check),
            ("hidden_bench", cases.hidden_bench),
        ):
            for generator in generators:
                lines += ["", f"[[{kind}.{key}]]", *_generator(generator)]
    return "\n".join(lines) + "\n"


def _idle(proof: Proof) -> str:
    return f"{{ operation = {quoted(proof.operation)}, reason = {quoted(proof.reason)} }}"


def _tolerance(draft: TaskDraft, shape: Sequence[int | str]) -> list[str]:
    """Tolerance of a result of such a shape, as task.toml has it."""
    rows = _row_dims(draft, shape)
    found = [f"k = {draft.k}", f"floor = {draft.floor}"]
    return [*found, f"row_dims = {rows}"] if rows != 1 else found


def _signature(draft: TaskDraft) -> str:
    trace, operation = draft.trace, draft.trace.operation
    given = [(operation.examples[i], trace.shapes[i]) for i in trace.used]
    parts = [f"{e.name}: {_tensor(draft, shape, e.dtype)}" for e, shape in given]
    parts += [f"{n}: {type(v).__name__}" for n, v in operation.numbers.items()]
    results = [_tensor(draft, r.shape, r.dtype) for r in trace.results]
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    result = result if results else "None"
    return f"{operation.name}({', '.join(parts)}) -> {result}"


def _tensor(draft: TaskDraft, shape: Sequence[int | str], dtype: torch.dtype) -> str:
    """A tensor in a signature: with its dtype, where that is not the case's."""
    sizes = f"Tensor[{', '.join(map(str, shape))}]"
    return sizes if draft.declared(dtype) == "$dtype" else f"{sizes} {plain(dtype)}"


def _bytes(draft: TaskDraft) -> str:
    trace, read = draft.trace, traffic.reads(draft.trace)
    tensors = [(read[i], trace.operation.examples[i].dtype) for i in trace.used]
    return _size(draft, [*tensors, *_compared(trace)])


def _written(draft: TaskDraft) -> str:
    return _size(draft, _compared(draft.trace))


def _compared(trace: TracedOperation) -> list[tuple[Sequence[int | str], torch.dtype]]:
    """Shape of what is written of each output, and its dtype."""
    dtypes = [result.dtype for result in trace.compared]
    return list(zip(traffic.writes(trace), dtypes, strict=True))


def _size(draft: TaskDraft, tensors: Sequence[tuple[Sequence[int | str], torch.dtype]]) -> str:
    """Bytes of tensors, as a formula."""
    parts: dict[str, dict[str, int]] = {}
    for shape, dtype in tensors:
        unit = "itemsize" if dtype == draft.dtype else str(dtype.itemsize)
        number, names = 1, []
        for size in shape:
            if isinstance(size, int):
                number *= size
            else:
                names.append(size if size.isidentifier() else f"({size})")
        products = parts.setdefault(unit, {})
        key = " * ".join(names)
        products[key] = products.get(key, 0) + number
    texts = []
    for unit, products in parts.items():
        terms = [
            " * ".join(p for p in (str(n) if n > 1 or not key else "", key) if p)
            for key, n in products.items()
            if n
        ]
        total = " + ".join(terms) or "0"
        texts.append(f"({total}) * {unit}" if len(terms) > 1 else f"{total} * {unit}")
    return " + ".join(texts) or "0"


def _flops(draft: TaskDraft) -> str:
    parts = [p for p in (draft.trace.products, draft.trace.elements) if p != "0"]
    return " + ".join(parts) or "0"


def _allow(draft: TaskDraft) -> list[str]:
    """Products that host code may leave to a library, if there is something else to do."""
    called = _called(draft)
    others = [c for c in called if c not in _LIBRARY and c not in _VIEWS and "sym" not in c]
    return _products(called) if others else []


def _called(draft: TaskDraft) -> list[str]:
    """Names of torch's operations, in order."""
    return [
        n.target.overloadpacket.__name__
        for n in draft.trace.graph.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)  # noqa: SLF001 - torch's own name
    ]


def _products(called: Sequence[str]) -> list[str]:
    """Library calls for products and convolutions among operations, each once."""
    return list(dict.fromkeys(a for c in called for a in _LIBRARY.get(c, ())))


def _meaning(draft: TaskDraft, name: str) -> str:
    """Text that says which argument a dimension is read from."""
    for i in draft.trace.used:
        for d, size in enumerate(draft.trace.shapes[i]):
            if size == name:
                return f"dimension {d} of {draft.trace.operation.examples[i].name}"
    return "a size"


def _row_dims(draft: TaskDraft, shape: Sequence[int | str]) -> int:
    """Trailing dimensions that make a row of some length; 0 for the whole.

    Of a convolution a sample is a row: in TF32 a few numbers near 0 err by as much as they are.
    """
    if "aten::convolution" in _products(_called(draft)):
        return max(len(shape) - 1, 0)
    width = 1
    sizes = draft.trace.sizes(shape, draft.trace.dims)
    for count, size in enumerate(reversed(sizes), 1):
        width *= size
        if width >= 32:
            return count
    return 0


def _case(kind: str, case: DraftCase) -> list[str]:
    lines = [f"name = {quoted(case.name(kind))}", f"dtype = {quoted(case.dtype)}"]
    if case.inputs != NORMAL:
        lines.append(f"inputs = {quoted(case.inputs)}")
    if case.scale != 1.0:
        lines.append(f"scale = {case.scale}")
    if case.noncontiguous:
        lines.append("noncontiguous = true")
    if case.offset:
        lines.append(f"offset = {case.offset}")
    return [*lines, *(f"{n} = {s}" for n, s in case.sizes.items())]


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(quoted(s) if isinstance(s, str) else str(s) for s in shape)}]"


def _generator(generator: DraftGenerator) -> list[str]:
    lines = [f"count = {generator.count}"]
    lines += [f"{key} = {json.dumps(list(values))}" for key, values in generator.fields.items()]
    dims = ", ".join(f"{n} = {v}" for n, v in generator.dims.items())
    lines.append(f"dims = {{ {dims} }}" if dims else "dims = {}")
    if generator.cost:
        lines += [f"cost = {quoted(generator.cost)}"]
        lines += [f"least = {generator.least:.0f}"] if generator.least else []
        lines.append(f"most = {generator.most:.0f}")
    return lines
