"""A Ray cluster as the machines of a run: a judge and builders in workers of their own.

Ray restarts a worker that is lost, with its node too, for ever and wherever there is room. What it
was asked is asked again by the clients that also serve one machine (`JudgeClient`), or by another
worker (`RayBuilder`). The agent alone keeps anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.device.table import device_for
from kagent_sandbox.errors import MachineError, UserError
from kagent_sandbox.judge.client import JudgeClient

from kagent.fleet.ray_builders import RayBuilder, require_same
from kagent.fleet.ray_calls import alive, end_workers, result_of
from kagent.fleet.ray_cluster import ACCELERATOR, ROLE, Node, connect, nodes
from kagent.fleet.ray_judge import RayLink
from kagent.fleet.station import Say, Station, open_judges
from kagent.fleet.worker import BuildWorker, JudgeWorker, task_files

MOST_BUILDERS = 8
"""Most builders of one run, unless more are asked for. A model's run has fewer builds at once."""
CPU = "cpu"
_FOREVER: Mapping[str, Any] = {"max_restarts": -1, "max_task_retries": 0}


class RayFleet:
    """A cluster.

    Args:
        on: "ray" or "ray://HOST[:PORT]".
        isolation: Tier to require, or "auto".
        wait_s: Seconds in which a worker must have started, anew too: nodes are added, or come
            back.
        accelerator: Type of the GPU to judge on, as Ray labels nodes: "H100"; None: any;
            "cpu": none.
    """

    def __init__(
        self, on: str, isolation: str, wait_s: float, accelerator: str | None = None
    ) -> None:
        self._on = on
        self._isolation = isolation
        self._wait_s = wait_s
        self._accelerator = accelerator

    def has(self, kind: Kind) -> bool:
        """Whether a node has a device of a kind, and of the type that is asked for."""
        if CPU in (kind, self._accelerator):
            return kind == CPU
        return any(self._fits(n) for n in nodes(connect(self._on)))

    def gpus(self) -> int:
        """Number of GPUs on all nodes, of the type that is asked for."""
        return sum(n.gpus for n in nodes(connect(self._on)) if self._fits(n))

    def _fits(self, node: Node) -> bool:
        return bool(node.gpus) and self._accelerator in (None, node.labels.get(ACCELERATOR))

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
        say(f"connecting to Ray ({self._on})")
        ray = connect(self._on)
        there = nodes(ray)
        workers: list[Any] = []
        with contextlib.ExitStack() as stack:
            stack.callback(end_workers, ray, workers)
            self._require_room(judges, kind, there)
            judge_workers = self._judge_workers(ray, kind, there, jobs, judges)
            workers += judge_workers
            hosts = {
                "judge" if not i else f"judge {i}": alive(ray, worker, "a judge", say, self._wait_s)
                for i, worker in enumerate(judge_workers)
            }
            builders = self._build_workers(ray, there, jobs)
            workers += builders
            same = {p: v for p, v in hosts["judge"]["versions"].items() if p in ("torch", "triton")}
            for found in hosts.values():
                require_same(found, same)
            for number, worker in enumerate(builders):
                found = alive(ray, worker, "a builder", say, self._wait_s)
                require_same(found, same)
                hosts[f"builder {number}"] = found
            say("trying the isolation")
            canaries = _canaries(ray, workers)
            files = task_files(task)
            judge, *others = open_judges(
                stack,
                [
                    partial(
                        JudgeClient,
                        task.folder,
                        device_for(kind),
                        secret,
                        race_s=race_s,
                        connect=partial(RayLink, ray, worker, files, say, self._wait_s),
                    )
                    for worker in judge_workers
                ],
            )
            tiers = [Tier(result_of(ray.get(b.isolation.remote()))) for b in builders]
            builder = RayBuilder(ray, builders, same, say, self._wait_s)
            stack.callback(builder.close)
            yield Station(
                builder=builder,
                judge=judge,
                jobs=len(builders),
                quiet=False,  # builders on the judge's host make way for it: `DeviceLock`
                tiers={"builder": min(tiers), "launcher": judge.isolation().tier},
                canaries=canaries,
                places={role: str(found["host"]) for role, found in hosts.items()},
                others=tuple(others),
            )

    def _require_room(self, judges: int, kind: Kind, there: Sequence[Node]) -> None:
        """Make sure that there is a device for each judge.

        Raises:
            UserError: There is not.
        """
        if kind == "gpu":
            have, what = sum(n.gpus for n in there if self._fits(n)), "GPUs"
        else:
            have, what = sum(n.cpus > 0 for n in there), "nodes with CPUs"
        if judges > max(1, have):
            raise UserError(
                f"--judges {judges} needs a device for each, and the Ray cluster ({self._on}) has "
                f"{have} {what}: give --judges {have}, or add nodes"
            )

    def _judge_workers(
        self, ray: ModuleType, kind: Kind, there: Sequence[Node], jobs: int | None, judges: int
    ) -> list[Any]:
        cls = ray.remote(JudgeWorker)
        return [
            cls.options(**_FOREVER, **options).remote(device_for(kind), self._isolation)
            for options in judge_options(kind, there, self._accelerator, jobs, judges)
        ]

    def _build_workers(self, ray: ModuleType, there: Sequence[Node], jobs: int | None) -> list[Any]:
        options: dict[str, Any] = {**_FOREVER, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if any(_is_builder(n) for n in there):
            options["label_selector"] = {ROLE: "builder"}
        count = jobs or builder_count(there, _free_cpus(ray))
        cls = ray.remote(BuildWorker).options(**options)
        return [cls.remote(self._isolation) for _ in range(count)]


def judge_options(
    kind: Kind, there: Sequence[Node], accelerator: str | None, jobs: int | None, judges: int = 1
) -> list[dict[str, Any]]:
    """Options of each worker that times on a device, as Ray takes them.

    Args:
        kind: "gpu" or "cpu".
        there: The nodes.
        accelerator: Type of the GPU, as Ray labels nodes; None: any.
        jobs: As `judge_cpus` takes it.
        judges: Likewise.

    Raises:
        MachineError: No node has a CPU to give.
    """
    options: dict[str, Any] = {"max_concurrency": 4}
    if kind == "gpu":
        # No CPU: builders that take all of a node must not keep its GPU idle.
        options |= {"num_gpus": 1, "num_cpus": 0}
        if accelerator is not None:
            options["label_selector"] = {ACCELERATOR: accelerator}
        return [options] * judges
    if judge_nodes(there, judges):
        options["label_selector"] = {ROLE: "!builder"}
    return [{**options, "num_cpus": n} for n in judge_cpus(there, jobs, judges)]


def judge_nodes(there: Sequence[Node], judges: int) -> list[Node]:
    """Nodes for judges of the CPU, where others are for builders; none if they are too few."""
    if not any(_is_builder(n) and n.cpus for n in there):
        return []
    found = [n for n in there if n.cpus and not _is_builder(n)]
    return found if len(found) >= judges else []


def _is_builder(node: Node) -> bool:
    return node.labels.get(ROLE) == "builder"


def builder_count(there: Sequence[Node], free: int) -> int:
    """Number of builders that a run starts, unless it is told: as many as there is room for on the
    nodes that are for builders, or on all where none is.

    Args:
        there: The nodes.
        free: CPUs that nobody has taken, on all nodes.
    """
    cpus = sum(n.cpus for n in [n for n in there if _is_builder(n)] or there)
    gpus = sum(n.gpus for n in there)
    # Each GPU may have a run, and each run gets its share of the CPUs.
    room = cpus // gpus if gpus else min(cpus, free)
    return max(1, min(room, MOST_BUILDERS))


def _free_cpus(ray: ModuleType) -> int:
    return int(ray.available_resources().get("CPU", 0))


def judge_cpus(there: Sequence[Node], jobs: int | None, judges: int = 1) -> list[int]:
    """CPUs that each judge of the CPU takes: all of a node, so that no second judge is there, or
    all but the builders' where no other node is left for them. Nodes that are for builders are left
    to them while there are enough others.

    Args:
        there: The nodes.
        jobs: Builders that are asked for; None: one.
        judges: How many, at most as many as nodes.

    Raises:
        MachineError: No node has a CPU to give.
    """
    others = judge_nodes(there, judges)
    if others:
        return sorted((n.cpus for n in others), reverse=True)[:judges]
    have = sorted((n.cpus for n in there if n.cpus), reverse=True)
    if not have or sum(have) < 2:
        raise MachineError(
            f"the Ray cluster has {sum(have)} CPUs: a judge and a builder need one each: start "
            "nodes with more (ray start --num-cpus)"
        )
    taken = have[:judges]
    if len(have) == judges:
        taken[-1] = max(1, taken[-1] - (jobs or 1))
    return taken


def _canaries(ray: ModuleType, workers: Sequence[Any]) -> Mapping[str, str | None]:
    """The mechanism that stopped each attack from inside, on every host.

    Raises:
        ConfinementError: One got out although the tier claims to stop it.
    """
    found: dict[str, str | None] = {}
    for answer in ray.get([w.attack.remote() for w in workers]):
        for name, stopped_by in cast("Any", result_of(answer))["canaries"].items():
            found[name] = None if stopped_by is None else found.get(name, stopped_by)
    return found
