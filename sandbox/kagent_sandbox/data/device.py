"""Facts about a device and its ceilings, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.target import Device


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about a device. `key` names device, driver and versions: figures with one key are
    comparable.
    """

    kind: Kind  # whose cases of a task it is judged on
    name: str
    target: str  # target of compilation: "sm_90a", "cpu"
    key: str
    memory_bytes: int
    l2_bytes: int
    units: int  # multiprocessors, or cores
    theoretical_gb_per_s: float  # from the memory clock and bus width; 0 where unknown
    unit: str = ""  # tells it from other devices of this name: a GPU's UUID

    @property
    def unique(self) -> tuple[str, str]:
        """Key of figures that are kept for later: equal cards differ by some percent."""
        return self.key, self.unit

    @property
    def device(self) -> Device | None:
        """Device that host code is told of when it is built for a GPU."""
        if self.kind == "cpu":
            return None
        return Device(self.name, self.units, self.l2_bytes, self.memory_bytes)


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of this device: the rates of the plainest kernels, timed like candidates."""

    copy_gb_per_s: float  # read + written bytes counted
    read_gb_per_s: float
    write_gb_per_s: float
    tflop_per_s: Mapping[str, float]  # matrix product per dtype of its operands
