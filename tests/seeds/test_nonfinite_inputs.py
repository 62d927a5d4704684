"""Nonfinite inputs have an infinity or a NaN in every draw, or a check sees nothing of them."""

import pytest
import torch
from kagent.tasks import find_task, task_names
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.judge.check.inputs import InputSampler

CPU = torch.device("cpu")
MOST_BYTES = 1 << 22
CASES = 10
DRAWS = 8


def nonfinite_cases(task, kind):
    """Visible ones and hidden ones of some runs, the smallest first."""
    hidden = [c for seed in range(12) for c in draw_hidden(task, kind, "check", seed)]
    found = [c for c in (*task.cases(kind).check, *hidden) if c.inputs == "nonfinite"]
    return sorted((c for c in found if task.min_bytes(c) < MOST_BYTES), key=task.min_bytes)[:CASES]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("name", task_names())
def test_every_draw_of_nonfinite_inputs_has_some(name, kind):
    task = find_task(name)
    sampler = InputSampler(task, CPU, TRAITS.inputs)
    named = any("nonfinite" in g.inputs for g in task.cases(kind).hidden_check)
    named |= any(c.inputs == "nonfinite" for c in task.cases(kind).check)
    cases = nonfinite_cases(task, kind)
    assert bool(cases) == named
    for case in cases:
        for seed in range(DRAWS):
            tensors = sampler.fresh(case, seed).tensors.values()
            floats = [t.float() for t in tensors if t.dtype.is_floating_point]
            assert not all(t.isfinite().all() for t in floats), (case, seed)
