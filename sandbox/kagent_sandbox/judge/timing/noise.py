"""A/A test: this machine's apparent ratio of one kernel timed against itself.

The kernel is a plain copy of the judge's own. Two contenders take turns with it as a candidate and
the incumbent do: in ABBA blocks, over several placements, on a CPU in a process each and on inputs
that were written before every sample. A difference that samples do not explain comes from the
machine. No number of samples removes it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kagent_sandbox.data.plan import Alloc, Buffer, Copy, Plan, TensorRef
from kagent_sandbox.judge.arena.layout import lay_out_many
from kagent_sandbox.judge.timing import estimates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kagent_sandbox.device.interface import Arena, Backend, Launcher
    from kagent_sandbox.device.traits import NoiseModel

_MORE = 3  # times as many, where those show what chance does not explain
_TRIES = 3  # what passes was a moment's: on shared cores some find 5 % that are gone a second later
_LIMIT_S = 30.0
_MAD = 1.4826  # standard deviation of normal numbers over their median absolute deviation
_DOUBT = 1.96  # an offset within so many standard deviations is what chance gives
_KNOWN_BY = 4
_SAME = 0.1  # share by which a copy's time may differ while figures of the two moments compare
_TWICE = 2.0  # so many times as noisy is another machine
_SMALL = 0.02  # share: what pairs differ by below it is nothing that changes a baseline


@dataclass(frozen=True, slots=True)
class Noise:
    """Result of an A/A test. `factor` widens all intervals of this machine's comparisons."""

    kernel_us: float = 0.0  # of the copy; 0: nothing was measured
    ratio: float = 1.0  # as of two kernels: 1 but for noise
    pair_sd: float = 0.0  # standard deviation of the copy's log(ratio) from pair to pair of blocks
    factor: float = 1.0  # on `NoiseModel.systematic`; 1: no worse than known machines
    seconds: float = 0.0

    def sd(self, us: float, model: NoiseModel, *, pairs: int, beside: int = 0) -> float:
        """Standard deviation of log(ratio) of kernels of `us`, beside what samples show themselves.

        Few pairs of blocks say little of how pairs vary, one says nothing: what they varied by in
        the A/A counts as well, as much as if `_KNOWN_BY` pairs had said it. `beside`: pairs after
        the first of the other cases of a comparison, whose mean shows what they vary by, too.
        On a device that is idle and shared with nobody, pairs of longer kernels than the copy vary
        by less, as they do from place to place. What they vary by beyond that is a neighbour's or a
        clock's doing, which lasts as long as any kernel.

        Args:
            us: Of the kernels.
            model: Of the device.
            pairs: Of blocks.
            beside: See above.
        """
        known = model.systematic(us, self.factor)
        if not self.kernel_us:
            return known
        of_copy = model.systematic(self.kernel_us)
        shrunk = min(1.0, model.systematic(us) / of_copy)
        idle = min(self.pair_sd, model.idle_pairs * of_copy)
        of_pairs = math.hypot(idle * shrunk, math.sqrt(self.pair_sd**2 - idle**2))
        share = _KNOWN_BY / (_KNOWN_BY + pairs - 1 + beside)
        return math.hypot(known, of_pairs * math.sqrt(share / pairs))

    def change(self, other: Noise) -> str:
        """Reason why times of the two moments do not compare, by the A/A tests; "" if they do."""
        if not (self.kernel_us and other.kernel_us):
            return "the machine's noise was not known" if self != other else ""
        sd = math.hypot(self.pair_sd, other.pair_sd)
        if abs(math.log(other.kernel_us / self.kernel_us)) > max(_SAME, sd):
            return f"a copy took {self.kernel_us:.0f} µs and takes {other.kernel_us:.0f} µs"
        low, high = sorted((self.pair_sd, other.pair_sd))
        if high > _TWICE * low and high - low > _SMALL:
            return f"pairs of blocks differed by {self.pair_sd:.1%}, and do by {other.pair_sd:.1%}"
        low, high = sorted((self.factor, other.factor))
        if high > _TWICE * low:
            return f"intervals were widened {self.factor:.1f}×, and are {other.factor:.1f}×"
        return ""

    @property
    def text(self) -> str:
        """One line for people."""
        widened = f"; intervals widened {self.factor:.1f}×" if self.factor > 1 else ""
        return (
            f"a {self.kernel_us:.0f} µs kernel against itself: {self.ratio:.4f}×, single pairs of "
            f"blocks differ by {self.pair_sd:.1%}{widened}"
        )


def measure_noise(backend: Backend) -> Noise:
    """Time a copy against itself on a device that is otherwise idle.

    Under a second; an offset that chance does not explain is looked into for two more, and again
    twice.

    Raises:
        MachineError: The device or the host fails.
    """
    began = time.perf_counter()
    traits, model = backend.traits, backend.traits.noise
    plan = copy_plan(backend.facts.target, model.copy_bytes)
    layouts = lay_out_many(plan, model.places, None)
    arena = backend.arena(layouts[-1].stop)
    try:
        arena.bytes(0, arena.nbytes).fill_(0x3F)
        anew = arena.bytes(0, arena.nbytes).clone()
        backend.synchronize()
        with _launchers(backend, arena) as launchers:
            keys = {side: [f"{side}{i}" for i in range(len(layouts))] for side in "ab"}
            for side in "ab":
                with _turn(launchers, side) as launcher:
                    for key, layout in zip(keys[side], layouts, strict=True):
                        launcher.prepare(key, plan, layout.offsets)
                    launcher.wait_until_idle()
                    launcher.sample(keys[side], limit_s=_LIMIT_S)  # warm up

            def block(side: str, pair: int) -> Sequence[float]:
                at_once, place = traits.schedule.placements, pair % len(layouts)
                used = keys[side] if at_once is None else keys[side][place : place + at_once]
                with _turn(launchers, side) as launcher:
                    if traits.judges_clock:  # as before a candidate's sample
                        launcher.stop()
                        arena.bytes(0, arena.nbytes).copy_(anew)
                        backend.settle()
                    return [launcher.sample(used, limit_s=_LIMIT_S) for _ in range(model.samples)]

            found = lasting_noise(block, model)
    finally:
        arena.close()
    return replace(found, seconds=time.perf_counter() - began)


def lasting_noise(block: Callable[[str, int], Sequence[float]], model: NoiseModel) -> Noise:
    """Pairs of blocks of two equal kernels, until they differ by no more than chance explains, or
    have differed `_TRIES` times: the least that they did is what lasts.

    Args:
        block: Takes samples in µs of side "a" or "b" for a pair, counted from 0.
        model: Of the device.
    """
    tries: list[Noise] = []
    for _ in range(_TRIES):
        blocks: dict[str, list[Sequence[float]]] = {"a": [], "b": []}
        for pairs in (model.pairs, _MORE * model.pairs):
            for i, side in enumerate(estimates.abba(pairs)):
                blocks[side].append(block(side, i // 2))
            found = judge_noise(blocks["a"], blocks["b"], model)
            if found.factor == 1.0:
                return found
        tries.append(found)
    return min(tries, key=lambda noise: noise.factor)


def judge_noise(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], model: NoiseModel
) -> Noise:
    """Estimate the machine's noise from blocks of two equal kernels."""
    pairs = [(tuple(x), tuple(y)) for x, y in zip(a, b, strict=True)]
    singles = [estimates.log_ratio(estimates.PairedSamples((x,), (y,))) for x, y in pairs]
    paired = estimates.PairedSamples(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))
    us = max(1e-3, statistics.median(u for block in (*a, *b) for u in block))
    offset = estimates.log_ratio(paired)
    spread = _MAD * statistics.median(abs(x - offset) for x in singles)
    chance = 1.25 * spread / math.sqrt(len(singles))  # of a median; of what counts, a bit less
    known = model.systematic(us)
    beyond = abs(offset) > _DOUBT * math.hypot(known, chance)
    factor = max(1.0, math.sqrt(max(0.0, offset**2 - chance**2)) / known) if beyond else 1.0
    return Noise(us, math.exp(offset), spread, factor)


def copy_plan(target: str, nbytes: int) -> Plan:
    """A plan that copies its argument, for A/A tests."""
    x, y = (TensorRef(i, 0, (nbytes // 4,), (1,), "float32") for i in range(2))
    buffers = (Buffer(0, "input", nbytes, "x"), Buffer(1, "scratch", nbytes))
    return Plan(target, buffers, (Alloc(1), Copy(x, y)), (y,), ())


@contextlib.contextmanager
def _launchers(backend: Backend, arena: Arena) -> Iterator[Mapping[str, Launcher]]:
    """Return the launchers of side a and side b: the same process, or one each as candidates would
    have.
    """
    with contextlib.ExitStack() as stack:
        found: dict[str, Launcher] = {}
        for side in "ab" if backend.traits.native else "a":
            found[side] = backend.launcher(arena)
            stack.callback(found[side].close)
            found[side].load({})
        yield {"b": found["a"], **found}


@contextlib.contextmanager
def _turn(launchers: Mapping[str, Launcher], side: str) -> Iterator[Launcher]:
    """The launcher of a side, while any other is stopped."""
    mine = launchers[side]
    for launcher in launchers.values():
        if launcher is not mine:
            launcher.stop()
    yield mine
