"""Further judges of a run: whether their devices are like the first one, as far as they show
without a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.judge.client import CEILINGS_APART, JudgeClient
from kagent_sandbox.judge.timing.noise import Noise

from kagent.evolve.machine import Unit

NOISIER = 2.0
"""Times by which another device's A/A test may widen intervals more than the first one's."""

Say = Callable[[str], None]


def unit_names(judges: Sequence[JudgeClient], hosts: Sequence[str]) -> list[str]:
    """A name for each judge's device: a GPU's UUID, or a CPU's host. Several judges of one CPU take
    turns on it; they are numbered.

    Args:
        judges: The first one's device is the run's own.
        hosts: Of each, for a device that has no name.
    """
    found: list[str] = []
    for judge, host in zip(judges, hosts, strict=True):
        name = judge.facts.unit or host
        found.append(name)
        if (count := found.count(name)) > 1:
            found[-1] = f"{name}#{count}"
    return found


def like_the_first(
    first: JudgeClient, noise: Noise, others: Sequence[Unit], say: Say, *, cached: bool
) -> list[Unit]:
    """Measure what further judges need, side by side, and return those that are like the first.

    Args:
        first: The run's own judge.
        noise: Its A/A test.
        others: Further ones; their judges are clients.
        say: Is told who is not, and why.
        cached: Whether stored baselines may be used.
    """
    ceilings = first.ceilings()

    def why_not(unit: Unit) -> str:
        assert isinstance(unit.judge, JudgeClient)
        try:
            return _difference(unit.judge, first.facts.key, noise, ceilings, cached=cached)
        except (MachineError, ChildDied) as e:
            return str(e)

    if not others:
        return []
    with ThreadPoolExecutor(len(others)) as threads:
        reasons = list(threads.map(why_not, others))
    for unit, reason in zip(others, reasons, strict=True):
        if reason:
            say(f"{unit.name} does not judge: {reason}")
    return [unit for unit, reason in zip(others, reasons, strict=True) if not reason]


def _difference(
    judge: JudgeClient, key: str, noise: Noise, ceilings: Ceilings, *, cached: bool
) -> str:
    """Reason why a device is not like the first one; "" if it is like it. Its baselines are
    measured then.
    """
    if judge.facts.key != key:
        return f"it is {judge.facts.key}, and the first is {key}: search on it in a run of its own"
    mine = judge.noise()
    if mine.factor > NOISIER * noise.factor:
        return (
            f"its A/A test widens intervals {mine.factor:.1f}×, and the first one's "
            f"{noise.factor:.1f}×"
        )
    apart = judge.ceilings_apart(ceilings, judge.ceilings())
    if apart > CEILINGS_APART:
        return (
            f"its ceilings for this task differ by {apart:.1%} from the first one's, most "
            f"{CEILINGS_APART:.0%}"
        )
    judge.baselines(cached=cached)
    return ""
