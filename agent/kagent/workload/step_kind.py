"""Ends of a step, by name. Apart from `steps`, which imports torch: the command line does not."""

from __future__ import annotations

from typing import Literal, TypeAlias

StepKind: TypeAlias = Literal["auto", "optimizer", "call"]
"""End of a step: whichever is there, `optimizer.step()`, or a call of the outermost module."""
