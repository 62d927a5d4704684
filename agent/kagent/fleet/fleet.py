"""Interface of a run to the machines that it runs on, and this machine as one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.table import available, device_for, find_device
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.process.isolation_probe import probe
from kagent_sandbox.process.temporary_space import temporary_space

from kagent.config.settings import Config, cores

LOCAL = "local"

Say = Callable[[str], None]


class Builds(Protocol):
    """Turns source into plans and binaries. Called from several threads at once."""

    def build(self, request: BuildRequest) -> Built | Rejected:
        """Block until it is built or rejected."""


@dataclass(frozen=True)
class Station:
    """Builders and a judge that have started.

    Attributes:
        builder: The builders.
        judge: The judge.
        jobs: Builds at once.
        quiet: Whether nothing may be built while the judge times.
        tiers: Isolation by role: "builder", "launcher".
        canaries: What stopped each attack that was tried where candidates' code runs; None: nothing
            did.
        places: Names of the hosts by role.
    """

    builder: Builds
    judge: JudgeClient
    jobs: int
    quiet: bool
    tiers: Mapping[str, Tier]
    canaries: Mapping[str, str | None]
    places: Mapping[str, str]


class Fleet(Protocol):
    """Machines that build and judge."""

    def has(self, kind: Kind) -> bool:
        """Whether there is a device of a kind; opens none."""

    def gpus(self) -> int:
        """GPUs that runs may be judged on at once."""

    def station(
        self, task: Task, kind: Kind, secret: int, jobs: int | None, race_s: float, say: Say
    ) -> contextlib.AbstractContextManager[Station]:
        """Start builders and a judge; at the end close them with all that they started.

        Args:
            task: The task.
            kind: "gpu" or "cpu".
            secret: Seed of the hidden cases.
            jobs: Builds at once; None: as many as the machines have room for.
            race_s: Seconds of a race while it is not clear (`JudgeClient`).
            say: Is told what is being done.

        Raises:
            MachineError: They do not start, or are not isolated as was asked for.
        """


class LocalFleet:
    """This machine."""

    def has(self, kind: Kind) -> bool:
        """Whether it has a device of a kind."""
        return available(kind)

    def gpus(self) -> int:
        """The one that --device chooses, if there is one."""
        return int(available("gpu"))

    @contextlib.contextmanager
    def station(
        self, task: Task, kind: Kind, secret: int, jobs: int | None, race_s: float, say: Say
    ) -> Iterator[Station]:
        """As `Fleet` has it."""
        device = device_for(kind)
        jobs = jobs or cores()
        with (
            Builder(jobs, on_wait=say) as builder,
            JudgeClient(task.folder, device, secret, race_s=race_s, on_wait=say) as judge,
        ):
            say("trying the isolation")
            with temporary_space():
                seen = probe()  # while the fork-servers import
            seen.require()
            yield Station(
                builder=builder,
                judge=judge,
                jobs=jobs,
                quiet=find_device(device).traits.disturbed_by_builds,
                tiers={"builder": builder.isolation.tier, "launcher": judge.isolation().tier},
                canaries={c.name: c.stopped_by for c in seen.canaries},
                places={},
            )


def fleet_of(config: Config) -> Fleet:
    """The machines that a configuration names. Nothing is connected to yet.

    Raises:
        UserError: A type of GPU is asked for, and it is this machine.
    """
    if config.on == LOCAL:
        if config.accelerator is not None:
            raise UserError(
                f"--accelerator {config.accelerator} chooses among the nodes of a Ray cluster: "
                "give --on ray, too; on this machine --device chooses"
            )
        return LocalFleet()
    from kagent.fleet.ray_fleet import RayFleet

    return RayFleet(config.on, config.isolation, config.accelerator)
