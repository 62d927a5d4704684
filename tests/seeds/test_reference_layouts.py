"""Torch's own implementation of a task gives the same for tensors that lie otherwise in memory: the
exported library calls it with whatever a user passes.
"""

import pytest
import torch
from kagent.tasks import find_task, task_names
from seed_cases import arguments, outputs


def transposed(value):
    """The same values, the last dimension not the fastest."""
    matrix = isinstance(value, torch.Tensor) and value.dim() > 1
    return value.mT.contiguous().mT if matrix else value


@pytest.mark.parametrize("name", task_names())
def test_eager_takes_tensors_whose_last_dimension_is_not_the_fastest(name):
    task = find_task(name)
    reference = task.reference()
    for case in task.cases("cpu").check:
        given = arguments(task, reference, case, seed=0)
        turned = {n: transposed(v) for n, v in given.items()}
        expected = outputs(task, reference.eager, given)
        for one, other in zip(outputs(task, reference.eager, turned), expected, strict=True):
            assert one.dtype == other.dtype
            one, other = (torch.nan_to_num(t.double(), posinf=0, neginf=0) for t in (one, other))
            off = torch.linalg.vector_norm(one - other)
            assert off <= 0.01 * torch.linalg.vector_norm(other), case.name
