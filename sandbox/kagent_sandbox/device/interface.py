"""The one interface between the judge and a device: memory that both see, and a process that runs
plans.

The judge owns the memory (an `Arena`: sealed shared memory on the CPU, a CUDA IPC allocation on a
GPU) and writes inputs, decoys and guard bands into it, and reads results from it, itself. A
`Launcher` is a confined, disposable process that maps the arena, loads binaries and executes plans
where the judge placed them. It is never given a reference, a tolerance or a seed. Tests on the CPU
therefore exercise the judge that GPUs use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.verdict import Status

if TYPE_CHECKING:
    import torch

    from kagent_sandbox.data.plan import Plan, TensorRef
    from kagent_sandbox.device.interference import Watch


Blame: TypeAlias = Literal["kernel", "unclear", "machine"]
"""Whose a failure is. "unclear": a driver or a host may do that once in a while, so that it is
tried once more in a fresh process before it counts. "machine": no kernel can cause it.
"""


def nothing() -> None:
    """Observe nothing."""


class LaunchFailed(Exception):  # noqa: N818
    """The candidate's code failed while it was loaded or run: becomes a verdict."""

    def __init__(self, status: Status, message: str, *, blame: Blame = "kernel") -> None:
        super().__init__(message)
        self.status = status
        self.blame: Blame = blame


def larger(one: Ceilings, other: Ceilings) -> Ceilings:
    """The larger of each figure: a device attains what it has attained once."""
    dtypes = {**one.tflop_per_s, **other.tflop_per_s}
    return Ceilings(
        copy_gb_per_s=max(one.copy_gb_per_s, other.copy_gb_per_s),
        read_gb_per_s=max(one.read_gb_per_s, other.read_gb_per_s),
        write_gb_per_s=max(one.write_gb_per_s, other.write_gb_per_s),
        tflop_per_s={
            d: max(one.tflop_per_s.get(d, 0.0), other.tflop_per_s.get(d, 0.0)) for d in dtypes
        },
    )


class Arena(Protocol):
    """Memory that judge and launcher both map."""

    nbytes: int

    def view(self, tensor: TensorRef, base: int) -> torch.Tensor:
        """The judge's own view of a plan's tensor whose buffer starts at byte `base`."""

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """uint8 view of a range of bytes."""

    def words(self, nbytes: int) -> torch.Tensor:
        """All of it as integers of 1, 2, 4 or 8 bytes."""

    def close(self) -> None:
        """Give the memory back."""


class Launcher(Protocol):
    """A confined process that executes plans. Everything it answers is untrusted but for the
    judge's clock.

    All methods raise `LaunchFailed` when the candidate's code is to blame (fault, hang past its
    limit, a binary that does not load) and `kagent_sandbox.errors.MachineError` when the machine
    is.
    """

    def load(self, binaries: Mapping[str, bytes]) -> None:
        """Lock the process down (first call) and take binaries by hash; loads lazily."""

    def prepare(self, key: str, plan: Plan, offsets: Mapping[int, int]) -> None:
        """Resolve a plan whose buffer `id` starts at byte `placement[id]` of the arena, under a
        name.

        A second placement of the same plan is another key: timing rotates over several.
        """

    def forget(self, key: str) -> None:
        """Drop a prepared plan."""

    def stop(self) -> None:
        """Nothing of the process runs from now on until it is asked for something: the judge writes
        inputs and reads results.

        CPU: the process is stopped (SIGSTOP). GPU: nothing to do, the device is idle between calls.
        """

    def wait_until_idle(self) -> None:
        """Wait until no other process is being started or ended on the device.

        `sample` and `wall_us` wait for it by themselves. CPU: nothing to wait for.
        """

    def run(self, key: str, *, limit_s: float) -> None:
        """Execute once and return when the device is idle. The arena is quiescent afterwards."""

    def sample(
        self, keys: Sequence[str], *, limit_s: float, observe: Callable[[], None] = nothing
    ) -> float:
        """µs per execution of `keys`, in order, once each, on inputs that were written while the
        process was stopped.

        Whenever the work is done, it is done within that time. CPU: on the judge's clock, from
        before the process goes on, and so can see the inputs, until `observe` has read what it
        wants of the results. What all of that takes without any execution is taken off, as it was
        before any candidate's code was loaded. GPU: one key; device time of a CUDA-graph replay
        between two events, after L2 was flushed by reading. `observe` is called when the device is
        idle.
        """

    def wall_us(self, keys: Sequence[str], count: int, *, limit_s: float) -> float | None:
        """µs per execution by the judge's own clock, of `count` and twice as many back to back: the
        slope. None where `sample` is on the judge's clock, too.
        """

    def close(self) -> None:
        """End the process and all that it started."""


class Backend(Protocol):
    """One device: makes arenas and launchers, knows what it is."""

    facts: DeviceFacts
    device: torch.device  # where the judge computes references and inputs

    def arena(self, nbytes: int) -> Arena:
        """Memory for one or more plans."""

    def launcher(self, arena: Arena) -> Launcher:
        """A fresh process over the arena."""

    def healthy(self) -> bool:
        """Whether a fresh process computes a known result correctly; tried twice.

        A launcher asks that by itself after a fault, a hang or a kill, and raises `DeviceWedged`
        where it fails: what comes next is then not judged at all, rather than wrongly.
        """

    def printed(self) -> str:
        """Return the output of launchers that have ended since the last call, the end of each."""

    def ceilings(self, *, again: bool = False) -> Ceilings:
        """Measured once per `facts.key` and cached; with `again`, measured now as well, and the
        larger of each kept.
        """

    def watch(self) -> Watch:
        """Tells of neighbours and clocks while the device is timed."""

    def close(self) -> None:
        """End all helper processes."""
