"""What a machine without the device can say about an answer: whether it builds for the run's
target, and where Triton's interpreter can run it, whether its values are right.

Nothing is timed, and nothing that is found here decides: the judge builds and checks it again.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from kagent_sandbox.build.client import Builder
from kagent_sandbox.records import to_json
from kagent_sandbox.task import Kind, Task
from kagent_sandbox.verdict import Rejected, Stage, Status

from kagent.asktell.desk import Desk, Looked
from kagent.asktell.opening import kind_of
from kagent.duplicates import Known
from kagent.lineage import Proposal
from kagent.prompting.measured import languages_of
from kagent.session import request_maker
from kagent.store import RunStore

if TYPE_CHECKING:
    from kagent_sandbox.interpret import Interpreter


class Looker:
    """Builds and interprets answers of one run. A context manager; its processes start when they
    are needed first.
    """

    def __init__(self, task: Task, kind: Kind, target: str, *, configs: int, jobs: int) -> None:
        self._task = task
        self._target = target
        self._jobs = jobs
        cases = task.cases(kind)
        self._request = request_maker(task, target, [*cases.check, *cases.bench], configs)
        self._processes = contextlib.ExitStack()
        self._builder: Builder | None = None
        self._interpreter: Interpreter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def look(self, proposal: Proposal) -> Looked:
        """Build an answer on all visible cases, then interpret it on the small check cases.

        Raises:
            MachineError: This host lacks a compiler, or cannot confine one.
        """
        if self._builder is None:
            self._builder = self._processes.enter_context(Builder(self._jobs))
        built = self._builder.build(self._request(proposal.source))
        if isinstance(built, Rejected):
            return Looked(proposal.id, self._target, rejected=built)
        looked = Looked(proposal.id, self._target, built.build_s)
        if languages_of(proposal.source) != ("triton",):
            return looked
        if self._interpreter is None:
            from kagent_sandbox.interpret import Interpreter

            seed = secrets.randbits(62)  # hidden cases of its own: not those of any judge
            interpreter = Interpreter(self._task, seed, target=self._target)
            self._interpreter = self._processes.enter_context(interpreter)
        found = self._interpreter.check(proposal.source)
        if isinstance(found, Rejected):
            return replace(looked, rejected=found, interpreted=True)
        return replace(looked, interpreted=bool(found.errors), skipped=found.skipped)


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
                looked = looker.look(proposal)
            store.append("looked", to_json(looked))
            yield looked
