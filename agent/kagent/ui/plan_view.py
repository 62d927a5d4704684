"""Output of `kagent build`: a plan as readable lines, and the resources of its kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.compiled import Loop, Remark
from kagent_sandbox.data.language import reports_resources
from kagent_sandbox.data.plan import (
    Alloc,
    Arg,
    Const,
    Copy,
    Fill,
    Free,
    KernelInfo,
    Launch,
    Null,
    Op,
    Plan,
    Pointer,
    Scalar,
    Struct,
    TensorMap,
    TensorRef,
    TorchOp,
)
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.records import to_json
from kagent_sandbox.runtime.text import printable
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.text import (
    config_text,
    human_bytes,
    kernel_label,
    loop_lines,
    remark_lines,
    widths_text,
)
from kagent.ui.table import Column, TextTable

_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "bool": "b1",
}


def plan_lines(plan: Plan, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    """One line per operation, in order. `labels` are names of kernels, by their hashes."""
    names = {b.id: b.name or f"b{b.id}" for b in plan.buffers}
    sizes = {b.id: b.nbytes for b in plan.buffers}
    kernels = labels or {k.hash: kernel_label(k.name) for k in plan.kernels}
    for op in plan.ops:
        yield _line(op, names, sizes, kernels)
    yield "return " + ", ".join(_tensor(t, names) for t in plan.outputs)


def _line(
    op: Op, names: Mapping[int, str], sizes: Mapping[int, int], kernels: Mapping[str, str]
) -> str:
    match op:
        case Alloc(buffer):
            return f"alloc  {names[buffer]}  {human_bytes(sizes[buffer])}"
        case Free(buffer):
            return f"free   {names[buffer]}"
        case Fill(tensor, value):
            return f"fill   {_tensor(tensor, names)} = {value}"
        case Copy(src, dst):
            return f"copy   {_tensor(dst, names)} <- {_tensor(src, names)}"
        case Const(tensor, data):
            return f"const  {_tensor(tensor, names)} ({len(data)} bytes)"
        case TorchOp(name, args, _, writes):
            into = ", ".join(_tensor(t, names) for t in writes)
            values = ", ".join(
                _tensor(a, names) if isinstance(a, TensorRef) else str(a) for a in args
            )
            return f"torch  {name}({values}) -> {into}"
        case Launch():
            return _launch(op, names, kernels[op.kernel])


def _launch(op: Launch, names: Mapping[int, str], name: str) -> str:
    notes = [f"shared={op.shared}"] if op.shared else []
    notes += [f"cluster={op.cluster}"] if op.cluster else []
    notes += ["cooperative"] if op.cooperative else []
    notes += ["pdl"] if op.pdl else []
    args = ", ".join(_argument(a, names) for a in op.args)
    return f"launch {name} grid={op.grid} block={op.block} {' '.join(notes)} ({args})"


def _argument(arg: Arg, names: Mapping[int, str]) -> str:
    match arg:
        case Pointer(buffer, offset):
            return names[buffer] + (f"+{offset}" if offset else "")
        case Scalar(kind, value):
            return f"{kind} {value}"
        case Null():
            return "null"
        case TensorMap():
            return f"tma {names[arg.buffer]} dims={arg.dims} box={arg.box}"
        case Struct(data, placed):
            inside = ", ".join(f"{offset}: {_argument(value, names)}" for offset, value in placed)
            return f"struct of {len(data)} bytes {{{inside}}}"


def _tensor(tensor: TensorRef, names: Mapping[int, str]) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    at = f"+{tensor.offset}" if tensor.offset else ""
    return f"{names[tensor.buffer]}{at}:{_SHORT.get(tensor.dtype, tensor.dtype)}[{shape}]"


def _shared(static: int, dynamic: int) -> str:
    """'33 KiB': static and dynamic together, and apart where there are both."""
    total = human_bytes(static + dynamic)
    return f"{total} ({human_bytes(static)} static)" if static and dynamic else total


def _labels(built: Built) -> Mapping[str, str]:
    """Names of kernels, by their hashes; a hash's start tells those of one name apart."""
    names = {k.hash: kernel_label(k.name) for p in built.plans.values() for k in p.kernels}
    count = Counter(names.values())
    return {key: f"{n} {key[:8]}" if count[n] > 1 else n for key, n in names.items()}


def kernel_table(built: Built) -> TextTable:
    """Every distinct kernel with its resources; of dynamic shared memory the most it is given.

    The cases stand beside kernels of one name: the first, and how many others.
    """
    dynamic: Counter[str] = Counter()
    kernels: dict[str, KernelInfo] = {}
    cases: dict[str, list[str]] = {}
    for (_, case), plan in built.plans.items():
        for kernel in plan.kernels:
            of = cases.setdefault(kernel.hash, [])
            of += [case] if case not in of else []
        kernels |= {k.hash: k for k in plan.kernels}
        for launch in plan.launches:
            dynamic[launch.kernel] = max(dynamic[launch.kernel], launch.shared)
    labels = _labels(built)
    alike = len({kernel_label(k.name) for k in kernels.values()}) < len(kernels)
    table = TextTable(
        (
            Column("kernel", wrap=True),
            *([Column("cases", wrap=True)] if alike else []),
            Column("language", drop=3),
            Column("registers", right=True),
            Column("spills", right=True),
            Column("shared memory", right=True),
            Column("global loads", right=True),
            Column("binary", right=True, drop=1),
            *([] if alike else [Column("code", drop=2)]),
        ),
        title=f"kernels for {built.target}",
    )
    for key, k in kernels.items():
        gpu = reports_resources(k.language)
        first, *more = cases[key]
        table.add_row(
            labels[key],
            *([f"{first} + {len(more)}" if more else first] if alike else []),
            k.language,
            str(k.registers) if gpu else "–",
            human_bytes(k.spill_bytes) if gpu else "–",
            _shared(k.static_shared_bytes, dynamic[key]) if gpu else "–",
            widths_text(k.load_bytes),
            human_bytes(len(built.binaries[key])),
            *([] if alike else [key[:8]]),
        )
    return table


def compiled_texts(remarks: Sequence[Remark], loops: Sequence[Loop]) -> list[RenderableType]:
    """Messages of the compilers, and loops of the machine code. Nothing where there are none."""
    parts: list[RenderableType] = []
    if remarks:
        parts += [Text("\nwhat the compilers said", "bold")]
        parts += [Text(printable(line), "yellow") for line in remark_lines(remarks)]
    if loops:
        parts += [
            Text(
                "\nloops of the machine code, each without the loops in it; most clocks first",
                "bold",
            )
        ]
        parts += [Text(printable(line)) for line in loop_lines(loops)]
    return parts


def built_view(built: Built, *, full: bool) -> RenderableType:
    """Kernels, then a line per case and configuration; with `full` every plan, line by line."""
    several = len(built.configs) > 1
    table = TextTable(
        (
            Column("case"),
            *([Column("configuration", wrap=True)] if several else []),
            Column("launches", right=True),
            Column("other steps", right=True, drop=1),
            Column("peak memory", right=True),
        ),
        title="plans" if several else f"plans, {config_text(built.configs[0])}",
    )
    listing: list[RenderableType] = []
    labels = _labels(built)
    for (index, case), plan in sorted(built.plans.items(), key=lambda item: item[0][0]):
        others = sum(not isinstance(op, Alloc | Free | Launch) for op in plan.ops)
        config = config_text(built.configs[index])
        peak = human_bytes(plan.peak_bytes)
        chosen = [config] if several else []
        table.add_row(case, *chosen, str(len(plan.launches)), str(others), peak)
        if full:
            listing.append(Text(f"\n{case} ({config})", style="bold"))
            listing.extend(Text("  " + line) for line in plan_lines(plan, labels))
    dropped = [Text(f"dropped: {reason}", style="yellow") for reason in built.dropped]
    said = compiled_texts(built.remarks, built.loops)
    return Group(kernel_table(built), *said, Text(), table, *dropped, *listing)


def built_json(built: Built) -> Mapping[str, object]:
    """Output of `kagent build --json`: plans by case and configuration, and kernels."""
    kernels = {k.hash: k for plan in built.plans.values() for k in plan.kernels}
    return {
        "outcome": "built",
        "target": built.target,
        "build_s": built.build_s,
        "source_hash": built.source_hash,
        "tree_hash": built.tree_hash,
        "work_hash": built.work_hash,
        "configs": [dict(c) for c in built.configs],
        "dropped": list(built.dropped),
        "remarks": [to_json(r) for r in built.remarks],
        "loops": [to_json(x) for x in built.loops],
        "kernels": [
            {**to_json(k), "load_bytes": {str(w): n for w, n in k.load_bytes.items()}}
            for k in kernels.values()
        ],
        "plans": [
            {
                "case": case,
                "config": index,
                "launches": len(plan.launches),
                "peak_bytes": plan.peak_bytes,
                "plan": json.loads(dump_plan(plan)),
            }
            for (index, case), plan in built.plans.items()
        ],
    }
