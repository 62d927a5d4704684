"""The loops of real kernels: a seed in Triton and one in CUDA, built for sm_90a without a GPU."""

from dataclasses import replace

import pytest
from kagent.evolve.open_machine import request_maker, visible_cases
from kagent.tasks import find_task
from kagent.text import loop_lines
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.compiled import MOST_LOOPS_OF_ALL, loop_text


@pytest.mark.parametrize("seed", ["triton_online.py", "cuda_cluster.py"])
def test_a_seed_has_loops_that_load_and_exponentiate(seed, builder):
    task = find_task("softmax" if seed.startswith("triton") else "cross_entropy")
    cases = visible_cases(task, "gpu")[-1:]
    request = request_maker(task, "sm_90a", cases, 1)((task.folder / seed).read_text())
    built = builder.build(replace(request, loops=True))
    assert isinstance(built, Built), built
    assert 0 < len(built.loops) <= MOST_LOOPS_OF_ALL
    kinds = {kind for loop in built.loops for kind in loop.counts}
    assert "MUFU" in kinds
    assert any(kind.startswith("LDG ") for kind in kinds)
    for loop in built.loops:
        assert sum(loop.counts.values()) <= loop.instructions
        assert "clocks for a warp on each scheduler" in loop_text(loop)


def test_main_loops_come_first_where_warps_wait_for_others(builder):
    """A Gluon kernel with a warp group for loads: each of its binaries has a loop of products."""
    task = find_task("attention")
    cases = visible_cases(task, "gpu")[-2:]
    request = request_maker(task, "sm_90a", cases, 1)((task.folder / "gluon_hopper.py").read_text())
    built = builder.build(replace(request, loops=True))
    assert isinstance(built, Built), built
    binaries = {x.binary for x in built.loops}
    assert len(binaries) == 2
    first = built.loops[:2]
    assert {x.binary for x in first} == binaries
    assert all(x.counts["HGMMA"] and x.counts["MUFU"] for x in first)
    lines = loop_lines(built.loops)
    assert all(
        f"_attention {x.binary[:8]} at" in line for x, line in zip(first, lines, strict=False)
    )
