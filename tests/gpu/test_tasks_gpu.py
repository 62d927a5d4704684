"""The built-in tasks themselves: on a GPU, too, a seed gives the same inputs each time."""

import pytest
import torch
from kagent.tasks import find_task, task_names
from kagent_sandbox.judge.check.task_checker import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", task_names())
def test_a_built_in_task_passes_its_check(name):
    found = check(find_task(name), "gpu", torch.device("cuda"))
    assert found.holes == ()
    assert found.wrong > 3
