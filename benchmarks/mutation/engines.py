"""Ways to judge a mutant: for real on a CPU or a GPU, or in Triton's interpreter.

A mutant counts as caught when the check rejects it, for whatever reason: wrong values, a crash, a
timeout, guard bands that were written over.
"""

from __future__ import annotations

import enum
import itertools
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.data.verdict import Rejected, Stage
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge import interpreter as interpret
from kagent_sandbox.judge.arena import session
from kagent_sandbox.judge.check.cases import check_cases
from kagent_sandbox.judge.interpreter import Interpreted, Interpreter
from kagent_sandbox.judge.judge import Judge

if TYPE_CHECKING:
    from kagent_sandbox.device.interface import Backend

    from mutation.edits import Mutant

T = TypeVar("T")
R = TypeVar("R")
HANG_S = 3.0
"""A seed's slowest check takes 0.1 s; a mutant that hangs must not cost the judge's own 10 s."""


class Fate(enum.StrEnum):
    """What became of a mutant."""

    CAUGHT = "caught"
    SURVIVED = "survived"
    NOT_BUILT = "not built"  # it has no plan: no kernel that could be right or wrong
    SAME = "same"  # the same plans and machine code as the seed's


@dataclass(frozen=True, slots=True)
class Judged:
    """A mutant with its fate, and what the judge said; `share` of the tolerance if it survived."""

    mutant: Mutant
    fate: Fate
    says: str
    share: float = 0.0


class Real:
    """Builds in parallel, and judges on a device as kagent does: all check cases, three runs.

    Closes the backend at its end.
    """

    def __init__(self, task: Task, backend: Backend, builder: Builder, jobs: int) -> None:
        session.RUN_LIMIT_S = HANG_S
        self._task = task
        self._builder = builder
        self._jobs = jobs
        secret = secrets.randbits(62)
        self._judge = Judge(task, backend, secret)
        self._target = backend.facts.target
        cases = check_cases(task, self._judge.kind, secret)
        self._cases = tuple(build_case(task, c) for c in cases)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._judge.close()

    def judge(self, originals: Mapping[str, str], mutants: Iterable[Mutant]) -> Iterator[Judged]:
        """Each mutant's fate, in order. `originals`: the seeds' texts by file.

        Raises:
            TaskError: A seed itself is rejected.
        """
        known: dict[str, str] = {}
        for file, source in originals.items():
            built = self._build(source)
            errors = built if isinstance(built, Rejected) else self._judge.check(built)
            if isinstance(built, Rejected) or isinstance(errors, Rejected):
                raise TaskError(f"{file}: the seed itself is rejected: {errors}")
            known[file] = built.work_hash
        for mutant, built in _ahead(self._jobs, mutants, lambda m: self._build(m.source)):
            if isinstance(built, Rejected):
                yield Judged(mutant, Fate.NOT_BUILT, _text(built))
            elif built.work_hash == known[mutant.file]:
                yield Judged(mutant, Fate.SAME, "")
            else:
                errors = self._judge.check(built)
                if isinstance(errors, Rejected):
                    yield Judged(mutant, Fate.CAUGHT, _text(errors))
                else:
                    share = max(e.share_of_tolerance for e in errors)
                    yield Judged(mutant, Fate.SURVIVED, "", share)

    def _build(self, source: str) -> Built | Rejected:
        request = BuildRequest(
            source, self._task.entry, self._target, self._cases, self._task.allow
        )
        return self._builder.build(request)


class Interpreting:
    """Triton's interpreter on small cases, several mutants at once. Survivors are also compiled:
    equal machine code is the same kernel.
    """

    def __init__(self, task: Task, builder: Builder, jobs: int) -> None:
        interpret.CASE_LIMIT_S = 20.0
        self._task = small(task)
        self._builder = builder
        self._jobs = jobs
        self._local = threading.local()
        self._open: list[Interpreter] = []
        self._lock = threading.Lock()
        # Compiled for shapes as they are: tunables and cases of other sizes give other code.
        self._cases = tuple(build_case(task, c) for c in task.gpu.check[:4])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for interpreter in self._open:
            interpreter.close()

    def judge(self, originals: Mapping[str, str], mutants: Iterable[Mutant]) -> Iterator[Judged]:
        """Each mutant's fate, in order.

        Raises:
            TaskError: A seed itself is rejected.
        """
        known: dict[str, str] = {}
        for file, source in originals.items():
            found = self._check(source)
            if isinstance(found, Rejected):
                raise TaskError(f"{file}: the seed itself is rejected: {found}")
            identity = self._identity(source)
            if isinstance(identity, Rejected):
                raise TaskError(f"{file}: the seed itself is rejected: {identity}")
            known[file] = identity
        yield from (
            judged
            for _, judged in _ahead(self._jobs, mutants, lambda m: self._judge(m, known[m.file]))
        )

    def _judge(self, mutant: Mutant, known: str) -> Judged:
        found = self._check(mutant.source)
        if isinstance(found, Rejected):
            broken = found.stage in (Stage.PARSE, Stage.BUILD)
            return Judged(mutant, Fate.NOT_BUILT if broken else Fate.CAUGHT, _text(found))
        identity = self._identity(mutant.source)
        if isinstance(identity, Rejected):  # the interpreter takes more than the compiler
            return Judged(mutant, Fate.NOT_BUILT, _text(identity))
        if identity == known:
            return Judged(mutant, Fate.SAME, "")
        share = max((e.share_of_tolerance for e in found.errors), default=0.0)
        return Judged(mutant, Fate.SURVIVED, "", share)

    def _check(self, source: str) -> Interpreted | Rejected:
        if not hasattr(self._local, "interpreter"):
            interpreter = Interpreter(self._task, 1)
            self._local.interpreter = interpreter
            with self._lock:
                self._open.append(interpreter)
        found: Interpreted | Rejected = self._local.interpreter.interpret(with_small_tiles(source))
        if isinstance(found, Interpreted) and found.skipped:
            case = found.skipped[0]  # a loop without end, or 20 s of interpretation
            return Rejected(Stage.CHECK, interpret.Status.TIMEOUT, "took too long", case)
        return found

    def _identity(self, source: str) -> str | Rejected:
        built = self._builder.build(
            BuildRequest(source, self._task.entry, "sm_90a", self._cases, self._task.allow)
        )
        return built if isinstance(built, Rejected) else built.work_hash


def with_race(task: Task, kind: Kind, secret: int) -> Task:
    """The task with all cases of a run as check cases: those of the check and of the races."""
    cases = task.cases(kind)
    hidden = [c for which in ("check", "bench") for c in draw_hidden(task, kind, which, secret)]
    every = (*cases.check, *cases.bench, *hidden)
    return task.model_copy(
        update={kind: cases.model_copy(update={"check": every, "hidden_check": ()})}
    )


SMALL_DIMS = {"M": 12, "N": 5000, "B": 1, "H": 4, "S": 70, "D": 64, "T": 40, "V": 300}
SMALL_TILES = {
    "CHUNK": 30, "SPLITS": 3, "BLOCK_V": 128, "GROUP": 2, "BLOCK": 128, "BLOCK_M": 32, "TILE": 1024,
}  # fmt: skip
"""So that small cases have several chunks, splits and tiles."""


def small(task: Task) -> Task:
    """The task with check cases that the interpreter is through with in a second or two."""
    cases = []
    for case in task.gpu.check:
        dims = {n: min(case.dims[n], m) for n, m in SMALL_DIMS.items() if n in case.dims}
        if "H" in dims:
            dims |= {"H": case.dims["H"] // case.dims["Hkv"] * 2, "Hkv": 2}
        cases.append(case.model_copy(update=dims))
    cases.sort(key=task.min_bytes)
    gpu = task.gpu.model_copy(update={"check": tuple(cases), "hidden_check": ()})
    return task.model_copy(update={"gpu": gpu})


def with_small_tiles(source: str) -> str:
    """A candidate with `SMALL_TILES`."""
    tiles = SMALL_TILES | ({"CHUNK": 130} if "SPLITS" in source else {})  # there, of the vocabulary
    for name, value in tiles.items():
        source = re.sub(rf"^{name} = \d+", f"{name} = {value}", source, flags=re.MULTILINE)
    return source


def _ahead(jobs: int, items: Iterable[T], work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Results in order, of a few more items than there are workers."""
    pending: list[tuple[T, Future[R]]] = []
    left = iter(items)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            pending += [(i, pool.submit(work, i)) for i in itertools.islice(left, 2 * jobs)]
            while pending:
                item, future = pending.pop(0)
                result = future.result()
                pending += [(i, pool.submit(work, i)) for i in itertools.islice(left, 1)]
                yield item, result
        finally:
            for _, future in pending:
                future.cancel()


def _text(rejected: Rejected) -> str:
    case = f" ({rejected.case})" if rejected.case else ""
    return f"{rejected.stage} {rejected.status}{case}: {rejected.message.splitlines()[0][:160]}"
