"""Checks Triton and Gluon candidates without a GPU: in Triton's interpreter, or in a simulation of
what Hopper does asynchronously (`judge.gluon`); in a confined process.

What it shows: the kernel computes the right values on the small check cases, as far as its language
defines them. What it does not: the languages' `unseen`, inline assembly, CUDA kernels. An
interpreted candidate is never timed and never promoted.

Only what was built is interpreted, and where its plans have operations of torch, it gets the ghost
test that the judge has: the plans' other operations run on the CPU.
"""

from __future__ import annotations

import contextlib
import math
import select
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from kagent_sandbox.builder.client import syntax_error
from kagent_sandbox.builder.identity import source_hash
from kagent_sandbox.confine import Tier, interpreter_confinement
from kagent_sandbox.data.build import Built, ScalarSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.language import GLUON
from kagent_sandbox.data.plan import ITEMSIZE, Launch
from kagent_sandbox.data.target import DEFAULT_TARGET, parse_target
from kagent_sandbox.data.verdict import CaseError, Rejected, Stage, Status
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.judge.arena.layout import pitch_of
from kagent_sandbox.judge.arena.session import CandidateRejected, LauncherSession
from kagent_sandbox.judge.check.cases import check_cases
from kagent_sandbox.judge.check.checker import Checker
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.process.channel import ChannelError, ChannelTimeout
from kagent_sandbox.process.child_handle import LOSSES
from kagent_sandbox.process.forkserver import ForkServer
from kagent_sandbox.runtime.text import printable
from kagent_sandbox.syntax import refuse_unseen

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.plan import Plan
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.process.forkserver import ChildHandle

MOST_ELEMENTS = 1 << 17
"""Most elements of all arguments of a case together: larger cases are skipped."""
MOST_SIMULATED_ELEMENTS = 1 << 21
"""Most elements of a simulated kernel, which computes whole tiles with torch."""
MOST_PROGRAMS = 2048
"""Most programs of a case's launches together, of some 5 ms each: larger cases are skipped."""
CASE_LIMIT_S = 60.0
"""CPU time, so that a busy machine refuses nobody."""
_SLOWER = 10.0
"""A case that takes so many times as long as others let expect is not slow: it hangs."""
_LOAD_LIMIT_S = 60.0  # of CPU time
_WAITS_S = 60.0
"""Wall time that a candidate may spend on other things than computing, such as sleeping."""
_LEAST_SHARE = 0.01
"""Share of a core that a candidate gets on the busiest machine while it computes: it gives way to
others, which have nine times its share each.
"""
_LOOK_S = 0.2  # between two looks at a CPU clock that stands still on a busy machine
_MAX_ANSWER_BYTES = 64 << 20
_MAX_TEXT = 4000
_FAILURES = (Status.COMPILE_ERROR, Status.RUNTIME_ERROR)


@dataclass(frozen=True, slots=True)
class Interpreted:
    """Right in the interpreter in every case that is not `skipped` or `failed`."""

    errors: tuple[CaseError, ...]
    skipped: tuple[str, ...]  # names of cases that are too large, or took too long for their size
    failed: tuple[Rejected, ...] = ()  # where all cases were asked for: those that it fails
    not_simulated: str = ""  # what a kernel uses that the simulation lacks: then all are `skipped`


class _Lost(Exception):  # noqa: N818
    """A process was ended from outside, perhaps: `verdict`, if it was the candidate's doing."""

    def __init__(self, why: str, verdict: Rejected | None = None) -> None:
        super().__init__(why)
        self.verdict = verdict


class _NotSimulated(Exception):  # noqa: N818
    """A kernel uses what the simulation of Gluon does not know."""


class Interpreter:
    """Checks candidates of one task. A context manager."""

    def __init__(
        self,
        task: Task,
        run_seed: int,
        *,
        target: str = DEFAULT_TARGET,
        tier: Tier | None = None,
    ) -> None:
        self._task = task = task.calibrated("gpu")
        self._target = parse_target(target)
        self._cases = check_cases(task, "gpu", run_seed)
        self._checker = Checker(task, InputSampler(task, torch.device("cpu"), TRAITS.inputs))
        self._tier = tier
        self._cpu: CpuBackend | None = None  # for ghost tests; most candidates need none
        self._server = ForkServer(
            "kagent_sandbox.judge.interpreter_worker:serve",
            preload=["torch", "triton", "numpy", "kagent_sandbox.judge.interpreter_worker"],
            confinement=interpreter_confinement(tier=tier),
            env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        self._server.close()
        if self._cpu is not None:
            self._cpu.close()

    def printed(self) -> str:
        """Return the output of processes that have ended since the last call: a candidate's own
        words.
        """
        return self._server.printed()

    def check(
        self, source: str, built: Built, *, every: bool = False, more: Sequence[Case] = ()
    ) -> Interpreted | Rejected:
        """Interpret a candidate, and refuse it if no kernel has a part in its results.

        Args:
            source: Its file.
            built: What was built of it, for these check cases among others.
            every: See `interpret`.
            more: See `interpret`.

        Raises:
            TaskError: The task's reference.py fails.
            ConfinementError: This host cannot confine the process.
            ValueError: Something else was built.
        """
        if built.source_hash != source_hash(source):
            raise ValueError("this was built of another source")
        found = self.interpret(source, programs=_programs(built), every=every, more=more)
        if isinstance(found, Interpreted) and not found.failed:
            try:
                self._refuse_decoys(built, {e.case for e in found.errors})
            except CandidateRejected as e:
                return e.verdict
        return found

    def interpret(
        self,
        source: str,
        *,
        programs: Mapping[str, int] | None = None,
        every: bool = False,
        more: Sequence[Case] = (),
    ) -> Interpreted | Rejected:
        """Run a candidate's file on the check cases that are small enough, the smallest first.

        Args:
            source: The file.
            programs: Number of programs that its plan launches, by case, where it is known.
            every: Whether it goes on after a case that fails. Such cases are in `failed`.
            more: Cases beside the check cases.

        Raises:
            TaskError: The task's reference.py fails.
            ConfinementError: This host cannot confine the process.
            MachineError: Something else ended the process, and once more.
            ChildDied: This was closed meanwhile.
        """
        try:
            refuse_unseen(source)
        except SyntaxError as e:
            return syntax_error(e, source)
        launched = programs or {}
        most = MOST_SIMULATED_ELEMENTS if GLUON.is_in(source) else MOST_ELEMENTS
        cases = [*self._cases, *more]
        small = [
            c
            for c in cases
            if self._elements(c) <= most and launched.get(c.name, 0) <= MOST_PROGRAMS
        ]
        small.sort(key=self._elements)
        try:
            return self._interpreted(source, cases, small, every=every)
        except _Lost:  # which says nothing of the candidate
            self._server.restart()
        try:
            return self._interpreted(source, cases, small, every=every)
        except _Lost as e:
            self._server.restart()
            if e.verdict is not None:
                return e.verdict
            raise MachineError(
                f"the interpreter's process is ended by something else on this machine: {e}. What "
                "is recorded is kept: see to memory, then go on"
            ) from None

    def _interpreted(
        self, source: str, cases: Sequence[Case], small: Sequence[Case], *, every: bool
    ) -> Interpreted | Rejected:
        """Results of the small ones among the cases, the smallest first.

        Raises:
            _Lost: The process may have been ended from outside.
        """
        skipped = [c.name for c in cases if c not in small]
        errors: list[CaseError] = []
        took: list[tuple[int, float]] = []  # elements and seconds of each case that is done
        failed: list[Rejected] = []
        child = self._loaded(source, len(small))
        if isinstance(child, Rejected):
            return child
        try:
            for case in small:
                before_s = child.cpu_s()
                try:
                    found = self._check(child, case)
                except CandidateRejected as e:
                    if not every:
                        raise
                    failed.append(e.verdict)
                    child.close()
                    fresh = self._loaded(source, len(small))
                    if isinstance(fresh, Rejected):
                        failed.append(fresh)
                        break
                    child = fresh
                    continue
                if found is None:
                    self._refuse_hanging(case, took)
                    skipped += [c.name for c in small[small.index(case) :]]
                    break
                took.append((self._elements(case), child.cpu_s() - before_s))
                errors += found
        except CandidateRejected as e:
            if not failed:
                return e.verdict
            failed.append(e.verdict)
        except _NotSimulated as e:
            return Interpreted((), tuple(c.name for c in cases), tuple(failed), str(e))
        finally:
            child.close()
        return Interpreted(tuple(errors), tuple(skipped), tuple(failed))

    def _loaded(self, source: str, cases: int) -> ChildHandle | Rejected:
        """A process that has imported a candidate, with the time that so many cases may take."""
        try:
            child = self._server.spawn(
                wall_limit_s=(_LOAD_LIMIT_S + CASE_LIMIT_S * cases) / _LEAST_SHARE
            )
        except ChildDied as e:
            raise _Lost(str(e)) from None
        try:
            self._load(child, source)
        except CandidateRejected as e:
            child.close()
            return e.verdict
        except BaseException:
            child.close()
            raise
        return child

    def _refuse_hanging(self, case: Case, took: Sequence[tuple[int, float]]) -> None:
        """Tell a case that hangs from one that is too large for the interpreter's time.

        Work grows at most with the square of the elements (attention), and what is done already
        shows how fast this candidate is.

        Raises:
            CandidateRejected: It hangs.
        """
        elements = self._elements(case)
        expected_s = max((s * (elements / max(1, n)) ** 2 for n, s in took), default=0.0)
        if _SLOWER * expected_s < CASE_LIMIT_S:
            than = f", and what is smaller lets expect {expected_s:.1f} s" if took else ""
            text = (
                f"it took {CASE_LIMIT_S:g} s of CPU time, interpreted{than}: is there an endless "
                "loop in a kernel?"
            )
            raise _out(Status.TIMEOUT, text, case)

    def _refuse_decoys(self, built: Built, names: Collection[str]) -> None:
        """The judge's ghost test, on the CPU, in the cases of these names.

        Raises:
            CandidateRejected: No kernel has a part in any result.
        """
        cases = [c for c in self._cases if c.name in names and (0, c.name) in built.plans]
        plans = {(0, c.name): _without_launches(built.plans[0, c.name]) for c in cases}
        if not any(p.works_beside_launches for p in plans.values()):
            return
        ghosts = replace(built, target="cpu", plans=plans)
        if self._cpu is None:
            self._cpu = CpuBackend(tier=self._tier)
        with contextlib.closing(self._cpu.arena(pitch_of(plans.values()))) as arena:
            try:
                with LauncherSession(self._cpu, arena, {}, Stage.CHECK, timed=False) as session:
                    self._checker.reject_decoys(session, ghosts, cases)
            except CandidateRejected as e:
                # An operation that torch has on GPUs only fails here, and says nothing of kernels.
                if e.verdict.status is Status.POLICY:
                    raise

    def _elements(self, case: Case) -> int:
        spec = build_case(self._task, case)
        return sum(torch.Size(t.shape).numel() for t in (*spec.tensors, *spec.results))

    def _load(self, child: ChildHandle, source: str) -> None:
        target = self._target
        device = {
            "name": target.device_name,
            "units": target.multiprocessors,
            "capability": divmod(target.capability, 10),
            "shared_bytes": target.shared_per_block,
        }
        request: dict[str, object] = {"source": source, "entry": self._task.entry, "device": device}
        if self._ask(child, request, [], None, _LOAD_LIMIT_S) is None:
            text = f"importing the file took longer than {_LOAD_LIMIT_S:g} s of CPU time"
            raise _out(Status.TIMEOUT, f"{text} (interpreted)", None)

    def _check(self, child: ChildHandle, case: Case) -> list[CaseError] | None:
        """Errors of one case, or None if it takes too long."""
        input_set = self._checker.sampler.draw(case)
        spec = build_case(self._task, case)
        arguments: list[dict[str, object]] = []
        blobs: list[bytes] = []
        for a in spec.arguments:
            if isinstance(a, ScalarSpec):
                arguments.append({"value": a.given})
                continue
            placed = {"shape": list(a.shape), "strides": list(a.strides), "offset": a.offset}
            writes = a.name in spec.writes
            arguments.append({**placed, "extent": a.extent, "dtype": a.dtype, "writes": writes})
            flat = input_set.tensors[a.name].contiguous().reshape(-1)
            blobs.append(bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
        answer = self._ask(child, {"arguments": arguments}, blobs, case, CASE_LIMIT_S)
        if answer is None:
            return None
        records, data = answer
        shapes = [list(r.shape) for r in spec.compared]
        if [r["shape"] for r in records] != shapes:
            got = [r["shape"] for r in records]
            raise _out(Status.INCORRECT_SHAPE, f"returns shapes {got}, expected {shapes}", case)
        dtypes = [r.dtype for r in spec.compared]
        if [r["dtype"] for r in records] != dtypes:
            got = [r["dtype"] for r in records]
            raise _out(Status.INCORRECT_DTYPE, f"returns {got}, expected {dtypes}", case)
        outputs = []
        for result, blob in zip(spec.compared, data, strict=True):
            if len(blob) != ITEMSIZE[result.dtype] * torch.Size(result.shape).numel():
                raise _out(Status.TAMPER, "a result of another size than its shape", case)
            dtype = dtype_of(result.dtype)
            flat = torch.frombuffer(bytearray(blob), dtype=dtype) if blob else torch.empty(0)
            outputs.append(flat.to(dtype).reshape(result.shape))
        return self._checker.compare(outputs, input_set, Stage.CHECK)

    def _ask(
        self,
        child: ChildHandle,
        request: dict[str, object],
        blobs: list[bytes],
        case: Case | None,
        limit_s: float,
    ) -> tuple[list[dict[str, Any]], tuple[bytes, ...]] | None:
        """One question; None when there is no answer in `limit_s` of CPU time."""
        before_s, began = child.cpu_s(), time.monotonic()
        poller = select.poll()
        poller.register(child.channel.fileno(), select.POLLIN)
        try:
            child.channel.send(request, blobs)
            while not poller.poll(_LOOK_S * 1e3):
                used_s = child.cpu_s() - before_s
                if used_s >= limit_s:
                    child.kill()
                    return None
                if time.monotonic() - began - used_s / _LEAST_SHARE >= _WAITS_S:
                    text = f"interpreted, it waited for {_WAITS_S:g} s instead of computing"
                    raise _out(Status.TIMEOUT, text, case)
            message = child.channel.recv(_WAITS_S, max_bytes=_MAX_ANSWER_BYTES)
        except ChannelTimeout:
            text = f"interpreted, it does not end its answer within {_WAITS_S:g} s"
            raise _out(Status.TIMEOUT, text, case) from None
        except ChannelError:
            end = child.wait(2.0) or child.kill()
            text = f"interpreted, the process {end.describe()}"
            if end.signal == signal.SIGSEGV:
                text += ": a load or store far outside of its tensor (is a mask missing?)"
            out = _out(Status.RUNTIME_ERROR, text, case)
            if end.reason in LOSSES:
                raise _Lost(end.describe()) from None
            if end.reason is None and end.signal == signal.SIGKILL:
                raise _Lost(end.describe(), out.verdict) from None
            raise out from None
        match message.obj:  # the candidate shares its process with what answers: believe nothing
            case {"failed": [str(status), str(text)]} if status in _FAILURES:
                raise _out(Status(status), f"{text} (interpreted)", case)
            case {"not_simulated": str(text)}:
                raise _NotSimulated(printable(text)[:_MAX_TEXT])
            case {"ok": list(records)} if len(records) == len(message.blobs):
                if all(map(_describes_tensor, records)):
                    return cast("list[dict[str, Any]]", records), message.blobs
        raise _out(Status.TAMPER, "the candidate wrote to the result channel", case)


def _without_launches(plan: Plan) -> Plan:
    """Return a plan's torch operations, for the CPU."""
    rest = tuple(op for op in plan.ops if not isinstance(op, Launch))
    return replace(plan, target="cpu", ops=rest, kernels=())


def _describes_tensor(record: object) -> bool:
    match record:
        case {"shape": list(shape), "dtype": str()}:
            return all(type(size) is int for size in shape)
    return False


def _out(status: Status, text: str, case: Case | None) -> CandidateRejected:
    stage = Stage.BUILD if case is None else Stage.CHECK
    text = printable(text)[:_MAX_TEXT]
    return CandidateRejected(Rejected(stage, status, text, case.name if case else None))


def _programs(built: Built) -> dict[str, int]:
    """Programs that the first configuration launches, by case."""
    return {
        name: sum(math.prod(op.grid) for op in plan.ops if isinstance(op, Launch))
        for (config, name), plan in built.plans.items()
        if config == 0
    }
