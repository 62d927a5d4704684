"""The agent's handle on the builder: a request in, plans and binaries or a rejection out.

The child that answers has run untrusted code, so its answers are not believed. Plans are parsed and
checked, and binaries are read and hashed again. A mismatch is TAMPER.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, zip_longest
from types import TracebackType
from typing import Self

from kagent_sandbox.builder.binary.disassemble import text_in, tool_command
from kagent_sandbox.builder.binary.inspect import architecture
from kagent_sandbox.builder.binary.loops import loops
from kagent_sandbox.builder.compile import cpp, cuda
from kagent_sandbox.builder.crash_report import crash_line, printed_before
from kagent_sandbox.builder.health import disk_was_full, first_line, known_request
from kagent_sandbox.builder.identity import source_hash, tree_hash
from kagent_sandbox.builder.validate import (
    Forged,
    checked_configs,
    checked_plan,
    checked_rejection,
    checked_remarks,
)
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.confine.policy import Confinement
from kagent_sandbox.data import records
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.compiled import (
    MOST_LOOPS_OF_ALL,
    MOST_REMARK_CHARS,
    MOST_REMARKS,
    Loop,
    Remark,
)
from kagent_sandbox.data.language import how_to_write, language
from kagent_sandbox.data.plan import MAX_PLAN_BYTES, Plan
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import ChildDied, MachineError, ToolchainError
from kagent_sandbox.process.channel import ChannelClosed, ChannelError, ChannelTimeout, Message
from kagent_sandbox.process.child_handle import LOSSES
from kagent_sandbox.process.cores import usable_cores
from kagent_sandbox.process.device_lock import CPU, DeviceLock
from kagent_sandbox.process.forkserver import ChildHandle, Exit, ForkServer, Isolation
from kagent_sandbox.process.temporary_space import free_bytes, require_room
from kagent_sandbox.runtime.text import printable
from kagent_sandbox.syntax import refuse_unseen

MAX_SOURCE_BYTES = 1 << 20
MAX_BINARIES_BYTES = 128 << 20
MAX_PLANS_BYTES = 64 << 20
MAX_PTX_BYTES = 64 << 20
_MAX_MESSAGE_BYTES = 128 << 20
_MAX_CONFIGS = 256
_MAX_DROPPED = 256
_MAX_TEXT = 4000
_MAX_FORKS = 8  # of one candidate: a fork each for tracing and compiling
_GRACE_S = 0.8  # over the wall limit, which the child itself keeps to, unless a fork stops it
_NO_LAUNCH = (
    "host code launches no kernel in any case: a candidate is a kernel and the host code that "
    f"launches it. Write the kernel with {how_to_write()}, and launch it from the entry function"
)
_TRIES = 3  # of a build whose process is lost
_MOST_READ = 8  # kernels whose loops are read
_MOST_READ_BYTES = 1 << 20  # of one of them
_DUMP_S = 1.0  # for the child to say which line it hangs at


class Builder:
    """A warm, confined builder.

    Use it as a context manager. Several threads may call `build`. `JudgeClient` has an example.

    Args:
        jobs: Number of candidates that are built at once. Spare cores trace and compile several
            cases of one candidate at once.
        confinement: Rights of the child; `builder_confinement()` if None.
        on_wait: Is told, from the thread of a call, which process times on the CPU while a build
            waits for that.
        take_turns: Whether builds make way for other processes' timings on the CPU. Otherwise the
            caller has the CPU (`kagent_sandbox.process.device_lock`).
    """

    def __init__(
        self,
        jobs: int = 1,
        *,
        confinement: Confinement | None = None,
        on_wait: Callable[[str], None] | None = None,
        take_turns: bool = True,
    ) -> None:
        self._turns = DeviceLock(CPU, on_wait) if take_turns else None
        self._slots = threading.BoundedSemaphore(jobs)
        self._active = 0  # builds that run
        self._generation = 0  # fork-servers that were replaced
        self._lock = threading.Lock()
        confinement = confinement or builder_confinement()
        self._disk_bytes = confinement.disk_bytes
        self._disk_files = confinement.disk_files
        self._server = ForkServer(
            "kagent_sandbox.builder.worker:handle",
            preload=(
                "torch",
                "triton",
                "numpy",
                "kagent_sandbox.lang",
                "kagent_sandbox.builder.warm_up",
            ),
            confinement=confinement,
        )

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._turns is not None:
            self._turns.close()
        self._server.close()

    @property
    def isolation(self) -> Isolation:
        """Isolation of its children, as observed. Waits until the server has started.

        Raises:
            ConfinementError: The host lacks what was asked for.
        """
        return self._server.isolation

    def build(self, request: BuildRequest) -> Built | Rejected:
        """Trace and compile a candidate for all its cases.

        The call blocks while `jobs` other candidates are being built. A process that is lost for no
        reason that the candidate could have given is no verdict: a known file is built, then the
        candidate once more.

        Args:
            request: The source, the target, the cases and the limits in seconds.

        Returns:
            Plans and binaries by configuration and case, or the rejection.

        Raises:
            MachineError: This machine lacks a compiler or its headers, cannot confine, does not
                build a known file, or has no room for temporary files.
            ChildDied: The fork-server is gone, and so is its successor; or the builder was closed.
            ValueError: Two cases of the request have one name.
        """
        if len({c.name for c in request.cases}) != len(request.cases):
            raise ValueError("two cases of a build request have one name")
        try:
            tree = _parse(request.source)
        except SyntaxError as e:
            return syntax_error(e, request.source)
        for _ in range(_TRIES - 1):
            generation = self._generation
            try:
                found, lost = self._built(request, tree)
                if not lost:
                    return found
                self._prove(request.target, found)
            except ChildDied:
                self._restart(generation)
        return self._built(request, tree)[0]

    def _prove(self, target: str, lost: Built | Rejected) -> None:
        """Build a known file.

        Raises:
            MachineError: It does not build.
        """
        request = known_request(target)
        found, _ = self._built(request, tree_hash(request.source))
        if isinstance(found, Rejected):
            before = (
                f" Before it, a candidate did not: {first_line(lost)}."
                if (isinstance(lost, Rejected))
                else ""
            )
            folder = self._server.folder.parent
            raise MachineError(
                f"a file that is known to build does not build here: {first_line(found)}.{before} "
                f"{folder} has {free_bytes(folder)} bytes free. What is recorded is kept: see to "
                "memory and disk, then resume the run"
            )

    def _restart(self, generation: int) -> None:
        """A fork-server in the place of one that is gone, unless another thread was first.

        Raises:
            ChildDied: The builder was closed.
        """
        with self._lock:
            if self._generation == generation:
                self._server.restart()
                self._generation += 1

    def _built(self, request: BuildRequest, tree: str) -> tuple[Built | Rejected, bool]:
        """Build once. Also returns whether the process was lost for no known reason."""
        with (
            self._slots,
            self._turns.turn("work") if self._turns is not None else contextlib.nullcontext(),
            self._server.spawn(wall_limit_s=request.wall_limit_s + _GRACE_S) as child,
        ):
            with self._lock:
                self._active += 1
                forks = max(1, usable_cores() // self._active)
            try:
                answers = _Answers(request, child, tree, min(forks, _MAX_FORKS))
                found = answers.collect()
                if isinstance(found, Built):
                    found = dataclasses.replace(found, log=child.kill().log_tail)
                    if request.loops:
                        found = self._with_loops(found)
            finally:
                with self._lock:
                    self._active -= 1
        if isinstance(found, Rejected):  # at a close, because its process was ended
            self._server.require_open()
        full = disk_was_full(found)
        if full:
            folder = self._server.folder.parent
            tier = self.isolation.tier
            require_room(folder, tier, self._disk_bytes, self._disk_files, "a build")
        return found, answers.lost or full

    def _with_loops(self, built: Built) -> Built:
        """Add the loops of the machine code, or a remark that says why there are none.

        The first of each kernel comes before the second of any. Loops that are equal in two
        binaries of a kernel count once.

        What fails here is no fault of the candidate: its verdict does not wait for it.
        """
        if built.target == "cpu":
            return built
        kernels = {k.hash: k for (i, _), p in built.plans.items() if i == 0 for k in p.kernels}
        read: list[list[Loop]] = []
        try:
            for key, kernel in islice(kernels.items(), _MOST_READ):
                if len(built.binaries[key]) <= _MOST_READ_BYTES:
                    command = tool_command(language(kernel.language))
                    text = text_in(self._server, command, kernel.name, built.binaries[key])
                    capability = architecture(built.binaries[key])
                    ones = loops(text, kernel.name, capability)
                    read.append([dataclasses.replace(x, binary=key) for x in ones])
        except (ToolchainError, ChildDied) as e:
            why = Remark("", f"loops were not read: {e}"[:MOST_REMARK_CHARS])
            built = dataclasses.replace(built, remarks=(*built.remarks, why))
        found: list[Loop] = []
        for loop in (x for group in zip_longest(*read) for x in group if x is not None):
            if not any(dataclasses.replace(x, binary=loop.binary) == loop for x in found):
                found.append(loop)
        return dataclasses.replace(built, loops=tuple(found[:MOST_LOOPS_OF_ALL]))


class _Answers:
    """Collects the child's messages and checks all of them."""

    def __init__(
        self, request: BuildRequest, child: ChildHandle, tree: str, forks: int = 1
    ) -> None:
        self._request = request
        self._forks = forks
        self._child = child
        self._tree = tree
        self._start = time.monotonic()
        self._cases = {c.name: c for c in request.cases}
        self._configs: tuple[Mapping[str, object], ...] | None = None
        self._plans: dict[tuple[int, str], Plan] = {}
        self._binaries: dict[str, bytes] = {}
        self._plans_bytes = 0
        self._ptx: dict[str, str] = {}
        self._ptx_bytes = 0
        self._remarks: list[Remark] = []
        self._dropped: list[str] = []
        self.lost = False  # the process ended for no reason that is known

    def collect(self) -> Built | Rejected:
        try:
            self._child.channel.send(
                {"request": records.to_json(self._request), "forks": self._forks}
            )
            while True:
                message = self._child.channel.recv(self._left_s(), max_bytes=_MAX_MESSAGE_BYTES)
                if (answer := self._take(message)) is not None:
                    return answer
        except ChannelTimeout:
            exit_ = self._child.kill()
            # A child that a stopped fork-server never forked has not taken that time.
            return self._ended(exit_) if exit_.reason in LOSSES else self._timeout(exit_)
        except ChannelClosed:
            ended = self._child.wait(10.0)
            found = self._ended(ended or self._child.kill())
            if ended is not None and ended.reason == "killed":  # not from here: with its server
                self.lost = True
            return found
        except (ChannelError, Forged, records.RecordError) as e:
            self._child.kill()
            why = printable(str(e))[:_MAX_TEXT]
            return self._rejected(Status.TAMPER, f"the builder's answer is not sound: {why}")

    def _left_s(self) -> float:
        """Seconds for the next message.

        Raises:
            ChannelTimeout: None are left, though in an endless stream there is always a next one.
        """
        left = self._limit_s() - (time.monotonic() - self._start)
        if left <= 0:
            raise ChannelTimeout("time is up")
        return left

    def _limit_s(self) -> float:
        """Seconds from the start for all that was sent so far and the next message."""
        wall_s = self._request.wall_limit_s
        if self._configs is None:
            return self._request.import_limit_s + _DUMP_S
        return wall_s + _GRACE_S

    def _take(self, message: Message) -> Built | Rejected | None:
        """One message; the result when it is the last."""
        match message.obj:
            case {"loaded": list(configs)} if self._configs is None:
                if not 0 < len(configs) <= min(self._request.max_configs, _MAX_CONFIGS):
                    raise Forged(f"{len(configs)} configurations")
                self._configs = checked_configs(configs)
            case {"plan": [int(index), str(case)], "hashes": list(hashes)}:
                return self._plan(index, case, hashes, message.blobs)
            case {"ptx": list(hashes)} if self._request.ptx and len(hashes) == len(message.blobs):
                self._keep_ptx(hashes, message.blobs)
            case {"remarks": list(said)}:
                self._keep_remarks(checked_remarks(said))
            case {"dropped": str(text)} if len(self._dropped) < _MAX_DROPPED:
                self._dropped.append(printable(text[:_MAX_TEXT]))
            case {"rejected": rejected}:
                found = checked_rejection(rejected, self._cases)
                return dataclasses.replace(found, message=found.message[:_MAX_TEXT])
            case {"machine": str(text)}:
                return self._machine(printable(text[:_MAX_TEXT]))
            case {"done": True}:
                return self._built()
            case _:
                raise Forged("a message that is not expected here")
        return None

    def _plan(
        self, index: int, name: str, hashes: list[object], blobs: tuple[bytes, ...]
    ) -> Rejected | None:
        case = self._cases.get(name)
        known = self._configs is not None and 0 <= index < len(self._configs)
        if case is None or not known or (index, name) in self._plans:
            raise Forged(f"a plan for configuration {index} of case {name!r:.80}")
        if not blobs or len(hashes) != len(blobs) - 1 or len(blobs[0]) > MAX_PLAN_BYTES:
            raise Forged("a plan without its binaries")
        for claimed, binary in zip(hashes, blobs[1:], strict=True):
            # A binary is looked at when a plan names it: later it cannot be exchanged.
            if self._binaries.setdefault(str(claimed)[:64], binary) != binary:
                raise Forged("two binaries under one name")
        if sum(map(len, self._binaries.values())) > MAX_BINARIES_BYTES:
            raise Forged(f"binaries of more than {MAX_BINARIES_BYTES} bytes")
        self._plans_bytes += len(blobs[0])
        if self._plans_bytes > MAX_PLANS_BYTES:  # in memory they take ten times as much
            most = f"all plans together take more than {MAX_PLANS_BYTES >> 20} MiB"
            text = f"{most}: launch less often, in larger pieces, or try fewer configurations"
            self._child.kill()
            return self._rejected(Status.RESOURCE_LIMIT, text)
        self._plans[index, name] = checked_plan(blobs[0], self._binaries, case, self._request)
        return None

    def _keep_ptx(self, hashes: list[object], texts: tuple[bytes, ...]) -> None:
        """Texts to show, as far as there is room for them."""
        for key, text in zip(hashes, texts, strict=True):
            self._ptx_bytes += len(text)
            if self._ptx_bytes > MAX_PTX_BYTES:
                raise Forged(f"PTX of more than {MAX_PTX_BYTES} bytes")
            self._ptx[str(key)[:64]] = printable(text.decode("utf-8", "replace"))

    def _keep_remarks(self, found: Iterable[Remark]) -> None:
        """Remarks to show, each once, as far as there is room for them."""
        for remark in found:
            if remark not in self._remarks and len(self._remarks) < MOST_REMARKS:
                self._remarks.append(remark)

    def _built(self) -> Built | Rejected:
        missing = [c for c in self._cases if (0, c) not in self._plans]
        if missing or self._configs is None:
            raise Forged(f"no plan for {', '.join(missing[:3]) or 'any case'}")
        launching = {i for (i, _), plan in self._plans.items() if plan.launches}
        if 0 not in launching:
            return self._rejected(Status.POLICY, _NO_LAUNCH)
        for index in sorted({i for i, _ in self._plans} - launching):
            self._plans = {k: p for k, p in self._plans.items() if k[0] != index}
            self._dropped.append(f"{dict(self._configs[index])}: launches no kernel in any case")
        used = {k.hash for p in self._plans.values() for k in p.kernels}
        return Built(
            source_hash=source_hash(self._request.source),
            tree_hash=self._tree,
            target=self._request.target,
            configs=self._configs,
            plans=self._plans,
            binaries={h: b for h, b in self._binaries.items() if h in used},
            build_s=time.monotonic() - self._start,
            dropped=tuple(self._dropped),
            ptx={h: t for h, t in self._ptx.items() if h in used},
            remarks=tuple(self._remarks),
        )

    def _machine(self, text: str) -> Rejected:
        """The child says that the machine is at fault: true only if it looks so from here, too.

        Raises:
            MachineError: A compiler or its headers are missing.
        """
        if self._request.target == "cpu":
            cpp.compiler()
        else:
            cuda.look_for_toolkit()
        return self._rejected(Status.RUNTIME_ERROR, text)

    def _ended(self, exit_: Exit) -> Rejected:
        """The child ended without a last word."""
        if exit_.timed_out:
            return self._timeout(exit_)
        outside = exit_.reason in LOSSES
        self.lost = outside or (exit_.reason is None and exit_.signal == signal.SIGKILL)
        resource = exit_.reason is not None and exit_.reason != "killed" and not outside
        status = Status.RESOURCE_LIMIT if resource else Status.RUNTIME_ERROR
        line = crash_line(exit_.log_tail, self._request.source)
        text = f"{line}the builder's process was lost while {self._phase()}: {exit_.describe()}"
        return self._rejected(status, f"{text}\n{printed_before(exit_.log_tail)[-1000:]}".strip())

    def _timeout(self, exit_: Exit) -> Rejected:
        line = crash_line(exit_.log_tail, self._request.source)
        limit_s = self._request.wall_limit_s
        hint = ""
        if self._configs is None:
            limit_s = self._request.import_limit_s
            hint = ": is there an endless loop?"
        text = f"{line}{self._phase()} took longer than {limit_s:g} s{hint}"
        return self._rejected(Status.TIMEOUT, text)

    def _phase(self) -> str:
        if self._configs is None:
            return "importing the file"
        done = len(self._plans)
        return f"tracing and compiling ({done} of {len(self._cases)} cases done)"

    def _rejected(self, status: Status, message: str) -> Rejected:
        return Rejected(Stage.BUILD, status, message)


def _parse(source: str) -> str:
    """Hash of the syntax tree.

    Raises:
        SyntaxError: It is no Python, or too much of it.
    """
    if len(source.encode(errors="surrogatepass")) > MAX_SOURCE_BYTES:
        raise SyntaxError(f"the file has more than {MAX_SOURCE_BYTES} bytes")
    refuse_unseen(source)
    try:
        return tree_hash(source)
    except (ValueError, RecursionError, MemoryError) as e:  # null bytes, absurd nesting
        raise SyntaxError(f"the file cannot be parsed: {str(e) or 'nested too deeply'}") from None


def parse_fault(source: str) -> Rejected | None:
    """The rejection of a file that is no Python, without building it; None if it is."""
    try:
        _parse(source)
    except SyntaxError as e:
        return syntax_error(e, source)
    return None


def syntax_error(error: SyntaxError, source: str) -> Rejected:
    """Reject a file that is no Python."""
    line = error.lineno or 0
    lines = printable(source).splitlines()
    text = lines[line - 1].strip()[:200] if 0 < line <= len(lines) else ""
    where = f"line {line}: `{text}`: " if text else ""
    return Rejected(Stage.PARSE, Status.COMPILE_ERROR, f"{where}SyntaxError: {error.msg}")
