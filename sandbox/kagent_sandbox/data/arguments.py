"""Arguments and results of a task's function, as task.toml declares them."""

from __future__ import annotations

from typing import Literal, Self

import pydantic
from pydantic import Field

from kagent_sandbox.data.case import CASE_DTYPE, Dtype, Identifier, Size, StrictModel
from kagent_sandbox.data.plan import COPIED_DTYPES


class Tolerance(StrictModel):
    """Tolerance of a result.

    The candidate may err by at most `k` times what torch's own implementation errs in the same
    dtype, plus `floor` times the dtype's machine epsilon; see
    `kagent_sandbox.judge.check.numerics`. `bias` is the part of that floor by which the whole
    result may be off in one direction: 0 where rounding averages out, 0.5 where many nearly equal
    numbers are rounded alike on the way.
    """

    k: float = Field(gt=0)
    floor: float = Field(default=1.0, ge=0)
    bias: float = Field(default=0.0, ge=0, le=1)
    row_dims: int = Field(
        default=1, ge=0
    )  # trailing dimensions that make one row; 0: the whole tensor


Layout = Literal["contiguous", "transposed", "channels_last", "strided"]


class Argument(StrictModel):
    """One parameter of the entry function: a tensor, or with `value` a plain number or flag."""

    name: Identifier
    shape: tuple[Size, ...] | None = None
    dtype: Dtype = CASE_DTYPE  # a torch dtype, or "$dtype": the case's
    value: Size | float | bool | tuple[int, ...] | None = (
        None  # a scalar: a constant (a text in quotes within), or a formula over the dimensions
    )
    layout: Layout = "contiguous"  # in memory; see `strides_of`
    optional: str | None = None  # a formula: the tensor is there, where it is not 0; else None
    mutates: bool = False  # the function may change it, and nobody looks at what it leaves there
    writes: Tolerance | None = None  # the function must write it: compared as a result is

    @property
    def may_change(self) -> bool:
        """Whether the function may write it. All others are compared bit for bit."""
        return self.mutates or self.writes is not None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.shape is None) == (self.value is None):
            what = "neither shape nor value" if self.shape is None else "both shape and value"
            raise ValueError(f"{self.name} has {what}: a tensor has a shape, a number a value")
        if self.may_change and self.shape is None:
            key = "mutates" if self.mutates else "writes"
            raise ValueError(f"{self.name}: {key} is for tensors")
        least = {"contiguous": 0, "strided": 1, "transposed": 2, "channels_last": 3}[self.layout]
        if (0 if self.shape is None else len(self.shape)) < least:
            raise ValueError(
                f"{self.name}: layout {self.layout} is for tensors of {least} dimensions or more"
            )
        if self.optional is not None and (self.shape is None or self.writes is not None):
            raise ValueError(f"{self.name}: optional is for tensors that need not be written")
        if self.mutates and self.writes is not None:
            raise ValueError(
                f"{self.name}: writes or mutates, not both: what is written may change"
            )
        return self


class ResultSpec(Tolerance):
    """One result of the entry function, in order, with what it may err."""

    name: Identifier
    shape: tuple[Size, ...]
    dtype: Dtype = CASE_DTYPE
    valid: str | None = None  # a result of one whole number: so many first rows are compared

    @pydantic.model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.dtype in COPIED_DTYPES:
            raise ValueError(
                f"{self.name}: results in {self.dtype} cannot be compared: declare uint8, whose "
                "bytes must be equal"
            )
        if self.row_dims > max(1, len(self.shape)):
            raise ValueError(
                f"{self.name}: row_dims is {self.row_dims}, and it has {len(self.shape)} dimensions"
            )
        if self.valid is not None and not 0 < self.row_dims < len(self.shape):
            raise ValueError(f"{self.name}: valid needs a dimension beside those of a row")
        return self
