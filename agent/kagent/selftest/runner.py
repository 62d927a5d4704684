"""Runs entries of the catalogue: builds side by side, checks and measures one after another."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Self

from kagent_sandbox.errors import KagentError

from kagent.selftest.catalogue import PASSED, Entry, Scenario, Variant
from kagent.selftest.evaluator import SelftestEvaluator
from kagent.selftest.expectations import EntryOutcome, miss, of_error
from kagent.selftest.jobs import Attempt, Job, job_of
from kagent.selftest.scenario import ScenarioRun, scenario_function


@dataclass(frozen=True, slots=True)
class EntryResult:
    """An entry with what came of it, and of its honest twin.

    `misses` says what was not as expected. With `skipped` nothing was run, and it says why.
    """

    entry: Entry
    seen: EntryOutcome | None
    twin: EntryOutcome | None = None
    misses: tuple[str, ...] = ()
    skipped: str = ""


def judged(entry: Entry, seen: EntryOutcome, twin: EntryOutcome | None) -> EntryResult:
    """Hold what came against what was expected."""
    misses = []
    if (why := miss(entry.expect, entry.says, seen)) is not None:
        misses.append(why)
    if isinstance(entry, Variant) and twin is not None and (why := miss((PASSED,), "", twin)):
        misses.append(f"its honest twin {entry.twin.name}: {why}")
    return EntryResult(entry, seen, twin, tuple(misses))


def run_scenario(evaluator: SelftestEvaluator, scenario: Scenario) -> EntryOutcome:
    """One scenario."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kagent-scene-") as folder:
        try:
            seen = scenario_function(scenario)(
                ScenarioRun(evaluator, scenario.item.folder, Path(folder))
            )
        except KagentError as e:
            seen = of_error(e)
        except Exception as e:  # noqa: BLE001 - one scenario's bug must not hide all other results
            where = traceback.extract_tb(e.__traceback__)[-1]
            seen = EntryOutcome(
                "error", f"{where.filename}:{where.lineno}: {type(e).__name__}: {e}"
            )
    return replace(seen, seconds=time.monotonic() - began)


def run(
    evaluator: SelftestEvaluator, entries: Sequence[Entry], say: Callable[[str], None]
) -> Iterator[EntryResult]:
    """All entries, as they are done.

    Candidates are built side by side. What is only checked is checked meanwhile, and scenarios that
    bring a judge of their own are played; what is timed waits until nothing is built any more.
    """
    ready: list[Entry] = []
    for entry in entries:
        if reason := evaluator.skips(entry.runs):
            yield EntryResult(entry, None, skipped=reason)
        else:
            ready.append(entry)
    variants = _Variants([e for e in ready if isinstance(e, Variant)])
    scenarios = [e for e in ready if isinstance(e, Scenario)]
    timed: list[Attempt] = []
    with _Aside(evaluator, [s for s in scenarios if s.own_judge]) as aside:
        for i, attempt in enumerate(evaluator.built(variants.jobs)):
            say(f"built {i + 1} of {len(variants.jobs)} candidates")
            if attempt.job.measured:
                timed.append(attempt)
            else:
                yield from variants.take(attempt.job, evaluator.finish(attempt))
        yield from aside.results(say)
    for i, attempt in enumerate(timed):
        say(f"measure {i + 1} of {len(timed)} candidates")
        yield from variants.take(attempt.job, evaluator.finish(attempt))
    for scenario in scenarios:
        if not scenario.own_judge:
            say(scenario.id)
            yield judged(scenario, run_scenario(evaluator, scenario), None)


class _Variants:
    """Variants that wait for what comes of their own job and of their twin's; many share one."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._waiting = {v: (job_of(v), job_of(v, twin=True)) for v in variants}
        self.jobs = list(dict.fromkeys(chain(*self._waiting.values())))
        self._seen: dict[Job, EntryOutcome] = {}

    def take(self, job: Job, seen: EntryOutcome) -> Iterator[EntryResult]:
        """The results that are complete with this one."""
        self._seen[job] = seen
        complete = [v for v, needs in self._waiting.items() if self._seen.keys() >= set(needs)]
        for variant in complete:
            own, twin = self._waiting.pop(variant)
            yield judged(variant, self._seen[own], self._seen[twin])


class _Aside:
    """Scenarios that are played one after the other in a thread. Mostly they wait for a limit.

    A context manager; at its end the one that is being played is awaited, and no other is begun.
    """

    def __init__(self, evaluator: SelftestEvaluator, scenarios: Sequence[Scenario]) -> None:
        self._threads = ThreadPoolExecutor(1, "aside")
        self._played = {s: self._threads.submit(run_scenario, evaluator, s) for s in scenarios}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def results(self, say: Callable[[str], None]) -> Iterator[EntryResult]:
        """All of them; waits for those that are not done yet."""
        for scenario, played in self._played.items():
            say(scenario.id)
            yield judged(scenario, played.result(), None)
