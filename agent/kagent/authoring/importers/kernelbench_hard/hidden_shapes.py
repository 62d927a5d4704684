"""Generators of hidden cases between the shapes that a problem gives."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.generator import Generator, draw_fields
from kagent_sandbox.judge.check.shape_gaps import FEW

Shape = Mapping[str, int]
Works = Callable[[Shape], bool]
"""Whether the problem runs at some sizes."""

_DRAWS = 16
"""Times that a generator draws before it is written."""
_TRIED = 3
"""The smallest of those draws, at which the problem is run: on a CPU, where large ones last."""


def needed_divisors(
    visible: Sequence[Shape], ran: Sequence[Shape], small: Shape, works: Works
) -> list[str]:
    """Constraints `a % b == 0` that the problem needs and draws of hidden cases could break.

    Args:
        visible: The shapes of its cases.
        ran: Others at which it runs.
        small: One of its small shapes: it is run at some that break a constraint.
        works: Runs it.
    """
    found = []
    for a, b in itertools.permutations(small, 2):
        divisors = {s[b] for s in visible}
        of_all = math.gcd(*(s[a] for s in visible))  # what is drawn of `a` is a multiple of it
        always = len(divisors) <= FEW and not any(of_all % d for d in divisors)
        if always or any(s[a] % s[b] for s in (*visible, *ran)):
            continue
        if not any(works(shape) for shape in _breaking(small, a, b)):
            found.append(f"{a} % {b} == 0")
    return found


def _breaking(shape: Shape, a: str, b: str) -> Iterator[Shape]:
    """Shapes, one size of which is a little larger, in which `a` is no multiple of `b`."""
    if shape[b] > 1:
        yield {**shape, a: shape[a] + 1}
    yield {**shape, b: next(n for n in itertools.count(shape[b] + 1) if shape[a] % n)}


def hidden_generators(
    visible: Sequence[Shape],
    given: Sequence[Shape],
    dtype: str,
    constraints: Sequence[str],
    works: Works,
) -> list[dict[str, Any]]:
    """Generators, as task.toml has them, of sizes between the least and the largest of the visible
    cases, since an export serves those, too. Dimensions of few sizes are together as in a given
    shape. Others keep to what all their sizes are multiples of. The product of all dimensions that
    vary is at most that of a visible case.

    Args:
        visible: The shapes of the visible cases, `given` among them.
        given: The shapes that the problem gives.
        dtype: Of the cases.
        constraints: Formulas that hold in every case.
        works: Runs the problem. A generator with a draw at which it fails is left out.
    """
    values = {n: sorted({s[n] for s in visible}) for n in visible[0]}
    few = [n for n, sizes in values.items() if len(sizes) <= FEW]
    varying = [n for n, sizes in values.items() if len(sizes) > 1]
    ranges = {n: _range(sizes) for n, sizes in values.items() if n not in few}
    together = dict.fromkeys(tuple(s[n] for n in few) for s in given)
    found = []
    for sizes in together:
        fixed = {n: [size] for n, size in zip(few, sizes, strict=True)}
        generator: dict[str, Any] = {
            "count": 2 if len(together) == 1 else 1,
            "dims": {n: fixed[n] if n in fixed else ranges[n] for n in values},
            "dtype": [dtype],
        }
        if varying:
            generator["cost"] = " * ".join(varying)
            generator["most"] = max(math.prod(s[n] for n in varying) for s in visible)
        if _works(generator, constraints, works):
            found.append(generator)
    return found


def _works(generator: Mapping[str, Any], constraints: Sequence[str], works: Works) -> bool:
    try:
        return all(works(shape) for shape in _smallest_draws(generator, constraints))
    except ValueError:  # hardly any sizes meet the constraints
        return False


def _range(sizes: Sequence[int]) -> dict[str, int]:
    step = math.gcd(*sizes)
    return {"min": sizes[0], "max": sizes[-1]} | ({"multiple": step} if step > 1 else {})


def _smallest_draws(generator: Mapping[str, Any], constraints: Sequence[str]) -> list[Shape]:
    """The smallest of some shapes that a generator draws.

    Raises:
        ValueError: It finds none that meet the constraints.
    """

    def unmet(dims: Mapping[str, Any], _dtype: str) -> Iterator[str]:
        return (c for c in constraints if not evaluate(c, dims))

    rng = random.Random(0)  # noqa: S311 - no secret
    made = Generator.model_validate(generator)
    drawn = [f for _ in range(_DRAWS) for f in draw_fields(made, rng, unmet)]
    shapes: list[Shape] = [{n: f[n] for n in made.dims} for f in drawn]
    return sorted(shapes, key=lambda s: math.prod(s.values()))[:_TRIED]
