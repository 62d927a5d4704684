"""Metrics from samples: times, shares of the roofline, suspicion, scores, resources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.data.verdict import CaseTiming
from kagent_sandbox.judge.timing import estimates

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Value
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.device import Ceilings, DeviceFacts
    from kagent_sandbox.data.plan import Plan
    from kagent_sandbox.data.task import Task

ALARM_SHARE = 1.1
"""Share of the roofline above which a time is suspicious and is measured again."""
WALL_TOLERANCE = 0.8
"""A GPU's sample may fall short of wall time by a launch's overhead, but not by more than this."""
LAUNCH_OVERHEAD_US = 10.0


def choice_for(
    cases: Sequence[Case], bench: Sequence[Case], choice: Mapping[str, int]
) -> dict[str, int]:
    """Extend a choice of configurations to all cases: by that of the most similar benchmark case.

    Args:
        cases: Cases that need a configuration.
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
    """Return the distance of two cases: another dtype outweighs everything, then sizes by their
    ratio.
    """
    total = 100.0 if known.dtype != case.dtype else 0.0
    for name, value in case.dims.items():
        other = known.dims.get(name, value)
        one, two = _amount(value), _amount(other)
        if one <= 0 or two <= 0:
            total += 10.0 * (value != other)
        else:
            total += abs(math.log(one / two))
    return total


def _amount(value: Value) -> float:
    """A size, of a list the sum; 0 for flags and texts."""
    if isinstance(value, bool | str):
        return 0
    return sum(value) if isinstance(value, tuple) else value


def attainable_us(task: Task, case: Case, ceilings: Ceilings) -> float:
    """Return the least time of a case at this device's measured ceilings.

    Args:
        task: The fewest bytes and operations of a call.
        case: The call's sizes.
        ceilings: Rates of the plainest kernels.

    Returns:
        µs for the bytes at their mix of reads and writes, or for matrix products.
    """
    written = task.min_written(case)
    read = task.min_bytes(case) - written
    us = memory_us(read, written, ceilings)
    peak = ceilings.tflop_per_s.get(task.product_dtype(case))
    if task.matrix and peak:
        us = max(us, task.flop_count(case) / peak / 1e6)
    return us


def ceilings_apart(task: Task, cases: Sequence[Case], one: Ceilings, other: Ceilings) -> float:
    """Largest part by which the least times of a task's cases differ at two devices' ceilings.

    Args:
        task: The fewest bytes and operations of a call.
        cases: At least one.
        one: Rates of one device.
        other: Rates of the other.

    Returns:
        0 to 1: the difference over the longer time.
    """
    pairs = [(attainable_us(task, c, one), attainable_us(task, c, other)) for c in cases]
    return max(abs(a - b) / max(a, b) for a, b in pairs)


def memory_us(read: float, written: float, ceilings: Ceilings) -> float:
    """µs to move bytes at the measured bandwidths of their mix."""
    paired = min(read, written)
    us = 2 * paired / ceilings.copy_gb_per_s
    us += (read - paired) / ceilings.read_gb_per_s + (written - paired) / ceilings.write_gb_per_s
    return us / 1e3  # bytes per GB/s are ns


def suspicion(
    task: Task,
    case: Case,
    us: float,
    facts: DeviceFacts,
    ceilings: Ceilings,
    executions: int,
) -> str | None:
    """Return why a time cannot be true, or None: it is more than `ALARM_SHARE` of the roofline.

    Bytes that the last-level cache holds need not cross the memory's pins while they are timed.
    Caches are flushed before each sample, so that those are written ones, as many as fit, of all
    executions of a sample together. Products may be those of any dtype of 16 bits or more: a result
    in float32 can be put together from several products of fewer bits, faster than by the plainest
    kernel. Those of 8 bits are for arguments of 8 bits.

    Args:
        task: The fewest bytes and operations of a call.
        case: The call's sizes.
        us: Per execution.
        facts: Of the device.
        ceilings: What the plainest kernels attain, timed likewise.
        executions: Of one sample.
    """
    read, written = task.min_bytes(case) - task.min_written(case), task.min_written(case)
    hidden = min(written, facts.l2_bytes / executions)
    bound_us = memory_us(read, written - hidden, ceilings)
    what = f"{(read + written) / 2**20:.1f} MiB must move"
    narrow = task.has_narrow_arguments(case)
    rates = (r for d, r in ceilings.tflop_per_s.items() if narrow or ITEMSIZE.get(d) != 1)
    peak = max(rates, default=0.0)
    if task.matrix and peak:
        products_us = task.flop_count(case) / peak / 1e6
        if products_us > bound_us:
            bound_us, what = products_us, f"{task.flop_count(case) / 1e9:.1f} GFLOP of products"
    if us >= bound_us / ALARM_SHARE:
        return None
    return (
        f"{us:.1f} µs, but {what}: {bound_us:.1f} µs at the rates of the plainest kernels on this "
        f"device, {bound_us / us:.0%} of the roofline (alarm above {ALARM_SHARE:.0%})"
    )


def disagreement(us: float, wall_us: float) -> str | None:
    """Return why a GPU's own times cannot be true, or None: the judge's clock disagrees."""
    if us + LAUNCH_OVERHEAD_US >= WALL_TOLERANCE * wall_us:
        return None
    return f"{us:.1f} µs a sample, but {wall_us:.1f} µs each by the judge's clock over many"


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
    """Make the record of one case's samples.

    Args:
        task: The task.
        case: The benchmark case.
        plan: The candidate's plan for it.
        samples: µs per execution.
        ceilings: Ceilings of the device.
        config: Index of the configuration.
        baseline_us: µs of the fastest baseline; None if there is none.
    """
    interval = estimates.median_interval(samples)
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


def with_own_memory(
    timings: Sequence[CaseTiming], own_bytes: Mapping[str, int]
) -> tuple[CaseTiming, ...]:
    """Add to peak memory, by case, what native code takes itself: no plan has it."""
    return tuple(replace(t, peak_bytes=t.peak_bytes + own_bytes.get(t.case, 0)) for t in timings)


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
    intervals = [estimates.Interval(t.kernel_us, t.low_us, t.high_us) for t in timings]
    return estimates.geometric_mean(ratios), estimates.log_stderr(intervals)


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
