"""The CPU as a device: arenas in shared memory, launchers from a warm fork-server."""

from __future__ import annotations

from typing import Self

import torch

from kagent_sandbox.confine import Tier, cpu_launcher_confinement
from kagent_sandbox.errors import KagentError
from kagent_sandbox.forkserver import ForkServer, Isolation
from kagent_sandbox.launch import health
from kagent_sandbox.launch.base import Arena, Ceilings, LaunchFailed
from kagent_sandbox.launch.cpu_arena import CpuArena
from kagent_sandbox.launch.cpu_ceilings import cached_ceilings
from kagent_sandbox.launch.cpu_facts import cpu_facts
from kagent_sandbox.launch.cpu_host import CpuHost
from kagent_sandbox.launch.cpu_launcher import Asking, CpuLauncher
from kagent_sandbox.launch.openmp import WAITING
from kagent_sandbox.plan import Alloc, Buffer, Fill, Plan, TensorRef


class CpuBackend:
    """The CPU behind the interface that GPUs have. Close it, or use it as a context manager."""

    def __init__(self, *, memory_bytes: int = 16 << 30, tier: Tier | None = None) -> None:
        """Start the fork-server; `memory_bytes` is what native code may allocate by itself."""
        self.facts = cpu_facts()
        self.device = torch.device("cpu")
        self._asking = Asking()
        memory = min(memory_bytes, self.facts.memory_bytes // 2)
        threads = str(self.facts.units)
        self._server = ForkServer(
            "kagent_sandbox.launch.cpu_exec:serve",
            preload=["torch"],
            confinement=cpu_launcher_confinement(memory_bytes=memory, tier=tier),
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
        """How launchers are confined, as observed.

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

    def launcher(self, arena: Arena) -> CpuHost:
        """A fresh process over the arena. It starts while others do: its first request waits.

        Raises:
            ConfinementError: It cannot be confined here.
        """
        if not isinstance(arena, CpuArena):
            raise TypeError("this arena was made by another backend")
        return CpuHost(self._server, arena, self._after_loss, self._asking)

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
                with launcher.quiesced():
                    return bool((arena.view(tensor, 0) == 7).all())
            finally:
                launcher.close()
        except (LaunchFailed, KagentError):
            return False
        finally:
            arena.close()

    def printed(self) -> str:
        """What launchers that have ended since the last call printed."""
        return self._server.printed()

    def ceilings(self) -> Ceilings:
        """Bandwidth and matrix product as attained here, measured once per `facts.key`."""
        return cached_ceilings(self.facts, self._measure_on)

    def _measure_on(self, nbytes: int) -> tuple[CpuArena, CpuLauncher]:
        arena = self.arena(nbytes)
        return arena, self.launcher(arena)

    def close(self) -> None:
        """End all helper processes."""
        self._server.close()
