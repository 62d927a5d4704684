"""Diagnosis of this machine: compilers, GPU, driver, versions, observed isolation, models."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.target import DEFAULT_TARGET
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.data.verdict import CaseError, Rejected
from kagent_sandbox.device.cpu.priority import reaches_launchers
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.device.table import available, device_for, find_device
from kagent_sandbox.errors import (
    INSTALL_CUDA,
    KagentError,
    MachineError,
    ToolchainError,
    UserError,
)
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.process.cores import usable_cores
from kagent_sandbox.process.isolation_probe import probe
from kagent_sandbox.process.temporary_space import free_bytes

from kagent.config.settings import NO_MODEL, load_config
from kagent.evolve.open_machine import request_maker, visible_cases
from kagent.runs.manifest import CUDA_PACKAGES, PACKAGES, versions
from kagent.runs.selftest_record import newest


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    MISSING = "missing"
    """Something optional is not there; the text says what that rules out."""
    BROKEN = "broken"
    """Something needed does not work; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    name: str
    text: str


_TASK = """
name = "doctor"
summary = "Twice a vector"
entry = "entry"
signature = "entry(x: Tensor[N]) -> Tensor[N]"
bytes = "2 * N * itemsize"
flops = "N"
dims = { N = "elements" }
arguments = [{ name = "x", shape = ["N"] }]
results = [{ name = "y", shape = ["N"], k = 2.0 }]
[cpu]
check = [{ name = "few", dtype = "float32", N = 64 }]
bench = [{ name = "more", dtype = "float32", N = 64 }]
[gpu]
check = [{ name = "few_gpu", dtype = "float32", N = 64 }]
bench = [{ name = "more_gpu", dtype = "float32", N = 64 }]
"""
_REFERENCE = """
import torch
def inputs(case, generator, device):
    return {"x": torch.randn(case.dims["N"], generator=generator, device=device)}
def reference(x):
    return x.double() * 2
def eager(x):
    return x * 2
def experts():
    return {}
"""
_CPP = '''
import torch
from kagent_sandbox.lang import cpp_kernel
SOURCE = r"""
extern "C" void twice(const float* x, float* y, long n) {
#pragma omp parallel for
  for (long i = 0; i < n; ++i) y[i] = 2 * x[i];
}
"""
def entry(x):
    y = torch.empty_like(x)
    cpp_kernel("twice", SOURCE)(x, y, x.numel())
    return y
'''
_CUDA = '''
import torch
from kagent_sandbox.lang import cuda_kernel
SOURCE = r"""
#include <cuda_bf16.h>
extern "C" __global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
"""
def entry(x):
    y = torch.empty_like(x)
    cuda_kernel("twice", SOURCE).launch((1,), (64,), x, y, x.numel())
    return y
'''
_TRITON = """
import torch, triton
import triton.language as tl
@triton.jit
def _twice(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
def entry(x):
    y = torch.empty_like(x)
    _twice[(1,)](x, y, x.numel(), BLOCK=64)
    return y
"""
_LANGUAGES: Mapping[Kind, Sequence[tuple[str, str]]] = {
    "cpu": (("C++ (g++)", _CPP),),
    "gpu": (("Triton", _TRITON), ("CUDA (NVRTC)", _CUDA)),
}


def examine(say: Callable[[str], None], **flags: object) -> list[Finding]:
    """Everything, in the order in which it is reported.

    Args:
        say: Is told what is being tried.
        flags: Options that were given, for `load_config`.
    """
    found = [
        Finding(Level.OK, "system", f"{platform.platform()}, {usable_cores()} cores"),
        Finding(Level.OK, "Python", f"{platform.python_version()} ({sys.executable})"),
        _versions(),
        _gcc(),
    ]
    say("compilers, and kernels in the judge")
    found += _compilers(say)
    say("isolation")
    found.append(_isolation())
    found += _container()
    say("GPU")
    found.append(_gpu())
    found.append(_selftest())
    say("models")
    found += _models(flags)
    return found


def _versions() -> Finding:
    texts, missing = [], []
    for package in PACKAGES:
        try:
            texts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if not missing:
        return Finding(Level.OK, "packages", ", ".join(texts))
    there, absent = ", ".join(texts), ", ".join(missing)
    if not has_gpu() and set(missing) <= set(CUDA_PACKAGES):
        text = f"{there}; not needed without an NVIDIA GPU: {absent} (they compile CUDA kernels)"
        return Finding(Level.OK, "packages", text)
    text = f"{there}; not installed: {absent}: {INSTALL_CUDA}"
    return Finding(Level.BROKEN, "packages", text)


def _gcc() -> Finding:
    path = shutil.which("g++")
    if path is None:
        return Finding(Level.BROKEN, "g++", "not found: apt-get install g++ (Debian, Ubuntu)")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return Finding(Level.OK, "g++", (done.stdout or done.stderr).splitlines()[0])


def _compilers(say: Callable[[str], None]) -> list[Finding]:
    """Build one small candidate per language in the real builder, confined as in a run, and have
    the judge check it where the device is.
    """
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="kagent-") as made:
        folder = Path(made)
        (folder / "task.toml").write_text(_TASK)
        (folder / "reference.py").write_text(_REFERENCE)
        try:
            with Builder(1, on_wait=say) as builder:
                for kind in _LANGUAGES:
                    found += _of_kind(kind, load_task(folder), builder, say)
        except KagentError as e:
            found.append(Finding(Level.BROKEN, "builder", str(e)))
    return found


def _of_kind(
    kind: Kind, task: Task, builder: Builder, say: Callable[[str], None]
) -> Iterator[Finding]:
    """As `_tried`. An error says nothing of the other kind's compilers: it is a finding."""
    try:
        yield from _tried(kind, task, builder, say)
    except KagentError as e:
        yield Finding(Level.BROKEN, f"builder or judge ({kind.upper()})", str(e))


def _tried(
    kind: Kind, task: Task, builder: Builder, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Build, and check on the device, a candidate of each of its languages; the judge's A/A test.

    Raises:
        KagentError: The builder or the judge fails.
    """
    cases = visible_cases(task, kind)
    if not available(kind):
        for name, source in _LANGUAGES[kind]:
            try:
                built = builder.build(request_maker(task, DEFAULT_TARGET, cases, 1)(source))
            except ToolchainError as e:
                yield Finding(Level.MISSING, name, str(e))
            else:
                yield _built(name, DEFAULT_TARGET, built)
        return
    with JudgeClient(task.folder, device_for(kind), 0, on_wait=say) as judge:
        for name, source in _LANGUAGES[kind]:
            built = builder.build(request_maker(task, judge.facts, cases, 1)(source))
            checked = built if isinstance(built, Rejected) else judge.check(built)
            yield _built(name, judge.facts.target, built, checked)
        yield Finding(Level.OK, f"clock ({kind.upper()})", judge.noise().text)


def _built(
    name: str,
    target: str,
    built: Built | Rejected,
    checked: tuple[CaseError, ...] | Rejected | None = None,
) -> Finding:
    failed = built if isinstance(built, Rejected) else checked
    if isinstance(failed, Rejected):
        return Finding(Level.BROKEN, name, f"{failed.stage} {failed.status}: {failed.message}")
    assert isinstance(built, Built)
    text = f"compiles for {target} in {built.build_s:.2f} s, confined"
    ran = "; its kernel is correct in a launcher" if checked is not None else "; not run here"
    return Finding(Level.OK, name, text + ran)


def _isolation() -> Finding:
    try:
        seen = probe()
    except MachineError as e:
        return Finding(Level.BROKEN, "isolation", str(e))
    level = Level.BROKEN if seen.escaped else Level.OK
    return Finding(level, "isolation", seen.describe())


def _container() -> list[Finding]:
    """Limits of a container, and their cost; nothing where there are none."""
    found: list[Finding] = []
    if not reaches_launchers():
        text = (
            "root without CAP_SYS_NICE: threads that are timed are neither pinned nor given "
            "priority, so that other programs disturb CPU times more: docker run --cap-add SYS_NICE"
        )
        found.append(Finding(Level.MISSING, "priority", text))
    if os.getpid() == 1:
        text = "this is process 1, and nobody ends what others leave behind: docker run --init"
        found.append(Finding(Level.MISSING, "init", text))
    free = free_bytes(Path(tempfile.gettempdir()))
    most = builder_confinement().disk_bytes
    if free < most:
        text = (
            f"{tempfile.gettempdir()} has {free >> 20} MiB free, and a build may take "
            f"{most >> 20}: free some, or set TMPDIR"
        )
        found.append(Finding(Level.MISSING, "disk", text))
    return found


def _gpu() -> Finding:
    if not has_gpu():
        return Finding(
            Level.MISSING,
            "GPU",
            "no NVIDIA GPU: C++ kernels are evolved and timed on the CPU; Triton and CUDA kernels "
            "are compiled, Triton ones interpreted, and not timed",
        )
    try:
        with contextlib.closing(find_device("gpu").open(0, products=True)) as backend:
            facts = backend.facts
            healthy = backend.healthy()
    except MachineError as e:
        return Finding(Level.BROKEN, "GPU", str(e))
    text = (
        f"{facts.name}, {facts.target}, {facts.units} multiprocessors, "
        f"{facts.memory_bytes / 2**30:.0f} GiB, {facts.key}"
    )
    if not healthy:
        return Finding(Level.BROKEN, "GPU", f"{text}; a known kernel computes wrong results")
    return Finding(Level.OK, "GPU", f"{text}; a known kernel computes correctly in a launcher")


def _selftest() -> Finding:
    """Report the stored outcome of `kagent selftest` on this machine with these versions."""
    from kagent_sandbox.device.cpu.facts import cpu_facts

    record = newest(cpu_facts().key, versions())
    if record is None:
        text = "not run on this machine with these versions: kagent selftest"
        return Finding(Level.MISSING, "selftest", text)
    text = record.text if record.noise is None else f"{record.text}; noise: {record.noise.text}"
    return Finding(Level.BROKEN if record.missed else Level.OK, "selftest", text)


def _models(flags: Mapping[str, object]) -> list[Finding]:
    """Call each model that is set. That none is set is no fault."""
    try:
        models = load_config(**flags).model_configs()
    except UserError as e:
        return [Finding(Level.BROKEN, "configuration", str(e))]
    if not models:
        text = f"none is set: the built-in tuner proposes. To ask a language model, {NO_MODEL}"
        return [Finding(Level.MISSING, "model", text)]
    from kagent.llm.chat import Reply
    from kagent.llm.ping import try_models

    return [
        Finding(
            Level.OK if isinstance(trial.result, Reply) else Level.BROKEN,
            f"model {trial.model.name}",
            trial.text,
        )
        for trial in try_models(models)
    ]
