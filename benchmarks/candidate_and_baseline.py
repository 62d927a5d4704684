"""How alike a candidate and a baseline are timed on a CPU: one copy, as both.

    python benchmarks/candidate_and_baseline.py [--mib 1,8,32] [--seconds 17]

Two launchers ("a", "b") run the same plan, a copy, in turn with torch's `clone` as a race's
baseline. Prints for each size the medians in µs, and ratios of times with 95 % intervals: b/a shows
what launchers differ by, torch/a and torch/b what a baseline gains by how it is timed. (`clone`
also takes memory for its result.)
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time

import numpy as np
import torch
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.baselines import CpuBaseline
from kagent_sandbox.device.cpu.launcher import CpuLauncher
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.judge.arena.layout import lay_out_many
from kagent_sandbox.judge.timing import estimates
from kagent_sandbox.judge.timing.noise import copy_plan

SAMPLES = 5
LIMIT_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=17.0, help="of each size")
    options = parser.parse_args()
    with CpuBackend() as backend:
        for mib in map(int, options.mib.split(",")):
            print(text(mib, blocks(backend, mib << 20, options.seconds)), flush=True)


def blocks(backend: CpuBackend, nbytes: int, seconds: float) -> dict[str, list[tuple[float, ...]]]:
    """Samples in µs of both launchers and of the baseline, in blocks, in turn."""
    x = torch.randn(nbytes // 4)
    baseline = CpuBaseline(functools.partial(torch.clone, input=x))
    count = TRAITS.placements.lasting(baseline.samples(1)[0])
    plan = copy_plan("cpu", nbytes)
    places = lay_out_many(plan, count, None)
    arena = backend.arena(places[-1].stop)
    launchers: dict[str, CpuLauncher] = {}
    for side in "ab":
        launchers[side] = backend.launcher(arena)
        launchers[side].load({})
        for i, place in enumerate(places):
            launchers[side].prepare(f"{side}{i}", plan, place.offsets)

    def candidate(side: str) -> tuple[float, ...]:
        keys, found = [f"{side}{i}" for i in range(count)], []
        launchers[side].populate(keys)
        for _ in range(SAMPLES):
            for launcher in launchers.values():
                launcher.stop()
            for place in places:
                source, result = (place.offsets[i] for i in (0, 1))
                arena.bytes(source, source + nbytes).copy_(x.view(torch.uint8))
                arena.bytes(result, result + nbytes).fill_(0x3F)
            backend.settle()
            found.append(launchers[side].sample(keys, limit_s=LIMIT_S))
        return tuple(found)

    def torchs() -> tuple[float, ...]:
        for launcher in launchers.values():
            launcher.stop()
        return tuple(baseline.samples(SAMPLES))

    ways = {"a": lambda: candidate("a"), "torch": torchs, "b": lambda: candidate("b")}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    end = time.monotonic() + seconds
    for turn in itertools.count():
        if turn % 2 == 0 and time.monotonic() > end:
            break
        for name in list(ways) if turn % 2 else reversed(ways):
            found[name].append(ways[name]())
    for launcher in launchers.values():
        launcher.close()
    arena.close()
    return found


def text(mib: int, found: dict[str, list[tuple[float, ...]]]) -> str:
    medians = {n: statistics.median(itertools.chain(*each)) for n, each in found.items()}
    words = [f"{mib} MiB"] + [f"{n} {us:.0f} µs" for n, us in medians.items()]
    for one, other in (("b", "a"), ("torch", "a"), ("torch", "b")):
        paired = estimates.PairedSamples(tuple(found[other]), tuple(found[one]))
        ratio = estimates.ratio(paired, np.random.default_rng(0))
        words.append(f"{one}/{other} {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f})")
    return ", ".join(words)


if __name__ == "__main__":
    main()
