"""One kernel as one readable Python file, with a test beside it: for a pull request.

The file has the kernel as it was judged, a function that calls it where it was measured to be the
faster and torch everywhere else, its licence, and its origin. It imports torch, Triton if the
kernel is in Triton, and the standard library. C++ is compiled by g++ at the first call.

CUDA kernels stay in libraries. What launches them (NVRTC, the driver's launch attributes, tensor
maps, cubins for the measured targets) is ten times as long as a file that anyone wants to review.
"""

from __future__ import annotations

import ast
import math
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.builder.binary.inspect import cpp_parameters
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.language import CPP, CUDA
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import UserError
from kagent_sandbox.runtime.cpp import DEFAULT_OPTIONS, compile_cpp
from kagent_sandbox.runtime.text import printable
from kagent_sandbox.syntax import parse

from kagent.export.dispatch_table import gain, least, task_of
from kagent.export.generic import template_values
from kagent.export.import_rewrite import JUDGED, kagent_imports
from kagent.export.library._portfolio import WIDTH
from kagent.export.record import (
    DeviceRecord,
    KernelRecord,
    OperatorRecord,
    PointRecord,
    RegionRecord,
)
from kagent.export.templating import figure, python, render
from kagent.search.definitions import defined_names, needed_definitions
from kagent.search.tunables import read_tunables

_CTYPES = {
    None: "c_void_p", "i1": "c_bool", "i8": "c_int8", "u8": "c_uint8", "i16": "c_int16",
    "u16": "c_uint16", "i32": "c_int32", "u32": "c_uint32", "i64": "c_int64", "u64": "c_uint64",
    "f32": "c_float", "f64": "c_double",
}  # fmt: skip
_MOST = 88  # characters of a case in one line
_DYNAMIC = frozenset({"__builtins__", "eval", "exec", "globals", "locals", "vars"})
_TRITON_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class _Parts:
    """A kernel's file, taken apart."""

    docstring: str
    imports: list[str]  # but for kagent's
    code: str
    names: set[str]  # of the module


def refuse_single_file(operator: OperatorRecord, kernel_id: str, source: str) -> None:
    """Refuse what cannot be a single file, before anything is measured.

    Raises:
        UserError: It is in CUDA, writes to its arguments, or takes more of kagent than C++ kernels.
    """
    task = task_of(operator)
    library = "export it into a library (omit --single-file)"
    if CUDA.is_in(source):
        raise UserError(
            f"{kernel_id}: a CUDA kernel needs NVRTC, launch attributes and cubins, which no "
            f"readable file has room for: {library}"
        )
    if task.mutates:
        raise UserError(f"{kernel_id}: {task.name} writes to its arguments: {library}")
    for name in kagent_imports(source):
        if name != "cpp_kernel":
            raise UserError(
                f"{kernel_id}: its {name} of {JUDGED} is not for single files: {library}"
            )
    _parts(task.entry, source)


def single_files(operator: OperatorRecord) -> dict[str, str]:
    """TASK.py and test_TASK.py of an operator with one kernel on one device.

    Raises:
        UserError: The kernel cannot be a single file; the text says why.
    """
    (kernel,), (device,) = operator.kernels, operator.devices
    task = task_of(operator)
    source, tuner = _configured(kernel, device)
    parts = _parts(task.entry, source)
    fallback = needed_definitions(operator.reference_py, ["eager"])
    values = template_values(task)
    both = (parts.names & fallback.names) | (parts.names & _OWN_NAMES)
    both |= fallback.names & (_OWN_NAMES - {"eager"})
    if both:
        raise UserError(
            f"{kernel.id}: {', '.join(sorted(both))} would have two meanings in a single file: "
            "export it into a library (omit --single-file)"
        )
    own = ["import functools", "import math", "import warnings", "import torch"]
    own += ["from torch.autograd import forward_ad"]
    if kernel.written_in is CPP:
        own += ["import ctypes", "import hashlib", "import os", "import platform", "import re"]
        own += ["import subprocess", "import tempfile", "from pathlib import Path"]
    text = render(
        "single_file.py.j2",
        **values,
        kernel=kernel,
        cpp=kernel.written_in is CPP,
        device=device,
        capability=_capability(device),
        about=list(_about(kernel, device)),
        rows=[_row(p, kernel) for p in device.points],
        proved=all(_proved(p, kernel) for p in device.points),
        kernel_docstring=_safe_block(parts.docstring),
        imports=_sorted_imports([*own, *parts.imports, *fallback.imports]),
        code=parts.code.strip("\n"),
        tuner=tuner,
        fallback=fallback.code.strip("\n"),
        launch=_launch_name(task.entry),
        least=least(operator),
        parameters_of=dict(_parameters_of(kernel)),
        flags=DEFAULT_OPTIONS,
        checked=[_region(r) for r in kernel.regions],
        measured=list(_measured(device, kernel)),
    )
    return {f"{task.name}.py": text, f"test_{task.name}.py": _test(operator, task, kernel)}


_OWN_NAMES = {
    "CAPABILITY", "CHECKED", "LEAST", "MEASURED", "PARAMETERS", "cpp_kernel", "uses_kernel",
    "eager", "_aligned", "_compiled", "_dims", "_eager", "_failed", "_fake", "_for_torch_alone",
    "_operator", "_run", "_tuner",
}  # fmt: skip


# -- the kernel ------------------------------------------------------------------------------------


def _launch_name(entry: str) -> str:
    return f"launch_{entry}"


def _parts(entry: str, source: str) -> _Parts:
    """A kernel's file with its entry renamed: the function for users has that name."""
    tree = parse(source)
    launch = _launch_name(entry)
    nodes = list(ast.walk(tree))
    taken = {n.arg for n in nodes if isinstance(n, ast.arg | ast.keyword) and n.arg}
    names = _module_names(source) - {
        n for k in tree.body if _is_kagents(k) for n in defined_names(k)
    }
    if dynamic := sorted({n.id for n in nodes if isinstance(n, ast.Name)} & _DYNAMIC):
        raise UserError(
            f"its {dynamic[0]} can change names of the file that it would share with what calls "
            "it: export it into a library (omit --single-file)"
        )
    if launch in names or entry in taken:
        raise UserError(
            f"its name {launch if launch in names else entry} is taken in a single file: rename it "
            "in the kernel, or export a library (omit --single-file)"
        )
    places = [(n.lineno, n.col_offset) for n in nodes if isinstance(n, ast.Name) and n.id == entry]
    lines = source.splitlines(keepends=True)
    hosts = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry]
    places += [(host.lineno, len("def ")) for host in hosts]
    for line, column in sorted(places, reverse=True):
        raw = lines[line - 1].encode()
        head, tail = raw[:column].decode(), raw[column:].decode()
        lines[line - 1] = head + launch + tail.removeprefix(entry)
    docstring = ast.get_docstring(tree) or ""
    imports: list[str] = []
    left_out: list[int] = []
    for i, node in enumerate(tree.body):
        is_docstring = i == 0 and docstring != ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += [] if _is_kagents(node) else [ast.unparse(node)]
        elif not is_docstring:
            continue
        assert node.end_lineno is not None
        left_out += range(node.lineno - 1, node.end_lineno)
    code = "".join(line for i, line in enumerate(lines) if i not in left_out)
    kept = [
        n for n in tree.body[docstring != "" :] if not isinstance(n, ast.Import | ast.ImportFrom)
    ]
    if _dumped(code) != [ast.dump(_renamed(n, entry, launch)) for n in kept]:
        raise UserError(
            "its file cannot be taken apart: write each import, the docstring and the line "
            f'"def {entry}(" by itself, with one blank, or export a library (omit --single-file)'
        )
    return _Parts(docstring, imports, code, (names - {entry}) | {launch})


def _dumped(code: str) -> list[str] | None:
    """The syntax trees of statements; None where it is no Python."""
    try:
        return [ast.dump(node) for node in parse(code).body]
    except SyntaxError:
        return None


def _renamed(statement: ast.stmt, entry: str, launch: str) -> ast.stmt:
    """A statement of the module in which the entry has another name."""
    if isinstance(statement, ast.FunctionDef) and statement.name == entry:
        statement.name = launch
    changed: ast.stmt = _Renamed(entry, launch).visit(statement)
    return changed


class _Renamed(ast.NodeTransformer):
    """Renames what names the entry."""

    def __init__(self, entry: str, launch: str) -> None:
        self._names = {entry: launch}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)


def _module_names(source: str) -> set[str]:
    """Names that a file binds in its module, wherever it does."""

    def bound(table: symtable.SymbolTable, *, top: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            here = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if here and (top or symbol.is_declared_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from bound(child, top=False)

    return set(bound(symtable.symtable(source, "kernel", "exec"), top=True))


def _is_kagents(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return False
    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(n.partition(".")[0] in ("kagent", "kagent_sandbox") for n in names)


def _configured(kernel: KernelRecord, device: DeviceRecord) -> tuple[str, Mapping[str, str]]:
    """The source with the tunables that were measured, and configurations of autotuned kernels."""
    used = {p.config[kernel.id] for p in device.points if p.best == kernel.id}
    if len(used) > 1:
        raise UserError(
            f"{kernel.id}: {len(used)} configurations of its tunables are used, by shape, and a "
            "single file has one: export it into a library (omit --single-file)"
        )
    values = kernel.configs[next(iter(used), 0)] if kernel.configs else {}
    tuners = {n: _triton_config(v) for n, v in values.items() if isinstance(v, Mapping)}
    plain = {n: v for n, v in values.items() if n not in tuners}
    known = read_tunables(kernel.source)
    if known is None or not set(plain) <= {item.name for item in known.items}:
        raise UserError(f"{kernel.id}: its tunables cannot be written into its file")
    return known.rewrite(plain), tuners  # type: ignore[arg-type]


def _triton_config(values: Mapping[str, object]) -> str:
    own = {n: v for n, v in values.items() if n not in _TRITON_OPTIONS}
    options = "".join(f", {n}={values[n]!r}" for n in _TRITON_OPTIONS if n in values)
    return f"triton.Config({own!r}{options})"


def _parameters_of(kernel: KernelRecord) -> Iterator[tuple[str, list[str]]]:
    """The C++ functions' parameters in ctypes' words, read from what g++ makes of them here."""
    for each in kernel.compiled if kernel.written_in is CPP else ():
        binary = compile_cpp(each.name, each.text, each.options, dict(each.defines))
        yield each.name, [_CTYPES[t] for t in cpp_parameters(binary)]


# -- parts of the task's reference -----------------------------------------------------------------


def _sorted_imports(imports: Sequence[str]) -> str:
    """Import statements once each: the standard library's first, then the others."""
    single = set()
    for statement in imports:
        for node in parse(statement).body:
            if isinstance(node, ast.Import):
                single |= {f"import {ast.unparse(a)}" for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
                single |= {f"from {node.module} import {ast.unparse(a)}" for a in node.names}
    joined: dict[str, list[str]] = {}
    plain = sorted(s for s in single if s.startswith("import "))
    for statement in sorted(single):
        if statement.startswith("from "):
            module, _, name = statement.removeprefix("from ").partition(" import ")
            joined.setdefault(module, []).append(name)
    both = [*plain, *(f"from {m} import {', '.join(n)}" for m, n in sorted(joined.items()))]
    own = [s for s in both if s.split()[1].partition(".")[0] in sys.stdlib_module_names]
    return "\n".join([*own, "", *(s for s in both if s not in own)]).strip()


# -- what was found --------------------------------------------------------------------------------


def _about(kernel: KernelRecord, device: DeviceRecord) -> Iterator[str]:
    """Lines on the origin of a kernel."""
    o = kernel.origin
    authors = ", ".join(m for m in o.models if m) or "no model"
    versions = device.environment.get("versions")
    known = versions if isinstance(versions, Mapping) else {}
    yield f"kernel {kernel.id}, sha256 of its source as judged {kernel.sha256}"
    run = f"run {o.run} ({o.run_id or 'no id'}), candidate {o.candidate}"
    yield f"found by kagent {o.kagent}: {run}"
    yield f"proposals by {o.proposer}; models of its path: {authors}"
    yield from (f"step {i}: {step}" for i, step in enumerate(o.path, 1))
    yield (
        f"that run's final race, on hidden cases: {o.ratio:.3f}x the fastest of torch "
        f"(95 %: {o.low:.3f}-{o.high:.3f})"
    )
    worst = max((r.element_error or 0.0 for r in kernel.regions), default=0.0)
    yield (
        f"checked against float64 on {sum(r.cases for r in kernel.regions)} cases, "
        f"largest error of an element {worst:.2g}"
    )
    yield (
        f"measured on {device.name}, {device.date}, with "
        f"{', '.join(f'{n} {v}' for n, v in known.items())}"
    )


def _row(point: PointRecord, kernel: KernelRecord) -> str:
    """A measured shape as a line of text."""
    dims = " ".join(f"{n}={v}" for n, v in point.dims.items())
    ratio = gain(point, kernel.id)
    verdict = point.verdicts.get(kernel.id)
    return (
        f"{point.dtype} {dims}: {figure(point.times[kernel.id].us)} µs"
        + (f", {ratio:.2f}x the fastest of torch" if ratio is not None else "")
        + (f", {verdict}" if verdict is not None else "")
        + ("" if point.best == kernel.id else "; torch is called")
    )


def _proved(point: PointRecord, kernel: KernelRecord) -> bool:
    """Whether the kernel is FASTER than the fastest of torch there, or torch is called."""
    known = point.verdicts.get(kernel.id, SpeedVerdict.FASTER)
    return point.best != kernel.id or known is SpeedVerdict.FASTER


def _measured(device: DeviceRecord, kernel: KernelRecord) -> Iterator[dict[str, object]]:
    """Measured shapes; those of one dtype stand in for another one as wide that was checked."""
    dtypes = {p.dtype for p in device.points}
    for dtype in sorted({r.dtype for r in kernel.regions}):
        alike = sorted(d for d in dtypes if WIDTH.get(d) == WIDTH.get(dtype, -1))
        of = dtype if dtype in dtypes else next(iter(alike), None)
        for point in device.points:
            if point.dtype == of:
                best = point.best == kernel.id
                yield {"dtype": dtype, "dims": dict(point.dims), "best": best}


def _region(region: RegionRecord) -> dict[str, object]:
    ranges = {n: (low, region.high[n]) for n, low in region.low.items()}
    return {
        "dtype": region.dtype,
        "ranges": ranges,
        "values": {n: tuple(v) for n, v in region.flags.items()},
        "volume": region.volume or math.prod(region.high.values()),
    }


def _capability(device: DeviceRecord) -> object:
    """The part of a device that must agree: torch's vectors on a CPU, the capability of a GPU."""
    if device.kind == "cpu":
        import torch  # takes seconds: whoever is refused before does not wait

        return torch.backends.cpu.get_cpu_capability()
    digits = device.capability.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def _safe_block(text: str) -> list[str]:
    """Lines of others' text that end no docstring."""
    return [
        printable(line.rstrip()).replace("\\", "/").replace('"', "'") for line in text.splitlines()
    ]


# -- the test --------------------------------------------------------------------------------------


def _test(operator: OperatorRecord, task: Task, kernel: KernelRecord) -> str:
    """A test of the file: the task's check cases against float64, and the dispatch."""
    kind = kernel.written_in.kind
    needed = needed_definitions(operator.reference_py, ["inputs", "reference"])
    return render(
        "single_file_test.py.j2",
        task=task,
        function=task.entry,
        launch=_launch_name(task.entry),
        imports=_sorted_imports(
            [
                *("import dataclasses", "import math", "import pytest", "import torch"),
                *("from dataclasses import dataclass, field", f"import {task.name}"),
                *needed.imports,
            ]
        ),
        reference=needed.code.strip("\n"),
        tolerance=_tolerance(),
        cases=[_case(task, c) for c in task.cases(kind).check],
        results=[
            {"name": r.name, "k": r.k, "floor": r.floor, "bias": r.bias, "row_dims": r.row_dims}
            for r in task.calibrated(kind).results
        ],
        arguments=[a.name for a in task.arguments],
        tensors=[a.name for a in task.arguments if a.shape is not None],
        device="cpu" if kind == "cpu" else "cuda",
    )


def _tolerance() -> str:
    """The library's tests' measure of errors, without its docstring and imports."""
    text = render("test_tolerance.py.j2")
    nodes = parse(text).body
    last = max(n.end_lineno or 0 for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
    return "\n".join(text.splitlines()[last:]).strip("\n")


def _case(task: Task, case: Case) -> str:
    """Arguments of a `Case` of the test, but for defaults."""
    scalars = {a.name: task.scalar(a, case) for a in task.arguments if a.shape is None}
    given = [python(case.name), python(case.dtype), python(dict(case.dims))]
    plain = Case(name=case.name, dtype=case.dtype)
    options = {n: getattr(case, n) for n in ("inputs", "scale", "noncontiguous")}
    options = {n: v for n, v in options.items() if v != getattr(plain, n)}
    options |= {"scalars": scalars} if scalars else {}
    given += [f"{name}={python(value)}" for name, value in options.items()]
    line = ", ".join(given)
    return line if len(line) < _MOST else "".join(f"\n        {each}," for each in given) + "\n    "


# -- on the disk -----------------------------------------------------------------------------------


def refuse_others(folder: Path, names: Sequence[str], *, force: bool) -> None:
    """Leave files alone that are there already.

    Raises:
        UserError: There is one; `force` takes it for an earlier export.
    """
    there = [n for n in names if (folder / n).exists()]
    if there and not force:
        raise UserError(
            f"{folder}: has {' and '.join(there)}: --force overwrites, or name another folder"
        )
