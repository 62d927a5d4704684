"""Confinement of untrusted code with what an ordinary Linux offers to everybody:

limits, Landlock, seccomp.
"""

from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.confine.presets import (
    builder_confinement,
    cpu_launcher_confinement,
    gpu_launcher_confinement,
    interpreter_confinement,
)

__all__ = [
    "Confinement",
    "Tier",
    "builder_confinement",
    "cpu_launcher_confinement",
    "gpu_launcher_confinement",
    "interpreter_confinement",
]
