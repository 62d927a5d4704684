"""Calls to workers of a Ray cluster, which may be lost, or stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.judge.protocol import raise_error

from kagent.fleet.station import Say

LONGER = "ray status says what is taken; KAGENT_CLUSTER_WAIT=20m waits longer"
"""The remedy where a cluster has no room."""
LOOK_S = 2.0
"""Seconds between looks at a worker that works."""
DEAF_S = 30.0
"""Seconds without an answer to a look, after which a worker is taken for stopped."""
CLOSE_S = 20.0
"""Seconds in which workers end what they started, before they are killed."""


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
                f"{what} does not start on the Ray cluster: {last_line(e)}: the same versions of "
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


def answer_of(
    ray: ModuleType,
    actor: Any,
    asked: Any,
    what: str,
    tell: Callable[[Sequence[str]], None],
    closed: threading.Event | None = None,
) -> dict[str, Any]:
    """The answer to a call, while the worker's messages are passed on (its method `said`).

    Args:
        ray: The module.
        actor: The worker's handle.
        asked: The call, as Ray refers to it.
        what: Name of the worker in messages, such as "the judge".
        tell: Is given the messages.
        closed: Is set once nobody waits any more.

    Raises:
        ChildDied: The worker is lost, or stopped, or nobody waits for it any more.
        MachineError: It failed.
    """
    try:
        while not ray.wait([asked], timeout=LOOK_S)[0]:
            require_open(what, closed)
            look = actor.said.remote()
            if not ray.wait([look, asked], timeout=DEAF_S)[0]:
                ray.kill(actor, no_restart=False)
                raise ChildDied(f"{what}'s worker has not answered for {DEAF_S:.0f} s")
            if ray.wait([look], timeout=0)[0]:
                tell(ray.get(look))
        answer: dict[str, Any] = ray.get(asked)
    except ray.exceptions.RayActorError as e:
        raise ChildDied(f"{what}'s worker was lost: {last_line(e)}") from None
    except ray.exceptions.RayError as e:  # such as an error of Python's in the worker
        raise MachineError(f"{what}'s worker failed: {last_line(e)}") from None
    return answer


def result_of(answer: Mapping[str, Any]) -> Any:
    """The result in a worker's answer.

    Raises:
        KagentError: The error that is there instead.
    """
    raise_error(answer)
    return answer["ok"]


def end_workers(ray: ModuleType, workers: Sequence[Any]) -> None:
    """End workers with all that they started. Those that hang are killed."""
    with contextlib.suppress(Exception):  # lost ones, and a lost cluster
        ray.wait([w.close.remote() for w in workers], num_returns=len(workers), timeout=CLOSE_S)
    for worker in workers:
        with contextlib.suppress(Exception):
            ray.kill(worker)


def last_line(error: Exception) -> str:
    """The cause in an error of Ray's: the last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
