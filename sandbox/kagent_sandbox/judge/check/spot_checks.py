"""Spot checks of every timed execution: a few secret places of each result against the reference,
or against torch's own results where the reference has no single rows (`InputSampler.spot_checks`).

A place is one element. Only the judge knows the places of a draw. On a CPU they are read before a
sample's clock stops, so the verified work is the timed work. A kernel that leaves out one element
in a hundred of its timed results is found with a probability of 1 - 0.99^1920, with 4 rows of 16
elements an execution and 30 executions.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kagent_sandbox.judge.check import numerics

ROWS, PER_ROW = 4, 16
"""Number of rows, and of elements per row, of each result of one draw."""


@dataclass(frozen=True, slots=True)
class SpotChecks:
    """Secret elements of one result on one draw.

    Attributes:
        index: Flat numbers of the elements, [rows, per row], int64.
        expected: The reference's values there, or torch's, [rows, per row], float64, or whole
            numbers or flags.
        magnitude: Magnitudes that errors are relative to: the element's plus its row's mean.
            [rows, per row], float64.
    """

    index: torch.Tensor
    expected: torch.Tensor
    magnitude: torch.Tensor

    def some(self, per_row: int) -> SpotChecks:
        """Keep the rows with fewer elements of each, drawn anew."""
        if per_row >= self.index.shape[1]:
            return self
        kept = torch.randperm(self.index.shape[1], generator=_secret(torch.device("cpu")))[:per_row]
        kept = kept.to(self.index.device)
        return SpotChecks(self.index[:, kept], self.expected[:, kept], self.magnitude[:, kept])


def _chosen(count: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers below `count` that nobody can foresee."""
    return torch.randint(count, tuple(shape), device=device, generator=_secret(device))


@functools.cache
def _secret(device: torch.device) -> torch.Generator:
    """A generator of this module's own: a task's code may seed torch's with a number that all know,
    as get_inputs of many a suite does.
    """
    return torch.Generator(device=device).manual_seed(secrets.randbits(63))


def choose_rows(
    rows: int, device: torch.device, changed: torch.Tensor | None = None
) -> torch.Tensor:
    """`ROWS` rows of a result of `rows`, or all of them where it has fewer. int64.

    Where `changed` says which elements of an argument are written (bool [rows, width]), all but one
    are rows with such.
    """
    if rows <= ROWS:
        return torch.arange(rows, device=device)
    chosen = _chosen(rows, (ROWS,), device)
    if changed is not None and len(written := changed.any(1).nonzero().flatten()):
        chosen[1:] = written[_chosen(len(written), (ROWS - 1,), device)]
    return chosen


def choose_spot_checks(
    rows: torch.Tensor,
    reference: torch.Tensor,
    dtype: torch.dtype,
    typical: float,
    changed: torch.Tensor | None = None,
) -> SpotChecks:
    """Elements of chosen rows.

    Args:
        rows: Their numbers within the result, [n] int64.
        reference: The reference's values in them, [n, width], float64 or float32.
        dtype: Of the result.
        typical: Root mean square norm of the result's rows on such inputs: a row of zeros is held
            against a typical row's rounding.
        changed: Which elements of them are written, bool [n, width]: of a row that has such, places
            are among these.
    """
    count, width = reference.shape
    at = _chosen(width, (count, min(PER_ROW, width)), rows.device)
    if changed is not None:
        for i, written in enumerate(changed):
            if len(places := written.nonzero().flatten()):
                at[i] = places[_chosen(len(places), at[i].shape, rows.device)]
    row = torch.arange(count, device=rows.device)[:, None].expand_as(at)
    return _spot_checks(rows[:, None] * width + at, row, at, reference, dtype, typical)


def spot_checks_at(
    index: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, typical: float
) -> SpotChecks:
    """Spot checks of given elements.

    Args:
        index: Their flat numbers, [n] int64.
        reference: The reference's whole result, [rows, width], float64 or float32; on the host
            where the device had no room for it.
        dtype: Of the result.
        typical: See `choose_spot_checks`.
    """
    width = reference.shape[1]
    rows, row = torch.unique(index // width, return_inverse=True)
    at_rows = reference[rows.to(reference.device)].to(index.device)
    return _spot_checks(index, row, index % width, at_rows, dtype, typical)


def _spot_checks(
    index: torch.Tensor,
    row: torch.Tensor,
    at: torch.Tensor,
    reference: torch.Tensor,
    dtype: torch.dtype,
    typical: float,
) -> SpotChecks:
    """Spot checks of elements by the row of `reference` that each is in, and its place there."""
    expected = reference[row, at]  # whole numbers may be too large for float64
    if expected.dtype.is_floating_point:
        expected = expected.double()
    reference = reference.double()
    least = numerics.least_magnitude(numerics.epsilon(dtype), typical, reference, dtype)
    finite = torch.nan_to_num(reference, nan=0.0, posinf=0.0, neginf=0.0).abs_()
    magnitude = finite[row, at].add_(finite.mean(1).clamp_min_(least)[row])
    return SpotChecks(index, expected, magnitude)
