"""The exchange format of FlashInfer-Bench: definition, workload, solution and trace as JSON.

SOL-ExecBench and other suites use it, too. Keys that are not named here are theirs, and are passed
over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from kagent_sandbox.errors import UserError
from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(min_length=1)]
Number = int | float | bool


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Axis(_Record):
    """A dimension: a constant, or one that a workload sets."""

    type: Literal["const", "var"]
    value: Annotated[int, Field(ge=0)] | None = None
    description: str = ""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "const") != (self.value is not None):
            raise ValueError("an axis has a value if it is const, and none if it is var")
        return self


class Tensor(_Record):
    """An input or an output. `shape`: names of axes; None for a number."""

    shape: tuple[Text, ...] | None
    dtype: Text
    description: str = ""
    optional: bool = False


class Definition(_Record):
    """A computation: its axes, inputs and outputs, and a reference in PyTorch."""

    name: Text
    op_type: Text
    axes: Mapping[str, Axis]
    inputs: Mapping[str, Tensor]
    outputs: Annotated[Mapping[str, Tensor], Field(min_length=1)]
    reference: Text
    description: str = ""
    tags: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, tensor in {**self.inputs, **self.outputs}.items():
            unknown = [a for a in tensor.shape or () if a not in self.axes]
            if unknown:
                raise ValueError(
                    f"{name}: no axis {unknown[0]!r}: there are {', '.join(self.axes)}"
                )
        return self

    def consts(self) -> dict[str, int]:
        """Values of the constant axes."""
        return {n: a.value for n, a in self.axes.items() if a.value is not None}


class InputDescriptor(_Record):
    """Source of a workload's input."""

    type: Literal["random", "scalar", "safetensors", "custom"]
    value: Number | None = None
    path: str | None = None
    tensor_key: str | None = None


class Workload(_Record):
    """Sizes of the variable axes, and inputs."""

    axes: Mapping[str, int]
    inputs: Mapping[str, InputDescriptor]
    uuid: Text


class SourceFile(_Record):
    """A file of a solution. `path` is relative and leads out of no folder."""

    path: Text
    content: str

    @pydantic.field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        if path.startswith(("/", "~")) or ".." in Path(path).parts:
            raise ValueError(f"{path!r} is no path inside of the solution")
        return path


class Spec(_Record):
    """Build and call of a solution."""

    language: Text
    target_hardware: Annotated[Sequence[Text], Field(min_length=1)]
    entry_point: Text
    dependencies: Sequence[str] = ()
    destination_passing_style: bool = True  # the format's own default

    @pydantic.field_validator("entry_point")
    @classmethod
    def _two_parts(cls, value: str) -> str:
        if value.count("::") != 1 or not all(value.split("::")):
            raise ValueError(f"{value!r}: expected FILE::FUNCTION")
        return value


class Solution(_Record):
    """An implementation of a definition, as source."""

    name: Text
    definition: Text
    author: Text
    spec: Spec
    sources: Annotated[Sequence[SourceFile], Field(min_length=1)]
    description: str | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        paths = [s.path for s in self.sources]
        if len(set(paths)) < len(paths):
            raise ValueError(f"sources: a path appears twice in {paths}")
        if (file := self.spec.entry_point.split("::")[0]) not in paths:
            raise ValueError(f"spec.entry_point: no source {file!r}: there are {', '.join(paths)}")
        return self


class Correctness(_Record):
    """Largest errors over all inputs."""

    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0


class Performance(_Record):
    """Times in milliseconds."""

    latency_ms: Annotated[float, Field(ge=0)] = 0.0
    reference_latency_ms: Annotated[float, Field(ge=0)] = 0.0
    speedup_factor: Annotated[float, Field(ge=0)] = 0.0


class Environment(_Record):
    """Machine on which a trace was measured."""

    hardware: Text
    libs: Mapping[str, str] = {}


_STATUSES = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
]


class SolutionEvaluation(_Record):
    """The result of one run. Which parts it has follows from its status."""

    status: _STATUSES
    environment: Environment
    timestamp: Text
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        measured = self.status == "PASSED"
        compared = self.status in ("PASSED", "INCORRECT_NUMERICAL")
        if (self.performance is not None) != measured:
            raise ValueError(f"{self.status}: expected performance if PASSED, and else none")
        if (self.correctness is not None) != compared:
            raise ValueError(f"{self.status}: correctness is there if results were compared")
        return self


class Trace(_Record):
    """A workload, or a solution's evaluation on it."""

    definition: Text
    workload: Workload
    solution: str | None = None
    evaluation: SolutionEvaluation | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.solution is None) != (self.evaluation is None):
            raise ValueError("a trace has a solution and an evaluation, or neither")
        return self


_R = TypeVar("_R", bound=_Record)


def read_definition(path: Path) -> Definition:
    """Read a definition's file.

    Raises:
        UserError: It cannot be read, or is no definition; the text names the key.
    """
    return _parse(Definition, _text(path), str(path))


def read_solution(path: Path) -> Solution:
    """Read a solution's file.

    Raises:
        UserError: It cannot be read, or is no solution; the text names the key.
    """
    return _parse(Solution, _text(path), str(path))


def read_traces(path: Path) -> list[Trace]:
    """Read a file of workloads or traces, a line each.

    Raises:
        UserError: It cannot be read, or a line is no trace; the text names line and key.
    """
    lines = enumerate(_text(path).splitlines(), 1)
    return [_parse(Trace, line, f"{path}:{i}") for i, line in lines if line.strip()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: {getattr(e, 'strerror', None) or e}") from None


def _parse(record: type[_R], text: str, where: str) -> _R:
    """Parse JSON as a record.

    Raises:
        UserError: It is none; the text begins with `where`.
    """
    try:
        return record.model_validate(json.loads(text, parse_constant=_no_constant))
    except pydantic.ValidationError as e:
        error = e.errors()[0]
        key = ".".join(map(str, error["loc"]))
        what = error["msg"].removeprefix("Value error, ")
        name = record.__name__.lower()
        text = f"{key + ': ' if key else ''}{what}"
        raise UserError(
            f"{where}: {text} (a {name} of FlashInfer-Bench's format was expected)"
        ) from None
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where}: no JSON: {e}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def find_definitions(paths: Sequence[Path]) -> list[tuple[Path, Path | None]]:
    """Find definitions among files and folders, and the workloads of each.

    Args:
        paths: Definitions (.json), workloads (.jsonl), or folders with both. A file of workloads
            belongs to the definition of the same name.

    Raises:
        UserError: There is no definition, or workloads belong to none.
    """
    files = [f for p in paths for f in (sorted(p.rglob("*.json*")) if p.is_dir() else [p])]
    given = {f for f in paths if not f.is_dir()}
    loads = {f.stem: f for f in files if f.suffix == ".jsonl" and "traces" not in f.parts}
    found = [f for f in files if f.suffix == ".json" and (f in given or _is_definition(f))]
    if not found:
        raise UserError(
            f"{', '.join(map(str, paths))}: no definition there: a .json file of "
            "FlashInfer-Bench's format was expected, or a folder of them"
        )
    if len(found) == 1 and len(loads) == 1:
        return [(found[0], next(iter(loads.values())))]
    lost = [f for stem, f in loads.items() if f in given and stem not in {d.stem for d in found}]
    if lost:
        raise UserError(f"{lost[0]}: workloads of no definition that was given: name it, too")
    return [(f, loads.get(f.stem)) for f in found]


def _is_definition(path: Path) -> bool:
    """Whether a file of a folder is a definition: solutions lie beside them."""
    if "solutions" in path.parts:
        return False
    head = path.read_text(encoding="utf-8", errors="replace")
    return '"axes"' in head and '"reference"' in head
