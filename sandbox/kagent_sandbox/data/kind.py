"""Whose cases of a task a kernel is built for and judged on: a GPU's or a CPU's."""

from __future__ import annotations

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["gpu", "cpu"]
"""A section of task.toml. Devices of one kind (two makes of GPU) share its cases."""


def kind_of_target(target: str) -> Kind:
    """The kind that kernels compiled for a target belong to."""
    return "cpu" if target == "cpu" else "gpu"
