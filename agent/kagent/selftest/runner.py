"""Runs entries of the catalogue: builds side by side, checks and measures one after another."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from kagent_sandbox.errors import KagentError

from kagent.selftest.catalogue import PASSED, Entry, Scenario, Variant
from kagent.selftest.compare import Seen, miss, of_error
from kagent.selftest.jobs import Attempt, Job, job_of
from kagent.selftest.rig import Rig
from kagent.selftest.scene import Scene, play_of


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


def run_entry(rig: Rig, entry: Entry, *, twin: bool) -> Seen:
    """One entry, or its honest twin, by itself."""
    if isinstance(entry, Variant):
        return rig.evaluate(job_of(entry, twin=twin))
    return play(rig, entry)


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

    Candidates are built side by side. What is only checked is checked meanwhile; what is timed
    waits until nothing is built any more.
    """
    jobs: dict[Job, Seen] = {}
    ready: list[Entry] = []
    for entry in entries:
        if reason := rig.skips(entry.runs):
            yield Result(entry, None, skipped=reason)
        else:
            ready.append(entry)
    variants = [e for e in ready if isinstance(e, Variant)]
    waiting = {v: (job_of(v), job_of(v, twin=True)) for v in variants}
    for job, seen in _evaluate(rig, list(dict.fromkeys(chain(*waiting.values()))), say):
        jobs[job] = seen
        for variant in [v for v, needs in waiting.items() if jobs.keys() >= set(needs)]:
            own, twin = waiting.pop(variant)
            yield judged(variant, jobs[own], jobs[twin])
    for scenario in ready:
        if isinstance(scenario, Scenario):
            say(scenario.id)
            yield judged(scenario, play(rig, scenario), None)


def _evaluate(
    rig: Rig, jobs: Sequence[Job], say: Callable[[str], None]
) -> Iterator[tuple[Job, Seen]]:
    """Every job with what came of it: the timed ones last, when nothing is built any more."""
    timed: list[Attempt] = []
    for i, attempt in enumerate(rig.built(jobs)):
        say(f"built {i + 1} of {len(jobs)} candidates")
        if attempt.job.measured:
            timed.append(attempt)
        else:
            yield attempt.job, rig.finish(attempt)
    for i, attempt in enumerate(timed):
        say(f"measure {i + 1} of {len(timed)} candidates")
        yield attempt.job, rig.finish(attempt)
