"""One call of a task: its sizes, dtype and distribution of inputs; and types of values in
task.toml.
"""

from __future__ import annotations

import keyword
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.plan import ITEMSIZE

CASE_DTYPE = "$dtype"  # the case's own
Size = int | str  # a number, or a formula over the case's dimensions
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class StrictModel(BaseModel):
    """A record of task.toml: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _known_dtype(dtype: str) -> str:
    if dtype not in (CASE_DTYPE, *ITEMSIZE):
        raise ValueError(f"no dtype {dtype!r}: expected {CASE_DTYPE} or one of {_dtypes()}")
    return dtype


def _known_case_dtype(dtype: str) -> str:
    if dtype not in ITEMSIZE:
        raise ValueError(f"no dtype {dtype!r}: expected one of {_dtypes()}")
    return dtype


def _dtypes() -> str:
    return ", ".join(ITEMSIZE)


def identifier(name: str) -> str:
    """Return a name that Python takes.

    Raises:
        ValueError: It is none.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name that Python takes")
    return name


Dtype = Annotated[str, AfterValidator(_known_dtype)]
CaseDtype = Annotated[str, AfterValidator(_known_case_dtype)]
Identifier = Annotated[str, AfterValidator(identifier)]


class Case(StrictModel):
    """Shapes, dtype and input distribution of one call; extra keys are dimensions and flags."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field(pattern=r"^[^\r\n]+$")
    dtype: CaseDtype
    inputs: str = "normal"  # a distribution that reference.py's `inputs` knows
    scale: float = 1.0
    noncontiguous: bool = False  # each row of an input starts 8 elements after the one before ends
    offset: int = Field(default=0, ge=0)
    """Elements by which every input starts behind its aligned place."""

    @property
    def dims(self) -> dict[str, Value]:
        """Values of the task's dimensions and flags."""
        extra = self.model_extra or {}
        return {n: tuple(v) if isinstance(v, list) else v for n, v in extra.items()}
