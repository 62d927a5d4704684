"""Traits of the CPU as a device. The module needs neither torch nor a device."""

from __future__ import annotations

from kagent_sandbox.device.traits import (
    InputPolicy,
    NoiseModel,
    Placements,
    Round,
    Schedule,
    Traits,
)

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
