"""Libraries of seeds, whose figures are made up: valid, and measured by nobody."""

import hashlib
import tomllib
from pathlib import Path

import torch
from kagent.export.library._devices import capability, device_name
from kagent.export.record import (
    TORCH,
    ChangeRecord,
    CompiledRecord,
    DeviceRecord,
    KernelRecord,
    LibraryRecord,
    OperatorRecord,
    OriginRecord,
    PointRecord,
    Timing,
)
from kagent.export.references import shipped_reference
from kagent.export.regions import regions_of
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import CaseError
from kagent_sandbox.runtime import Source

CPU = torch.device("cpu")
SEEDS = Path(__file__).parents[3] / "seeds"
HOSTILE = "tune: | <b>bold</b> `x` [a](https://example.org) \x1b[31m\nsecond line"
OPERATOR = '''"""Stands in for an operator where only its names matter."""
import torch
from torch import nn
__all__ = ["{module}", "{task}"]
def {task}(input: torch.Tensor, dim: int = -1) -> torch.Tensor: ...
class {module}(nn.Module): ...
LAYERS = {{"{module}": {module}}}
'''


def operator_text(task, module):
    own = SEEDS / task / "operator.py"
    return own.read_text() if own.is_file() else OPERATOR.format(task=task, module=module)


def timing(us):
    return Timing(us, us * 0.97, us * 1.04)


def errors_of(cases):
    """1, 2, ... machine epsilons of float32."""
    return [
        CaseError(c.name, "y", *[i * 2.0**-23] * 3, *[2.0**-23] * 3, 0.5)
        for i, c in enumerate(cases, 1)
    ]


def kernel_of(task, file, kind="cpu", config=None):
    source = (SEEDS / task / file).read_text()
    sha = hashlib.sha256(source.encode()).hexdigest()
    loaded = load_task(SEEDS / task)
    cases = loaded.cases(kind)
    origin = OriginRecord(
        run=f"{task}-made-up",
        run_id="0123456789abcdef",
        candidate=7,
        path=("seed: ", HOSTILE, "rewrite: rows in registers"),
        proposer="model a, model b",
        models=("model a",),
        evaluated=50,
        ratio=1.25,
        low=1.2,
        high=1.3,
        started="2026-11-21T05:16:19+0000",
        kagent="0.1.0",
        task_digest=loaded.digest,
        selftest="",
    )
    return KernelRecord(
        id=f"{task}_{sha[:8]}",
        task=task,
        language=file.partition("_")[0],
        source=source,
        sha256=sha,
        targets=("cpu" if kind == "cpu" else "sm_90a",),
        configs=(config or {},),
        regions=regions_of([*cases.check, *cases.bench], errors_of(cases.check)),
        pitched=True,
        origin=origin,
        compiled=compiled_by(source) if file.startswith("cpp") else (),
    )


def compiled_by(source):
    """What a seed's host code compiles, had by running it as far as the compiler."""
    names = {}
    code = source.replace("from kagent_sandbox.lang import cpp_kernel", "")
    exec(compile(code, "seed", "exec"), names)
    defines = {n: names[n] for n in names["TUNE"]}
    name = source.partition('cpp_kernel("')[2].partition('"')[0]
    key = Source("cpp", name, names["SOURCE"], (), tuple(defines.items())).key("cpu")
    pairs = tuple(defines.items())
    return (CompiledRecord(key, "cpu", "cpp", name, names["SOURCE"], (), pairs),)


def operator_of(task, module, kernels, devices):
    folder = SEEDS / task
    data = tomllib.loads((folder / "task.toml").read_text())
    return OperatorRecord(
        task=task,
        entry=data["entry"],
        signature=data["signature"],
        summary=data["summary"],
        dims=tuple(data["dims"]),
        kernels=tuple(kernels),
        devices=tuple(devices),
        task_toml=(folder / "task.toml").read_text(),
        reference_py=shipped_reference(load_task(folder)),
        operator_py=operator_text(task, module),
    )


def device_of(task, kernel, kind="cpu", name=None, able=None, lost=1):
    """The task's benchmark cases: 100, 200, ... µs, and torch takes 1.3 times that; on the last
    `lost` of them 0.8 times.
    """
    points = []
    cases = load_task(SEEDS / task).cases(kind).bench
    for i, case in enumerate(cases):
        mine = 100.0 * (i + 1)
        loses = i >= len(cases) - lost
        torch = timing(mine * (0.8 if loses else 1.3))
        times = {kernel.id: timing(mine), "eager": torch, "compile": timing(torch.us * 1.1)}
        points.append(
            PointRecord(
                case=case.name,
                dtype=case.dtype,
                dims=case.dims,
                times={**times, TORCH: torch},
                config={kernel.id: 0},
                best=TORCH if loses else kernel.id,
            )
        )
    environment = {
        "key": "g++ 12.2.0, torch 2.13.0",
        "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
        "isolation": "namespaces",
        "python": "3.11.7",
    }
    name = name or device_name(CPU)
    return DeviceRecord(
        name, kind, able or capability(CPU), environment, "2026-11-21", tuple(points)
    )


def cpu_library(name="made_kernels", able=None):
    """Softmax and cross entropy in C++."""
    operators = []
    for task, module, file in (
        ("softmax", "Softmax", "cpp_rows.py"),
        ("cross_entropy", "CrossEntropyLoss", "cpp_rows.py"),
    ):
        kernel = kernel_of(task, file)
        device = device_of(task, kernel, able=able)
        operators.append(operator_of(task, module, [kernel], [device]))
    history = (ChangeRecord("0.1.0", "2026-11-21", ("softmax: added", HOSTILE)),)
    return LibraryRecord(name, "0.1.0", "0.1.0", tuple(operators), history)


def gpu_library(name="made_gpu_kernels"):
    """Attention in Triton and linear cross entropy in CUDA, for a GPU that is elsewhere."""
    operators = []
    for task, module, file in (
        ("attention", "Attention", "triton_flash.py"),
        ("linear_cross_entropy", "LinearCrossEntropyLoss", "cuda_rows.py"),
    ):
        kernel = kernel_of(task, file, "gpu")
        device = device_of(task, kernel, "gpu", "NVIDIA H100 80GB HBM3", "sm_90", lost=0)
        operators.append(operator_of(task, module, [kernel], [device]))
    return LibraryRecord(name, "1.2.0", "0.1.0", tuple(operators), ())


def in_place_library(name="made_steps", kind="cpu"):
    """AdamW in C++ or Triton: it writes three of its arguments, and returns nothing."""
    kernel = kernel_of("adamw", "cpp_simd.py" if kind == "cpu" else "triton_flat.py", kind)
    device = device_of("adamw", kernel, kind, lost=0)
    operator = operator_of("adamw", "AdamW", [kernel], [device])
    return LibraryRecord(name, "0.1.0", "0.1.0", (operator,), ())
