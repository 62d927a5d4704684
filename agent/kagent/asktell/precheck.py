"""Check answers on a machine without the device: see `kagent.evolve.offline_check`.

Nothing is timed, and nothing that is found here decides: the judge builds and checks it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected, Stage, Status

from kagent.asktell.state import AskTellState, Precheck
from kagent.evolve.offline_check import OfflineCheck, OfflineChecker
from kagent.runs.source_index import SourceIndex
from kagent.runs.store import RunStore


def precheck(
    store: RunStore,
    task: Task,
    state: AskTellState,
    numbers: Sequence[int],
    jobs: int,
    say: Callable[[str], None],
) -> Iterator[Precheck]:
    """Look at candidates that were told, one by one; each finding is kept before it is returned.

    Texts that are known are not built again; a reply without a kernel has nothing to look at.

    Raises:
        MachineError: This host lacks a compiler, or cannot confine one.
        RunError: The run cannot be written.
    """
    manifest, known = store.manifest, SourceIndex(state.proposals)
    kind, target = manifest.kind, manifest.target
    with OfflineChecker(task, kind, target, configs=manifest.configs, jobs=jobs) as checker:
        for proposal in (state.proposals[n] for n in numbers):
            if proposal.fault:
                continue
            same = known.same(proposal)
            if same is not None and same != proposal.id:
                text = f"the same text as candidate {same}"
                duplicate = Rejected(Stage.PARSE, Status.DUPLICATE, text)
                looked = Precheck(proposal.id, target, rejected=duplicate)
            else:
                say(f"#{proposal.id} {proposal.name}: build for {target}")
                looked = _looked(proposal.id, target, checker.look(proposal.source))
            store.append("looked", to_json(looked))
            yield looked


def _looked(number: int, target: str, look: OfflineCheck) -> Precheck:
    """Turn an offline check into the record that the run keeps."""
    return Precheck(
        number,
        target,
        build_s=look.built.build_s if isinstance(look.built, Built) else None,
        rejected=look.rejected,
        interpreted=look.values is not None and not look.unchecked,
        skipped=look.skipped,
        unchecked=look.unchecked,
        where=look.where,
    )
