"""How often the judge calls a planted speed-up by its name.

    python benchmarks/planted.py [--device gpu|cpu] [--repeats 20] [--deadline-s 280] [--plants 0,5]

One kernel doubles a matrix row by row. Its slower twin is the same binary, told to do some rows
once more: 0, 0.5, 1, 2 or 5 % of them, or what `--plants` says. The real judge times the two
against each other in fresh launchers, with the faster one as the candidate and with the slower one.
Printed is, per size and plant, how often the candidate was called faster (P > 0.95: it would be
promoted), slower (P < 0.05, or let go early) or a tie, and the median ratio that was measured.

Of equal kernels also how far estimates lie from 1, and how far by what their intervals say (1: as
far as these say). Rounds over everything are repeated until `--repeats` are done or the deadline
has come.
"""

import argparse
import hashlib
import importlib
import itertools
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from kagent_sandbox.device.cpu.openmp import WAITING

os.environ.update(WAITING)  # as in a judge's own process, before OpenMP is loaded

from kagent_sandbox.data.build import Built, Contender
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.plan import (
    Alloc,
    Buffer,
    KernelInfo,
    Launch,
    Plan,
    Pointer,
    Scalar,
    TensorRef,
)
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.data.verdict import Comparison, Passed, Rejected
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.device.interface import Backend
from kagent_sandbox.judge.check.cases import bench_cases
from kagent_sandbox.judge.judge import Judge

Key: TypeAlias = tuple[int, float, str]  # rows, share, which one is the candidate
SECRET = 5
PLANTS = "0,0.5,1,2,5"
COLUMNS = {"gpu": 4096, "cpu": 256}
ROWS = {"gpu": (1000, 2000, 4000, 8000, 32000), "cpu": (200, 1000, 4000)}
PROMOTION = 0.95
ORDERS = ("faster one", "slower one")  # who is the candidate

TASK = """
name = "rows{rows}"
summary = "Twice a matrix"
entry = "double"
signature = "double(x: Tensor[M, N]) -> Tensor[M, N]"
bytes = "2 * M * N * itemsize"
written = "M * N * itemsize"
flops = "M * N"
dims = {{ M = "rows", N = "columns" }}
arguments = [{{ name = "x", shape = ["M", "N"] }}]
results = [{{ name = "y", shape = ["M", "N"], k = 2.0 }}]
"""
CASES = """
[[{kind}.{use}]]
name = "{kind}_{use}"
dtype = "float32"
M = {rows}
N = {columns}
"""
REFERENCE = """
import torch

def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    return {"x": torch.randn(shape, generator=generator, device=device)}

def reference(*, x):
    return 2 * x.double()

def eager(*, x):
    return x * 2

def experts():
    return {}
"""
CUDA = """
extern "C" __global__ void twice(const float4* x, float4* y, int rows, int columns) {
  long long at = (long long)(blockIdx.x % rows) * columns;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    float4 v = x[at + i];
    y[at + i] = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);
  }
}
"""
CPP = """
extern "C" void twice(const float* x, float* y, int rows, int columns, int times) {
#pragma omp parallel for schedule(static)
  for (int i = 0; i < times; ++i) {
    const float* from = x + (long)(i % rows) * columns;
    float* to = y + (long)(i % rows) * columns;
#pragma omp simd
    for (int j = 0; j < columns; ++j) {
      float s = from[j];
      for (int k = 0; k < 24; ++k) s = 0.5f * s + from[j];  // towards twice the element
      to[j] = s;
    }
  }
}
"""


def make_task(folder: Path, rows: int) -> Task:
    """A task with one benchmark case."""
    folder.mkdir()
    text = TASK.format(rows=rows)
    for kind in ("gpu", "cpu"):
        for use, size in (("check", 2), ("bench", rows)):
            text += CASES.format(kind=kind, use=use, rows=size, columns=COLUMNS[kind])
    (folder / "task.toml").write_text(text)
    (folder / "reference.py").write_text(REFERENCE)
    return load_task(folder)


def compile_kernel(kind: str, target: str) -> bytes:
    if kind == "gpu":
        core = importlib.import_module("cuda.core")
        options = core.ProgramOptions(std="c++17", arch=target)
        return bytes(core.Program(CUDA, "c++", options=options).compile("cubin").code)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "k.cpp"), Path(folder, "k.so")
        source.write_text(CPP)
        options = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-s"]
        subprocess.run(["g++", *options, str(source), "-o", str(library)], check=True)
        return library.read_bytes()


def planted(task: Task, kind: Kind, target: str, code: bytes, share: float) -> Built:
    """The kernel, doing `share` of its rows once more."""
    cases = [*task.cases(kind).check, *bench_cases(task, kind)]
    plans = {(0, c.name): plan_for(c.dims["M"], kind, target, code, share) for c in cases}
    name = hashlib.sha256(code + str(share).encode()).hexdigest()
    return Built(name, name, target, ({},), plans, {hashlib.sha256(code).hexdigest(): code}, 0.0)


def plan_for(rows: float, kind: str, target: str, code: bytes, share: float) -> Plan:
    """One launch, of `share` more rows than there are."""
    rows, columns, key = int(rows), COLUMNS[kind], hashlib.sha256(code).hexdigest()
    times, nbytes = round(rows * (1 + share)), rows * columns * 4
    pointers = (Pointer(0, 0), Pointer(1, 0))
    if kind == "gpu":
        kernel = KernelInfo(key, "cuda", "twice", (8, 8, 4, 4))
        args = (*pointers, Scalar("i32", rows), Scalar("i32", columns // 4))
        launch = Launch(key, (times, 1, 1), (256, 1, 1), args)
    else:
        kernel = KernelInfo(key, "cpp", "twice", (8, 8, 4, 4, 4))
        args = (*pointers, *(Scalar("i32", n) for n in (rows, columns, times)))
        launch = Launch(key, (1, 1, 1), (1, 1, 1), args)
    buffers = (Buffer(0, "input", nbytes, "x"), Buffer(1, "scratch", nbytes))
    output = TensorRef(1, 0, (rows, columns), (columns, 1), "float32")
    return Plan(target, buffers, (Alloc(1), launch), (output,), (kernel,))


def open_backend(kind: str) -> Backend:
    if kind == "cpu":
        from kagent_sandbox.device.cpu.backend import CpuBackend

        return CpuBackend()
    from kagent_sandbox.device.cuda.backend import GpuBackend

    return GpuBackend(products=False)


def called(verdict: Passed | Rejected) -> str:
    if isinstance(verdict, Rejected):
        return f"rejected: {verdict.status} {verdict.message}"
    versus = verdict.versus
    assert versus is not None
    if verdict.screened or versus.p_faster < 1 - PROMOTION:
        return "slower"
    return "faster" if versus.p_faster > PROMOTION else "tie"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu" if has_gpu() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--deadline-s", type=float, default=280.0)
    parser.add_argument("--plants", default=PLANTS, help="in percent")
    options = parser.parse_args()
    plants = [float(p) / 100 for p in options.plants.split(",")]
    kind = options.device
    calls: dict[Key, Counter[str]] = defaultdict(Counter)
    ratios: dict[Key, list[float]] = defaultdict(list)
    times: dict[int, list[float]] = defaultdict(list)
    equal: list[Comparison] = []
    lanes: list[float] = []
    notes: Counter[str] = Counter()
    # One size after the other: a judge keeps its inputs, in a fifth of a CPU's memory.
    for rows in ROWS[kind]:
        deadline = time.monotonic() + options.deadline_s / len(ROWS[kind])
        with tempfile.TemporaryDirectory() as folder:
            backend = open_backend(kind)
            code = compile_kernel(kind, backend.facts.target)
            task = make_task(Path(folder, str(rows)), rows)
            judge = Judge(task, backend, SECRET, {f"{kind}_bench": 100.0})
            try:
                print(f"{backend.facts.key}: noise: {judge.find_noise().text}", flush=True)
                turns = itertools.product(range(options.repeats), plants, ORDERS)
                for _, share, order in turns:
                    if time.monotonic() > deadline:
                        break
                    pair = [
                        planted(task, kind, backend.facts.target, code, s) for s in (0.0, share)
                    ]
                    mine, other = pair if order == ORDERS[0] else reversed(pair)
                    verdict = judge.measure(mine, (), Contender("other", other, {}))
                    key = rows, share, order
                    calls[key][called(verdict)] += 1
                    if isinstance(verdict, Passed) and verdict.versus is not None:
                        ratios[key].append(verdict.versus.ratio)
                        times[rows].append(verdict.timings[0].kernel_us)
                        lanes.append(verdict.lane_s)
                        if share == 0 and not verdict.screened:
                            equal.append(verdict.versus)
                        notes.update(n.split(":")[0] for n in verdict.notes)
            finally:
                judge.close()
    report(calls, ratios, times)
    if equal:
        print(f"equal kernels: {spread(equal)}")
    if lanes:
        print(f"{len(lanes)} measurements, median {statistics.median(lanes):.2f} s each")
    print(f"disturbed: {dict(notes.most_common(6)) or 'never'}")


def spread(found: Sequence[Comparison]) -> str:
    """How far estimates of equal kernels lie from 1."""
    off = [math.log(c.ratio) for c in found]
    said = [math.log(c.high / c.low) / (2 * 1.96) for c in found]
    rms = math.sqrt(statistics.fmean(x * x for x in off))
    share = math.sqrt(statistics.fmean((x / sd) ** 2 for x, sd in zip(off, said, strict=True)))
    return f"{len(found)} estimates, {rms:.2%} from 1 (rms), {share:.2f} of what intervals say"


def report(
    calls: Mapping[Key, Counter[str]],
    ratios: Mapping[Key, list[float]],
    times: Mapping[int, list[float]],
) -> None:
    """The table, then what the aims are about."""
    print("     µs | planted | candidate  |  n | faster | tie | slower | ratio measured")
    for key in sorted(calls):
        rows, share, order = key
        found, n = calls[key], sum(calls[key].values())
        us = f"{statistics.median(times[rows]):7.1f}" if times[rows] else "      –"
        ratio = f"{statistics.median(ratios[key]):.4f}" if ratios[key] else "–"
        named = " | ".join(f"{found[name]:>{len(name)}}" for name in ("faster", "tie", "slower"))
        odd = ", ".join(f"{v} {k}" for k, v in found.items() if k.startswith("rejected"))
        print(f"{us} | {share:7.1%} | {order} | {n:2} | {named} | {ratio} {odd}")
    equal = [c for (_, share, _), c in calls.items() if share == 0]
    total = sum(sum(c.values()) for c in equal)
    if total:
        wrong = sum(c["faster"] for c in equal)
        print(f"equal kernels called faster: {wrong} of {total} ({wrong / total:.1%}; aim: 5 %)")
    for share in sorted({s for _, s, _ in calls} - {0.0}):
        for name, us in (("all", 0.0), ("50 µs and more", 50.0)):
            chosen = [
                c
                for (rows, s, order), c in calls.items()
                if s == share and order == "faster one" and times[rows]
                and statistics.median(times[rows]) >= us
            ]  # fmt: skip
            n = sum(sum(c.values()) for c in chosen)
            if n:
                hits = sum(c["faster"] for c in chosen)
                print(f"planted {share:.1%}, {name}: found {hits} of {n} ({hits / n:.0%})")


if __name__ == "__main__":
    main()
