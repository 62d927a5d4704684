"""Inputs from secret seeds, the reference's results on them, and torch's own errors.

Checks draw from a small pool of each case, on a GPU anew every time. What is timed runs on inputs
that its process has never seen: see `Unseen`. No candidate learns which draw it gets, and nothing
of one evaluation reaches the next but what a message says.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import random
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from kagent_sandbox.data.build import ScalarSpec, TensorSpec
from kagent_sandbox.data.task import build_case
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.places import Places, choose_places, choose_rows

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case, Reference, Task

POOL = 3
"""Draws per check case on a CPU, where drawing costs as much as a whole check."""
STOCK_SHARE = 0.2
"""Part of a CPU's memory that draws for timing may take: later processes use them, too."""
_THREADS = 4  # that draw inputs at once
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
    number: int = field(default_factory=itertools.count().__next__)
    known_results: tuple[torch.Tensor, ...] | None = field(default=None, repr=False)
    known_places: tuple[Places, ...] | None = field(default=None, repr=False)
    known_errors: tuple[numerics.Errors, ...] | None = field(default=None, repr=False)

    @property
    def arguments(self) -> dict[str, object]:
        """Keyword arguments of the entry function."""
        return {**self.tensors, **self.scalars}

    @property
    def nbytes(self) -> int:
        """Of its inputs."""
        return sum(t.nbytes for t in self.tensors.values())


@dataclass(frozen=True)
class Stale:
    """What memory holds before an execution: plausible values, and wrong ones.

    They are torch's results on another draw, off by a quarter, so that they are wrong also where
    results do not depend on inputs (a row of one column). Nothing tells a kernel when somebody is
    going to look: they are there before every execution.

    Attributes:
        results: The bytes of each result, uint8, in the result's declared dtype.
        norms: Root mean square norm of each result's rows.
    """

    results: tuple[torch.Tensor, ...]
    norms: tuple[float, ...]

    @property
    def any(self) -> torch.Tensor:
        """The largest result's bytes: for workspaces."""
        return max(self.results, key=torch.Tensor.numel)


class Unseen:
    """Draws of one case for the processes of one session, none of them twice.

    On a CPU they come from a stock that earlier processes have used and later ones will: those have
    nothing in common with these, not even memory (`session.Arenas`). Where the stock has none that
    this session has not seen, new ones are added to it. On a GPU all are new.
    """

    def __init__(self, draws: Draws, case: Case) -> None:
        self._draws = draws
        self._case = case
        self._seen: set[int] = set()
        self._queue: list[Draw] = []

    def take(self, count: int) -> list[Draw]:
        """So many.

        Raises:
            TaskError: `inputs` of the task fails or does not give what task.toml declares.
        """
        while len(self._queue) < count:
            known = {d.number for d in self._queue} | self._seen
            new = [d for d in self._draws.stock(self._case) if d.number not in known]
            random.SystemRandom().shuffle(new)
            self._queue += new or self._draws.add(self._case, count - len(self._queue))
        taken, self._queue = self._queue[:count], self._queue[count:]
        self._seen.update(d.number for d in taken)
        return taken


class Draws:
    """Source of draws for one task on one device."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        self.device = device
        self._reference: Reference = task.reference()
        self._pools: dict[str, list[Draw]] = {}
        self._yardsticks: dict[str, tuple[numerics.Errors, ...]] = {}
        self._random = random.SystemRandom()
        self._stock: OrderedDict[str, list[Draw]] = OrderedDict()  # the case in use last
        self._stale: dict[str, Stale] = {}
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._stock_bytes = int(STOCK_SHARE * memory) if device.type == "cpu" else 0
        self._threads = ThreadPoolExecutor(_THREADS) if device.type == "cpu" else None

    def stock(self, case: Case) -> list[Draw]:
        """Draws of a case that are kept for timing."""
        found = self._stock.setdefault(case.name, [])
        self._stock.move_to_end(case.name)
        return found

    def add(self, case: Case, count: int) -> list[Draw]:
        """New draws of a case, kept as far as there is room: cases that have not been used for long
        make some, else they take the places of older ones.
        """
        if self._threads is None:
            return [self.fresh(case) for _ in range(count)]
        new = list(self._threads.map(self.fresh, [case] * count))
        stock = self.stock(case)
        stock += new
        while sum(d.nbytes for kept in self._stock.values() for d in kept) > self._stock_bytes:
            oldest = next(iter(self._stock))
            if oldest == case.name:
                if not stock:
                    break
                stock.pop(self._random.randrange(len(stock)))
            else:
                del self._stock[oldest]
        return new

    def typical_errors(self, case: Case) -> tuple[numerics.Errors, ...]:
        """What torch errs on a draw of the case, per result."""
        if case.name not in self._yardsticks:
            self.torch_errors(self.fresh(case), typical=True)
        return self._yardsticks[case.name]

    def stale(self, case: Case) -> Stale:
        """What memory is to hold before a case is executed; made once."""
        if case.name not in self._stale:
            draw = self.fresh(case)
            outputs = self._call("eager", draw)
            dtypes = [dtype_of(r.dtype) for r in build_case(self.task, case).results]
            own = [o.to(d).contiguous() for o, d in zip(outputs, dtypes, strict=True)]
            self._stale[case.name] = Stale(
                tuple(_wrong(o).flatten().view(torch.uint8) for o in own),
                tuple(
                    numerics.typical_norm(o, r.row_dims)
                    for o, r in zip(own, self.task.results, strict=True)
                ),
            )
        return self._stale[case.name]

    def places(self, draw: Draw) -> tuple[Places, ...]:
        """Secret places of each result, and what the reference has there; chosen once per draw."""
        if draw.known_places is None:
            norms = self.stale(draw.case).norms
            specs = build_case(self.task, draw.case).results
            widths = [
                math.prod(s.shape[len(s.shape) - min(r.row_dims, len(s.shape)) :])
                if r.row_dims
                else math.prod(s.shape)
                for s, r in zip(specs, self.task.results, strict=True)
            ]
            rows = tuple(
                choose_rows(math.prod(s.shape) // max(1, w), self.device)
                for s, w in zip(specs, widths, strict=True)
            )
            found = self._reference_rows(draw, rows, widths)
            draw.known_places = tuple(
                choose_places(r, f, dtype_of(s.dtype), n)
                for r, f, s, n in zip(rows, found, specs, norms, strict=True)
            )
        return draw.known_places

    def _reference_rows(
        self, draw: Draw, rows: Sequence[torch.Tensor], widths: Sequence[int]
    ) -> list[torch.Tensor]:
        """What the reference has in some rows of each result, [rows, width]: by the task's own
        `reference_rows` where it has one, else from all of its results.
        """
        by_rows = getattr(self._reference, "reference_rows", None)
        if by_rows is None:
            full = draw.known_results or self._call("reference", draw)
            return [f.reshape(-1, max(1, w))[r] for f, w, r in zip(full, widths, rows, strict=True)]
        try:
            with torch.no_grad():
                found = by_rows(tuple(rows), **draw.arguments)
        except Exception as e:  # see fresh
            raise TaskError(f"{self.task.name}: reference_rows of {draw.case.name}: {e!r}") from e
        found = found if isinstance(found, tuple | list) else (found,)
        shapes = [tuple(f.shape) for f in found]
        expected = [(len(r), w) for r, w in zip(rows, widths, strict=True)]
        if shapes != expected:
            raise TaskError(
                f"{self.task.name}: reference_rows of {draw.case.name} returns shapes {shapes}, "
                f"expected {expected}"
            )
        return list(found)

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

    def torch_errors(self, draw: Draw, *, typical: bool = False) -> tuple[numerics.Errors, ...]:
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

    def _errors(self, draw: Draw) -> tuple[numerics.Errors, ...]:
        """What torch errs on one draw, computed once."""
        if draw.known_errors is None:
            outputs = self._call("eager", draw)
            draw.known_errors = tuple(
                numerics.measure_errors(out, ref, result.row_dims)
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


def _wrong(result: torch.Tensor) -> torch.Tensor:
    """Values like a result's that are none of its: zeros and what is not finite are replaced."""
    if result.dtype == torch.bool:
        return ~result
    if not result.dtype.is_floating_point:
        return result + 1
    norm = numerics.typical_norm(result.reshape(1, -1), 1) if result.numel() else 0.0
    usual = norm / math.sqrt(max(1, result.numel())) or 1.0
    there = torch.isfinite(result) & (result != 0)
    return torch.where(there, result, usual) * 1.25


def _most(errors: Sequence[tuple[numerics.Errors, ...]]) -> tuple[numerics.Errors, ...]:
    """Of each result the largest errors."""
    return tuple(functools.reduce(operator.or_, each) for each in zip(*errors, strict=True))
