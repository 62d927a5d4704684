"""A judge in a worker of a Ray cluster, as `JudgeClient` sees it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from kagent.fleet.ray_calls import alive, answer_of, result_of
from kagent.fleet.station import Say


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
        return result_of(answer)

    def close(self) -> None:
        """Let go of the judge. Whoever waits for an answer gives up. The worker ends the judge when
        another is opened, or with itself.
        """
        self._closed.set()

    def _get(self, asked: Any, on_progress: Say | None) -> dict[str, Any]:
        def tell(lines: Sequence[str]) -> None:
            self._tell(lines, on_progress)

        return answer_of(self._ray, self._actor, asked, "the judge", tell, self._closed)

    def _tell(self, lines: Sequence[str], on_progress: Say | None) -> None:
        for line in lines:
            (on_progress or self._say)(line)
