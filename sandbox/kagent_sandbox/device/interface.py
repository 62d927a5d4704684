"""All that the judge knows of a device: memory that both see, a process that runs plans, and how
candidates are timed there.

A `Backend` is one device, opened; `device/entry.py` is what is known of it before that, and
`device/traits.py` what differs between devices as data. The judge never asks what a device is
called: docs/add-a-device.md.

The judge owns the memory (an `Arena`: sealed shared memory on the CPU, a CUDA IPC allocation on a
GPU). It writes inputs, stale values and guard bands into it and reads results from it. A `Launcher`
 is a confined, disposable process that maps the arena, loads binaries and executes plans
where the judge placed them. It is never given a reference, a tolerance or a seed. Tests on the CPU
therefore exercise the judge that GPUs use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.verdict import Status

if TYPE_CHECKING:
    import torch

    from kagent_sandbox.confine.isolation import Isolation
    from kagent_sandbox.data.plan import Plan, TensorRef
    from kagent_sandbox.device.baseline_calls import BaselineCall
    from kagent_sandbox.device.interference import Watch
    from kagent_sandbox.device.process_snapshot import ProcessSnapshot
    from kagent_sandbox.device.traits import Traits
    from kagent_sandbox.process.device_lock import Mode


Blame: TypeAlias = Literal["kernel", "unclear", "machine"]
"""Cause of a failure. "unclear": a driver or a host may cause it now and then, so it is tried once
more in a fresh process before it counts. "machine": no kernel can cause it.
"""


LEAST_US = 1e-3
"""Least time that counts. On a CPU the cost of a request is subtracted, which may leave less than
nothing of no work at all.
"""
SAMPLE_LIMIT_S = 30.0
"""Seconds for one sample of a candidate or baseline."""


def nothing() -> None:
    """Observe nothing."""


class BaselineFailed(Exception):  # noqa: N818
    """A baseline that was made ready failed while it was timed: the case is to be run again."""


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
        """Return the judge's own view of a plan's tensor whose buffer starts at byte `base`."""

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """Return a uint8 view of a range of bytes."""

    def words(self, nbytes: int) -> torch.Tensor:
        """Return all of it as integers of `nbytes` bytes: 1, 2, 4 or 8."""

    def close(self) -> None:
        """Give the memory back."""


class Launcher(Protocol):
    """A confined process that executes plans. Its answers are untrusted; times are on the judge's
    clock or compared with it.

    Nothing is executed before what the judge has asked torch for on the device is done, such as
    writing inputs.

    All methods raise `LaunchFailed` when the candidate's code is to blame (fault, hang past its
    limit, a binary that does not load) and `kagent_sandbox.errors.MachineError` when the machine
    is.
    """

    def load(self, binaries: Mapping[str, bytes]) -> None:
        """Lock the process down (first call) and take binaries by hash; loads lazily."""

    def prepare(self, key: str, plan: Plan, offsets: Mapping[int, int]) -> None:
        """Prepare a plan at a placement, under a name.

        Args:
            key: Name for later calls. A second placement of the same plan has another key: timing
                rotates over several.
            plan: The plan.
            offsets: First byte in the arena of each buffer, by the buffer's id.
        """

    def forget(self, key: str) -> None:
        """Drop a prepared plan."""

    def populate(self, keys: Sequence[str]) -> None:
        """Have the process hold all memory of prepared plans, before inputs are written there.

        CPU: its page tables hold it, whatever others did to the arena since it ran last. What it
        then faults in while it is timed is its own doing. GPU: nothing to do.
        """

    def stop(self) -> None:
        """Stop the process until the next request, so that the judge can write and read memory.

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
        """Execute `keys` in order, once each, and return the time.

        The inputs were written while the process was stopped.

        CPU: the time is on the judge's clock. It begins before the process goes on, and so before
        it can see the inputs. It ends when `observe` has read its elements of the results. The cost
        of all that without any execution is subtracted; it was measured before any candidate's code
        was loaded. GPU: there is one key. The time is the device time of a CUDA-graph replay
        between two events, after L2 was flushed by reading. `observe` is called when the device is
        idle.

        Args:
            keys: Names of prepared plans.
            limit_s: Seconds after which the candidate counts as hung.
            observe: Reads results.

        Returns:
            µs per execution.
        """

    def wall_us(self, keys: Sequence[str], count: int, *, limit_s: float) -> float | None:
        """Return the µs per execution by the judge's own clock.

        Of `count` executions back to back, at least what they took. None where `sample` is on the
        judge's clock, too.
        """

    def close(self) -> None:
        """End the process and its descendants."""


class GuestHost(Launcher, Protocol):
    """A launcher of native code: a process that can be asked whether its guest has left it as it
    was. See `kagent_sandbox.judge.check.guests`.
    """

    def seen(self) -> ProcessSnapshot:
        """Read the state that the kernel shows of the process, which should be stopped."""

    def asked_bytes(self) -> int:
        """Memory of its own that it has asked the kernel for; it should be stopped."""

    def more_bytes(self) -> int:
        """Return how much more is allocated than at the last call, as the process reports it."""

    def remember(self) -> None:
        """Have the process look at itself, for `changes`."""

    def changes(self) -> str:
        """Describe the changes since the process was told to remember; empty if there are none."""

    def lend(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make whole pages of the arena, given by their first and last byte plus one, read-only to
        it, and all others writable.
        """

    def unload(self) -> None:
        """End all callers but the first and unload the guest's libraries: destructors of both run.
        No plan may be prepared.

        Raises:
            LaunchFailed: The process did not survive that.
        """

    def repeat(self, key: str, count: int, *, limit_s: float) -> None:
        """Execute a prepared plan some times in a row."""

    def execute_together(self, keys: Sequence[Sequence[str]], *, limit_s: float) -> None:
        """Execute prepared plans in all callers at once: each of them its own, in order."""


class OpenBaselines(Protocol):
    """The baselines of one case, ready to be timed. A context manager."""

    names: Sequence[str]
    missing: Mapping[str, str]  # baselines that do not run here, and why
    lacking: Sequence[str]  # those of them that may run with the memory that others hold
    launcher: Launcher | None  # to be used for the candidates too, where baselines live in it

    def samples(self, name: str, count: int) -> list[float]:
        """`count` times in µs of one execution.

        Raises:
            BaselineFailed: It faulted or hung. No candidate is blamed for that.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class BaselineSource(Protocol):
    """Source of a race's baselines: trusted code, interleaved with candidates."""

    def prefetch(self) -> None:
        """Begin, without waiting, what `open` will need: a race is going to come."""

    def compile_ahead(
        self, calls: Sequence[BaselineCall], call_bytes: int, *, shared: Collection[str]
    ) -> Generator[Mode, None, Collection[str]]:
        """Compile what `open` would for one case after the other, where all of them can be done at
        once. It takes steps: the first beside others that use the device.

        Args:
            calls: torch.compile baselines of all cases.
            call_bytes: Device memory that one of them takes.
            shared: Names of cases whose code is for the process that measures baselines, and not
                for `open`.

        Yields:
            The turn on the device that the next step needs: alone ("timing"), to find the fastest
            of several variants of a kernel, or beside others ("work").

        Returns:
            Names of cases of which nothing need be asked again.
        """

    def open(self, calls: Sequence[BaselineCall], arena: Arena) -> OpenBaselines:
        """Compile and warm up the baselines of one case; those that fail are left out."""


class Backend(Protocol):
    """One device: makes arenas and launchers, knows what it is. Closed at the end."""

    facts: DeviceFacts
    device: torch.device  # where the judge computes references and inputs
    traits: Traits

    @property
    def isolation(self) -> Isolation:
        """Isolation of launchers, as observed.

        Raises:
            ConfinementError: This host cannot, and weaker isolation was not accepted.
        """

    def arena(self, nbytes: int) -> Arena:
        """Allocate memory for one or more plans."""

    def launcher(self, arena: Arena, *, timed: bool = True, callers: int = 1) -> Launcher:
        """A fresh process over the arena; a `GuestHost` where `traits.native`.

        Without `timed` it is never asked for samples: what only they need may be left out. More
        `callers` than one, threads that execute plans at once, are asked of a `GuestHost` alone.
        """

    def synchronize(self) -> None:
        """Wait until what the judge has asked torch for on `device` is done: launchers see it."""

    def wait_until_idle(self) -> None:
        """Wait until no process is being started or ended on the device: others may time then."""

    def free_unused(self, *, shared: bool = False) -> None:
        """Give back memory of the device that is kept for later; another judge may need it. Where
        the device is `shared`, all of it, and keep fewer processes from then on.
        """

    def settle(self) -> None:
        """Empty caches and let threads rest before a sample; asked where `traits.judges_clock`."""

    def race_baselines(self) -> BaselineSource:
        """Source of the baselines of races on this device."""

    def healthy(self) -> bool:
        """Whether a fresh process computes a known result correctly; tried twice.

        A launcher calls this after a fault, a hang or a kill, and raises `DeviceWedged` if it
        fails. The next candidate is then not judged at all, rather than wrongly.
        """

    def printed(self) -> str:
        """Return the output of launchers that have ended since the last call, the end of each."""

    def ceilings(self, *, again: bool = False) -> Ceilings:
        """Return the ceilings. They are measured once per device and versions and cached.

        `again`: they are measured now as well, and the larger figure of each is kept.
        """

    def watch(self) -> Watch:
        """Watch neighbours and clocks while the device is timed."""

    def close(self) -> None:
        """End all helper processes."""
