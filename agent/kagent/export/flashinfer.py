"""The library's contents as FlashInfer-Bench has them: Definition, Solution, workload and Trace.

flashinfer_bench/ can be read as a trace set: `TraceSet.from_path("flashinfer_bench")`. A definition
is a task in one dtype, with all of its dimensions variable; a solution is a kernel with one of its
configurations. CUDA and C++ kernels are compiled by the library's own runtime, so that their
solutions are Python, and depend on the library.

The format has no arguments that are written in place. Their new values are outputs, which a
reference returns; a solution writes in place and returns the arguments. flashinfer-bench gives each
call inputs of its own.

The record of a library has the largest error of an element over all checks in a dtype, not that of
each workload. Traces have it as their relative error, and say so. Absolute errors are not measured,
and not named.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.language import TRITON
from kagent_sandbox.data.task import Task

from kagent.export.dispatch_table import task_of
from kagent.export.import_rewrite import as_shipped
from kagent.export.record import (
    TORCH,
    DeviceRecord,
    KernelRecord,
    LibraryRecord,
    OperatorRecord,
    PointRecord,
)
from kagent.export.templating import render

_FOLDER = "flashinfer_bench"
_SCALARS = {bool: "bool", int: "int64", float: "float32"}
_NOT_A_NAME = re.compile(r"\W+")

Json = dict[str, object]


def flashinfer_files(library: LibraryRecord) -> dict[str, str]:
    """Files of flashinfer_bench/, by their paths in the library."""
    files: dict[str, str] = {}
    for operator in library.operators:
        task = task_of(operator)
        for dtype in _dtypes(operator):
            name = f"{operator.task}_{dtype}"
            where = f"{operator.task}/{name}"
            definition = _definition(operator, task, dtype)
            files[f"{_FOLDER}/definitions/{where}.json"] = _pretty(definition)
            measured = list(_measured(operator, dtype))
            loads = {_workload(task, p)["uuid"]: _workload(task, p) for _, p in measured}
            files[f"{_FOLDER}/workloads/{where}.jsonl"] = _lines(
                {"definition": name, "workload": w, "solution": None, "evaluation": None}
                for w in loads.values()
            )
            traces = [t for d, p in measured for t in _traces(operator, task, d, p)]
            files[f"{_FOLDER}/traces/{where}.jsonl"] = _lines(traces)
            for kernel, config in _used(operator, dtype):
                solution = _solution(library, operator, task, kernel, config, dtype)
                path = f"{_FOLDER}/solutions/{operator.task}/{solution['name']}.json"
                files[path] = _pretty(solution)
    return files


def _dtypes(operator: OperatorRecord) -> list[str]:
    return sorted({p.dtype for d in operator.devices for p in d.points})


def _measured(operator: OperatorRecord, dtype: str) -> Iterator[tuple[DeviceRecord, PointRecord]]:
    for device in operator.devices:
        yield from ((device, p) for p in device.points if p.dtype == dtype)


def _used(operator: OperatorRecord, dtype: str) -> list[tuple[KernelRecord, int]]:
    """Kernels with their configurations at the measured shapes, in order."""
    found = {
        (name, index): None
        for _, point in _measured(operator, dtype)
        for name, index in point.config.items()
        if name in point.times
    }
    return [(operator.kernel(name), index) for name, index in sorted(found)]


# -- definition -----------------------------------------------------------------------------------


def _definition(operator: OperatorRecord, task: Task, dtype: str) -> Json:
    tensors = [a for a in task.arguments if a.shape is not None]
    shapes = [*(a.shape for a in tensors), *(r.shape for r in task.results)]
    axes: dict[str, Json] = {}
    constraints: list[str] = []
    for size in (s for shape in shapes for s in shape or ()):
        name = _axis(size)
        if isinstance(size, int):
            axes[name] = {"type": "const", "value": size}
        else:
            axes[name] = {"type": "var", "description": task.dims.get(size, f"equals {size}")}
            if name != size:
                constraints.append(f"{name} == {size}")
    return {
        "name": f"{operator.task}_{dtype}",
        "op_type": operator.task,
        "description": operator.summary,
        "axes": axes,
        "constraints": list(dict.fromkeys(constraints)),
        "inputs": {a.name: _input(task, a.name, dtype) for a in task.arguments},
        "outputs": dict(_outputs(task, dtype)),
        "reference": render(
            "flashinfer_reference.py.j2",
            reference=operator.reference_py.rstrip(),
            arguments=[a.name for a in task.arguments],
            dtypes=[_dtype(r.dtype, dtype) for r in task.compared],
        ),
    }


def _axis(size: int | str) -> str:
    """A size of a shape as the name of an axis: M, size_3, and 2 * N as size_2_N."""
    if isinstance(size, str) and size.isidentifier():
        return size
    return f"size_{_NOT_A_NAME.sub('_', str(size)).strip('_')}"


def _dtype(declared: str, dtype: str) -> str:
    return dtype if declared == "$dtype" else declared


def _input(task: Task, name: str, dtype: str) -> Json:
    argument = next(a for a in task.arguments if a.name == name)
    if argument.shape is not None:
        shape = [_axis(s) for s in argument.shape]
        return {"shape": shape, "dtype": _dtype(argument.dtype, dtype)}
    value = _value(task, name, (*task.gpu.check, *task.cpu.check)[0])
    return {"shape": None, "dtype": _SCALARS[type(value)]}


def _outputs(task: Task, dtype: str) -> Iterator[tuple[str, Json]]:
    """The results, then the new values of written arguments: no output may be named like an
    input.
    """
    taken = {*(a.name for a in task.arguments), *(r.name for r in task.results)}
    for result in task.compared:
        name, more = result.name, {}
        if name in _written(task):
            more = {"description": f"{name} after the call, which writes it in place"}
            while name in taken:
                name = f"new_{name}"
        taken.add(name)
        shape = [_axis(s) for s in result.shape]
        yield name, {"shape": shape, "dtype": _dtype(result.dtype, dtype), **more}


def _written(task: Task) -> list[str]:
    return [a.name for a in task.arguments if a.writes is not None]


def _value(task: Task, name: str, case: Case) -> Any:
    """A scalar argument's value in a case: a dimension keeps its type, a formula gives a number."""
    value = next(a for a in task.arguments if a.name == name).value
    assert value is not None, "it is no tensor"
    if isinstance(value, str):
        return case.dims[value] if value in case.dims else task.formula(value, case)
    return value


# -- workloads and traces -------------------------------------------------------------------------


def _workload(task: Task, point: PointRecord) -> Json:
    case = Case(name="point", dtype=point.dtype, **dict(point.dims))  # type: ignore[arg-type]
    tensors = [a.shape for a in task.arguments if a.shape is not None]
    shapes = [*tensors, *(r.shape for r in task.results)]
    axes = {
        _axis(s): int(task.formula(s, case))
        for shape in shapes
        for s in shape
        if isinstance(s, str)
    }
    inputs = {
        a.name: {"type": "random"}
        if a.shape is not None
        else {"type": "scalar", "value": _value(task, a.name, case)}
        for a in task.arguments
    }
    key = json.dumps([task.name, point.dtype, axes, inputs], sort_keys=True)
    return {"axes": axes, "inputs": inputs, "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, key))}


def _traces(
    operator: OperatorRecord, task: Task, device: DeviceRecord, point: PointRecord
) -> Iterator[Json]:
    torch = point.times.get(TORCH)
    for name, index in point.config.items():
        timing = point.times.get(name)
        if timing is None or torch is None:
            continue
        regions = [r for r in operator.kernel(name).regions if r.dtype == point.dtype]
        errors = [r.element_error for r in regions if r.element_error is not None]
        if not errors:  # figures for another dtype stand in, in which nothing was checked
            continue
        evaluation = {
            "status": "PASSED",
            "environment": {"hardware": device.name, "libs": _versions(device)},
            "timestamp": device.date,
            "log": "latency: median device time of one call; reference: the fastest of eager and "
            "the modes of torch.compile, interleaved with it",
            "correctness": {
                "max_relative_error": max(errors),
                "extra": {
                    "max_relative_error": "the largest |out - ref| / (|ref| + mean |ref| of its "
                    "row) over the judge's check cases in this dtype, against float64",
                    "max_absolute_error": "not measured",
                    "cases": sum(r.cases for r in regions),
                    "judge": f"kagent {operator.kernel(name).origin.kagent}",
                    "tolerance": "k times torch's error plus a floor, per row, element and bias",
                },
            },
            "performance": {
                "latency_ms": timing.us / 1000,
                "reference_latency_ms": torch.us / 1000,
                "speedup_factor": torch.us / timing.us,
            },
        }
        yield {
            "definition": f"{operator.task}_{point.dtype}",
            "workload": _workload(task, point),
            "solution": _solution_name(name, index, point.dtype),
            "evaluation": evaluation,
        }


def _versions(device: DeviceRecord) -> dict[str, str]:
    versions = device.environment.get("versions")
    known = versions if isinstance(versions, Mapping) else {}
    return {str(k): str(v) for k, v in known.items()}


# -- solutions ------------------------------------------------------------------------------------


def _solution_name(kernel: str, config: int, dtype: str) -> str:
    return f"{kernel}_{dtype}_config{config}"


def _solution(
    library: LibraryRecord,
    operator: OperatorRecord,
    task: Task,
    kernel: KernelRecord,
    config: int,
    dtype: str,
) -> Json:
    # A kernel that takes what the library brings is the library's; any other one goes along.
    own = kernel.written_in is TRITON and as_shipped(kernel.source) == kernel.source
    main = render(
        "flashinfer_main.py.j2",
        where="" if own else f"{library.name}.kernels",
        module="kernel" if own else kernel.id,
        entry=operator.entry,
        arguments=[a.name for a in task.arguments],
        results=len(task.results),
        written=_written(task),
        config=repr(dict(kernel.configs[config]) if kernel.configs else {}),
    )
    sources = [{"path": "main.py", "content": main}]
    origin = kernel.origin
    authors = [m for m in origin.models if m] or [origin.proposer]
    return {
        "name": _solution_name(kernel.id, config, dtype),
        "definition": f"{operator.task}_{dtype}",
        "author": f"kagent {origin.kagent}: {', '.join(authors)}",
        "description": f"run {origin.run}, candidate {origin.candidate}",
        "spec": {
            "language": TRITON.name if kernel.written_in is TRITON else "python",
            "target_hardware": ["cpu" if kernel.written_in.kind == "cpu" else "cuda"],
            "entry_point": "main.py::run",
            "dependencies": [] if own else [library.name],
            "destination_passing_style": False,
        },
        "sources": sources + [{"path": "kernel.py", "content": kernel.source}] * own,
    }


def _pretty(value: Json) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _lines(values: Iterator[Json] | list[Json]) -> str:
    return "".join(json.dumps(v, ensure_ascii=False, allow_nan=False) + "\n" for v in values)
