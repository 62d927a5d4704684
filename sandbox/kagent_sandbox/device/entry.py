"""One row of the table of devices: what is known of a device before it is opened.

A device's folder has it as `ENTRY`. It is imported by whoever names the device, so that it imports
torch and drivers only inside of its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kagent_sandbox.data.device import DeviceFacts
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.device.baseline_calls import BaselineCall, MeasuredBaseline
    from kagent_sandbox.device.interface import Backend
    from kagent_sandbox.device.traits import Traits


class Opens(Protocol):
    """Opens a device, in the judge's process."""

    def __call__(self, index: int, *, products: bool) -> Backend:
        """The device.

        Args:
            index: Which of several.
            products: Whether plans may call matrix products of torch.

        Raises:
            MachineError: There is no such device, or it does not work.
        """


def _nothing() -> None:
    """Require nothing."""


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """A device of the table. Its name is that by which it is asked for."""

    name: str
    kind: Kind
    """Whose cases of a task it is judged on: also `facts.kind` of its backend."""
    traits: Traits
    environment: Mapping[str, str]
    """Environment of the judge's process, set before libraries are loaded."""
    unit: Callable[[int], str] = str
    """Return what tells one of several such devices from the others, on this machine, for good.
    Opens none.
    """
    alone: Callable[[int], Mapping[str, str]] | None = None
    """Return the environment in which a process sees one of several alone, as its first, so that
    nothing it does reaches another. None: it sees all of them, and is told which is its own.
    """
    available: Callable[[], bool]
    """Whether this machine has one; opens none."""
    require: Callable[[], None] = _nothing
    """Raise `MachineError` where a program is missing without which the device cannot be judged on.
    Opens none, takes no time.
    """
    facts: Callable[[int], DeviceFacts]
    """Return the facts of a device by its index. Opens none of its memory. Raises `MachineError`.
    """
    timing_version: Callable[[], int]
    """Version of its clock: baselines of another version are measured again."""
    load: Callable[[], None] = _nothing
    """Import, in the judge's process, what `open` needs, and start what it needs of other programs.
    Opens none, so that others may be timed on it meanwhile: nothing that disturbs their clock.
    Raises `MachineError`.
    """
    open: Opens
    baselines: Callable[[int], Callable[[BaselineCall], MeasuredBaseline]]
    """Return what measures baselines on the device of an index, in a trusted process of their own.
    """

    def unit_name(self, index: int) -> str:
        """The name by which processes take turns on a device of this machine."""
        return f"{self.name}-{self.unit(index)}"
