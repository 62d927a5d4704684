"""One NVIDIA GPU: arenas, launchers, health.

Launcher processes are made ahead (`gpu_spares`); nothing is timed while that goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, cast

import torch

from kagent_sandbox.confine.presets import gpu_launcher_confinement
from kagent_sandbox.errors import DeviceError, DeviceWedged
from kagent_sandbox.forkserver import ForkServer, Isolation
from kagent_sandbox.launch import cache
from kagent_sandbox.launch.base import Arena, Ceilings
from kagent_sandbox.launch.baseline_calls import BaselineCall
from kagent_sandbox.launch.gpu_driver import GpuError
from kagent_sandbox.launch.gpu_facts import gpu_facts
from kagent_sandbox.launch.gpu_launcher import Connection, GpuLauncher
from kagent_sandbox.launch.gpu_memory import Transport, allocate, best_transport, bytes_tensor
from kagent_sandbox.launch.gpu_spares import START_LIMIT_S, Spares
from kagent_sandbox.launch.gpu_timing import TIMING_VERSION
from kagent_sandbox.launch.plan_ops import strided_view
from kagent_sandbox.plan import TensorRef
from kagent_sandbox.records import to_json

_OPEN_LIMIT_S = 60.0
_HEALTH_LIMIT_S = 30.0
_CEILINGS_LIMIT_S = 300.0
_BASELINES_LIMIT_S = 1800.0  # max-autotune of a large product takes minutes
_CHILD_LIMIT_S = 24 * 3600.0
_HEALTHY = [3 * (2**20 - 1) * 2**19 + 2**20, 256.0**3]  # see Executor.health


# None of these touches the driver when it is imported, which would spoil it for forks.
_PRELOAD = (
    "torch",
    "triton",
    "cuda.bindings.driver",
    "cuda.core",
    "kagent_sandbox.launch.gpu_serve",
)
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
# Importing the compiler asks whether there is a GPU. Asked of the driver, no fork could use the
# GPU any more; NVML answers without it.
_COMPILER_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _server(preload: Sequence[str], env: Mapping[str, str]) -> ForkServer:
    return ForkServer(
        "kagent_sandbox.launch.gpu_serve:serve",
        preload=preload,
        confinement=gpu_launcher_confinement(),
        # baselines of a race are compiled in the launcher itself, without worker processes
        env={"CUDA_CACHE_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **env},
    )


class GpuArena:
    """Device memory that the judge owns and launchers map."""

    def __init__(self, nbytes: int, index: int, transport: Transport) -> None:
        try:
            self.shared = allocate(nbytes, index, transport)
        except GpuError as e:
            if e.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise DeviceError(str(e)) from None
            torch.cuda.empty_cache()  # torch holds on to what references have used
            try:
                self.shared = allocate(nbytes, index, transport)
            except GpuError as again:
                raise DeviceError(str(again)) from None
        self.nbytes = self.shared.nbytes
        device = torch.device("cuda", index)
        self._bytes = bytes_tensor(self.shared.address, self.nbytes, device)

    def view(self, tensor: TensorRef, base: int) -> torch.Tensor:
        """The judge's own view of a plan's tensor whose buffer starts at byte `base`."""
        return strided_view(self._bytes, tensor, base)

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """uint8 view of a range of bytes."""
        return self._bytes[start:stop]

    def close(self) -> None:
        """Give the memory back; no view may be used afterwards."""
        torch.cuda.synchronize(self._bytes.device)
        self.shared.close()


class GpuBackend:
    """See `kagent_sandbox.launch.base.Backend`. Use as a context manager."""

    def __init__(
        self, index: int = 0, *, transport: Transport | None = None, products: bool = True
    ) -> None:
        """Start on device `index`; `transport` overrides how memory is shared (for tests).

        `products` says whether plans may call matrix products of torch: their library is then
        loaded in every launcher before it is locked.

        Raises:
            DeviceError: There is no such device, or it does not work.
            ConfinementError: This host cannot confine the launcher.
        """
        self.facts = gpu_facts(index)
        self.device = torch.device("cuda", index)
        self._index = index
        self._transport = transport or best_transport(index)
        self._server = _server(_PRELOAD, {})
        self._server.start()
        self._race_server: ForkServer | None = None
        self._products = products
        self._spares = Spares(
            functools.partial(self._connect, self._server),
            torch.cuda.empty_cache,  # torch keeps what references have used
        )
        torch.zeros(1, device=self.device)  # the judge's own context, while the server imports
        try:
            self._spares.begin()
        except BaseException:
            self._server.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def isolation(self) -> Isolation:
        """How launchers are confined, as observed.

        Raises:
            ConfinementError: This host cannot confine them.
        """
        return self._server.isolation

    def arena(self, nbytes: int) -> GpuArena:
        """Device memory for one or more plans.

        Raises:
            DeviceError: There is not enough.
        """
        self._spares.wait_ended()  # they had the last arena mapped
        return GpuArena(nbytes, self._index, self._transport)

    def launcher(
        self, arena: Arena, baselines: Mapping[str, BaselineCall] | None = None
    ) -> GpuLauncher:
        """A fresh process over the arena.

        With `baselines` (the final race) these are compiled and captured in it before it locks
        itself, on memory and inputs of its own; `samples` takes their keys beside plans' keys.

        Raises:
            DeviceError: The process does not start, or cannot map the arena.
        """
        assert isinstance(arena, GpuArena)
        connection = self._race_connection() if baselines else self._spares.take()
        try:
            outcome = self._set_up(connection, arena, baselines or {})
        except BaseException:
            connection.kill()
            raise
        finally:
            self._spares.begin(least=1)
        return GpuLauncher(
            connection,
            settle=lambda: torch.cuda.synchronize(self.device),
            quiet=self._spares.quiet,
            after_loss=self._after_loss,
            end=self._spares.end,
            baselines=outcome,
        )

    def _set_up(
        self, connection: Connection, arena: GpuArena, baselines: Mapping[str, BaselineCall]
    ) -> Mapping[str, bool | str]:
        """Have a process map the arena and make baselines ready; what became of these."""
        shared = arena.shared
        connection.ask(
            {"do": "open", "transport": shared.transport, "nbytes": shared.nbytes},
            limit_s=_OPEN_LIMIT_S,
            blobs=[shared.handle],
            fds=[shared.fd] if shared.transport == "fd" else [],
        )
        if not baselines:
            return {}
        calls = {key: to_json(call) for key, call in baselines.items()}
        # As text: the process runs as another user, who may not read a user's task folder.
        references = {c.reference: Path(c.reference).read_text() for c in baselines.values()}
        folder = str(cache.cache_folder() / "inductor")
        outcome = connection.ask(
            {"do": "baselines", "calls": calls, "references": references, "cache": folder},
            limit_s=_BASELINES_LIMIT_S,
        )
        return cast("Mapping[str, bool | str]", outcome)

    def healthy(self) -> bool:
        """Whether a fresh process computes known results; tries twice."""
        return any(self._check_fresh() for _ in range(2))

    def ceilings(self) -> Ceilings:
        """What the device attains on plain work; measured once per `facts.key` and cached.

        Raises:
            DeviceError: The device fails.
        """
        name = cache.named("gpu-ceilings", self.facts.key, TIMING_VERSION)
        cached = cache.load(name, Ceilings)
        if cached is not None:
            return cached
        connection = self._spares.take()
        try:
            self._spares.quiet()
            fields = connection.ask({"do": "ceilings"}, limit_s=_CEILINGS_LIMIT_S)
        finally:
            self._spares.end(connection)
        measured = Ceilings(**cast("dict[str, float]", fields))  # type: ignore[arg-type]
        cache.save(name, measured)
        return measured

    def expect_race(self) -> None:
        """Begin to import torch's compiler for the launchers of a race; does not wait for it.

        The import takes 12 s on a cold file system (H100 host, torch 2.11), and each of a race's
        launchers would pay it.
        """
        if self._race_server is None:
            self._race_server = _server((*_PRELOAD, *_COMPILER), _COMPILER_ENV)
            self._race_server.start()

    def close(self) -> None:
        """End all helper processes."""
        self._spares.close()
        self._server.close()
        if self._race_server is not None:
            self._race_server.close()

    def _race_connection(self) -> Connection:
        """A process with a context that has torch's compiler imported.

        Where that import spoils the GPU for forks after all (another torch), it is one that has
        not: slower, and otherwise the same.
        """
        self.expect_race()
        assert self._race_server is not None
        connection = self._connect(self._race_server)
        try:
            connection.pid = connection.receive("context", START_LIMIT_S)
        except DeviceError:
            connection.kill()
            return self._spares.take()
        except BaseException:
            connection.kill()
            raise
        return connection

    def _connect(self, server: ForkServer) -> Connection:
        """A new process that is making its context."""
        connection = Connection(server.spawn(wall_limit_s=_CHILD_LIMIT_S, lock_first=False))
        connection.send({"do": "context", "device": self._index, "products": self._products})
        return connection

    def _check_fresh(self) -> bool:
        """Compute known results in a process that is started now, and keep it as a spare."""
        self._spares.drop()
        try:
            connection = self._spares.take()
        except DeviceError:
            return False
        try:
            good = connection.ask({"do": "health"}, limit_s=_HEALTH_LIMIT_S) == _HEALTHY
        except DeviceError:
            good = False
        if good:
            self._spares.give_back(connection)
        else:
            connection.kill()
        return good

    def _after_loss(self) -> None:
        """Decide after a fault or a kill whether the device still works.

        Raises:
            DeviceWedged: It does not.
        """
        if not self.healthy():
            raise DeviceWedged(
                f"{self.facts.name} no longer computes correctly after a kernel faulted or was "
                "killed; results so far are kept. Reset the device (nvidia-smi --gpu-reset) or "
                "restart the machine, then resume the run"
            )
