"""Torch's coordinate descent with its compilations side by side: the same search."""

import contextlib
import itertools
import math
import threading
import time
from types import SimpleNamespace

import pytest
from kagent_sandbox.device import coordinate_descent
from kagent_sandbox.device.coordinate_descent import compiling_side_by_side
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.runtime_utils import triton_config_to_hashable
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, HeuristicType
from triton import Config


def key_of(config):
    return triton_config_to_hashable(config)


def away(config, best):
    """Times of a kernel that is the fastest at one configuration; one does not compile."""
    values = [*config.kwargs.values(), config.num_warps]
    return 1 + sum(abs(math.log2(a / b)) for a, b in zip(values, best, strict=True))


class Kernel:
    """What torch's tuner is given: its own methods, without Triton and a device."""

    def __init__(self, best, broken=()):
        self.compiled, self.timed, self.compiling = [], [], 0
        self.timed_beside = False
        autotuner = CachingAutotuner.__new__(CachingAutotuner)
        autotuner.fn = SimpleNamespace(fn=object(), src="", __name__="kernel")
        autotuner.lock = threading.Lock()
        autotuner.heuristic_type = HeuristicType.POINTWISE
        autotuner.inductor_meta = {"warp_size": 32, "max_threads_per_block": 1024}
        autotuner.save_cache_hook = None
        autotuner.size_hints = {"x": 4096, "y": 4096}
        autotuner.coordesc_tuner = CoordescTuner(
            size_hints=autotuner.size_hints, inductor_meta=autotuner.inductor_meta
        )
        autotuner._ensure_kernel_loaded = lambda: None

        def compile_one(config):
            self.compiling += 1
            self.compiled.append(key_of(config))
            time.sleep(0.005)  # whoever did not wait for it would time beside it
            self.compiling -= 1
            if (config.kwargs["XBLOCK"], config.kwargs["YBLOCK"]) in broken:
                raise RuntimeError("out of registers")
            launcher = SimpleNamespace(config=config, n_regs=0, n_spills=0, shared=0, cache_hash="")
            return SimpleNamespace(make_launcher=lambda: launcher)

        def bench(launcher, *_, **__):
            self.timed_beside |= self.compiling > 0
            self.timed.append(key_of(launcher.config))
            return away(launcher.config, best)

        autotuner._precompile_config = compile_one
        autotuner.bench = bench
        self.autotuner = autotuner

    def tune(self):
        start = SimpleNamespace(config=Config({"XBLOCK": 32, "YBLOCK": 32}, num_warps=4))
        return self.autotuner._coordinate_descent_tuning(start).config


@pytest.mark.parametrize(
    ("best", "broken"),
    [((32, 32, 4), []), ((256, 8, 8), []), ((1024, 1, 1), []), ((256, 8, 8), [(64, 32)])],
)
def test_the_search_is_torchs_own(best, broken):
    alone, together = Kernel(best, broken), Kernel(best, broken)
    found = alone.tune()
    with compiling_side_by_side():
        assert key_of(together.tune()) == key_of(found)
    assert together.timed == alone.timed
    assert set(together.compiled) >= set(together.timed)
    assert not together.timed_beside


def test_neighbours_are_compiled_before_the_first_of_them_is_timed(monkeypatch):
    monkeypatch.setattr(coordinate_descent, "usable_cores", lambda: 4)
    kernel = Kernel((32, 32, 4))
    everyone, calls = threading.Barrier(4, timeout=20), itertools.count()
    compile_one = kernel.autotuner._precompile_config

    def with_others(config):
        if threading.current_thread() is not threading.main_thread() and next(calls) < 4:
            everyone.wait()  # four at once, or it breaks
        return compile_one(config)

    kernel.autotuner._precompile_config = with_others
    with compiling_side_by_side():
        kernel.tune()
    # Both sides of two blocks and of the number of warps, and then each once more, from the cache.
    assert len(set(kernel.compiled[1:7])) == 6
    assert kernel.timed[1:] == kernel.compiled[7:]
    assert not everyone.broken


def test_afterwards_torch_is_as_it_was():
    before = CachingAutotuner._coordinate_descent_tuning, CoordescTuner.compare_config
    with contextlib.suppress(RuntimeError), compiling_side_by_side():
        raise RuntimeError
    assert before == (CachingAutotuner._coordinate_descent_tuning, CoordescTuner.compare_config)
