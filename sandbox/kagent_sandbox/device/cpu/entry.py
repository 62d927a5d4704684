"""The CPU in the table of devices. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kagent_sandbox.device.cpu.openmp import WAITING
from kagent_sandbox.device.entry import TableEntry
from kagent_sandbox.device.traits import (
    InputPolicy,
    NoiseModel,
    Placements,
    Round,
    Schedule,
    Traits,
)
from kagent_sandbox.errors import ToolchainError
from kagent_sandbox.runtime import cpp
from kagent_sandbox.runtime.errors import KernelUnavailable

if TYPE_CHECKING:
    from kagent_sandbox.data.device import DeviceFacts
    from kagent_sandbox.device.baseline_calls import BaselineCall, MeasuredBaseline
    from kagent_sandbox.device.interface import Backend

TIMING_VERSION = 3
"""Changes whenever a CPU's times no longer compare with earlier ones."""

TRAITS = Traits(
    # A pair of single samples is over within some 10 ms, in which little else happens: pairs differ
    # by hardly more than those of longer blocks would, and there can be more of them. Who is far
    # behind shows from four. 24 are the least that anybody is promoted by.
    schedule=Schedule((Round(4, 1), Round(6, 1), Round(14, 1)), Round(36, 1), 9, None),
    # Three, and more for short kernels, since a sample runs all of them, candidates' and baselines'
    # alike: what waking up varies by is then 3 % of it.
    placements=Placements(least=3, most=64, span_us=1800.0),
    # A shared CPU: what pairs of blocks show is all that there is, in fresh processes too
    # (docs/measuring.md); half a percent is for what they cannot.
    noise=NoiseModel(
        share=0.005,
        us=0.0,
        idle_pairs=0.0,  # cores are shared at any length
        copy_bytes=8 << 20,  # some hundreds of µs
        places=3,
        pairs=30,
        samples=1,
    ),
    # Drawing costs as much as a whole check, and as much as a sample.
    inputs=InputPolicy(pool=3, stock_share=0.1, threads=4),
    race_rounds=3,
    race_samples=10,
    sweep_s=0.25,
    drift=2.0,
    alignment_bytes=64,
    native=True,  # and so no launcher is kept: native code that waits could not be trusted to
    judges_clock=True,
    disturbed_by_builds=True,
    compile_modes=("compile",),
)


def _facts(index: int) -> DeviceFacts:
    del index
    from kagent_sandbox.device.cpu.facts import cpu_facts

    return cpu_facts()


def _open(index: int, *, products: bool) -> Backend:
    del index, products  # there is one, and torch is loaded in every launcher
    from kagent_sandbox.device.cpu.backend import CpuBackend

    try:
        cpp.compiler()  # or torch.compile fails first, case by case, for minutes
    except KernelUnavailable as e:
        raise ToolchainError(f"timing on the CPU needs a C++ compiler: {e}") from None
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
    facts=_facts,
    timing_version=lambda: TIMING_VERSION,
    open=_open,
    baselines=_baselines,
)
