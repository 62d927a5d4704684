"""How long a candidate holds the device, and on what it spends that.

    python benchmarks/lane.py [--task softmax] [--device gpu|cpu] [--times 10]

Every seed of the task is checked and timed beside the first one, in turn, `--times` times, as in a
search but with nothing being built meanwhile. The first seed is so timed against itself: its ratio
should be 1, and its P(faster) above 0.95 in one run of twenty. One line each, then medians.
"""

import argparse
import statistics
import time
from collections import defaultdict

from kagent.config.settings import load_config
from kagent.evolve.open_machine import request_maker
from kagent.tasks import find_task, seeds_of
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.judge.client import JudgeClient

SECRET = 11


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu" if has_gpu() else "cpu")
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    task, kind = find_task(options.task), options.device
    seeds = [s for s in seeds_of(task) if (s.language == "cpp") == (kind == "cpu")]
    cases = task.cases(kind)
    wanted = [*cases.check, *draw_hidden(task, kind, "check", SECRET), *cases.bench]
    found: dict[str, list[Passed]] = defaultdict(list)
    with Builder(load_config().jobs) as builder, JudgeClient(task.folder, kind, SECRET) as judge:
        request = request_maker(task, judge.facts, wanted, 1)
        built = {s.name: builder.build(request(s.source())) for s in seeds}
        good = {n: b for n, b in built.items() if isinstance(b, Built)}
        judge.baselines(print)
        judge.ceilings()
        print(judge.facts.key)
        best = next(iter(good))
        for _ in range(options.times):
            for name, candidate in good.items():
                began = time.monotonic()
                errors = judge.check(candidate)
                if isinstance(errors, Rejected):
                    print(f"{name}: {errors}")
                    continue
                verdict = judge.measure(candidate, errors, good[best], best)
                if isinstance(verdict, Rejected):
                    print(f"{name}: {verdict}")
                    continue
                found[name].append(verdict)
                print(line(name, verdict, time.monotonic() - began), flush=True)
    for name, verdicts in found.items():
        ratios = [v.versus.ratio for v in verdicts if v.versus]
        won = sum(v.versus.p_faster > 0.95 for v in verdicts if v.versus)
        print(
            f"{name}: median {statistics.median(v.lane_s for v in verdicts):.3f} s, ratio "
            f"{min(ratios):.4f} to {max(ratios):.4f}, P(faster) > 0.95 in {won} of {len(verdicts)}"
        )


def line(name: str, passed: Passed, seconds: float) -> str:
    parts = sorted(passed.lane.items(), key=lambda part: -part[1])
    spent = ", ".join(f"{part} {1e3 * s:.0f}" for part, s in parts)
    versus = passed.versus
    assert versus is not None
    how = "let go" if passed.screened else "in full"
    return (
        f"{name}: {passed.lane_s:.3f} s ({seconds:.3f} with messages), {how}, ratio "
        f"{versus.ratio:.4f}, P(faster) {versus.p_faster:.3f}; ms: {spent}"
    )


if __name__ == "__main__":
    main()
