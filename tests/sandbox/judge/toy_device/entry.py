"""The toy in the table of devices."""

from kagent_sandbox.device.entry import TableEntry
from kagent_sandbox.device.traits import (
    InputPolicy,
    NoiseModel,
    Placements,
    Round,
    Schedule,
    Traits,
)

TRAITS = Traits(
    schedule=Schedule((Round(3, 2), Round(5, 2)), further=None, interim_looks=0, placements=1),
    placements=Placements(least=2, most=2),
    noise=NoiseModel(
        share=0.001, us=0.0, idle_pairs=0.0, copy_bytes=1 << 16, places=2, pairs=4, samples=2
    ),
    inputs=InputPolicy(),
    race_rounds=2,
    race_samples=3,
    sweep_s=0.1,
    drift=1.5,
    alignment_bytes=512,
    native=False,
    judges_clock=False,
    disturbed_by_builds=False,
    compile_modes=(),
)


def _facts(index):
    from toy_device.backend import facts

    return facts()


def _open(index, *, products):
    from toy_device.backend import ToyBackend

    return ToyBackend()


def _baselines(index):
    from toy_device.backend import measure

    return measure


ENTRY = TableEntry(
    name="toy",
    kind="cpu",  # it is judged on the cases of a CPU
    traits=TRAITS,
    environment={"TOY_DEVICE": "1"},
    available=lambda: True,
    facts=_facts,
    timing_version=lambda: 1,
    open=_open,
    baselines=_baselines,
)
