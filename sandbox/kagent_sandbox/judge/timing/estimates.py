"""Statistics of interleaved timings. Pure functions over samples in µs.

Two kernels are compared in blocks ordered ABBA. Drift that is linear in time hits both alike, and
each pair of neighbouring blocks has a ratio of its own. The interval of the mean ratio is a
bootstrap over pairs; with few pairs also over samples within blocks. It is widened by the noise
that no number of samples removes: the place of buffers shifts short kernels by up to a percent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000
LOOK_RESAMPLES = 1000  # of an interim analysis, which only decides whether to go on
_LEAST_US = 1e-3
_NORMAL_95 = 1.959964
_ENOUGH_PAIRS = 8
"""Pairs from which on only pairs are resampled. The variation of samples is part of that of pairs,
and is counted twice where both are resampled (Davison and Hinkley, Bootstrap Methods and their
Application, 3.8). Fewer pairs have too few resamples.
"""
NOISE_SPAN = 4.0  # largest upper over lower end of a median's interval that still means something


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedSamples:
    """Blocks of samples of two kernels on one case: block i of `a` ran next to block i of `b`."""

    a: tuple[tuple[float, ...], ...]
    b: tuple[tuple[float, ...], ...]


def abba(pairs: int) -> str:
    """Order of blocks: "…abbaabba", with `pairs` blocks of each kernel, the last one of a."""
    return "".join("ba" if i % 2 == 0 else "ab" for i in reversed(range(pairs)))


def median_interval(samples: Sequence[float]) -> Interval:
    """Median with the 95 % interval that order statistics give without any assumed distribution.

    The number of samples below the true median is binomial(n, 1/2); with few samples the interval
    is their range.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    if n == 0:
        raise ValueError("median of no samples")
    reach = _NORMAL_95 * math.sqrt(n) / 2
    low = max(0, math.floor((n - 1) / 2 - reach))
    high = min(n - 1, math.ceil((n - 1) / 2 + reach))
    return Interval(float(np.median(ordered)), float(ordered[low]), float(ordered[high]))


def is_noise(samples: Sequence[float]) -> bool:
    """Whether samples are no measurement: not even the order of magnitude of their median is known.

    On a busy host a neighbour may take most of the time of most samples.
    """
    interval = median_interval(samples)
    return interval.low <= 0 or interval.high > NOISE_SPAN * interval.low


def bootstrap_log_ratios(
    paired: PairedSamples,
    rng: np.random.Generator,
    *,
    noise: float = 0.0,
    resamples: int = RESAMPLES,
) -> Floats:
    """Return the bootstrap distribution of log(time of b / time of a): positive where a is faster.

    Pairs of blocks are resampled; where there are fewer than `_ENOUGH_PAIRS`, samples within each
    block are, too. Each resample gives the statistic of `log_ratio`. Resamples vary less than the
    truth, by the square root of (pairs - 1) / pairs, so deviations are stretched by as much. One
    pair alone tells nothing of how pairs vary: `noise` has to.

    Args:
        paired: Samples of both kernels in µs.
        rng: Source of the resamples.
        noise: Standard deviation of the log ratio that is added to every resample.
        resamples: Number of resamples.

    Returns:
        Log ratios, float64 [resamples].
    """
    center, pairs = log_ratio(paired), len(paired.a)
    picks = rng.integers(0, pairs, size=(resamples, pairs))
    if pairs < _ENOUGH_PAIRS:
        logs = _middle(
            _logs(_medians(paired.b, picks, rng)) - _logs(_medians(paired.a, picks, rng))
        )
    else:
        logs = _middle(_pair_logs(paired)[picks])
    if pairs > 1:
        logs = center + (logs - center) * math.sqrt(pairs / (pairs - 1))
    return logs + rng.normal(0.0, noise, size=resamples) if noise else logs


def log_ratio(paired: PairedSamples) -> float:
    """Return log(time of b / time of a), the interquartile mean over pairs of blocks.

    A pair's ratio is that of its blocks' medians. Both blocks met the machine in the same state.
    Pairs that were disturbed are left out.

    Raises:
        ValueError: There are no pairs, or a block is empty.
    """
    if len(paired.a) != len(paired.b) or not paired.a or not all((*paired.a, *paired.b)):
        raise ValueError(
            "paired samples need as many blocks of one kernel as of the other, none empty"
        )
    return float(_middle(_pair_logs(paired)[np.newaxis])[0])


def _pair_logs(paired: PairedSamples) -> Floats:
    """Return log(time of b / time of a) of each pair, from its blocks' medians, [pairs]."""
    a, b = (_logs(np.asarray([np.median(x) for x in side])) for side in (paired.a, paired.b))
    return np.asarray(b - a, dtype=np.float64)


def _logs(us: Floats) -> Floats:
    """Return logarithms of times. They may be 0 or less where the cost of a request was subtracted:
    see `is_noise`.
    """
    return np.asarray(np.log(np.maximum(us, _LEAST_US)), dtype=np.float64)


def _middle(values: Floats) -> Floats:
    """Interquartile mean of each row: a quarter of its values is left out at either end."""
    out = values.shape[1] // 4
    kept = np.sort(values, axis=1)[:, out : values.shape[1] - out]
    return np.asarray(kept.mean(axis=1), dtype=np.float64)


def _medians(
    blocks: Sequence[Sequence[float]], pairs: NDArray[np.int64], rng: np.random.Generator
) -> Floats:
    """Medians of the blocks that were picked, each resampled to its own width.

    Of a sorted block, n draws with replacement are n indices floor(n u), u uniform, and their
    median needs the middle one or two of the u alone: the k-th smallest of n is Beta(k, n + 1 - k),
    and the next one the smallest of n - k uniform between that and 1 (David and Nagaraja, Order
    Statistics, 2.1 and 2.5).
    """
    widths = np.asarray([len(b) for b in blocks])
    timed = np.full((len(blocks), int(widths.max())), np.inf)
    for row, block in zip(timed, blocks, strict=True):
        row[: len(block)] = np.sort(block)
    count = widths[pairs]
    k = (count + 1) // 2
    low = rng.beta(k, count + 1 - k)
    more = np.maximum(count - k, 1)
    high = np.where(count % 2, low, 1 - (1 - low) * rng.random(pairs.shape) ** (1 / more))
    lower, upper = (
        timed[pairs, np.minimum((u * count).astype(np.int64), count - 1)] for u in (low, high)
    )
    return np.asarray((lower + upper) / 2, dtype=np.float64)


def ratio(paired: PairedSamples, rng: np.random.Generator, *, noise: float = 0.0) -> Interval:
    """Return time of b / time of a (`log_ratio`) with its interval. Above 1, a is faster.

    Example:
        Two kernels in two pairs of blocks, in µs; a is 5 % faster::

            paired = PairedSamples(a=((20.0, 20.2), (20.1, 19.9)), b=((21.0, 21.2), (21.1, 20.9)))
            print(ratio(paired, np.random.default_rng(0), noise=0.002).value)  # 1.05
    """
    logs = bootstrap_log_ratios(paired, rng, noise=noise)
    value = math.exp(log_ratio(paired))
    low, high = np.exp(np.percentile(logs, [2.5, 97.5]))
    return Interval(value, min(float(low), value), max(float(high), value))


@dataclass(frozen=True, slots=True)
class Combined:
    """Geometric mean of ratios over cases, its interval, and the probability that it exceeds 1."""

    ratio: Interval
    p_faster: float
    cases: Mapping[str, float]


def combine(
    paired: Mapping[str, PairedSamples],
    rng: np.random.Generator,
    noise: Mapping[str, float],
    *,
    resamples: int = RESAMPLES,
) -> Combined:
    """Combine the paired samples of several cases. Every case weighs the same.

    Args:
        paired: Samples in µs by case.
        rng: Source of the bootstrap.
        noise: Standard deviation of the log ratio that is added to every resample, by case.
        resamples: Number of bootstrap resamples.
    """
    total = np.zeros(resamples)
    cases: dict[str, float] = {}
    for case, samples in paired.items():
        more = bootstrap_log_ratios(samples, rng, noise=noise.get(case, 0.0), resamples=resamples)
        total += more
        cases[case] = math.exp(log_ratio(samples))
    total /= len(paired)
    value = geometric_mean(list(cases.values()))
    low, high = (float(v) for v in np.exp(np.percentile(total, [2.5, 97.5])))
    p_faster = float(np.mean(total > 0) + 0.5 * np.mean(total == 0))
    return Combined(Interval(value, min(low, value), max(high, value)), p_faster, cases)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def log_stderr(times: Sequence[Interval]) -> float:
    """Standard error of the logarithm of a geometric mean of medians, from their intervals."""
    widths = [math.log(t.high / t.low) / (2 * _NORMAL_95) for t in times if t.low > 0]
    return math.sqrt(math.fsum(w * w for w in widths)) / max(1, len(times))
