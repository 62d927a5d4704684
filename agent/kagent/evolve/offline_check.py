"""Check a candidate without its device: it must build for a target, and its values must be right
where its languages have an interpreter: Triton's own, or the simulation of Gluon.

`kagent build`, `check` and `bench` where there is no GPU, and `tell --queue`, all come through
here, and build what a judge builds: what is refused here is refused everywhere, for that reason.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import TRITON, Language, language
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.data.verdict import Rejected

from kagent.evolve.open_machine import request_maker, search_cases

if TYPE_CHECKING:
    from kagent_sandbox.judge.interpreter import Interpreted, Interpreter


@dataclass(frozen=True)
class OfflineCheck:
    """Findings about a candidate. Nothing was run on a device, and nothing was timed."""

    built: Built | Rejected
    values: Interpreted | Rejected | None = None  # in an interpreter; None: not run there
    unchecked: str = ""  # why none of its values was checked, though it was built
    where: str = TRITON.interpreter  # what checked its values
    unseen: str = TRITON.unseen  # what that cannot show

    @property
    def rejected(self) -> Rejected | None:
        """The reason for a rejection, if there is one."""
        return next((v for v in (self.built, self.values) if isinstance(v, Rejected)), None)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Cases that are too large for the interpreter, or take too long in it."""
        return getattr(self.values, "skipped", ())


class OfflineChecker:
    """Builds candidates of one task, and interprets those in Triton. A context manager; its
    processes start when they are needed first.

    Hidden check cases are drawn for it alone: they are not those of any judge.
    """

    def __init__(
        self,
        task: Task,
        kind: Kind,
        target: str,
        *,
        configs: int,
        jobs: int,
        every: bool = False,
        bench_shapes: bool = False,
    ) -> None:
        """`every`: whether all cases are tried after one that fails. `bench_shapes`: whether the
        benchmark cases and those of a final race are tried, too.
        """
        self._task = task
        self._target = target
        self._jobs = jobs
        self._secret = secrets.randbits(62)
        cases = search_cases(task, kind, self._secret)
        hidden = draw_hidden(task, kind, "bench", self._secret) if bench_shapes else []
        self._request = request_maker(task, target, cases + hidden, configs)
        self._every = every
        self._more = [*task.cases(kind).bench, *hidden] if bench_shapes else []
        self._processes = contextlib.ExitStack()
        self._builder: Builder | None = None
        self._interpreter: Interpreter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def look(self, source: str) -> OfflineCheck:
        """Build a candidate for all cases of a search, then interpret it on the small check cases.

        Raises:
            MachineError: This host lacks a compiler, or cannot confine one.
            TaskError: The task's reference.py fails.
        """
        if self._builder is None:
            self._builder = self._processes.enter_context(Builder(self._jobs))
        built = self._builder.build(self._request(source))
        if isinstance(built, Rejected):
            return OfflineCheck(built)
        names = sorted({k.language for plan in built.plans.values() for k in plan.kernels})
        languages = [language(name) for name in names]
        unchecked = [each for each in languages if not each.interpreted]
        if unchecked:
            return OfflineCheck(built, unchecked=_why(unchecked[0]))
        where = " and ".join(each.interpreter for each in languages)
        unseen = "; ".join(each.unseen for each in languages)
        if self._interpreter is None:
            from kagent_sandbox.judge.interpreter import Interpreter

            interpreter = Interpreter(self._task, self._secret, target=self._target)
            self._interpreter = self._processes.enter_context(interpreter)
        values = self._interpreter.check(source, built, every=self._every, more=self._more)
        if isinstance(values, Rejected) or values.errors or values.failed:
            return OfflineCheck(built, values, "", where, unseen)
        why = f"all its check cases are too large for {where}"
        if values.not_simulated:
            why = f"{where} lacks what it uses: {values.not_simulated}"
        return OfflineCheck(built, values, why, where, unseen)


def _why(written_in: Language) -> str:
    where = "run in the judge" if written_in.kind == "cpu" else "need a GPU"
    return f"{written_in.title} kernels {where}"
