"""A judge in a worker of a Ray cluster, as `JudgeClient` sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.judge.protocol import ERRORS

Say = Callable[[str], None]

LONGER = "ray status says what is taken; KAGENT_CLUSTER_WAIT=20m waits longer"
"""The remedy where a cluster has no room."""
LOOK_S = 2.0
"""Seconds between looks at a worker that works."""
DEAF_S = 30.0
"""Seconds without an answer to a look, after which a worker is taken for stopped."""


def alive(
    ray: ModuleType,
    actor: Any,
    what: str,
    say: Say,
    wait_s: float,
    closed: threading.Event | None = None,
) -> dict[str, Any]:
    """Facts of a worker that is up. A worker that was lost comes back elsewhere.

    Args:
        ray: The module.
        actor: The worker's handle.
        what: What is waited for, such as "a judge".
        say: Is told what the wait is for, and how long it may be.
        wait_s: Seconds after which it is given up.
        closed: Is set once nobody waits any more.

    Raises:
        MachineError: It does not come up.
        ChildDied: Nobody waits for it any more.
    """
    told, deadline = False, time.monotonic() + wait_s
    problem = "no node has room for it"
    while time.monotonic() < deadline:
        ask = actor.describe.remote()
        try:
            while not (done := ray.wait([ask], timeout=LOOK_S)[0]) and time.monotonic() < deadline:
                require_open(what, closed)
                told = told or _tell_of_wait(what, say, wait_s)
            if done:
                found: dict[str, Any] = ray.get(ask)
                return found
        except ray.exceptions.ActorUnavailableError as e:
            require_open(what, closed)
            problem = str(e).splitlines()[0]
            told = told or _tell_of_wait(what, say, wait_s)
            time.sleep(0.5)
        except ray.exceptions.RayActorError as e:
            raise MachineError(
                f"{what} does not start on the Ray cluster: {_last(e)}: the same versions of "
                "kagent and torch belong on every node (pip install 'kagent[ray]')"
            ) from None
    have = ray.available_resources()
    free = ", ".join(f"{have.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
    raise MachineError(
        f"{what} has not started on the Ray cluster within {wait_s:.0f} s ({problem[:300]}); free "
        f"there: {free}. {LONGER}"
    )


def require_open(what: str, closed: threading.Event | None) -> None:
    """Make sure that somebody still waits for a worker.

    Raises:
        ChildDied: Nobody does.
    """
    if closed is not None and closed.is_set():
        raise ChildDied(f"{what} was closed")


def _tell_of_wait(what: str, say: Say, wait_s: float) -> bool:
    say(f"waiting for {what} to start on the cluster, {wait_s:.0f} s at most: {LONGER}")
    return True


class RayLink:
    """A `Link` to the judge in one worker. The worker outlives its judges, and Ray restarts it.

    Args:
        ray: The module.
        actor: The worker's handle.
        files: The task's, by name.
        say: Is told who has the device while the judge waits for it.
        wait_s: Seconds in which the worker must have started, anew too.
    """

    def __init__(
        self,
        ray: ModuleType,
        actor: Any,
        files: Mapping[str, bytes],
        say: Say,
        wait_s: float,
    ) -> None:
        self._ray = ray
        self._actor = actor
        self._files = files
        self._say = say
        self._wait_s = wait_s
        self._closed = threading.Event()
        self.pid = 0

    def ask(
        self,
        verb: str,
        request: Mapping[str, object],
        blobs: Sequence[bytes],
        on_progress: Say | None,
    ) -> object:
        """As `Link` has it. A call is made at most once: whether it is made again is the client's
        to decide, with a new judge.
        """
        if verb == "open":
            alive(self._ray, self._actor, "a judge", self._say, self._wait_s, self._closed)
            answer = self._get(self._actor.open.remote(self._files, request), on_progress)
            self.pid = int(answer.get("pid", 0))
        else:
            answer = self._get(self._actor.ask.remote(verb, request, blobs), on_progress)
        self._tell(answer.get("said", ()), on_progress)
        if "error" in answer:
            raise ERRORS[answer["error"]](answer["text"])
        return answer["ok"]

    def close(self) -> None:
        """Let go of the judge. Whoever waits for an answer gives up. The worker ends the judge when
        another is opened, or with itself.
        """
        self._closed.set()

    def _get(self, asked: Any, on_progress: Say | None) -> dict[str, Any]:
        """An answer, while the worker's words are passed on.

        Raises:
            ChildDied: The worker is lost, or stopped.
        """
        ray = self._ray
        try:
            while not ray.wait([asked], timeout=LOOK_S)[0]:
                require_open("the judge", self._closed)
                look = self._actor.said.remote()
                if not ray.wait([look, asked], timeout=DEAF_S)[0]:
                    ray.kill(self._actor, no_restart=False)
                    raise ChildDied(f"the judge's worker has not answered for {DEAF_S:.0f} s")
                if ray.wait([look], timeout=0)[0]:
                    self._tell(ray.get(look), on_progress)
            answer: dict[str, Any] = ray.get(asked)
        except ray.exceptions.RayActorError as e:
            raise ChildDied(f"the judge's worker was lost: {_last(e)}") from None
        return answer

    def _tell(self, lines: Sequence[str], on_progress: Say | None) -> None:
        for line in lines:
            (on_progress or self._say)(line)


def _last(error: Exception) -> str:
    """The cause in an error of Ray's: the last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
