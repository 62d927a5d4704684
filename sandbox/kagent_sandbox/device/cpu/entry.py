"""The CPU in the table of devices. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kagent_sandbox.device.cpu.openmp import WAITING
from kagent_sandbox.device.cpu.traits import TIMING_VERSION, TRAITS
from kagent_sandbox.device.entry import TableEntry
from kagent_sandbox.errors import ToolchainError
from kagent_sandbox.runtime import cpp
from kagent_sandbox.runtime.errors import KernelUnavailable

if TYPE_CHECKING:
    from kagent_sandbox.data.device import DeviceFacts
    from kagent_sandbox.device.baseline_calls import BaselineCall, MeasuredBaseline
    from kagent_sandbox.device.interface import Backend


def _facts(index: int) -> DeviceFacts:
    del index
    from kagent_sandbox.device.cpu.facts import cpu_facts

    return cpu_facts()


def _require() -> None:
    try:
        cpp.compiler()  # or torch.compile fails first, case by case, for minutes
    except KernelUnavailable as e:
        raise ToolchainError(f"timing on the CPU needs a C++ compiler: {e}") from None


def _open(index: int, *, products: bool) -> Backend:
    del index, products  # there is one, and torch is loaded in every launcher
    from kagent_sandbox.device.cpu.backend import CpuBackend

    _require()
    return CpuBackend()


def _baselines(index: int) -> Callable[[BaselineCall], MeasuredBaseline]:
    del index
    from kagent_sandbox.device.cpu.baselines import measure

    return measure


ENTRY = TableEntry(
    name="cpu",
    kind="cpu",
    traits=TRAITS,
    # The final race's baselines run in the judge: they wait like candidates do, and must not pay
    # for page faults that candidates' arena does not have.
    environment={
        **WAITING,
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    },
    available=lambda: True,
    require=_require,
    facts=_facts,
    timing_version=lambda: TIMING_VERSION,
    open=_open,
    baselines=_baselines,
)
