"""A node of a Ray cluster as the machine of an export: all is done in one worker there.

The worker gets the texts of kernels and tasks, builds, measures and replays them as an export does
on its own machine, and later runs the tests of the library that was made of them. The library is
merged and written where the command runs. What crosses is JSON and bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import ChildDied, KagentError, MachineError
from kagent_sandbox.judge.protocol import error_answer
from kagent_sandbox.process.process_tree import kill_all
from kagent_sandbox.replay.library_tests import Ran

from kagent import resources
from kagent.config.settings import Config
from kagent.export.measuring import LibraryEntrant, LibraryTimes, Measurement, Say, measure_all
from kagent.export.own_tests import run_in_turn
from kagent.fleet.fleet import fleet_of
from kagent.fleet.ray_calls import alive, answer_of, end_workers, result_of
from kagent.fleet.ray_cluster import connect, nodes
from kagent.fleet.ray_fleet import judge_options
from kagent.fleet.worker import Answer, Worker, task_files, task_folder

_WHAT = "the measurement"


class ExportWorker(Worker):
    """A node's side: measures kernels on its device, and runs libraries' tests.

    Args:
        isolation: Tier to require, or "auto".
    """

    def measure(self, wanted: Sequence[Mapping[str, Any]], options: Mapping[str, object]) -> Answer:
        """Measure kernels of several tasks.

        Args:
            wanted: `task` (contents of its files by name), `kind` and `entrants`, of each.
            options: Isolation, the time of a race, and jobs if they were given.
        """
        # No file and no variable of the node's has a say.
        config = Config.model_construct(None, **options)
        try:
            found = measure_all([_measurement(w) for w in wanted], config, self._said.append)
        except KagentError as e:
            return {**error_answer(e), "said": self.said()}
        return {"ok": [to_json(times) for times in found], "said": self.said()}

    def run_tests(self, name: str, files: Mapping[str, bytes], gpu: bool, path: str) -> Answer:
        """Run the tests of a library, as `ExportHost` has it."""
        try:
            ran = run_in_turn(name, files, self._said.append, gpu=gpu, path=path)
            return {"ok": to_json(ran)}
        except KagentError as e:
            return error_answer(e)

    def close(self) -> None:
        """End all that a call has started, which may not be over."""
        kill_all(os.getpid())


def _measurement(asked: Mapping[str, Any]) -> Measurement:
    task = load_task(task_folder(asked["task"]))
    return Measurement(
        task, asked["kind"], [from_json(LibraryEntrant, e) for e in asked["entrants"]]
    )


class RayHost:
    """A cluster, of which each kind of device has one worker, from its first use on.

    Args:
        config: Where, jobs, isolation, and the seconds in which a worker must have started.
        say: Is told what is waited for.
    """

    def __init__(self, config: Config, say: Say) -> None:
        self._config = config
        self._say = say
        self._fleet = fleet_of(config)
        self._workers: dict[Kind, Any] = {}
        self.place = f"the Ray cluster ({config.on})"

    def has(self, kind: Kind) -> bool:
        """As `ExportHost` has it."""
        return self._fleet.has(kind)

    def measure(self, wanted: Sequence[Measurement], say: Say) -> list[LibraryTimes]:
        """As `ExportHost` has it; the kinds of device one after the other."""
        options = self._config.model_dump(include={"isolation", "race_time"})
        if "jobs" in self._config.model_fields_set:
            options["jobs"] = self._config.jobs
        found: dict[int, LibraryTimes] = {}
        for kind in dict.fromkeys(w.kind for w in wanted):
            places = [i for i, w in enumerate(wanted) if w.kind == kind]
            texts = [
                {
                    "task": task_files(w.task),
                    "kind": w.kind,
                    "entrants": [to_json(e) for e in w.entrants],
                }
                for w in (wanted[i] for i in places)
            ]
            answer = self._ask(kind, "measure", say, texts, options)
            times = (from_json(LibraryTimes, each) for each in answer)
            found |= dict(zip(places, times, strict=True))
        return [found[i] for i in range(len(wanted))]

    def run_tests(self, name: str, files: Mapping[str, bytes], *, gpu: bool, path: str) -> Ran:
        """As `ExportHost` has it."""
        kind: Kind = "gpu" if gpu else "cpu"
        return from_json(Ran, self._ask(kind, "run_tests", self._say, name, dict(files), gpu, path))

    def close(self) -> None:
        """End the workers with all that they started."""
        if self._workers:
            end_workers(connect(self._config.on), list(self._workers.values()))
            self._workers.clear()

    def _ask(self, kind: Kind, verb: str, say: Say, *given: object) -> Any:
        """The answer of a worker.

        Raises:
            KagentError: What it answered.
            ChildDied: It is lost.
            MachineError: It failed.
        """
        ray, worker = connect(self._config.on), self._worker(kind)
        call = getattr(worker, verb).remote(*given)

        def tell(lines: Sequence[str]) -> None:
            for line in lines:
                say(line)

        try:
            answer = answer_of(ray, worker, call, _WHAT, tell)
        except ChildDied as e:
            raise ChildDied(f"{e}. Nothing was written: give the command again") from None
        tell(answer.get("said", ()))
        return result_of(answer)

    def _worker(self, kind: Kind) -> Any:
        """The worker on a node that has such a device.

        Raises:
            MachineError: None starts, or its kagent is another one.
        """
        if kind not in self._workers:
            self._say(f"connecting to Ray ({self._config.on})")
            ray = connect(self._config.on)
            (options,) = judge_options(kind, nodes(ray), self._config.accelerator, None)
            cls = ray.remote(ExportWorker)
            worker = cls.options(max_restarts=0, **options).remote(self._config.isolation)
            self._workers[kind] = worker
            found = alive(ray, worker, _WHAT, self._say, self._config.cluster_wait)
            if found["kagent"] != resources.version():
                raise MachineError(
                    f"host {found['host']} has kagent {found['kagent']}, and {resources.version()} "
                    "is here: both need the same"
                )
            self._say(f"measuring on {found['host']}")
        return self._workers[kind]
