"""Checks of this machine beside the corpus: its noise, the canaries, honest kernels in every tier.

A correct kernel in each language must pass in every tier of isolation that the host offers, and
take the time that it takes unconfined (tier T0, which nothing else uses unless asked to).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.language import LANGUAGES, Language
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.table import available
from kagent_sandbox.process.isolation_probe import Probe, probe

from kagent.resources import corpus_folder
from kagent.selftest.assemble import candidate_text
from kagent.selftest.catalogue import PASSED, Runs
from kagent.selftest.evaluator import SelftestEvaluator
from kagent.selftest.expectations import EntryOutcome
from kagent.selftest.jobs import Attempt, Job
from kagent.text import interval_text

TASK = "rows"
SLOWER = 0.1
"""Share by which a tier's time may exceed the unconfined one. The noise of the A/A race may be
larger.
"""
ROUNDS = 15  # at most: times agree after a few unless the machine is busy


@dataclass(frozen=True, slots=True)
class Check:
    """One property of this machine."""

    name: str
    expected: str
    got: str
    ok: bool


def machine_checks(evaluator: SelftestEvaluator, say: Callable[[str], None]) -> Iterator[Check]:
    """All of them, one after the other; nothing else may run meanwhile.

    Raises:
        KagentError: The machine fails before there is anything to check.
    """
    highest = Tier(evaluator.tier)
    tiers = [tier for tier in Tier if Tier.T1 <= tier <= highest]
    for tier in tiers:
        say(f"canaries in tier {tier}")
        yield _canaries(probe(tier))
    noise: dict[str, float] = {}
    languages = [each for each in LANGUAGES.values() if _honest_kernel(each).is_file()]
    for language in languages:
        if not available(language.kind):
            continue
        say(f"a kernel against itself: {language.name}")
        check, noise[language.name] = _against_itself(evaluator, language)
        yield check
    with contextlib.ExitStack() as stack:
        rigs: dict[str, SelftestEvaluator] = {}
        for tier in (Tier.T0, *tiers):
            rigs[tier] = (
                evaluator
                if tier == highest
                else stack.enter_context(SelftestEvaluator(1, evaluator.token, tier))
            )
        jobs = {language.name: honest_job(language) for language in languages}
        say(f"honest kernels are built in {', '.join(rigs)}")
        built = _built(rigs, list(jobs.values()))
        for name, job in jobs.items():
            say(f"honest kernels in {', '.join(rigs)}: {name}")
            attempts = {tier: found[job] for tier, found in built.items()}
            yield _honest(name, rigs, attempts, max(SLOWER, noise.get(name, 0.0)))


def _built(
    rigs: Mapping[str, SelftestEvaluator], jobs: Sequence[Job]
) -> Mapping[str, Mapping[Job, Attempt]]:
    """Every job in every tier; builders and judges start side by side."""
    with ThreadPoolExecutor(len(rigs)) as threads:
        found = threads.map(
            lambda evaluator: {a.job: a for a in evaluator.built(jobs)}, rigs.values()
        )
        return dict(zip(rigs, found, strict=True))


def _canaries(seen: Probe) -> Check:
    stopped = sum(not c.escaped for c in seen.canaries)
    got = f"{stopped} of {len(seen.canaries)} stopped"
    if seen.escaped:
        got += f"; these got out: {', '.join(seen.escaped)}"
    if seen.uncovered:
        got += f"; left to a higher tier: {', '.join(seen.uncovered)}"
    name, expected = f"canaries, {seen.isolation.tier}", "all covered attacks stopped"
    return Check(name, expected, got, not seen.escaped)


def honest_job(language: Language) -> Job:
    """The corpus's plain kernel of a language, as far as this machine can judge it."""
    task = corpus_folder() / "tasks" / TASK
    measured = available(language.kind)
    without_gpu: Runs = "interpret" if language.interpreted else "build"
    runs = language.kind if measured else without_gpu
    return Job(candidate_text(_honest_kernel(language)), task, runs, measured=measured)


def _honest_kernel(language: Language) -> Path:
    return corpus_folder() / "honest" / f"{TASK}_{language.name}.py"


def _against_itself(evaluator: SelftestEvaluator, language: Language) -> tuple[Check, float]:
    """An A/A race, and the share of a time that is noise.

    Once more where it seems faster than itself: an interval of 95 % is wrong in one of 20.
    """
    name, expected = f"A/A, {language.name}", "as fast as itself"
    got = ""
    for _ in range(2):
        race = evaluator.against_itself(honest_job(language))
        if isinstance(race, Rejected):
            got = f"{race.stage} {race.status}: {race.message}"
            break
        found = race.cases[0].ratio("a", "b") if race.cases else None
        if found is None:
            failed = "; ".join(r.message for r in race.failed.values())
            got = f"it did not finish: {failed}"
            break
        got = interval_text(found.value, found.low, found.high)
        if found.low <= 1 <= found.high:
            spread = math.sqrt(found.high / found.low) - 1
            return Check(name, expected, f"{got}: noise of ±{spread:.1%}", ok=True), spread
    return Check(name, expected, got, ok=False), 0.0


def _honest(
    language: str, rigs: Mapping[str, SelftestEvaluator], built: Mapping[str, Attempt], noise: float
) -> Check:
    """Right everywhere, and nowhere slower than unconfined by more than noise."""
    most = 1 + noise
    job = built[Tier.T0].job
    times_us: dict[str, list[float]] = {tier: [] for tier in rigs}
    expected = "right in every tier" + (", as fast as in T0" if job.measured else "")
    for i in range(ROUNDS if job.measured else 1):
        for tier, evaluator in rigs.items():
            seen = evaluator.judged(built[tier]) if i else evaluator.finish(built[tier])
            if seen.outcome != PASSED:
                return Check(f"honest {language}", expected, _failed(tier, seen), ok=False)
            if seen.kernel_us is not None:
                times_us[tier].append(seen.kernel_us)
        if i > 0 and job.measured and _slowest(times_us) <= most:
            break
    where = ", ".join(rigs)
    if not job.measured:
        how = "interpreted" if job.runs == "interpret" else "compiled"
        return Check(f"honest {language}", expected, f"right in {where} ({how})", ok=True)
    ratios = _beside_t0(times_us)
    ok = _slowest(times_us) <= most
    texts = ", ".join(f"{t} {r:.2f}×" for t, r in ratios.items())
    got = f"right; T0 {_undisturbed(times_us[Tier.T0]):.0f} µs, {texts} of it"
    return Check(f"honest {language}", expected, got, ok)


def _beside_t0(times_us: Mapping[str, Sequence[float]]) -> dict[str, float]:
    unconfined = _undisturbed(times_us[Tier.T0])
    return {t: _undisturbed(us) / unconfined for t, us in times_us.items() if t != Tier.T0}


def _slowest(times_us: Mapping[str, Sequence[float]]) -> float:
    return max(_beside_t0(times_us).values(), default=1.0)  # a host may offer no tier but T0


def _undisturbed(times_us: Sequence[float]) -> float:
    """The lower quartile: neither what a neighbour slows down, nor a lone moment without any."""
    return sorted(times_us)[len(times_us) // 4]


def _failed(tier: str, seen: EntryOutcome) -> str:
    return f"in {tier}: {seen.outcome} {seen.message}"
