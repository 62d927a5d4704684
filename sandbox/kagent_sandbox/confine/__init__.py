"""Confinement of untrusted code with what an ordinary Linux offers: limits, Landlock, seccomp,
namespaces and control groups, in tiers that are found out by trying.
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
