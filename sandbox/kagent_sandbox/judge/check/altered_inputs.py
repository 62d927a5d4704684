"""Inputs of a draw with one element changed: what a kernel that keeps results must notice.

A kernel may keep its last result, and give it again where a few elements of the inputs are what
they were, at the same addresses. On draws that share nothing it is right, and in a program whose
tensors change in place it is wrong. So a check ends with a run right after another one, in the same
place, on the same inputs but for one element, anywhere. Each argument has its turn, those of whole
numbers and of 8 bits, too: what a kept result does not depend on is what a kernel leaves out.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import numerics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.judge.check.inputs import InputSampler, InputSet

_PACKED = (torch.float4_e2m1fn_x2,)
"""Dtypes of several numbers in a byte, with which torch does nothing."""
TRIES = 3
"""Elements that are tried: a change of some is not seen in any result, or is no input of the task,
as where one argument is computed from another."""


def altered(sampler: InputSampler, input_set: InputSet) -> InputSet | None:
    """Change one element of an argument, so that a result must be another one: of one of those
    whose turn has come the fewest times.

    Args:
        sampler: Of the task, with its reference.
        input_set: A draw. The altered one shares its other tensors.

    Returns:
        The altered draw, or None if none was found: torch must be as near to the reference on it as
        a candidate may be, and the results of the draw as it was must be too far.
    """
    turns = sampler.alterations
    names = list(input_set.tensors)
    random.SystemRandom().shuffle(names)
    names.sort(key=turns.__getitem__)
    for name in (TRIES * names)[:TRIES]:  # of few arguments several elements
        turns[name] += 1
        tensor = _copy(input_set.tensors[name])
        if _change(tensor) and (found := with_argument(sampler, input_set, name, tensor)):
            turns[name] += 1  # one that does not show comes again before the others do
            return found
    return None


def with_argument(
    sampler: InputSampler, input_set: InputSet, name: str, tensor: torch.Tensor
) -> InputSet | None:
    """The draw with another tensor for an argument; None if its results need not be others, or if
    it is no input of the task.
    """
    found = replace(
        input_set,
        tensors={**input_set.tensors, name: tensor},
        seed=None,
        known_results=None,
        known_spot_checks=None,
        known_errors=None,
        known_altered=(),
        is_altered=True,
    )
    with contextlib.suppress(TaskError):  # which inputs of the task do not lead to
        if _must_differ(sampler, input_set, found):
            return found
    return None


def unread_arguments(sampler: InputSampler, cases: Sequence[Case]) -> list[str]:
    """Names of arguments of which nothing shows that a kernel reads them, in any of some cases: no
    result is another one with those of another draw, nor with one element changed.

    Raises:
        TaskError: The task's reference.py fails.
    """
    # What a call is to write need not be read.
    wanted = [a.name for a in sampler.task.arguments if a.shape is not None and not a.may_change]
    read: dict[str, bool] = {}  # of those that some case has
    for case in cases:
        left = [n for n in wanted if not read.get(n)]
        if not left:
            break
        one, other = sampler.fresh(case, 1), sampler.fresh(case, 2)
        for name in (n for n in left if n in one.tensors):
            read[name] = _is_read(sampler, one, name, other.tensors[name])
    return [n for n in wanted if read.get(n) is False]


def _is_read(
    sampler: InputSampler, input_set: InputSet, name: str, of_another: torch.Tensor
) -> bool:
    if with_argument(sampler, input_set, name, of_another) is not None:
        return True
    tensor = _copy(input_set.tensors[name])
    return _change(tensor) and with_argument(sampler, input_set, name, tensor) is not None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _PACKED:
        return tensor.contiguous().view(torch.uint8).clone().view(tensor.dtype)
    return tensor.clone(memory_format=torch.contiguous_format)


def _change(tensor: torch.Tensor) -> bool:
    """Change a random element, in place, to what may stand there.

    A floating-point number becomes the largest finite one of the tensor, or minus that. A whole
    number changes places with another one: indices stay in their range, and permutations what they
    are; where all are in order, as offsets are, none does. A truth value becomes the other one.
    """
    flat = (tensor.view(torch.uint8) if tensor.dtype in _PACKED else tensor).view(-1)
    if not flat.numel():
        return False
    place = random.SystemRandom().randrange(flat.numel())
    if tensor.dtype == torch.bool:
        flat[place] = ~flat[place]
        return True
    if not flat.is_floating_point():
        return _swap(flat, place)
    if flat.numel() == 1:
        flat.fill_(1.5 * float(flat) if float(flat) else 1.0)
        return True
    sizes = flat.float().abs()
    largest = int(torch.where(sizes.isfinite(), sizes, 0).argmax())
    if bool(flat[place].float() == flat[largest].float()):
        return False
    flat[place] = flat[largest].clone()
    return True


def _swap(flat: torch.Tensor, place: int) -> bool:
    if bool((flat[1:] >= flat[:-1]).all()):
        return False
    # A negative number says something else than those that are not, as padding does.
    others = (flat != flat[place]) & ((flat < 0) == (flat[place] < 0))
    places = others.nonzero().flatten()
    if not len(places):
        return False
    other = int(places[random.SystemRandom().randrange(len(places))])
    flat[place], flat[other] = flat[other].clone(), flat[place].clone()
    return True


def _must_differ(sampler: InputSampler, before: InputSet, after: InputSet) -> bool:
    """Whether torch is near enough to the reference on the altered draw, and the results on the
    draw before are not.
    """
    task, differ = sampler.task, False
    dtypes = [dtype_of(spec.dtype) for spec in build_case(task, after.case).compared]
    results = zip(sampler.expected(before), sampler.expected(after), strict=True)
    errors = sampler.torch_errors(after)
    for result, dtype, (old, new), error in zip(
        task.compared, dtypes, results, errors, strict=True
    ):
        if not numerics.share(error, numerics.most_allowed(result, dtype)) <= 1:
            return False
        far = numerics.measure_errors(old.to(dtype), new, result.row_dims, effective=False)
        differ |= numerics.share(far, numerics.allowed(error, result, dtype)) > 1
    return differ
