"""Builders in workers of a Ray cluster, as one builder."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from kagent_sandbox.builder.health import known_request
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.judge.packing import Header, unpack_unread
from kagent_sandbox.judge.protocol import raise_error

from kagent.fleet.ray_calls import LONGER, LOOK_S, alive, last_line, require_open
from kagent.fleet.worker import BuiltWords

TRIES = 3
"""Workers that a candidate may cost before it is asked whether they build a known file."""
_GRACE_S = 120.0  # over all tries of a worker's own builder, which keeps to the limit of each


class RayBuilder:
    """Several workers, each of which builds one candidate at a time.

    A worker that is lost is no verdict: the candidate is built by another one. Plans stay texts:
    they were checked where they were built, and are validated where they run.

    Args:
        ray: The module.
        actors: The workers' handles.
        same: Versions that a worker must have, by package.
        say: Is told of workers that are lost.
        wait_s: Seconds in which a worker that was lost must have come back.
    """

    def __init__(
        self,
        ray: ModuleType,
        actors: Sequence[Any],
        same: Mapping[str, str],
        say: Callable[[str], None],
        wait_s: float,
    ) -> None:
        self._ray = ray
        self._same = same
        self._say = say
        self._wait_s = wait_s
        self._closed = threading.Event()
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for actor in actors:
            self._free.put(actor)

    def build(self, request: BuildRequest) -> Built | Rejected:
        """Block until it is built or rejected.

        Raises:
            ChildDied: This was closed.
            MachineError: Workers are lost one after the other, or cannot build.
        """
        for _ in range(TRIES):
            answer = self._ask(request)
            if answer is not None:
                return read_built(answer)
        known = self._ask(known_request(request.target))
        if known is None or isinstance(read_built(known), Rejected):
            raise MachineError(
                f"{TRIES} builders were lost one after the other, and a file that is known to "
                "build does not build either. What is recorded is kept: see to the memory of the "
                "cluster's nodes, then resume the run"
            )
        return Rejected(
            Stage.BUILD,
            Status.RUNTIME_ERROR,
            f"set aside: {TRIES} builders in a row were lost while they built this candidate, and "
            "a known file builds as before. It may be the machines' fault",
        )

    def close(self) -> None:
        """Whoever waits for a build gives up. Workers are ended by those who started them."""
        self._closed.set()

    def _ask(self, request: BuildRequest) -> dict[str, Any] | None:
        """A worker's answer; None if it was lost."""
        ray, actor = self._ray, self._free_worker()
        asked = actor.build.remote(to_json(request))
        deadline = time.monotonic() + 3 * request.wall_limit_s + _GRACE_S
        try:
            while not ray.wait([asked], timeout=LOOK_S)[0]:
                require_open("the builder", self._closed)
                if time.monotonic() > deadline:
                    ray.kill(actor, no_restart=False)
                    break
            answer: dict[str, Any] = ray.get(asked)
        except ray.exceptions.RayActorError:
            require_open("the builder", self._closed)
            self._say("a builder was lost: another one builds its candidate")
            threading.Thread(target=self._revive, args=[actor], daemon=True).start()
            return None
        except ray.exceptions.RayError as e:  # such as an error of Python's in the worker
            self._free.put(actor)
            raise MachineError(f"the builder's worker failed: {last_line(e)}") from None
        self._free.put(actor)
        return answer

    def _free_worker(self) -> Any:
        """A worker that builds nothing, once there is one."""
        deadline = time.monotonic() + self._wait_s
        while True:
            require_open("the builder", self._closed)
            left_s = deadline - time.monotonic()
            try:
                return self._free.get(timeout=max(0.0, min(LOOK_S, left_s)))
            except queue.Empty:
                if left_s <= 0:
                    raise MachineError(
                        f"no builder has come back on the Ray cluster within {self._wait_s:.0f} s. "
                        f"What is recorded is kept: resume the run then. {LONGER}"
                    ) from None

    def _revive(self, actor: Any) -> None:
        """Use a worker again once Ray has restarted it."""
        try:
            found = alive(self._ray, actor, "a builder", self._say, self._wait_s, self._closed)
            require_same(found, self._same)
        except ChildDied:
            return  # nobody needs it any more
        except MachineError as e:
            self._say(f"one builder less: {e}")
        else:
            self._free.put(actor)


def require_same(worker: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Make sure that a worker has the versions of others.

    Raises:
        MachineError: It has not.
    """
    for package, version in versions.items():
        found = worker["versions"].get(package, "none")
        if found != version:
            raise MachineError(
                f"host {worker['host']} has {package} {found}, and the judge's has {version}: the "
                "nodes of a cluster need the same versions"
            )


def read_built(answer: Mapping[str, Any]) -> Built | Rejected:
    """A candidate of a worker's answer, its plans unparsed.

    Raises:
        KagentError: What the worker answered.
    """
    raise_error(answer)
    if "rejected" in answer:
        return from_json(Rejected, answer["rejected"])
    words = from_json(BuiltWords, answer["words"])
    built = unpack_unread(from_json(Header, answer["header"]), answer["blobs"], words.work_hash)
    return dataclasses.replace(
        built,
        dropped=words.dropped,
        log=words.log,
        ptx=words.ptx,
        remarks=words.remarks,
        loops=words.loops,
    )
