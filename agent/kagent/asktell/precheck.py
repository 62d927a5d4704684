"""What a machine without the device can say about answers: see `kagent.evolve.offline_check`.

Nothing is timed, and nothing that is found here decides: the judge builds and checks it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected, Stage, Status

from kagent.asktell.state import Desk, Looked
from kagent.evolve.offline_check import Look, Looker
from kagent.evolve.stored_run import kind_of
from kagent.runs.known_sources import Known
from kagent.runs.store import RunStore


def look_at(
    store: RunStore,
    task: Task,
    desk: Desk,
    numbers: Sequence[int],
    jobs: int,
    say: Callable[[str], None],
) -> Iterator[Looked]:
    """Look at candidates that were told, one by one; each finding is kept before it is returned.

    Texts that are known are not built again; a reply without a kernel has nothing to look at.

    Raises:
        MachineError: This host lacks a compiler, or cannot confine one.
        RunError: The run cannot be written.
    """
    manifest, known = store.manifest, Known(desk.proposals)
    kind, target = kind_of(manifest), manifest.target
    with Looker(task, kind, target, configs=manifest.configs, jobs=jobs) as looker:
        for proposal in (desk.proposals[n] for n in numbers):
            if proposal.fault:
                continue
            same = known.same(proposal)
            if same is not None and same != proposal.id:
                text = f"the same text as candidate {same}"
                duplicate = Rejected(Stage.PARSE, Status.DUPLICATE, text)
                looked = Looked(proposal.id, target, rejected=duplicate)
            else:
                say(f"#{proposal.id} {proposal.name}: build for {target}")
                looked = _looked(proposal.id, target, looker.look(proposal.source))
            store.append("looked", to_json(looked))
            yield looked


def _looked(number: int, target: str, look: Look) -> Looked:
    """What is kept with the run."""
    return Looked(
        number,
        target,
        build_s=look.built.build_s if isinstance(look.built, Built) else None,
        rejected=look.rejected,
        interpreted=look.values is not None and not look.unchecked,
        skipped=look.skipped,
        unchecked=look.unchecked,
    )
