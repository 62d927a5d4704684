"""Tasks for tests of what task.toml can say, and candidates for them, built and judged for real."""

from kagent.evolve.open_machine import request_maker
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.judge.check.cases import bench_cases, check_cases
from kagent_sandbox.judge.judge import Judge

SEED = 7
TOML = """
name = "tiny"
summary = "A tiny task"
entry = "run"
signature = "run(...)"
bytes = "%s"
flops = "0"
"""
REFERENCE = """
import torch

def experts():
    return {}
"""
SOURCE = '''
import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
%s
"""

%s
'''


class Backend(CpuBackend):
    """Ceilings that nobody measured: nothing is timed against them."""

    def ceilings(self, *, again=False):
        return Ceilings(10.0, 10.0, 10.0, {})


def write(folder, toml, reference, *, gpu=True, moved="1"):
    """A task's folder. `toml` is without its head, of which `moved` are the bytes; the CPU's cases
    stand for a GPU's, too.
    """
    folder.mkdir(exist_ok=True)
    cases = toml[toml.index("[[cpu.check]]") :]
    visible = cases[: cases.index("[[cpu.hidden")] if "[[cpu.hidden" in cases else cases
    gpus = visible.replace("cpu.", "gpu.").replace('name = "', 'name = "gpu_') if gpu else ""
    head = "" if toml.lstrip().startswith("name =") else TOML % moved
    (folder / "task.toml").write_text(head + toml + gpus)
    (folder / "reference.py").write_text(REFERENCE + reference)
    return load_task(folder)


def candidate(code, host):
    """A candidate's file with one C++ source."""
    return SOURCE % (code, host)


def build(builder, task, source):
    """What the builder makes of a candidate for all cases."""
    cases = [*check_cases(task, "cpu", SEED), *bench_cases(task, "cpu")]
    return builder.build(request_maker(task, "cpu", cases, 1)(source))


def judged(builder, task, source):
    """Errors of a candidate in all check cases, or its rejection."""
    built = build(builder, task, source)
    if not isinstance(built, Built):
        return built
    judge = Judge(task, Backend(), SEED)
    try:
        return judge.check(built)
    finally:
        judge.close()
