"""Inputs from secret seeds, the reference's results on them, and torch's own errors.

On a GPU every draw is fresh. On a CPU, where drawing costs as much as a whole evaluation, each
case has a small pool that is made once and drawn from at random. No candidate learns which entry
it gets, and nothing of one evaluation reaches the next but what a message says.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from kagent_sandbox import compare
from kagent_sandbox.build.request import ScalarSpec, TensorSpec
from kagent_sandbox.errors import TaskError
from kagent_sandbox.launch.plan_ops import dtype_of
from kagent_sandbox.task import build_case

if TYPE_CHECKING:
    from kagent_sandbox.task import Case, Reference, Task

POOL = 3
"""Draws per case on a CPU: neighbouring blocks of a comparison get different ones."""
YARDSTICKS = 3
"""Draws of a check case on which torch's errors are known before a candidate's are held against
them."""
MANY_ELEMENTS = 1 << 22
"""Of results that large one draw says what torch errs: its worst element hardly differs."""


@dataclass
class Draw:
    """One set of inputs of a case, on the judge's device, never shared with a launcher."""

    case: Case
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, int | float | bool]
    known_results: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)
    known_errors: tuple[compare.Errors, ...] | None = field(default=None, repr=False)

    @property
    def arguments(self) -> dict[str, object]:
        """Keyword arguments of the entry function."""
        return {**self.tensors, **self.scalars}


class Draws:
    """Source of draws for one task on one device."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        self.device = device
        self._reference: Reference = task.reference()
        self._pools: dict[str, list[Draw]] = {}
        self._yardsticks: dict[str, tuple[compare.Errors, ...]] = {}
        self._random = random.SystemRandom()

    def draw(self, case: Case, *, other_than: Draw | None = None) -> Draw:
        """Inputs of a case: fresh ones on a GPU, one of the case's pool on a CPU.

        Raises:
            TaskError: `inputs` of the task fails or does not give what task.toml declares.
        """
        if self.device.type != "cpu":
            return self.fresh(case)
        pool = self._pools.setdefault(case.name, [])
        if len(pool) < POOL:
            pool.append(self.fresh(case))
            return pool[-1]
        return self._random.choice([d for d in pool if d is not other_than])

    def expected(self, draw: Draw) -> tuple[torch.Tensor, ...]:
        """The reference's results, float64 or float32, computed once per draw."""
        if draw.known_results is None:
            draw.known_results = self._call("reference", draw)
        return draw.known_results

    def torch_errors(self, draw: Draw, *, typical: bool = False) -> tuple[compare.Errors, ...]:
        """What torch's own implementation errs on such inputs, per result: the most on this draw
        and on the case's first few.

        On one draw alone its error is chance where few elements decide, as in a row whose terms
        cancel: an honest kernel that rounds otherwise can err several times as much.

        `typical` accepts the errors on earlier draws of the case: over millions of elements they
        hardly differ, and eager on gigabytes costs more than the candidate.
        """
        name = draw.case.name
        if typical and name in self._yardsticks:
            return self._yardsticks[name]
        own = self._errors(draw)
        if name not in self._yardsticks:
            others = [] if typical else self._others(draw)
            self._yardsticks[name] = _most([own, *map(self._errors, others)])
        return _most([self._yardsticks[name], own])

    def _errors(self, draw: Draw) -> tuple[compare.Errors, ...]:
        """What torch errs on one draw, computed once."""
        if draw.known_errors is None:
            outputs = self._call("eager", draw)
            draw.known_errors = tuple(
                compare.measure_errors(out, ref, result.row_dims)
                for out, ref, result in zip(
                    outputs, self.expected(draw), self.task.results, strict=True
                )
            )
        return draw.known_errors

    def _others(self, draw: Draw) -> list[Draw]:
        """Further draws of the case, unless one says enough."""
        results = build_case(self.task, draw.case).results
        if max(math.prod(r.shape) for r in results) >= MANY_ELEMENTS:
            return []
        if self.device.type != "cpu":
            return [self.fresh(draw.case) for _ in range(YARDSTICKS - 1)]
        pool = self._pools.setdefault(draw.case.name, [])
        pool += [self.fresh(draw.case) for _ in range(POOL - len(pool))]
        return [d for d in pool if d is not draw][: YARDSTICKS - 1]

    def fresh(self, case: Case) -> Draw:
        """Inputs of a case that nothing has seen before.

        Raises:
            TaskError: `inputs` of the task fails or does not give what task.toml declares.
        """
        generator = torch.Generator(device=self.device).manual_seed(secrets.randbits(63))
        try:
            tensors = self._reference.inputs(case, generator, self.device)
        except Exception as e:  # a user's reference.py: one clear line instead of its traceback
            raise TaskError(f"{self.task.name}: inputs of {case.name}: {e!r}") from e
        spec = build_case(self.task, case)
        for argument in spec.arguments:
            if isinstance(argument, TensorSpec):
                self._check_input(case, argument, tensors.get(argument.name))
        scalars = {a.name: a.value for a in spec.arguments if isinstance(a, ScalarSpec)}
        return Draw(case, tensors, scalars)

    def _check_input(self, case: Case, spec: TensorSpec, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            raise TaskError(f"{self.task.name}: inputs of {case.name} lack {spec.name}")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype_of(spec.dtype):
            raise TaskError(
                f"{self.task.name}: inputs of {case.name}: {spec.name} is {tensor.dtype} "
                f"{list(tensor.shape)}, task.toml says {spec.dtype} {list(spec.shape)}"
            )

    def _call(self, which: str, draw: Draw) -> tuple[torch.Tensor, ...]:
        mutable = [a.name for a in self.task.arguments if a.mutates]
        arguments = draw.arguments
        for name in mutable:
            arguments[name] = draw.tensors[name].clone()
        function = getattr(self._reference, which)
        try:
            with torch.no_grad():
                value = function(**arguments)
        except Exception as e:  # see fresh
            raise TaskError(f"{self.task.name}: {which} of {draw.case.name}: {e!r}") from e
        results = value if isinstance(value, tuple | list) else (value,)
        shapes = [r.shape for r in build_case(self.task, draw.case).results]
        got = [tuple(t.shape) for t in results if isinstance(t, torch.Tensor)]
        if got != shapes:
            raise TaskError(
                f"{self.task.name}: {which} of {draw.case.name} returns shapes {got}, "
                f"task.toml says {shapes}"
            )
        return tuple(t.detach() for t in cast("Sequence[torch.Tensor]", results))


def _most(errors: Sequence[tuple[compare.Errors, ...]]) -> tuple[compare.Errors, ...]:
    """Of each result the largest errors."""
    return tuple(functools.reduce(operator.or_, each) for each in zip(*errors, strict=True))
