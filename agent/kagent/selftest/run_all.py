"""A selftest from beginning to end: the corpus, the checks of the machine, what is left behind."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.device.table import available, own_unit
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.process.device_lock import DeviceLock

from kagent.runs import selftest_record
from kagent.runs.manifest import versions
from kagent.runs.selftest_record import SelftestRecord
from kagent.selftest.bait import name_for
from kagent.selftest.catalogue import Entry
from kagent.selftest.evaluator import SelftestEvaluator
from kagent.selftest.leftovers import Leftovers
from kagent.selftest.machine_checks import Check, machine_checks
from kagent.selftest.runner import EntryResult, run
from kagent.text import local_time

Observer = Callable[[str | EntryResult | Check], None]
"""Function that is called with what is being done, and with every result and check as soon as it is
there.
"""


@dataclass
class Report:
    """The result of a selftest. `results` are in the order of the catalogue."""

    results: Sequence[EntryResult] = ()
    checks: list[Check] = field(default_factory=list)
    tier: str = ""
    devices: Sequence[DeviceFacts] = ()
    noise: Mapping[str, Noise] = field(default_factory=dict)  # by a device's key
    when: str = field(default_factory=local_time)
    seconds: float = 0.0
    corpus: str = ""
    digest: str = ""

    @property
    def missed(self) -> tuple[str, ...]:
        """Ids of entries and names of checks that were not as expected."""
        wrong = [r.entry.id for r in self.results if r.misses]
        return (*wrong, *(c.name for c in self.checks if not c.ok))

    @property
    def ran(self) -> int:
        """Entries and checks that were not skipped."""
        return sum(r.seen is not None for r in self.results) + len(self.checks)


@contextlib.contextmanager
def _all_devices(observe: Observer) -> Iterator[None]:
    """This machine's devices, alone: its judges and builders run side by side, without turns."""
    names = sorted({own_unit(k) for k in get_args(Kind) if available(k)})
    with contextlib.ExitStack() as turns:
        for name in names:  # in one order everywhere, so that two selftests cannot block each other
            turns.enter_context(DeviceLock(name, observe).turn("timing"))
        yield


def selftest(
    entries: Collection[Entry], jobs: int, observe: Observer, *, checks: bool = True
) -> Report:
    """Run entries of the corpus, then the checks of the machine.

    Raises:
        KagentError: The machine fails before there is anything to test.
    """
    began, report, token = time.monotonic(), Report(), secrets.token_hex(16)
    results: list[EntryResult] = []
    with contextlib.closing(Leftovers(name_for(token))) as outside:
        with _all_devices(observe), SelftestEvaluator(jobs, token) as evaluator:
            for result in run(evaluator, list(entries), observe):
                results.append(result)
                observe(result)
            for check in machine_checks(evaluator, observe) if checks else ():
                report.checks.append(check)
                observe(check)
            if checks:
                report.noise = evaluator.noise()
            report.tier, report.devices = evaluator.tier, evaluator.devices
        left = outside.left()
    got = "; ".join(left) or "nothing"
    report.checks.append(Check("left behind", "nothing", got, ok=not left))
    observe(report.checks[-1])
    order = {entry: i for i, entry in enumerate(entries)}
    report.results = sorted(results, key=lambda r: order[r.entry])
    report.seconds = time.monotonic() - began
    report.corpus = selftest_record.corpus_hash()
    report.digest = selftest_record.digest_of(report.corpus, versions(), _outcomes(report))
    return report


def _outcomes(report: Report) -> list[tuple[str, str]]:
    """The outcomes that the digest covers: of every entry and twin, and of every check."""
    found = [(f"{c.name}?", "ok" if c.ok else c.got) for c in report.checks]
    for r in report.results:
        found.append((r.entry.id, r.seen.outcome if r.seen else "skipped"))
        if r.twin is not None:
            found.append((f"{r.entry.id}'s twin", r.twin.outcome))
    return found


def keep(report: Report) -> None:
    """Keep the outcome of a whole selftest for later runs on the devices that it has judged on."""
    for facts in report.devices:
        kept = SelftestRecord(
            digest=report.digest,
            device=facts.name,
            tier=report.tier,
            when=report.when,
            ran=report.ran,
            skipped=sum(r.seen is None for r in report.results),
            missed=report.missed,
            noise=report.noise.get(facts.key),
        )
        selftest_record.save(kept, facts.key, report.corpus, versions())
