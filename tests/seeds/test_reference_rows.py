"""Rows of a reference, as timed results are held against them, are the reference's own."""

import pytest
import torch
from kagent.tasks import find_task
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.judge.check.inputs import InputSampler

TASKS = [
    *("softmax", "gelu", "attention", "cross_entropy", "linear_cross_entropy"),
    *(
        "adamw",
        "adamw_tensors",
        "attention_backward",
        "attention_train",
        "gelu_backward",
        "rms_norm",
        "rms_norm_backward",
        "softmax_backward",
    ),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_what_the_whole_reference_has_there(name):
    task = find_task(name)
    draws = InputSampler(task, CPU, TRAITS.inputs)
    for case in task.cases("cpu").check:
        draw = draws.fresh(case)
        whole = draws.expected(draw)
        for result, full, places in zip(task.compared, whole, draws.spot_checks(draw), strict=True):
            mine = full.double().flatten()[places.index]
            assert torch.allclose(places.expected, mine, rtol=1e-9, atol=1e-12, equal_nan=True), (
                case.name,
                result.name,
            )


@pytest.mark.parametrize("name", TASKS)
def test_the_places_of_a_draw_are_kept_with_it(name):
    task = find_task(name)
    draws = InputSampler(task, CPU, TRAITS.inputs)
    draw = draws.fresh(task.cases("cpu").bench[0])
    first = draws.spot_checks(draw)
    assert draws.spot_checks(draw) is first
    assert draw.known_results is None  # rows were enough
