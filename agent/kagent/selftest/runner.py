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
from kagent.selftest.evaluator import Rig
from kagent.selftest.expectations import Seen, miss, of_error
from kagent.selftest.jobs import Attempt, Job, job_of
from kagent.selftest.scenario import Scene, play_of


@dataclass(frozen=True, slots=True)
class Result:
    """An entry with what came of it, and of its honest twin.

    `misses` says what was not as expected. With `skipped` nothing was run, and it says why.
    """

    entry: Entry
    seen: Seen | None
    twin: Seen | None = None
    misses: tuple[str, ...] = ()
    skipped: str = ""


def judged(entry: Entry, seen: Seen, twin: Seen | None) -> Result:
    """Hold what came against what was expected."""
    misses = []
    if (why := miss(entry.expect, entry.says, seen)) is not None:
        misses.append(why)
    if isinstance(entry, Variant) and twin is not None and (why := miss((PASSED,), "", twin)):
        misses.append(f"its honest twin {entry.twin.name}: {why}")
    return Result(entry, seen, twin, tuple(misses))


def play(rig: Rig, scenario: Scenario) -> Seen:
    """One scenario."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kagent-scene-") as folder:
        try:
            seen = play_of(scenario)(Scene(rig, scenario.item.folder, Path(folder)))
        except KagentError as e:
            seen = of_error(e)
        except Exception as e:  # noqa: BLE001 - one scenario's bug must not hide all other results
            where = traceback.extract_tb(e.__traceback__)[-1]
            seen = Seen("error", f"{where.filename}:{where.lineno}: {type(e).__name__}: {e}")
    return replace(seen, seconds=time.monotonic() - began)


def run(rig: Rig, entries: Sequence[Entry], say: Callable[[str], None]) -> Iterator[Result]:
    """All entries, as they are done.

    Candidates are built side by side. What is only checked is checked meanwhile, and scenarios that
    bring a judge of their own are played; what is timed waits until nothing is built any more.
    """
    ready: list[Entry] = []
    for entry in entries:
        if reason := rig.skips(entry.runs):
            yield Result(entry, None, skipped=reason)
        else:
            ready.append(entry)
    variants = _Variants([e for e in ready if isinstance(e, Variant)])
    scenarios = [e for e in ready if isinstance(e, Scenario)]
    timed: list[Attempt] = []
    with _Aside(rig, [s for s in scenarios if s.own_judge]) as aside:
        for i, attempt in enumerate(rig.built(variants.jobs)):
            say(f"built {i + 1} of {len(variants.jobs)} candidates")
            if attempt.job.measured:
                timed.append(attempt)
            else:
                yield from variants.take(attempt.job, rig.finish(attempt))
        yield from aside.results(say)
    for i, attempt in enumerate(timed):
        say(f"measure {i + 1} of {len(timed)} candidates")
        yield from variants.take(attempt.job, rig.finish(attempt))
    for scenario in scenarios:
        if not scenario.own_judge:
            say(scenario.id)
            yield judged(scenario, play(rig, scenario), None)


class _Variants:
    """Variants that wait for what comes of their own job and of their twin's; many share one."""

    def __init__(self, variants: Sequence[Variant]) -> None:
        self._waiting = {v: (job_of(v), job_of(v, twin=True)) for v in variants}
        self.jobs = list(dict.fromkeys(chain(*self._waiting.values())))
        self._seen: dict[Job, Seen] = {}

    def take(self, job: Job, seen: Seen) -> Iterator[Result]:
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

    def __init__(self, rig: Rig, scenarios: Sequence[Scenario]) -> None:
        self._threads = ThreadPoolExecutor(1, "aside")
        self._played = {s: self._threads.submit(play, rig, s) for s in scenarios}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def results(self, say: Callable[[str], None]) -> Iterator[Result]:
        """All of them; waits for those that are not done yet."""
        for scenario, played in self._played.items():
            say(scenario.id)
            yield judged(scenario, played.result(), None)
