"""Health of a device, tested by a launcher after every fault, hang or kill.

A kernel that did harm ends with its own process. If two fresh processes in a row then do not
compute what is known, no verdict on anything else could be trusted: the device is wedged.
"""

from __future__ import annotations

from collections.abc import Callable

from kagent_sandbox.errors import DeviceWedged

TRIES = 2


def computes(fresh: Callable[[], bool]) -> bool:
    """Whether a fresh process computes a known result, in two tries."""
    return any(fresh() for _ in range(TRIES))


def require(healthy: Callable[[], bool], device: str, remedy: str) -> None:
    """Make sure after a loss that the device can judge the next candidate.

    Raises:
        DeviceWedged: It cannot; the text says what to do.
    """
    if not healthy():
        raise DeviceWedged(
            f"{device} no longer computes correctly after a kernel faulted, hung or was killed: "
            f"{TRIES} fresh processes failed at a known result. What is recorded is kept. "
            f"{remedy}, then resume the run"
        )
