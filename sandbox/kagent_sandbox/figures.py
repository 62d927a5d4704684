"""What samples mean: times, shares of the roofline, suspicion, scores, resources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_sandbox import timing
from kagent_sandbox.verdict import CaseTiming

if TYPE_CHECKING:
    from kagent_sandbox.build.request import Built
    from kagent_sandbox.launch.base import Ceilings, DeviceFacts
    from kagent_sandbox.plan import Plan
    from kagent_sandbox.task import Case, Task

MATRIX_PEAK_OVER_CEILING = 1.5
"""No product on a GPU runs faster than this times the measured ceiling (H100: 989 TFLOP/s peak, 738
measured). A CPU's clock and its neighbours' load vary more between two measurements.
"""
WALL_TOLERANCE: Mapping[str, float] = {"gpu": 0.8, "cpu": 0.5}
"""A sample may fall short of wall time by a launch's overhead, but not by more than this.

On a CPU both are the judge's clock: the wall's ends with another question and answer, so that it
counts what native code does after an early answer. Other programs disturb it, hence the factor."""
LAUNCH_OVERHEAD_US: Mapping[str, float] = {"gpu": 10.0, "cpu": 50.0}
FRESH_RATIO = 1.5
"""Over what is timed, on inputs that are new beyond doubt: more, and results are kept."""
FRESH_SLACK_US: Mapping[str, float] = {"gpu": 5.0, "cpu": 400.0}
"""On a GPU of each execution, after a pause. On a CPU of all together: threads that were stopped,
caches and translations that the judge's own work has emptied. Two executions of 460 µs took 320 to
600 µs more than samples of them did, on an idle machine of two cores; on a shared one a stopped
process needs up to 1.5 ms to go on, which the share of a longer span allows (`blocks`)."""


@dataclass(frozen=True)
class Contender:
    """A candidate that is ready to be timed. `choice` has a configuration per case, 0 where
    missing.
    """

    id: str
    built: Built
    choice: Mapping[str, int]

    def plan(self, case: str) -> Plan:
        """The plan of its configuration for a case.

        Raises:
            KeyError: It was not built for the case.
        """
        config = self.choice.get(case, 0)
        plan = self.built.plans.get((config, case))
        return self.built.plans[0, case] if plan is None else plan


def choice_for(
    cases: Sequence[Case], bench: Sequence[Case], choice: Mapping[str, int]
) -> dict[str, int]:
    """Also for `cases` that `choice` lacks: the configuration of the most similar benchmark case.

    Args:
        cases: For which a configuration is wanted.
        bench: The visible benchmark cases.
        choice: Indices of configurations, by the names of cases.
    """
    known = [c for c in bench if c.name in choice]
    found = dict(choice)
    for case in cases:
        if case.name not in choice and known:
            nearest = min(known, key=lambda k, c=case: _distance(k, c))  # type: ignore[misc]
            found[case.name] = choice[nearest.name]
    return found


def _distance(known: Case, case: Case) -> float:
    """How unlike two cases are: another dtype outweighs everything, then sizes by their ratio."""
    total = 100.0 if known.dtype != case.dtype else 0.0
    for name, value in case.dims.items():
        other = known.dims.get(name, value)
        if isinstance(value, bool) or value <= 0 or other <= 0:
            total += 10.0 * (value != other)
        else:
            total += abs(math.log(value / other))
    return total


def attainable_us(task: Task, case: Case, ceilings: Ceilings) -> float:
    """Least µs at this device's measured ceilings: bytes at their mix, or matrix products."""
    written = task.min_written(case)
    read = task.min_bytes(case) - written
    paired = min(read, written)
    us = 2 * paired / ceilings.copy_gb_per_s
    us += (read - paired) / ceilings.read_gb_per_s + (written - paired) / ceilings.write_gb_per_s
    us /= 1e3  # bytes per GB/s are ns
    peak = ceilings.tflop_per_s.get(case.dtype)
    if task.matrix and peak:
        us = max(us, task.flop_count(case) / peak / 1e6)
    return us


def suspicion(
    task: Task,
    case: Case,
    us: float,
    facts: DeviceFacts,
    ceilings: Ceilings,
    wall_us: float,
) -> str | None:
    """Why a time cannot be true, or None.

    Bytes that fit the second-level cache need not leave it within the measurement; the rest must
    cross the memory's pins, at most at their theoretical rate. Neither this nor the peak of matrix
    products applies to CPUs, whose rates are unknown.
    """
    must_move = task.min_bytes(case) - min(task.min_written(case), facts.l2_bytes)
    if facts.theoretical_gb_per_s > 0:
        floor_us = must_move / facts.theoretical_gb_per_s / 1e3
        if us < floor_us:
            return (
                f"{us:.1f} µs, but {must_move / 2**20:.0f} MiB must move: {floor_us:.1f} µs "
                f"at the memory's theoretical {facts.theoretical_gb_per_s:.0f} GB/s"
            )
    peak = ceilings.tflop_per_s.get(case.dtype)
    if task.matrix and peak and facts.kind == "gpu":
        floor_us = task.flop_count(case) / (peak * MATRIX_PEAK_OVER_CEILING) / 1e6
        if us < floor_us:
            return f"{us:.1f} µs, but its products take {floor_us:.1f} µs at the device's peak"
    if us + LAUNCH_OVERHEAD_US[facts.kind] < WALL_TOLERANCE[facts.kind] * wall_us:
        return f"{us:.1f} µs a sample, but {wall_us:.1f} µs each by the judge's clock over many"
    return None


def remembers(blocks: Sequence[Sequence[float]]) -> bool:
    """Whether it looks as if only the first execution on new inputs did the work.

    Every block starts with fresh inputs and then repeats them: a kernel that recognises inputs and
    keeps its answer is slow once per block. The median decides: one block in which the work was
    skipped altogether (and which was not the one whose results are checked) hides nothing.
    """
    if len(blocks) < 3 or min(len(b) for b in blocks) < 3:
        return False
    first = timing.median_interval([b[0] for b in blocks]).value
    rest = timing.median_interval([us for b in blocks for us in b[1:]]).value
    return first > FRESH_RATIO * rest + FRESH_SLACK_US["gpu"]


def case_timing(
    task: Task,
    case: Case,
    plan: Plan,
    samples: Sequence[float],
    ceilings: Ceilings,
    *,
    config: int,
    baseline_us: float | None,
) -> CaseTiming:
    """The record of one case's samples."""
    interval = timing.median_interval(samples)
    return CaseTiming(
        case=case.name,
        kernel_us=interval.value,
        low_us=interval.low,
        high_us=interval.high,
        samples=len(samples),
        roofline_share=attainable_us(task, case, ceilings) / interval.value,
        gb_per_s=task.min_bytes(case) / interval.value / 1e3,
        tflop_per_s=task.flop_count(case) / interval.value / 1e6,
        config=config,
        baseline_us=baseline_us,
        launches=len(plan.launches),
        peak_bytes=plan.peak_bytes,
    )


def score(timings: Sequence[CaseTiming]) -> tuple[float, float]:
    """Geometric mean of baseline time / time, and the standard error of its logarithm.

    Raises:
        ValueError: A case has no baseline.
    """
    ratios = []
    for t in timings:
        if t.baseline_us is None:
            raise ValueError(f"no baseline was measured for case {t.case}")
        ratios.append(t.baseline_us / t.kernel_us)
    intervals = [timing.Interval(t.kernel_us, t.low_us, t.high_us) for t in timings]
    return timing.geometric_mean(ratios), timing.log_stderr(intervals)


def resources(plans: Sequence[Plan]) -> tuple[Mapping[str, object], ...]:
    """One record per kernel that any of the plans launches."""
    found: dict[str, dict[str, object]] = {}
    for plan in plans:
        for kernel in plan.kernels:
            launches = [op for op in plan.launches if op.kernel == kernel.hash]
            if not launches:
                continue
            shared = max(op.shared for op in launches) + kernel.static_shared_bytes
            threads = max(math.prod(op.block) for op in launches)
            known = found.get(kernel.hash)
            if known is not None:
                shared = max(shared, int(str(known["shared_bytes"])))
                threads = max(threads, int(str(known["threads"])))
            found[kernel.hash] = {
                "name": kernel.name,
                "language": kernel.language,
                "threads": threads,  # of a block
                "registers": kernel.registers,
                "spill_bytes": kernel.spill_bytes,
                "shared_bytes": shared,
                "load_bytes": {str(k): v for k, v in kernel.load_bytes.items()},
            }
    return tuple(found.values())
