"""What share of the shapes that an exported library hands to a kernel does a run come near?

    python benchmarks/sampled_space.py [--runs 200]

For every task and device, in many runs, each with a secret of its own: calls are drawn from the
regions that an export would state (evenly in the logarithm of each dimension, products as large as
the largest benchmark case), and held against the sizes of the run's cases, visible and hidden, of
the search's checks and of the race. Printed is the share of calls that have such a case of their
dtype within a factor of two: in each dimension by itself, the worst one; and in all at once.
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence

from kagent.export.record import RegionRecord
from kagent.export.regions import regions_of
from kagent.tasks import find_task, task_names
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, draw_hidden

CALLS = 200  # of a run
NEAR = math.log(2)


def calls(
    regions: Sequence[RegionRecord], rng: random.Random
) -> Iterator[tuple[str, dict[str, float]]]:
    """Dtype and logarithms of sizes."""
    for _ in range(CALLS):
        region = rng.choice(regions)
        while True:
            at = {n: rng.uniform(math.log(v), math.log(region.high[n]))
                  for n, v in region.low.items()}  # fmt: skip
            if sum(at.values()) <= math.log(region.volume):
                break
        yield region.dtype, at


def shares(task: Task, kind: Kind, runs: int) -> tuple[float, float]:
    """Of calls: near in the dimension that is sampled least, near in all of them."""
    cases = task.cases(kind)
    visible = (*cases.check, *cases.bench)
    one: dict[str, int] = {}
    every = seen = 0
    for number in range(runs):
        rng = random.Random(number)
        hidden: list[Case] = []
        for which in ("check", "bench"):
            hidden += draw_hidden(task, kind, which, rng.randrange(1 << 62))
        run = (*visible, *hidden)
        for dtype, at in calls(regions_of(run), rng):
            same = [c.dims for c in run if c.dtype == dtype]
            near = [{n: abs(math.log(c[n]) - v) <= NEAR for n, v in at.items()} for c in same]
            seen += 1
            every += any(all(n.values()) for n in near)
            for name in at:
                one[name] = one.get(name, 0) + any(n[name] for n in near)
    return min(one.values()) / seen, every / seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    print("| task | device | one dimension | all dimensions |\n|---|---|---|---|")
    for name in task_names():
        for kind in ("gpu", "cpu"):
            one, every = shares(find_task(name), kind, options.runs)
            print(f"| {name} | {kind} | {one:.0%} | {every:.0%} |", flush=True)


if __name__ == "__main__":
    main()
