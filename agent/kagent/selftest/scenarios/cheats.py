"""Cheats that no verdict shows: a source that does not do on real tensors what its plan says."""

from __future__ import annotations

from pathlib import Path

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.replay.replayer import Replayer

from kagent.selftest.assemble import candidate_text
from kagent.selftest.catalogue import PASSED, Variant, load_item
from kagent.selftest.expectations import EntryOutcome
from kagent.selftest.jobs import job_of
from kagent.selftest.scenario import ScenarioRun


def replayed_on_real_tensors(scenario_run: ScenarioRun) -> EntryOutcome:
    """Run the host code of the item's candidates that pass as plans, and of their twins, on real
    tensors: the twins do what their plans say, and nobody else.
    """
    found, honest = 0, set[Path]()
    with Replayer() as replayer:
        for variant in load_item(scenario_run.item):
            if not isinstance(variant, Variant) or variant.expect != (PASSED,):
                continue
            for path in (variant.path, variant.twin):
                if path in honest:
                    continue
                verdict = _replayed(replayer, scenario_run, variant, path)
                if isinstance(verdict, str) or (verdict is None) != (path == variant.twin):
                    return EntryOutcome(
                        "mistaken", f"{path.name}: {verdict or 'does what its plan says'}"
                    )
            honest.add(variant.twin)
            found += 1
    return EntryOutcome("TAMPER", f"{found} candidates do something else on real tensors")


def _replayed(
    replayer: Replayer, scenario_run: ScenarioRun, variant: Variant, path: Path
) -> Rejected | str | None:
    """Replay its first case; return the outcome, or why there is no plan to compare with."""
    attempt = scenario_run.evaluator.build(job_of(variant, twin=path == variant.twin))
    scenario_run.evaluator.drop(attempt)
    if not isinstance(attempt.built, Built):
        return str(attempt.error or attempt.built)
    task = scenario_run.evaluator.task(variant.task)
    case = build_case(task, task.cpu.check[0])
    built = attempt.built
    plan, config = built.plans[0, case.name], built.configs[0]
    return replayer.compare(candidate_text(path), task.entry, case, plan, config)
