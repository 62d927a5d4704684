"""A/A: planted blocks, and a real one of this machine."""

import numpy as np
import pytest
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.table import find_device
from kagent_sandbox.judge.timing.noise import Noise, judge_noise, lasting_noise, measure_noise

GPU, CPU = (find_device(name).traits.noise for name in ("gpu", "cpu"))


def blocks(rng, us, spread, pairs=8, samples=8):
    return [tuple(us * np.exp(rng.normal(0, spread, samples))) for _ in range(pairs)]


def test_a_calm_machine_widens_nothing():
    rng = np.random.default_rng(0)
    found = judge_noise(blocks(rng, 45.0, 0.002), blocks(rng, 45.0, 0.002), GPU)
    assert found.factor == 1.0
    assert found.kernel_us == pytest.approx(45.0, rel=0.01)
    assert found.ratio == pytest.approx(1.0, abs=0.005)
    assert "itself" in found.text
    assert "widened" not in found.text


def test_an_offset_that_chance_does_not_explain_widens_intervals():
    rng = np.random.default_rng(1)
    found = judge_noise(blocks(rng, 45.0, 0.002), blocks(rng, 47.0, 0.002), GPU)
    assert found.factor == pytest.approx(np.log(47 / 45) / GPU.systematic(45), rel=0.1)
    assert "widened" in found.text
    wide = GPU.systematic(300.0, found.factor)
    assert wide == pytest.approx(found.factor * GPU.systematic(300.0))


@pytest.mark.parametrize(("last", "widened"), [(7, False), (31, False), (63, False), (10**6, True)])
def test_an_offset_widens_intervals_only_if_it_lasts(last, widened):
    """Side b is 5 % slower in the first so many pairs: a moment's disturbance, or the machine."""
    rng = np.random.default_rng(4)
    taken = []

    def block(side, pair):
        slow = side == "b" and taken.count("b") <= last
        taken.append(side)
        return list((525.0 if slow else 500.0) * np.exp(rng.normal(0, 0.005, 4)))

    found = lasting_noise(block, CPU)
    assert taken.count("a") == taken.count("b")
    assert (found.factor > 1) is widened
    if widened:
        assert found.factor == pytest.approx(np.log(1.05) / 0.005, rel=0.1)
    else:
        assert found.ratio == pytest.approx(1.0, abs=0.01)


def test_pairs_that_differ_widely_hide_an_offset():
    rng = np.random.default_rng(2)
    found = judge_noise(blocks(rng, 500.0, 0.5), blocks(rng, 510.0, 0.5), CPU)
    assert found.factor == 1.0
    assert found.pair_sd > 0.05


def test_one_disturbed_block_is_no_noise():
    rng = np.random.default_rng(3)
    a, b = blocks(rng, 500.0, 0.005), blocks(rng, 500.0, 0.005)
    b[3] = tuple(9 * us for us in b[3])
    found = judge_noise(a, b, CPU)
    assert found.factor == 1.0
    assert found.pair_sd < 0.02


def test_what_pairs_vary_by_counts_until_there_are_many():
    restless = judge_noise(
        blocks(np.random.default_rng(6), 100.0, 0.2), blocks(np.random.default_rng(7), 100.0, 0.2),
        CPU,
    )  # fmt: skip
    known = CPU.systematic(100.0, restless.factor)
    sds = [restless.sd(100.0, CPU, pairs=n) for n in (1, 4, 16)]
    assert sds == sorted(sds, reverse=True)
    assert sds[0] == pytest.approx(np.hypot(known, restless.pair_sd))
    assert sds[2] > known
    shown_by_others = restless.sd(100.0, CPU, pairs=1, beside=12)
    assert known < shown_by_others == pytest.approx(np.hypot(known, restless.pair_sd / 2))


def test_on_a_gpu_longer_kernels_than_the_copy_vary_less():
    found = Noise(kernel_us=43.0, pair_sd=0.015)  # a restless H100: 0.12 % at 351 µs
    known = {us: GPU.systematic(us) for us in (12.0, 43.0, 351.0)}
    of_pairs = {12.0: 0.015, 43.0: 0.015, 351.0: 0.015 * known[351.0] / known[43.0]}
    for us, alone in known.items():
        expected = np.hypot(alone, of_pairs[us])
        assert found.sd(us, GPU, pairs=1) == pytest.approx(expected)
    assert of_pairs[351.0] < 0.006


def test_what_neighbours_do_is_not_less_for_longer_kernels():
    busy = Noise(kernel_us=43.0, pair_sd=0.1, factor=5.0)  # a GPU that another program uses
    alone = GPU.systematic(351.0, 5.0)
    assert busy.sd(351.0, GPU, pairs=1) > np.hypot(alone, 0.098)
    assert busy.sd(351.0, GPU, pairs=1) < busy.sd(43.0, GPU, pairs=1)
    cores = Noise(kernel_us=400.0, pair_sd=0.1)  # a CPU's are shared at any length
    assert cores.sd(5.0, CPU, pairs=1) == cores.sd(5000.0, CPU, pairs=1)


def test_nothing_measured_adds_nothing():
    assert Noise().sd(50.0, GPU, pairs=1) == GPU.systematic(50.0)


def test_this_machine_is_asked():
    with CpuBackend() as backend:
        found = measure_noise(backend)
    assert found.kernel_us > 0
    assert found.pair_sd >= 0
    assert found.factor >= 1
    assert found.seconds > 0
