"""The loops of real kernels: a seed in Triton and one in CUDA, built for sm_90a without a GPU."""

from dataclasses import replace

import pytest
from kagent.evolve.open_machine import request_maker, visible_cases
from kagent.tasks import find_task
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.compiled import MOST_LOOPS_OF_ALL, loop_text


@pytest.mark.parametrize("seed", ["triton_online.py", "cuda_cluster.py"])
def test_a_seed_has_loops_that_load_and_exponentiate(seed):
    task = find_task("softmax" if seed.startswith("triton") else "cross_entropy")
    cases = visible_cases(task, "gpu")[-1:]
    request = request_maker(task, "sm_90a", cases, 1)((task.folder / seed).read_text())
    with Builder() as builder:
        built = builder.build(replace(request, loops=True))
    assert isinstance(built, Built), built
    assert 0 < len(built.loops) <= MOST_LOOPS_OF_ALL
    kinds = {kind for loop in built.loops for kind in loop.counts}
    assert "MUFU" in kinds
    assert any(kind.startswith("LDG ") for kind in kinds)
    for loop in built.loops:
        assert sum(loop.counts.values()) <= loop.instructions
        assert "clocks for a warp on each scheduler" in loop_text(loop)
