"""Times of what a judge computes for one draw of a case: inputs, reference, torch, spot checks.

    python benchmarks/draw_seconds.py TASK... [--device cuda:0] [--hidden 2]

A task is a name or a folder. The first benchmark case is measured, and so many hidden ones. Each
line has the times of a second call in ms; the first one loads kernels.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from kagent.tasks import find_task
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.device.table import find_device
from kagent_sandbox.judge.check.inputs import InputSampler

SEED = 7


def main() -> None:
    """Print a line for each case of each task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--hidden", type=int, default=2)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    kind: Kind = "gpu" if device.type == "cuda" else "cpu"
    name = torch.cuda.get_device_name(device) if kind == "gpu" else "CPU"
    print(f"{name}, torch {torch.__version__}; ms")
    print(f"{'':44} {'inputs':>9} {'reference':>9} {'torch':>9} {'errors':>9} {'spots':>9}")
    for each in arguments.tasks:
        task = find_task(each)
        sampler = InputSampler(task, device, find_device(kind).traits.inputs)
        hidden = draw_hidden(task, kind, "bench", SEED)[: arguments.hidden]
        for case in [*task.cases(kind).bench[:1], *hidden]:
            times = " ".join(f"{ms:9.2f}" for ms in measured_ms(sampler, case))
            print(f"{task.name[:20]} {case.name[:23]}".ljust(44), times, flush=True)


def measured_ms(sampler: InputSampler, case: Case) -> Iterator[float]:
    """Times of inputs, reference, torch, torch's errors, and spot checks of a new draw."""
    draw = sampler.fresh(case)
    yield second_ms(lambda: sampler.fresh(case), sampler.device)
    yield second_ms(lambda: sampler.call("reference", draw), sampler.device)
    yield second_ms(lambda: sampler.call("eager", draw), sampler.device)
    sampler.stale(case)
    sampler.expected(draw)

    def errors() -> None:
        draw.known_errors = None
        sampler.torch_errors(draw)

    yield second_ms(errors, sampler.device)
    yield second_ms(lambda: sampler.spot_checks(sampler.fresh(case)), sampler.device)


def second_ms(call: Callable[[], object], device: torch.device) -> float:
    """Time of a second call in ms."""
    for _ in range(2):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
