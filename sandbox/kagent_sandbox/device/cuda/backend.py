"""One NVIDIA GPU: arenas, launchers, health.

Launcher processes are made ahead (`launcher_pool`); nothing is timed while that goes on.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from typing import Self, cast

import torch

from kagent_sandbox import cache
from kagent_sandbox.confine.presets import gpu_launcher_confinement
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.records import from_json
from kagent_sandbox.device import compiler_cache, health
from kagent_sandbox.device.baseline_calls import BaselineCall, ReadyBaseline
from kagent_sandbox.device.cuda import ceilings as gpu_ceilings
from kagent_sandbox.device.cuda.arena import GpuArena
from kagent_sandbox.device.cuda.facts import bus_id, gpu_facts
from kagent_sandbox.device.cuda.launcher import Connection, GpuLauncher
from kagent_sandbox.device.cuda.launcher_pool import LauncherPool
from kagent_sandbox.device.cuda.memory import Transport, best_transport
from kagent_sandbox.device.cuda.nvml import watch_gpu
from kagent_sandbox.device.cuda.race_baselines import GpuRaceBaselines
from kagent_sandbox.device.cuda.race_processes import BASELINES_LIMIT_S, RaceProcesses, described
from kagent_sandbox.device.cuda.traits import TIMING_VERSION, TRAITS
from kagent_sandbox.device.interface import Arena, larger
from kagent_sandbox.device.interference import Unwatched, Watch
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.process.device_lock import Mode
from kagent_sandbox.process.forkserver import ForkServer, Isolation

_OPEN_LIMIT_S = 60.0
_HEALTH_LIMIT_S = 30.0
_CEILINGS_LIMIT_S = 300.0
_KEPT_BYTES = 1 << 30
"""Device memory that a judge's torch may keep between requests."""
_CHILD_LIMIT_S = 24 * 3600.0
_HEALTHY = [3 * (2**20 - 1) * 2**19 + 2**20, 256.0**3]  # see Executor.health


# None of these touches the driver when it is imported, which would spoil it for forks.
_PRELOAD = (
    "torch",
    "triton",
    "cuda.bindings.driver",
    "cuda.core",
    "kagent_sandbox.device.cuda.worker",
)
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx")
# Importing the compiler asks whether there is a GPU. Asked of the driver, no fork could use the
# GPU any more; NVML answers without it.
_COMPILER_ENV = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _server(preload: Sequence[str], env: Mapping[str, str]) -> ForkServer:
    return ForkServer(
        "kagent_sandbox.device.cuda.worker:serve",
        preload=preload,
        confinement=gpu_launcher_confinement(),
        # baselines of a race are compiled in the launcher itself, without worker processes
        env={"CUDA_CACHE_DISABLE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **env},
    )


def _started() -> ForkServer:
    server = _server(_PRELOAD, {})
    server.start()
    return server


_loaded: list[ForkServer] = []


def load() -> None:
    """Start what launchers are forked from, for the next device that is opened, and wait until it
    has imported all: seconds in which nobody needs the device.

    Raises:
        ConfinementError: This host cannot confine launchers.
        ChildDied: It did not start.
    """
    server = _started()
    try:
        server.isolation  # noqa: B018 - waits
    except BaseException:
        server.close()
        raise
    _loaded.append(server)


class GpuBackend:
    """See `kagent_sandbox.device.interface.Backend`. Use as a context manager."""

    traits = TRAITS

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
        self._server = _loaded.pop() if _loaded else _started()
        self._products = products
        self._race = RaceProcesses(
            lambda: _server((*_PRELOAD, *_COMPILER), _COMPILER_ENV),
            self._connect,
            self._free_bytes,
            self.wait_until_idle,
        )
        self._spares = LauncherPool(
            functools.partial(self._connect, self._server),
            torch.cuda.empty_cache,  # torch keeps what references have used
        )
        try:
            torch.zeros(1, device=self.device)  # the own context, while the server imports
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
        """Isolation of launchers, as observed.

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
        self,
        arena: Arena,
        baselines: Mapping[str, BaselineCall] | None = None,
        compiled: Sequence[bytes] = (),
        *,
        timed: bool = True,  # noqa: ARG002 - whoever samples needs nothing more
        callers: int = 1,  # noqa: ARG002 - of native code alone
    ) -> GpuLauncher:
        """A fresh process over the arena.

        With `baselines` (the final race) these are compiled and captured in it before it locks
        itself, on memory and inputs of its own; `samples` takes their keys beside plans' keys.
        `compiled` is what `compile_ahead` gave for them.

        Raises:
            DeviceError: The process does not start, or cannot map the arena.
        """
        assert isinstance(arena, GpuArena)
        wanted, faulted = dict(baselines or {}), dict[str, ReadyBaseline]()
        try:
            while True:
                connection, outcome = self._opened(arena, wanted, compiled)
                lost = {key: how for key, how in outcome.items() if how.faulted}
                if not lost:
                    break
                connection.kill()  # a baseline ended its context: without that one, in another
                self._after_loss()
                faulted |= lost
                wanted = {key: call for key, call in wanted.items() if key not in lost}
        finally:
            self._spares.begin(least=1)
        return GpuLauncher(
            connection,
            settle=self.synchronize,
            quiet=self._spares.wait_until_idle,
            after_loss=self._after_loss,
            end=self._spares.end,
            baselines={**outcome, **faulted},
        )

    def _opened(
        self, arena: GpuArena, baselines: Mapping[str, BaselineCall], compiled: Sequence[bytes]
    ) -> tuple[Connection, Mapping[str, ReadyBaseline]]:
        """A process over the arena, and what became of the baselines."""
        try:
            return self._opened_once(arena, baselines, compiled)
        except DeviceError:  # a driver on a bad day: once more, in another process
            self._after_loss()
            return self._opened_once(arena, baselines, compiled)

    def _opened_once(
        self, arena: GpuArena, baselines: Mapping[str, BaselineCall], compiled: Sequence[bytes]
    ) -> tuple[Connection, Mapping[str, ReadyBaseline]]:
        connection = self._race_connection() if baselines else self._spares.take()
        try:
            return connection, self._set_up(connection, arena, baselines, compiled)
        except BaseException:
            connection.kill()
            raise

    def _set_up(
        self,
        connection: Connection,
        arena: GpuArena,
        baselines: Mapping[str, BaselineCall],
        compiled: Sequence[bytes],
    ) -> Mapping[str, ReadyBaseline]:
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
        # The fastest of several kernels, and of call and graph, is looked for.
        self._spares.wait_until_idle()
        folder = str(compiler_cache.shared_folder())
        outcome = connection.ask(
            {"do": "baselines", "cache": folder, **described(baselines)},
            limit_s=BASELINES_LIMIT_S,
            blobs=compiled,
        )
        found = cast("Mapping[str, object]", outcome)
        return {key: from_json(ReadyBaseline, each) for key, each in found.items()}

    def compile_ahead(
        self, calls: Sequence[BaselineCall], need_bytes: int
    ) -> Generator[Mode, None, list[bytes]]:
        """See `RaceProcesses`; to be given to `launcher`."""
        return self._race.compile_ahead(calls, need_bytes)

    def healthy(self) -> bool:
        """Whether a fresh process computes known results; tries twice."""
        return health.computes(self._check_fresh)

    def ceilings(self, *, again: bool = False) -> Ceilings:
        """Measure the device's rates on plain work; see `Backend`.

        Raises:
            DeviceError: The device fails.
        """
        name = cache.named("gpu-ceilings", *self.facts.unique, TIMING_VERSION, gpu_ceilings.VERSION)
        cached = cache.load(name, Ceilings)
        if cached is not None and not again:
            return cached
        connection = self._spares.take()
        try:
            self._spares.wait_until_idle()
            fields = connection.ask({"do": "ceilings"}, limit_s=_CEILINGS_LIMIT_S)
        finally:
            self._spares.end(connection)
        measured = Ceilings(**cast("dict[str, float]", fields))  # type: ignore[arg-type]
        if cached is not None:
            measured = larger(measured, cached)
        cache.save(name, measured)
        return measured

    def printed(self) -> str:
        """Return the output of launchers that have ended since the last call."""
        return self._server.printed()

    def prefetch_race(self) -> None:
        """Begin to import torch's compiler for the launchers of a race; does not wait for it."""
        self._race.prefetch()

    def synchronize(self) -> None:
        """See `Backend`."""
        torch.cuda.synchronize(self.device)

    def wait_until_idle(self) -> None:
        """See `Backend`."""
        self._spares.wait_until_idle()

    def free_unused(self, *, shared: bool = False) -> None:
        """See `Backend`. Less is left: to allocate it again takes a call of the driver."""
        if shared:
            self._spares.share()
            torch.cuda.empty_cache()
            return
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if held > _KEPT_BYTES:
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """See `Backend`: launchers flush L2 by themselves."""

    def race_baselines(self) -> GpuRaceBaselines:
        """See `Backend`."""
        return GpuRaceBaselines(self)

    def watch(self) -> Watch:
        """See `Backend`."""
        found = bus_id(self.device.index or 0)
        return Unwatched() if found is None else watch_gpu(found)

    def close(self) -> None:
        """End all helper processes."""
        self._spares.close()
        self._server.close()
        self._race.close()

    def _race_connection(self) -> Connection:
        """A process with a context that has torch's compiler imported.

        Where that import spoils the GPU for forks after all (another torch), it is one that has
        not: slower, and otherwise the same.
        """
        try:
            return self._race.connection()
        except DeviceError:
            return self._spares.take()

    def _free_bytes(self) -> int:
        """Memory that other processes can have."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

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
        remedy = "Reset the device (nvidia-smi --gpu-reset) or restart the machine"
        health.require(self.healthy, self.facts.name, remedy)
