"""A small task and hand-made C++ candidates for tests of the judge."""

import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

from kagent_sandbox.data.build import Built, TensorSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.plan import (
    Alloc,
    Buffer,
    Fill,
    KernelInfo,
    Launch,
    Plan,
    Pointer,
    Scalar,
    TensorRef,
)
from kagent_sandbox.judge.check.cases import bench_cases, check_cases, race_cases

TASK = """
name = "scale"
summary = "Twice the input"
entry = "scale"
signature = "scale(x: Tensor[M, N]) -> Tensor[M, N]"
bytes = "2 * M * N * itemsize"
written = "M * N * itemsize"
flops = "M * N"
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]

[[gpu.check]]
name = "gpu_check"
dtype = "float32"
M = 3
N = 5

[[gpu.bench]]
name = "gpu_bench"
dtype = "float32"
M = 64
N = 64

[[cpu.check]]
name = "odd"
dtype = "float32"
M = 7
N = 13

[[cpu.check]]
name = "padded"
dtype = "float32"
noncontiguous = true
M = 5
N = 9

[[cpu.bench]]
name = "wide"
dtype = "float32"
M = 64
N = 2048

[[cpu.bench]]
name = "tall"
dtype = "float32"
M = 2048
N = 64

[[cpu.hidden_check]]
count = 1
dtype = ["float32"]
dims = { M = { min = 1, max = 9 }, N = { min = 2, max = 40, prime = true } }

[[cpu.hidden_bench]]
count = 1
dtype = ["float32"]
dims = { M = [128], N = [1024] }
"""
REFERENCE = """
import torch

def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    x = torch.randn(shape, generator=generator, device=device)
    return {"x": (x * case.scale).to(getattr(torch, case.dtype))}

def reference(*, x):
    return 2 * x.double()

def reference_rows(rows, x):
    return reference(x=x[rows[0]])

def eager(*, x):
    return x * 2

def experts():
    return {}
"""
HEADER = """
#include <cstdint>
#include <cstdlib>
"""
BODY = (
    HEADER
    + """
extern "C" void scale(const float* x, float* y, int64_t rows, int64_t cols, int64_t step) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) { %s }
}
"""
)
GOOD = BODY % "y[i * cols + j] = 2.0f * x[i * step + j];"
SLOW = BODY % (
    "for (volatile int k = 0; k < 8; k = k + 1) {} y[i * cols + j] = 2.0f * x[i * step + j];"
)


def write_task(folder: Path) -> Path:
    (folder / "task.toml").write_text(TASK)
    (folder / "reference.py").write_text(REFERENCE)
    return folder


def write_small_task(folder: Path) -> Path:
    """Write the task with a sixteenth of the CPU's bytes, for tests with times of their own: there,
    drawing inputs and comparing results is most of the work. A machine for it has a sixteenth of
    the ceilings.
    """
    write_task(folder)
    changed = TASK
    for size, smaller in {
        "M = 64\nN = 2048": "M = 16\nN = 512",
        "M = 2048\nN = 64": "M = 512\nN = 16",
        "M = [128], N = [1024]": "M = [32], N = [256]",
    }.items():
        assert changed.count(size) == 1
        changed = changed.replace(size, smaller)
    (folder / "task.toml").write_text(changed)
    return folder


@functools.cache
def compiled(source: str) -> tuple[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "k.cpp"
        path.write_text(source)
        command = ["g++", "-O2", "-march=native", "-fopenmp", "-shared", "-fPIC", "-s"]
        subprocess.run([*command, "-o", f"{folder}/k.so", str(path)], check=True)
        data = (Path(folder) / "k.so").read_bytes()
    return hashlib.sha256(source.encode()).hexdigest(), data


def plan_for(case, digest, *, dtype=None, shape=None, zero_first=False):
    """One launch of `scale` into a new result."""
    spec = case.arguments[0]
    assert isinstance(spec, TensorSpec)
    rows, cols = spec.shape
    step = spec.strides[0]
    y_shape = shape or spec.shape
    y = TensorRef(1, 0, y_shape, (y_shape[1], 1), dtype or spec.dtype)
    sizes = (((rows - 1) * step + cols) * 4, rows * cols * 4)
    buffers = (Buffer(0, "input", sizes[0], "x"), Buffer(1, "scratch", sizes[1]))
    args = (Pointer(0, 0), Pointer(1, 0), *(Scalar("i64", n) for n in (rows, cols, step)))
    kernel = KernelInfo(digest, "cpp", "scale", (8,) * 5)
    launch = Launch(digest, (1, 1, 1), (1, 1, 1), args)
    ops = (Alloc(1), *((Fill(y, 0.0),) if zero_first else ()), launch)
    return Plan("cpu", buffers, ops, (y,), (kernel,))


def built(task, seed, *sources, kind="cpu", race=False, **options):
    """A candidate with one configuration per source."""
    cases = [*check_cases(task, kind, seed), *bench_cases(task, kind)]
    cases += race_cases(task, kind, seed) if race else []
    plans, binaries = {}, {}
    for i, source in enumerate(sources):
        digest, data = compiled(source)
        binaries[digest] = data
        for case in cases:
            plans[i, case.name] = plan_for(build_case(task, case), digest, **options)
    name = hashlib.sha256("".join(sources).encode()).hexdigest()
    configs = tuple({"VARIANT": i} for i in range(len(sources)))
    return Built(name, name, "cpu", configs, plans, binaries, 0.0)
