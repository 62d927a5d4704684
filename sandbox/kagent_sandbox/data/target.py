"""Targets of compilation: facts of each architecture's usual device, known without having one.

Host code may ask for device properties while it is traced; it gets these, or those of the device
that it is judged on. A plan never depends on the machine that built it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kagent_sandbox.errors import UserError

DEFAULT_TARGET = "sm_90a"
"""Target of GPU kernels where nobody names one, and this machine has no GPU."""


@dataclass(frozen=True, slots=True)
class Target:
    """An architecture and its representative device. Sizes in bytes."""

    name: str  # "cpu", "sm_90a"
    capability: int  # 90; 0 for the CPU
    device_name: str
    multiprocessors: int
    shared_per_block: int  # most dynamic shared memory that a block can ask for
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int
    memory_clock_khz: int
    memory_bus_bits: int
    clock_khz: int
    registers_per_multiprocessor: int = 65536
    warp_size: int = 32
    threads_per_block: int = 1024

    @property
    def is_cpu(self) -> bool:
        """Whether this is the host's processor."""
        return self.capability == 0

    @property
    def major(self) -> int:
        """First part of the compute capability."""
        return self.capability // 10

    @property
    def minor(self) -> int:
        """Second part of the compute capability."""
        return self.capability % 10


@dataclass(frozen=True, slots=True)
class Device:
    """A device, as far as it may differ from others of its architecture. Sizes in bytes."""

    name: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

# capability: name, multiprocessors, shared memory of a block and of a multiprocessor in KiB,
# threads of a multiprocessor, L2 in MiB, memory in GiB, memory clock in MHz, bus in bits, clock in
# MHz (data sheets, and "Technical Specifications per Compute Capability" of the CUDA programming
# guide)
_DEVICES: Mapping[int, tuple[str, int, int, int, int, int, int, int, int, int]] = {
    80: ("NVIDIA A100-SXM4-80GB", 108, 163, 164, 2048, 40, 80, 1593, 5120, 1410),
    86: ("NVIDIA A10", 72, 99, 100, 1536, 6, 24, 6251, 384, 1695),
    87: ("NVIDIA Jetson AGX Orin", 16, 163, 164, 1536, 4, 64, 3200, 256, 1300),
    89: ("NVIDIA L40S", 142, 99, 100, 1536, 96, 48, 9001, 384, 2520),
    90: ("NVIDIA H100 80GB HBM3", 132, 227, 228, 2048, 50, 80, 2619, 5120, 1980),
    100: ("NVIDIA B200", 148, 227, 228, 2048, 126, 180, 3996, 8192, 1965),
    103: ("NVIDIA B300", 148, 227, 228, 2048, 126, 270, 3996, 8192, 1965),
    120: ("NVIDIA GeForce RTX 5090", 170, 99, 100, 1536, 96, 32, 14001, 512, 2407),
}


def parse_target(name: str, device: Device | None = None) -> Target:
    """`cpu`, `sm_80`, `sm_90a`, `sm_100`, ...

    Args:
        name: Of the architecture.
        device: One of that architecture; its usual device, if None.

    Raises:
        UserError: The architecture is unknown.
    """
    if name == "cpu":
        return Target("cpu", 0, "cpu", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0)
    digits = name.removeprefix("sm_").rstrip("af")
    usual = _DEVICES.get(int(digits)) if digits.isdecimal() and name.startswith("sm_") else None
    if usual is None:
        known = ", ".join(f"sm_{c}" for c in _DEVICES)
        raise UserError(
            f"unknown target {name!r}: expected cpu or one of {known} (sm_90a and the like too)"
        )
    title, units, block, unit_shared, threads, l2, memory, memory_mhz, bus, mhz = usual
    found = Target(
        name=name,
        capability=int(digits),
        device_name=title,
        multiprocessors=units,
        shared_per_block=block * _KIB,
        shared_per_multiprocessor=unit_shared * _KIB,
        threads_per_multiprocessor=threads,
        l2_bytes=l2 * _MIB,
        memory_bytes=memory * _GIB,
        memory_clock_khz=memory_mhz * 1000,
        memory_bus_bits=bus,
        clock_khz=mhz * 1000,
    )
    if device is None:
        return found
    return replace(
        found,
        device_name=device.name,
        multiprocessors=device.multiprocessors,
        l2_bytes=device.l2_bytes,
        memory_bytes=device.memory_bytes,
    )
