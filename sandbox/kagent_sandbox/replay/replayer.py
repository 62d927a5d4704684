"""Replay of a candidate's source: its host code on real tensors, compared with its plan.

A plan shows the work of host code on symbolic tensors, but the source is exported. So the source is
run as a user would run it, with the launchers of a kernel library, in a confined process, three
times for each case: a library records the second call. Its work is recorded as a plan, too, and
must be the same each time: every launch (the binary, grid, block, shared memory, cluster,
cooperative and dependent launch, scalars, tensor maps, the bytes of the tensor behind each
pointer), every fill, copy and operation of torch between them, in order, and every result. A
difference is TAMPER.

C++ runs on the CPU; CUDA and Triton on an NVIDIA GPU of the plan's target, in a process that makes
its context, locks itself, and only then loads the candidate.

Not covered: host code that behaves for three calls, or at the cases' sizes, and then does something
else; host code that tells this process from a user's by its limits, its parent, the names of
private folders (on a GPU) or the contents of memory, and then behaves; host code that patches the
recorder, since it runs in the same process; writes through addresses; the time when memory is
freed. The values of arguments are random numbers, or zeros, where the caller gives none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from kagent_sandbox.builder.binary.inspect import InspectError, kernel_info
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.confine.presets import gpu_launcher_confinement
from kagent_sandbox.data import records
from kagent_sandbox.data.build import BuildCase
from kagent_sandbox.data.plan import Plan, PlanError, TorchOp
from kagent_sandbox.data.plan_json import parse_plan
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.process.channel import ChannelError, Message
from kagent_sandbox.process.forkserver import ChildHandle, ForkServer
from kagent_sandbox.replay.difference import first_difference
from kagent_sandbox.runtime.source import Source
from kagent_sandbox.runtime.store import packed_cubin
from kagent_sandbox.runtime.text import printable

if TYPE_CHECKING:
    import torch

CPU_LIMIT_S = 30.0  # a case
GPU_LIMIT_S = 180.0  # a case, with a context, and Triton's compiler from cold
_CHILD_LIMIT_S = 3600.0
_MAX_TEXT = 2000
_HANDLER = "kagent_sandbox.replay.worker:handle"
_PRELOAD = (
    "torch",
    "numpy",
    "kagent_sandbox.lang",
    "kagent_sandbox.replay.worker",
    "kagent_sandbox.replay.warm_up",
)
# None of these touches the driver when it is imported, which would spoil it for forks.
_PRELOAD_GPU = ("torch", "triton", "cuda.bindings.driver", *_PRELOAD[1:])


@dataclasses.dataclass
class ReplayedKernel:
    """Sources and binaries of kernels, in all replays so far that found no difference."""

    sources: dict[str, list[dict[str, object]]] = dataclasses.field(default_factory=dict)
    """Records (`Source.record`) with `key` and `target`, by what the caller calls the kernel."""
    cubins: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Cubins by `Source.key(target)`, each with its symbol, for a library."""


class Replayer:
    """Runs host code on real tensors, in a confined process for each candidate and configuration:
    one case after the other, as a user would call it. A context manager, to be used from one
    thread. `device` is the GPU's index.
    """

    def __init__(self, device: int = 0) -> None:
        self.observed = ReplayedKernel()
        self._device = device
        self._servers: dict[bool, ForkServer] = {}  # for GPUs or not
        self._child: ChildHandle | None = None
        self._of: object = None  # the source that the child has loaded
        self._built = b""  # by Triton for itself, in a process that had seen no candidate

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for server in self._servers.values():
            server.close()

    def compare(
        self,
        source: str,
        entry: str,
        case: BuildCase,
        plan: Plan,
        config: Mapping[str, object],
        *,
        inputs: Mapping[str, torch.Tensor] | None = None,
        kernel: str = "",
    ) -> Rejected | None:
        """Run a case; TAMPER where it is not what the plan says, else None. Cases of a candidate
        that are asked for one after the other are called in one process.

        Args:
            source: The candidate's file.
            entry: Its function.
            case: Its arguments.
            plan: What it did on symbolic tensors.
            config: Of its tunables.
            inputs: Values of arguments by name, on the CPU, where those that are made up will not
                do: kernels that read addresses from memory need some that are valid.
            kernel: Under which name `observed` lists its sources.

        Raises:
            ChildDied: A fork-server is gone.
            ConfinementError: This host cannot confine it.
            DeviceError: There is no GPU of the plan's target that works.
        """
        request = {
            "source": source,
            "entry": entry,
            "config": dict(config),
            "case": records.to_json(case),
            "target": plan.target,
            "device": self._device,
            "allow": sorted({op.name for op in plan.ops if isinstance(op, TorchOp)}),
            "inputs": list(inputs or {}),
        }
        blobs = [_bytes(t) for t in (inputs or {}).values()]
        message = self._ask(plan.target, request, blobs)
        try:
            different = message if isinstance(message, str) else _compared(plan, message)
            if different is None:
                self._keep(kernel, plan, cast("Message", message))
                return None
        except (PlanError, InspectError, LookupError, TypeError, ValueError, AttributeError) as e:
            different = f"its process answers nonsense: {printable(str(e))[:_MAX_TEXT]}"
        self.end()
        text = f"on real tensors host code does not do what its plan says: {different}"
        return Rejected(Stage.CHECK, Status.TAMPER, text, case.name)

    def _ask(
        self, target: str, request: Mapping[str, object], blobs: Sequence[bytes]
    ) -> Message | str:
        """The answer of the candidate's process, or how that ended."""
        gpu = target != "cpu"
        limit_s = GPU_LIMIT_S if gpu else CPU_LIMIT_S
        of = [request[name] for name in ("source", "entry", "config", "target")]
        new = self._child is None or of != self._of
        if new:
            self.end()
            server = self._server(gpu=gpu)
            self._child = server.spawn(wall_limit_s=_CHILD_LIMIT_S, lock_first=not gpu)
            self._of = of
        child = self._child
        assert child is not None
        try:
            child.channel.send(dict(request), [self._built, *blobs])
            if new and gpu:
                self._take_built(child)
            return child.channel.recv(limit_s)
        except ChannelError as e:
            return f"its process {(child.wait(1.0) or child.kill()).describe()} ({e})"

    def end(self) -> None:
        """End the process of the last candidate. The next one has one of its own."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _take_built(self, child: ChildHandle) -> None:
        """Return the code that Triton built before the candidate was loaded.

        Raises:
            DeviceError: The process ended: no GPU can be used.
        """
        try:
            message = child.channel.recv(GPU_LIMIT_S)
        except ChannelError as e:
            end = child.wait(5.0) or child.kill()
            said = end.log_tail.strip().rpartition("\n")[2] or str(e)
            raise DeviceError(f"host code cannot be run on a GPU here: {said}") from None
        self._built = self._built or message.blobs[0]

    def _server(self, *, gpu: bool) -> ForkServer:
        if gpu not in self._servers:
            confinement = dataclasses.replace(builder_confinement(), cpu_s=int(_CHILD_LIMIT_S))
            if gpu:  # Triton runs its assembler
                confinement = dataclasses.replace(gpu_launcher_confinement(), execute=True)
            self._servers[gpu] = ForkServer(
                _HANDLER,
                preload=_PRELOAD_GPU if gpu else _PRELOAD,
                confinement=confinement,
                folder_prefix="tmp",
            )
            self._servers[gpu].start()
        return self._servers[gpu]

    def _keep(self, kernel: str, plan: Plan, message: Message) -> None:
        """Note sources and cubins; a cubin only if it is one of the plan's."""
        hashes = {k.hash for k in plan.kernels}
        known = self.observed.sources.setdefault(kernel, [])
        rows = cast("dict[str, Any]", message.obj)["sources"]
        for (record, target, symbol), binary in zip(
            rows, message.blobs[len(_plans(message)) :], strict=True
        ):
            source = Source.of(record)
            key = source.key(target)
            if target != plan.target:
                raise ValueError(f"a kernel for {target} in a plan for {plan.target}")
            if binary:
                if kernel_info(binary, symbol, source.language).hash not in hashes:
                    raise ValueError(f"the binary of {symbol} is none of the plan's")
                self.observed.cubins[key] = packed_cubin(binary, symbol)
            if all(known_["key"] != key for known_ in known):
                known.append({"key": key, "target": target, **record})


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _compared(plan: Plan, message: Message) -> str | None:
    """Describe the difference of an answer from the plan in words.

    Raises:
        PlanError, LookupError, TypeError, AttributeError: It is no answer.
    """
    failed = cast("dict[str, Any]", message.obj).get("failed")
    if failed is not None:
        return f"it fails: {printable(str(failed))[:_MAX_TEXT]}"
    found = (first_difference(plan, parse_plan(blob)) for blob in _plans(message))
    return next((different for different in found if different is not None), None)


def _plans(message: Message) -> Sequence[bytes]:
    """The plans of an answer: one, if all calls did the same.

    Raises:
        LookupError, TypeError, ValueError: It has none.
    """
    count = int(cast("dict[str, Any]", message.obj)["plans"])
    if not 0 < count <= len(message.blobs):
        raise ValueError(f"{count} plans in {len(message.blobs)} blobs")
    return message.blobs[:count]
