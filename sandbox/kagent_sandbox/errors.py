"""Errors of the machine and of the user, never of a kernel (those are verdicts).

KagentError
├── UserError            bad input: what was given, what was expected, what to do
│   └── TaskError        a task folder that does not make sense
├── MachineError         this host cannot do what was asked
│   ├── ToolchainError   a compiler or its headers are missing or broken
│   ├── ConfinementError the requested isolation is not available here
│   ├── JudgeMoved       a judge's successor is on another device
│   └── DeviceError      the GPU or its driver
│       ├── DeviceWedged it no longer computes correctly after a fault
│       └── DeviceFull   its memory is not enough while others hold some of it
├── IncumbentWrong       the incumbent is wrong where it is timed (data/verdict.py)
├── RunError             a run's folder: full disk, read-only, in use, damaged, too new
└── ChildDied            a trusted process ended unexpectedly
"""

from __future__ import annotations

INSTALL_CUDA = "pip install 'kagent[cuda]'"
"""Command that installs the CUDA toolkit's wheels: NVRTC, its headers, the driver's bindings."""


class KagentError(Exception):
    """Base of all errors that a user may see; the text is complete without a traceback."""

    exit_code = 1


class UserError(KagentError):
    """Bad input."""

    exit_code = 2


class TaskError(UserError):
    """A task folder that does not make sense."""


class MachineError(KagentError):
    """This host cannot do what was asked. (3 is the code of a run that is not FASTER.)"""

    exit_code = 5


class ToolchainError(MachineError):
    """A compiler or its headers are missing or broken."""


class ConfinementError(MachineError):
    """The isolation that was asked for is not to be had here."""


class JudgeMoved(MachineError):  # noqa: N818
    """A judge was lost, and the one in its place is on another device of the same kind.

    Attributes:
        unit: Name of that device.
    """

    def __init__(self, text: str, unit: str = "") -> None:
        super().__init__(text)
        self.unit = unit


class DeviceError(MachineError):
    """The GPU or its driver misbehaves."""


class DeviceWedged(DeviceError):  # noqa: N818
    """The device no longer computes correctly after a fault."""


class DeviceFull(DeviceError):  # noqa: N818
    """The device's memory is not enough while others hold some of it."""


class RunError(KagentError):
    """A run's folder cannot be used."""

    exit_code = 4


class ChildDied(KagentError):  # noqa: N818
    """A trusted helper process ended unexpectedly."""
