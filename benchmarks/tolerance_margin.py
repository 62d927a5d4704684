"""How near honest kernels come to what the numerics contract allows.

    python benchmarks/tolerance_margin.py [--tasks softmax,gelu] [--draws 40]

Every C++ seed of a task and the plain kernel of corpus/numerics is built and checked on the CPU as
in a search, `--draws` times, each time with other inputs and other hidden cases. Printed are the
rejections, which should be none, and the cases and results whose errors took the largest share of
their tolerance. A share that comes near 1 is a case whose inputs leave the error to chance.
"""

import argparse
import os
from collections import defaultdict

from kagent_sandbox.device.cpu.openmp import WAITING

os.environ.update(WAITING)  # as in a judge's own process, before OpenMP is loaded

from kagent.evolve.open_machine import request_maker
from kagent.resources import corpus_folder
from kagent.selftest.assemble import candidate_text
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.judge.check.cases import check_cases
from kagent_sandbox.judge.judge import Judge

MOST_LINES = 5


def kernels_of(task: Task) -> dict[str, str]:
    """Sources by name."""
    found = {s.name: s.source() for s in seeds_of(task) if s.language == "cpp"}
    honest = corpus_folder() / "numerics" / task.name / "honest_cpp.py"
    if honest.exists():
        found["honest"] = candidate_text(honest)
    return found


def margin(builder: Builder, task: Task, draws: int) -> None:
    shares: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    checked = rejected = 0
    for number in range(draws):
        backend = CpuBackend()
        judge = Judge(task, backend, number)
        cases = check_cases(task, "cpu", number)
        request = request_maker(task, backend.facts, cases, 1)
        try:
            for name, source in kernels_of(task).items():
                built = builder.build(request(source))
                if not isinstance(built, Built):
                    raise SystemExit(f"{task.name} {name}: {built.status}: {built.message}")
                errors = judge.check(built)
                checked += 1
                if isinstance(errors, Rejected):
                    rejected += 1
                    print(f"{task.name} {name}: {errors.case}: {errors.message}", flush=True)
                    continue
                for error in errors:
                    key = name, error.case, error.output
                    shares[key].append(error.share_of_tolerance)
        finally:
            judge.close()
    print(
        f"{task.name}: {rejected} of {checked} checks of honest kernels rejected; largest shares:"
    )
    for key, values in sorted(shares.items(), key=lambda i: -max(i[1]))[:MOST_LINES]:
        print(f"    {max(values):.2f}  {' '.join(key)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(task_names()))
    parser.add_argument("--draws", type=int, default=40)
    options = parser.parse_args()
    with Builder(2) as builder:
        for name in options.tasks.split(","):
            margin(builder, find_task(name), options.draws)


if __name__ == "__main__":
    main()
