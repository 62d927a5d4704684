"""Choice of candidates to export, from runs on disk. Those whose figures do not hold are refused.

What can be known without a machine is decided here: whether a run is finished, and whether its
winner beat torch at all. The version of kagent and that of the task do not matter, since a kernel
is judged anew before it is exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.language import Language, language_of_source
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Comparison, Passed, Rejected, SpeedVerdict
from kagent_sandbox.errors import UserError

from kagent.evolve.stored_run import is_same_task, todays_task
from kagent.export.record import OriginRecord
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, find_candidate, kernel_id
from kagent.runs.manifest import Manifest, find_run
from kagent.runs.store import read_history
from kagent.tasks import command_word
from kagent.text import interval_text
from kagent.ui.tables import lacking_text

_DIGITS = 8  # of a source's hash, in a kernel's id


@dataclass(frozen=True)
class Winner:
    """A candidate that is to be exported, and its run."""

    id: str  # of the kernel in a library: softmax_1a2b3c4d
    folder: Path
    manifest: Manifest
    history: History
    candidate: Candidate
    task: Task
    versus_torch: Comparison  # the final race's

    @property
    def source(self) -> str:
        """File of the winner, as it was judged."""
        return self.candidate.proposal.source

    @property
    def language(self) -> Language:
        """Language of its kernels."""
        return language_of_source(self.source)

    @property
    def is_of_todays_task(self) -> bool:
        """Whether its run was made with the task as it is now."""
        return is_same_task(self.task, self.manifest)

    @property
    def configs(self) -> int:
        """Configurations of its tunables that it was built with."""
        return self.candidate.proposal.configs or self.manifest.configs

    @property
    def choice(self) -> dict[str, int]:
        """The configuration that was the fastest, by visible benchmark case."""
        verdict = self.candidate.verdict
        assert isinstance(verdict, Passed)
        return {t.case: t.config for t in verdict.timings}

    @property
    def origin(self) -> OriginRecord:
        """Origin of a winner, as a library records it."""
        lineage, found = self.history.lineage, self.versus_torch
        path = lineage.path(self.candidate.id)
        authors = [c.proposal.origin.model for c in path if c.proposal.origin is not None]
        tested = self.manifest.environment.get("selftest")
        return OriginRecord(
            run=self.folder.name,
            run_id=self.manifest.id,
            candidate=self.candidate.id,
            path=tuple(f"{c.proposal.operator}: {c.proposal.hypothesis}".strip() for c in path),
            proposer=self.manifest.proposed_by,
            models=tuple(dict.fromkeys(authors)),
            evaluated=lineage.counted,
            ratio=found.ratio,
            low=found.low,
            high=found.high,
            started=self.manifest.started,
            kagent=self.manifest.version,
            task_digest=self.manifest.task_digest,
            selftest=str(tested["digest"]) if isinstance(tested, dict) else "",
        )


def find_winner(runs: Path, name: str, *, allow_slower: bool = False) -> Winner:
    """The winner of a run, or with RUN:ID another of its candidates that took part in its race.

    Raises:
        RunError: There is no such run, or its task is not to be found.
        UserError: It must not be exported; the text says why.
    """
    run, _, number = name.partition(":")
    if number and not number.isdigit():
        raise UserError(f"{name}: write RUN or RUN:ID, ID being a candidate's number")
    folder = find_run(runs, run)
    store, history = read_history(folder)
    manifest = store.manifest
    task = todays_task(folder, manifest)
    final = history.race
    if final is None:
        raise UserError(
            f"{folder}: it has not been raced on hidden cases, so nothing in it is verified: "
            f"finish it with kagent evolve {command_word(task)} --resume {folder.name} "
            f"(kagent judge {folder.name} --race, if it is answered from outside)"
        )
    if not number and final.winner is None:
        raise UserError(f"{folder}: no candidate came through its final race")
    chosen = find_candidate(history.lineage, int(number) if number else final.winner or 0)
    verdict = chosen.verdict
    if isinstance(verdict, Rejected):
        raise UserError(f"{folder}: #{chosen.id} was rejected ({verdict.status})")
    raced = final.race.overall.get(str(chosen.id))
    if raced is None:
        took = ", ".join(f"#{i}" for i in final.finalists)
        why = final.race.failed.get(str(chosen.id))
        what = f"failed in it ({why.status})" if why else f"took no part in it ({took} did)"
        raise UserError(f"{folder}: #{chosen.id} is not verified by the final race: it {what}")
    versus = final.race.versus_torch(str(chosen.id))
    if versus is None:
        reason = lacking_text(final.race) or "it has no baseline of torch to compare with"
        raise UserError(f"{folder}: the race of #{chosen.id} gives no verdict: {reason}")
    if versus.verdict is not SpeedVerdict.FASTER and not allow_slower:
        raise UserError(
            f"{folder}: #{chosen.id} is not FASTER than torch on hidden cases: {versus.verdict}, "
            f"{interval_text(versus.ratio, versus.low, versus.high)}. --allow-slower exports it "
            "all the same"
        )
    key = f"{task.name}_{kernel_id(chosen.proposal.source)[:_DIGITS]}"
    return Winner(key, folder, manifest, history, chosen, task, versus)
