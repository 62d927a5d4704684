"""Runs one plan for a profiler: `ncu … python -m kagent_sandbox.judge.profile_run FOLDER`.

FOLDER holds request.json (the task's folder, the case's name, the device) and plan.json, and the
plan's binaries by their hashes. The profiler must live in the process that it looks at, so this one
is not confined: what runs here is kagent's own code and the plan's device code, never a candidate's
host code. Only what lies between the profiler's start and stop is the plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kagent_sandbox.data.plan import TensorRef
from kagent_sandbox.data.plan_json import parse_plan
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.cuda.executor import Executor
from kagent_sandbox.device.cuda.traits import TRAITS
from kagent_sandbox.device.plan_ops import as_words, strided_view
from kagent_sandbox.judge.arena.layout import lay_out
from kagent_sandbox.judge.check.checker import place_plan
from kagent_sandbox.judge.check.inputs import InputSampler

_FLUSH_BYTES = 256 << 20


class _Memory:
    """An arena of this process alone."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.all = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def view(self, tensor: TensorRef, base: int) -> torch.Tensor:
        return strided_view(self.all, tensor, base)

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        return self.all[start:stop]

    def words(self, nbytes: int) -> torch.Tensor:
        return as_words(self.all, nbytes)

    def close(self) -> None:
        """Nothing: the process ends."""


def main(folder: Path) -> None:
    """Run the plan twice: once to load it, once for the profiler."""
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    task = load_task(Path(request["task"]))
    case = next(c for c in task.cases("gpu").bench if c.name == request["case"])
    plan = parse_plan((folder / "plan.json").read_bytes())
    executor = Executor(request["device"], task.matrix)
    device = executor.clock.device
    memory = _Memory(lay_out(plan).stop, device)
    executor.arena = memory.all
    binaries = {k.hash: (folder / f"{k.hash}.bin").read_bytes() for k in plan.kernels}
    executor.kernels.add(binaries)
    (placement,) = place_plan(task, case, plan, memory, count=1)
    executor.prepare(placement.key, plan, placement.layout.offsets)
    draws = InputSampler(task, device, TRAITS.inputs)
    input_set, stale = draws.fresh(case), draws.stale(case)
    placement.write(input_set.tensors, stale)
    torch.cuda.synchronize(device)  # the executor has a stream of its own
    executor.run(placement.key)
    placement.write(input_set.tensors, stale)
    flush = torch.ones(_FLUSH_BYTES // 4, device=device)
    flush.sum()  # a kernel of torch's own leaves the caches with clean lines of something else
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(executor.clock.stream):
        executor.enqueue(placement.key)
    executor.clock.sync("running the plan")
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
