"""The CPU as a device: arenas in shared memory, launchers from a warm fork-server."""

from __future__ import annotations

from typing import Self

import torch

from kagent_sandbox.confine import Tier, cpu_launcher_confinement
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.plan import Alloc, Buffer, Fill, Plan, TensorRef
from kagent_sandbox.device import health
from kagent_sandbox.device.cpu.arena import CpuArena
from kagent_sandbox.device.cpu.ceilings import cached_ceilings
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.cpu.flush import settle
from kagent_sandbox.device.cpu.host import CpuHost
from kagent_sandbox.device.cpu.launcher import CpuLauncher, RequestCost
from kagent_sandbox.device.cpu.openmp import WAITING
from kagent_sandbox.device.cpu.race_baselines import CpuRaceBaselines
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.device.interface import Arena, LaunchFailed
from kagent_sandbox.device.interference import HostWatch, Watch
from kagent_sandbox.errors import KagentError, MachineError
from kagent_sandbox.process.forkserver import ForkServer, Isolation

MOST_TOGETHER = 8
"""Launchers that may live at once: contenders of one race."""
_LEAST_BYTES = 384 << 20  # torch's own data and stacks take 200 MiB with two threads
_MOST_DISK_BYTES = 512 << 20  # of a launcher's private folder, which may be memory, too


class CpuBackend:
    """The CPU behind the interface that GPUs have. Close it, or use it as a context manager."""

    traits = TRAITS

    def __init__(self, *, memory_bytes: int = 16 << 30, tier: Tier | None = None) -> None:
        """Start the fork-server.

        Args:
            memory_bytes: What native code may allocate by itself, at most: together, launchers that
                live at once get half of the machine's.
            tier: Of isolation, if not the highest.
        """
        self.facts = cpu_facts()
        self.device = torch.device("cpu")
        self._request_cost = RequestCost()
        self._together, memory, disk = shares(self.facts.memory_bytes)
        threads = str(self.facts.units)
        self._server = ForkServer(
            "kagent_sandbox.device.cpu.executor:serve",
            preload=["torch"],
            confinement=cpu_launcher_confinement(
                memory_bytes=min(memory_bytes, memory), disk_bytes=disk, tier=tier
            ),
            # Read when libgomp is loaded, so they must be there before the import.
            env={
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "OMP_DYNAMIC": "false",
                **WAITING,
            },
        )
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolation(self) -> Isolation:
        """Isolation of launchers, as observed.

        Raises:
            ConfinementError: This host cannot, and weaker isolation was not accepted.
        """
        return self._server.isolation

    def arena(self, nbytes: int) -> CpuArena:
        """Shared memory for one or more plans.

        Raises:
            MachineError: The host has no such amount.
        """
        return CpuArena(nbytes)

    def launcher(self, arena: Arena, *, timed: bool = True, callers: int = 1) -> CpuHost:
        """A fresh process over the arena. It starts while others do: its first request waits.

        One that is not `timed` does not find out what asking costs, which takes 0.1 s. `callers` of
        it can execute plans at once; from the third on they have fewer threads of OpenMP.

        Raises:
            ConfinementError: It cannot be confined here.
            MachineError: So many live already that this one's memory would be too much.
        """
        if self._server.alive >= self._together:
            raise MachineError(
                f"{self._together} processes of C++ candidates share half of this machine's "
                "memory, and there is no room for another: compare fewer at once"
            )
        if not isinstance(arena, CpuArena):
            raise TypeError("this arena was made by another backend")
        cost = self._request_cost if timed else None
        return CpuHost(self._server, arena, self._after_loss, cost, callers)

    def healthy(self) -> bool:
        """Whether a fresh process fills memory as told; tries twice."""
        return health.computes(self._fills)

    def _after_loss(self) -> None:
        remedy = "See what kagent doctor says, free memory or restart the machine"
        health.require(self.healthy, self.facts.name, remedy)

    def _fills(self) -> bool:
        tensor = TensorRef(0, 0, (1024,), (1,), "int32")
        plan = Plan(
            "cpu", (Buffer(0, "scratch", 4096),), (Alloc(0), Fill(tensor, 7)), (tensor,), ()
        )
        arena = self.arena(4096)
        try:
            launcher = CpuLauncher(self._server, arena)
            try:
                launcher.prepare("health", plan, {0: 0})
                launcher.run("health", limit_s=10.0)
                launcher.stop()
                return bool((arena.view(tensor, 0) == 7).all())
            finally:
                launcher.close()
        except (LaunchFailed, KagentError):
            return False
        finally:
            arena.close()

    def printed(self) -> str:
        """Return the output of launchers that have ended since the last call."""
        return self._server.printed()

    def ceilings(self, *, again: bool = False) -> Ceilings:
        """Bandwidth and matrix product as attained here; see `Backend`."""
        return cached_ceilings(self.facts, self._measure_on, again=again)

    def _measure_on(self, nbytes: int) -> tuple[CpuArena, CpuLauncher]:
        arena = self.arena(nbytes)
        return arena, self.launcher(arena)

    def synchronize(self) -> None:
        """See `Backend`: torch's own work on a CPU is done when it returns."""

    def wait_until_idle(self) -> None:
        """See `Backend`: processes start and end within a request."""

    def free_unused(self, *, shared: bool = False) -> None:
        """See `Backend`: torch keeps no memory of a CPU."""

    def settle(self) -> None:
        """See `Backend`."""
        settle()

    def race_baselines(self) -> CpuRaceBaselines:
        """See `Backend`."""
        return CpuRaceBaselines()

    def watch(self) -> Watch:
        """See `Backend`."""
        return HostWatch()

    def close(self) -> None:
        """End all helper processes."""
        self._server.close()


def shares(machine_bytes: int) -> tuple[int, int, int]:
    """Return the number of launchers that may live at once, and the memory and the disk of each.

    All of them, and one more that looks whether the machine is healthy, have half of the machine's
    memory together. Equal shares, fixed from the start: who is compared has the same.
    """
    half = machine_bytes // 2
    together = max(1, min(MOST_TOGETHER, half // _LEAST_BYTES - 1))
    share = half // (together + 1)
    disk = min(_MOST_DISK_BYTES, share // 8)
    return together, share - disk, disk
