"""Machine that a library is measured and tested on: this one, or a node of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.device.table import available
from kagent_sandbox.replay.library_tests import Ran

from kagent.config.settings import Config
from kagent.export.measuring import LibraryTimes, Measurement, Say, measure_all
from kagent.export.own_tests import run_in_turn
from kagent.export.ray_host import RayHost
from kagent.fleet.fleet import LOCAL


class ExportHost(Protocol):
    """Machine that kernels are measured on, and that the library made of them is tried on."""

    @property
    def place(self) -> str:
        """Name for messages, such as "this machine"."""

    def has(self, kind: Kind) -> bool:
        """Whether there is a device of a kind; opens none."""

    def measure(self, wanted: Sequence[Measurement], say: Say) -> list[LibraryTimes]:
        """Measure kernels of several tasks, as `measure_all` does.

        Raises:
            MachineError, DeviceWedged, ChildDied: As `measure_all`.
        """

    def run_tests(self, name: str, files: Mapping[str, bytes], *, gpu: bool, path: str) -> Ran:
        """Run a library's own tests, while nobody times on the device.

        Args:
            name: Of its package.
            files: Of the library, by their paths in it; it need not be on the disk.
            gpu: Whether its tests may use the GPU.
            path: The folder among the files that tests import from.

        Raises:
            MachineError, ChildDied, ConfinementError: They cannot be run.
        """


class LocalHost:
    """This machine.

    Args:
        config: Jobs and isolation.
        say: Is told who has the device while it is waited for.
    """

    place = "this machine"

    def __init__(self, config: Config, say: Say) -> None:
        self._config = config
        self._say = say

    def has(self, kind: Kind) -> bool:
        """As `ExportHost` has it."""
        return available(kind)

    def measure(self, wanted: Sequence[Measurement], say: Say) -> list[LibraryTimes]:
        """As `ExportHost` has it."""
        return measure_all(wanted, self._config, say)

    def run_tests(self, name: str, files: Mapping[str, bytes], *, gpu: bool, path: str) -> Ran:
        """As `ExportHost` has it."""
        return run_in_turn(name, files, self._say, gpu=gpu, path=path)


@contextlib.contextmanager
def open_host(config: Config, say: Say) -> Iterator[ExportHost]:
    """The machine that a configuration names; at the end all that was started there is closed.

    Args:
        config: Where, jobs and isolation.
        say: Is told what is waited for.

    Raises:
        UserError: Ray is needed, and is not installed.
        MachineError: There is no such cluster, or no room in it.
    """
    if config.on == LOCAL:
        yield LocalHost(config, say)
        return
    with contextlib.closing(RayHost(config, say)) as host:
        yield host
