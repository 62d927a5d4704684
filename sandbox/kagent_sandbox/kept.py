"""Is the work done when and where it is timed? Looked into on inputs that are new beyond doubt.

A block repeats its inputs, so a kernel that keeps results (in static memory, in `__device__`
globals, or in its output, which nobody poisons between two samples) can be fast in all samples but
the first, or spread the work of one execution over a block. On a CPU native code has more ways
still: it may answer early and go on in another thread, work while the judge asks for something that
is not timed, or be slow in the shorter half of a slope. All of them end with inputs that nothing
has seen, others in each place, and a clock that starts before they can be seen and stops after the
last answer.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from kagent_sandbox import figures, timing
from kagent_sandbox.session import Disqualified
from kagent_sandbox.verdict import Rejected, Stage, Status

if TYPE_CHECKING:
    from kagent_sandbox.blocks import Table
    from kagent_sandbox.task import Kind

PAUSES_S = (*[0.02] * 8, *[0.1] * 8)
"""After each look into a suspicion, before it is believed: a busy host raises some, and a
hypervisor may leave threads waiting for tenths of a second."""


def refuse_kept_results(table: Table, side: str, kind: Kind) -> None:
    """Hold a contender's times on one case, right after its last block, against new inputs.

    On a GPU, whose every block begins with new inputs, only if its blocks look like it: there one
    more set of inputs and its reference cost as much as a block.

    Raises:
        Disqualified: They cannot be true.
    """
    blocks = table.blocks[side]
    if kind == "gpu" and not figures.remembers(blocks):
        return
    timed_us = [timing.median_interval([x for b in blocks for x in b]).value]
    fresh_us = known_us = long_us = idle_us = calm_us = math.inf
    for pause_s in PAUSES_S:
        us = statistics.median_low(timed_us)  # not the largest: one busy moment would excuse all
        took_us, runs = table.fresh_us(side)
        fresh_us = min(fresh_us, took_us)
        slack_us = figures.FRESH_SLACK_US[kind] / runs
        if fresh_us <= figures.FRESH_RATIO * us + slack_us:
            return
        known_us = min(known_us, table.known_us(side))
        long_us = min(long_us, table.long_us(side))
        if kind == "cpu":
            idle_us = min(idle_us, table.idle_us(side))
            calm_us = min(calm_us, table.calm_us(side))
        time.sleep(pause_s)  # what disturbed may be over
        timed_us.append(table.typical_us(side))
    us = statistics.median_low(timed_us)
    # On a busy host it is waking threads that took so long, on known inputs as on new ones.
    if fresh_us - known_us > (figures.FRESH_RATIO - 1) * us + slack_us:
        raise _kept(fresh_us, us, table)
    if kind == "cpu":
        _refuse_work_when_woken(table, us, runs, known_us, idle_us, calm_us)
    if kind == "cpu" and long_us > figures.FRESH_RATIO * us + slack_us:
        text = (
            f"{us:.1f} µs a sample, but {long_us:.1f} µs each from when the inputs were there to "
            "the last answer: the work is done elsewhere"
        )
        raise Disqualified(Rejected(Stage.MEASURE, Status.SUSPECT, text, table.case.name))


def refuse_if_noise_is_its_own(table: Table, side: str, kind: Kind) -> None:
    """Find out whether samples that are no measurement come from kept results, not from the host.

    What takes no time has samples of nothing but noise. New inputs and known ones are then timed in
    turns, in the same way: a busy host slows down both.

    Raises:
        Disqualified: New inputs take longer.
    """
    fresh_us = known_us = idle_us = calm_us = math.inf
    for _ in range(len(PAUSES_S)):
        us, runs = table.fresh_us(side)
        fresh_us = min(fresh_us, us)
        known_us = min(known_us, table.known_us(side))
        if kind == "cpu":
            idle_us = min(idle_us, table.idle_us(side))
            calm_us = min(calm_us, table.calm_us(side))
    known_us = max(0.0, known_us)
    if fresh_us > figures.FRESH_RATIO * known_us + figures.FRESH_SLACK_US[kind] / runs:
        raise _kept(fresh_us, known_us, table)
    if kind == "cpu":
        _refuse_work_when_woken(table, max(0.0, calm_us), runs, known_us, idle_us, calm_us)


def _refuse_work_when_woken(
    table: Table, us: float, runs: int, known_us: float, idle_us: float, calm_us: float
) -> None:
    """Native code may work when it is woken, asked or not, and then be fast until it is stopped
    again: it need only notice that time has passed. Left alone for as long, it works for nothing.

    Raises:
        Disqualified: It takes longer after a stop than after a pause, or to do nothing at all.
    """
    more_us = (figures.FRESH_RATIO - 1) * us + figures.FRESH_SLACK_US["cpu"] / runs
    if idle_us <= more_us * runs and known_us <= max(0.0, calm_us) + more_us:
        return
    text = (
        f"{max(0.0, calm_us):.1f} µs after a pause, but {known_us:.1f} µs after the process was "
        f"stopped, and {idle_us:.1f} µs to do nothing then: the work is done before it is asked for"
    )
    raise Disqualified(Rejected(Stage.MEASURE, Status.SUSPECT, text, table.case.name))


def _kept(fresh_us: float, us: float, table: Table) -> Disqualified:
    text = (
        f"{fresh_us:.1f} µs on inputs that are new, {us:.1f} µs when they are repeated: "
        "results are kept"
    )
    return Disqualified(Rejected(Stage.MEASURE, Status.SUSPECT, text, table.case.name))
