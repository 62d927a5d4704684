"""Choice of the machines that a run uses, and this machine as one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.device.detect import gpu_count
from kagent_sandbox.device.table import available, device_for, find_device
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.process.cores import usable_cores
from kagent_sandbox.process.isolation_probe import probe
from kagent_sandbox.process.temporary_space import temporary_space

from kagent.config.settings import Config
from kagent.fleet.ray_fleet import RayFleet
from kagent.fleet.station import Fleet, Say, Station, open_judges

LOCAL = "local"


class LocalFleet:
    """This machine."""

    def has(self, kind: Kind) -> bool:
        """Whether it has a device of a kind."""
        return available(kind)

    def gpus(self) -> int:
        """The one that --device chooses, if there is one."""
        return int(available("gpu"))

    def seats(self, kind: Kind) -> int:
        """Devices of a kind, one for each judge of a run."""
        return gpu_count() if kind == "gpu" else 1

    def require_seats(self, kind: Kind, judges: int) -> None:
        """Make sure that there is a device for each judge of a run.

        Raises:
            UserError: There are fewer.
        """
        have = self.seats(kind)
        if judges > have:
            raise UserError(
                f"--judges {judges} needs a device for each, and this machine has {have} that "
                f"{'it may use' if kind == 'gpu' else 'kernels of the CPU run on'}: give "
                f"--judges {have}, or --on ray for the nodes of a cluster"
            )

    @contextlib.contextmanager
    def station(
        self,
        task: Task,
        kind: Kind,
        secret: int,
        jobs: int | None,
        race_s: float,
        say: Say,
        judges: int = 1,
    ) -> Iterator[Station]:
        """As `Fleet` has it."""
        self.require_seats(kind, judges)
        device, jobs = device_for(kind), jobs or usable_cores()
        with contextlib.ExitStack() as opened:
            builder = opened.enter_context(Builder(jobs, on_wait=say))
            judge, *others = open_judges(
                opened,
                [
                    partial(
                        JudgeClient,
                        task.folder,
                        device,
                        secret,
                        index=index,
                        race_s=race_s,
                        on_wait=say,
                    )
                    for index in range(judges)
                ],
            )
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
                others=tuple(others),
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
    return RayFleet(config.on, config.isolation, config.cluster_wait, config.accelerator)
