"""Traits of NVIDIA GPUs as devices. The module needs neither torch nor a device."""

from __future__ import annotations

from kagent_sandbox.data.race import COMPILE_MODES
from kagent_sandbox.device.traits import (
    InputPolicy,
    KeptLaunchers,
    NoiseModel,
    Placements,
    Round,
    Schedule,
    Traits,
)

TIMING_VERSION = 2
"""Changes whenever times are no longer comparable with earlier ones: part of all caches' keys."""

TRAITS = Traits(
    # Every sample costs fresh inputs and a verification, which cost more than the sample itself.
    schedule=Schedule((Round(1, 14), Round(1, 14), Round(2, 14)), None, 0, 1),
    # Addresses shift a 28 µs kernel by 0.7 %. Everybody has the same ones, and 5 GB in two places,
    # with the reference's copies in float64, would be more than the device has.
    placements=Placements(least=2, most=2, single_share=1 / 16),
    # H100: 0.2 % at ≥ 100 µs, 1 % at 28 µs (addresses of buffers decide).
    noise=NoiseModel(
        share=0.002,
        us=0.2,
        idle_pairs=2.5,  # idle H100s showed 0.5 to 1.6 % for a copy of 43 µs
        copy_bytes=64 << 20,  # 45 µs on an H100
        places=2,
        pairs=8,
        samples=8,
    ),
    inputs=InputPolicy(tf32=True),
    # Starting a launcher costs the lane half a second: those that checked a candidate wait for its
    # measurement. Each holds a context, nearly 1 GiB. Other judges take turns on the device, and
    # have no use for a turn without memory.
    kept_launchers=KeptLaunchers(most=4, bytes_each=8 << 30, share=1 / 32),
    # A race's ratio is the mean of the middle half of its rounds: of 12, three may be disturbed at
    # either end. Of six rounds with five samples, one that was disturbed twice shifted a bootstrap,
    # and a kernel of 36 us as fast as torch was known as 0.64 to 1.04 times it.
    race_rounds=12,
    race_samples=3,
    sweep_s=0.5,
    drift=1.1,
    # Long kernels' samples vary by a tenth as much as short ones', and each costs inputs that are a
    # hundred times as large.
    enough_samples={400.0: 2, 100.0: 4},
    alignment_bytes=512,
    native=False,
    judges_clock=False,
    disturbed_by_builds=False,
    compile_modes=tuple(COMPILE_MODES),
)
