"""Interface of a run to the machines that build and judge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.judge.client import JudgeClient

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
        others: Further judges, each on a device of its own.
    """

    builder: Builds
    judge: JudgeClient
    jobs: int
    quiet: bool
    tiers: Mapping[str, Tier]
    canaries: Mapping[str, str | None]
    places: Mapping[str, str]
    others: tuple[JudgeClient, ...] = ()


def open_judges(
    opened: contextlib.ExitStack, starts: Sequence[Callable[[], JudgeClient]]
) -> list[JudgeClient]:
    """Start judges side by side: each takes seconds to import torch and to open its device.

    Args:
        opened: Closes them, also those that have started when another does not.
        starts: What starts each, at least one. The others' are called in threads of their own.

    Raises:
        Exception: What the first of them that failed raised.
    """
    first, *others = starts
    threads = opened.enter_context(ThreadPoolExecutor(len(starts)))
    pending = [threads.submit(start) for start in others]
    for each in pending:
        opened.callback(_close, each)
    return [opened.enter_context(first()), *(each.result() for each in pending)]


def _close(pending: Future[JudgeClient]) -> None:
    """Close a judge once it has started; one that did not has closed itself."""
    with contextlib.suppress(Exception):
        pending.result().close()


class Fleet(Protocol):
    """Machines that build and judge."""

    def has(self, kind: Kind) -> bool:
        """Whether there is a device of a kind; opens none."""

    def gpus(self) -> int:
        """GPUs that runs may be judged on at once."""

    def station(
        self,
        task: Task,
        kind: Kind,
        secret: int,
        jobs: int | None,
        race_s: float,
        say: Say,
        judges: int = 1,
    ) -> contextlib.AbstractContextManager[Station]:
        """Start builders and a judge; at the end close them with all that they started.

        Args:
            task: The task.
            kind: "gpu" or "cpu".
            secret: Seed of the hidden cases.
            jobs: Builds at once; None: as many as the machines have room for.
            race_s: Seconds of a race while it is not clear (`JudgeClient`).
            say: Is told what is being done.
            judges: How many, each on a device of its own.

        Raises:
            UserError: There are not so many devices.
            MachineError: They do not start, or are not isolated as was asked for.
        """
