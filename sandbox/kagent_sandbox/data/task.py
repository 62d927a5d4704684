"""A task: an operation, the cases that matter, and what counts as correct. Read from a folder.

`task.toml` declares everything that is data; `reference.py` beside it holds the code that cannot be
(see `Reference`). docs/tasks.md is the guide for writing one.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, cast

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kagent_sandbox.data.build import BuildCase, ScalarSpec, TensorSpec, Value
from kagent_sandbox.data.calibration import FILE as CALIBRATION
from kagent_sandbox.data.calibration import Calibration, read_calibration
from kagent_sandbox.data.formula import MOST_NUMBERS, evaluate
from kagent_sandbox.data.kind import Kind as Kind
from kagent_sandbox.data.plan import COPIED_DTYPES, ITEMSIZE
from kagent_sandbox.errors import TaskError
from kagent_sandbox.importing import import_file

if TYPE_CHECKING:
    import torch

CASE_DTYPE = "$dtype"  # the case's own
MOST_SIZE = (1 << 31) - 1  # of a range: finding a prime near it takes a moment
Size = int | str  # a number, or a formula over the case's dimensions
_MOST_VALUE = 1 << 63
_TEXT = re.compile(r"[A-Za-z_][\w .-]*")  # as a dimension: it must not look like a number
_QUOTED = re.compile(r"'[^']*'")
MOST_REDRAWS = 50
"""Draws of dimensions until some meet the constraints."""
MOST_NEAR = 512
"""Values of a range that are tried around one that does not."""
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class _Model(BaseModel):
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


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name that Python takes")
    return name


Dtype = Annotated[str, AfterValidator(_known_dtype)]
CaseDtype = Annotated[str, AfterValidator(_known_case_dtype)]
Identifier = Annotated[str, AfterValidator(_identifier)]


class Tolerance(_Model):
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


class Argument(_Model):
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

    name: str
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
        if self.valid is not None and not 0 < self.row_dims < len(self.shape):
            raise ValueError(f"{self.name}: valid needs a dimension beside those of a row")
        return self


class Case(_Model):
    """Shapes, dtype and input distribution of one call; extra keys are dimensions and flags."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str
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


class Range(_Model):
    """Whole numbers from min to max, evenly in the logarithm; multiples of one, or primes only."""

    min: int = Field(ge=1)
    max: int = Field(ge=1, le=MOST_SIZE)
    multiple: int = Field(default=1, ge=1)
    prime: bool = False

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.prime and self.multiple > 1:
            raise ValueError("prime or multiple, not both")
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, and max {self.max}: expected min <= max")
        if self.nearest(self.min, self.max) is None:
            raise ValueError(f"nothing to draw from {self.min} to {self.max}")
        return self

    def nearest(self, value: float, limit: int) -> int | None:
        """The largest number of the range that is at most `value`, else the smallest above it.

        None if there is none up to `limit`.
        """
        start = min(max(math.floor(value), self.min), limit)
        step = self.multiple
        below = range(start // step * step, self.min - 1, -step)
        above = range((start // step + 1) * step, limit + 1, step)
        for candidates in (below, above):
            for n in candidates:
                if not self.prime or _is_prime(n):
                    return n
        return None


class ListRange(_Model):
    """`count` whole numbers from min to max, evenly in the logarithm; with `total`, their sum."""

    count: int = Field(ge=1, le=MOST_NUMBERS)
    min: int = Field(ge=0)
    max: int = Field(ge=1, le=MOST_SIZE)
    total: int | None = Field(default=None, ge=1)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, and max {self.max}: expected min <= max")
        least, most = self.count * self.min, self.count * self.max
        if self.total is not None and not least <= self.total <= most:
            raise ValueError(
                f"total is {self.total}: {self.count} numbers from {self.min} to {self.max} have "
                f"sums from {least} to {most}"
            )
        return self

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """Draw the numbers."""
        low, high = max(1, self.min), self.max + 1
        found = [int(low * (high / low) ** rng.random()) for _ in range(self.count)]
        if self.min == 0:  # one in eight: an empty one is a case of its own
            found = [0 if rng.random() < 1 / 8 else n for n in found]
        found = [min(n, self.max) for n in found]
        if self.total is None:
            return tuple(found)
        scale = self.total / max(1, sum(found))
        found = [min(self.max, max(self.min, int(n * scale))) for n in found]
        left = self.total - sum(found)
        while left:  # what rounding and the bounds have left over
            places = [i for i, n in enumerate(found) if self.min < n + (left > 0) <= self.max]
            share = max(1, abs(left) // len(places))
            for i in rng.sample(places, min(len(places), abs(left))):
                room = self.max - found[i] if left > 0 else found[i] - self.min
                step = min(share, room, abs(left))
                found[i] += step if left > 0 else -step
                left += -step if left > 0 else step
        return tuple(found)


class Generator(_Model):
    """Draws `count` hidden cases.

    Every value of `dims` is a list to choose from or a range. Of each list the cases get all values
    equally often, as far as it goes; a range they divide among them, see `draw_hidden`. With
    `cost`, a formula that grows with every dimension, it lies between `least` and `most`, evenly in
    the logarithm.
    """

    count: int = Field(ge=1, le=32)
    dtype: tuple[CaseDtype, ...] = Field(min_length=1)
    inputs: tuple[str, ...] = Field(default=("normal",), min_length=1)
    scale: tuple[float, ...] = Field(default=(1.0,), min_length=1)
    noncontiguous: tuple[bool, ...] = Field(default=(False,), min_length=1)
    offset: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    dims: Mapping[str, Annotated[tuple[Value, ...], Field(min_length=1)] | Range | ListRange]
    cost: str | None = None
    least: float = 0.0
    most: float = math.inf

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least is {self.least:g}, and most {self.most:g}")
        if self.cost is None and (self.least > 0 or self.most < math.inf):
            raise ValueError("least and most need a cost")
        if self.cost is not None:
            lowest = {n: self._costliest(v) for n, v in self.dims.items()}
            if (value := evaluate(self.cost, lowest)) > self.most:
                raise ValueError(f"the cost is {value:g} at least, and most {self.most:g}")
        return self

    @staticmethod
    def _costliest(values: Sequence[Any] | Range | ListRange) -> Any:
        """Values that a case may need of a dimension, whatever is drawn."""
        if isinstance(values, Range):
            return values.min
        if isinstance(values, ListRange):
            each = values.max if values.total is None else values.total // values.count
            return (each,) * values.count
        numbers = all(isinstance(v, int | float) for v in values)
        return max(values) if numbers else values[0]


class Cases(_Model):
    """Visible cases and generators of hidden ones, for one kind of device."""

    check: tuple[Case, ...] = Field(min_length=1)
    bench: tuple[Case, ...] = Field(min_length=1)
    hidden_check: tuple[Generator, ...] = ()
    hidden_bench: tuple[Generator, ...] = ()


class Task(_Model):
    """One operation to make faster."""

    name: Name
    summary: str
    entry: Identifier
    signature: str  # as a person would write it, for prompts and messages
    dims: Mapping[str, str]  # dimension -> what it means
    arguments: tuple[Argument, ...]
    results: tuple[ResultSpec, ...] = ()  # what the entry returns, in order
    constraints: tuple[str, ...] = ()  # formulas over the dimensions that hold in every case
    allow: tuple[str, ...] = ()  # torch operations beyond allocation, views, copies and fills
    bytes: str  # formula: fewest bytes that must move through memory
    flops: str  # formula: operations, 0 for none worth counting
    accept: bool = False  # reference.py has a rule for results that torch does not fix
    matrix: bool = False  # flops are matrix products: the tensor cores' ceiling applies
    written: str = "0"  # formula: the part of `bytes` that is written (may stay in L2)
    gpu: Cases
    cpu: Cases
    folder: Path
    calibration: Calibration | None = None
    tolerance_from: str = "task.toml"  # the file that k and floor come from

    def calibrated(self, kind: Kind) -> Task:
        """The task with the tolerances of calibration.json, where that has some for this kind."""
        known = None if self.calibration is None else self.calibration.kinds.get(kind)
        if known is None:
            return self
        found = {n: {"k": r.k, "floor": r.floor} for n, r in known.results.items()}
        results = tuple(r.model_copy(update=found.get(r.name, {})) for r in self.results)
        arguments = tuple(
            a
            if a.writes is None
            else a.model_copy(update={"writes": a.writes.model_copy(update=found.get(a.name, {}))})
            for a in self.arguments
        )
        task = self.model_copy(
            update={"results": results, "arguments": arguments, "tolerance_from": CALIBRATION}
        )
        task.__dict__.pop("compared", None)  # what was worked out from the others
        return task

    def cases(self, kind: Kind) -> Cases:
        """Cases for the kind of device that kernels run on."""
        return self.gpu if kind == "gpu" else self.cpu

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments that the function may write."""
        return tuple(a.name for a in self.arguments if a.may_change)

    @functools.cached_property
    def compared(self) -> tuple[ResultSpec, ...]:
        """Names of the tensors that are compared: the results, then the written arguments."""
        written = tuple(
            ResultSpec(name=a.name, shape=a.shape or (), dtype=a.dtype, **a.writes.model_dump())
            for a in self.arguments
            if a.writes is not None
        )
        return (*self.results, *written)

    @functools.cached_property
    def known_build_cases(self) -> dict[tuple[object, ...], BuildCase]:
        """Memory of `build_case`."""
        return {}

    @functools.cached_property
    def digest(self) -> str:
        """Hash of task.toml and reference.py: results of different digests are not comparable."""
        files = (self.folder / "task.toml", self.folder / "reference.py")
        return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]

    def shape(self, shape: Sequence[Size], case: Case) -> tuple[int, ...]:
        """Sizes of a declared shape in a case.

        Raises:
            ValueError: One is no whole number, or negative.
        """
        sizes = []
        for declared in shape:
            size = self.formula(declared, case)
            if size != int(size) or size < 0:
                raise ValueError(f"size {declared!r} is {size:g}, expected a whole number")
            sizes.append(int(size))
        return tuple(sizes)

    def dtype(self, declared: str, case: Case) -> str:
        """Torch dtype name of a declaration in a case."""
        return case.dtype if declared == CASE_DTYPE else declared

    def formula(self, text: Size | float, case: Case) -> float:
        """Value of a formula (`kagent_sandbox.data.formula`) over a case's dimensions.

        `itemsize` is the size in bytes of the case's dtype.
        """
        if not isinstance(text, str):
            return text
        return evaluate(text, self._names(case.dims, case.dtype))

    def _names(self, dims: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Names that formulas may use."""
        return {**dims, "itemsize": ITEMSIZE[dtype]}

    def unmet(self, dims: Mapping[str, Any], dtype: str) -> Iterator[str]:
        """The constraints that do not hold for a case's dimensions, one after the other.

        Raises:
            ValueError: One is no formula over them.
        """
        names = self._names(dims, dtype)
        return (c for c in self.constraints if not evaluate(c, names))

    def min_bytes(self, case: Case) -> float:
        """Fewest bytes that a call must move through the device's memory."""
        return self.formula(self.bytes, case)

    def min_written(self, case: Case) -> float:
        """Bytes of `min_bytes` that are written."""
        return self.formula(self.written, case)

    def flop_count(self, case: Case) -> float:
        """Floating-point operations of a call."""
        return self.formula(self.flops, case)

    def reference(self) -> Reference:
        """The task's reference.py, imported.

        Raises:
            TaskError: It cannot be imported, lacks a function, or has a rule that is not declared.
        """
        path = self.folder / "reference.py"
        found = load_reference(path)
        if hasattr(found, "accept") != self.accept:
            what = "lacks accept(results, expected, **inputs)" if self.accept else "defines accept"
            raise TaskError(
                f"{path}: {what}, and accept is {str(self.accept).lower()} in task.toml: a rule is "
                "used if it is both declared and defined"
            )
        return found

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [a.name for a in self.arguments]
        if len(set(names)) != len(names):
            raise ValueError(f"arguments: a name appears twice in {names}")
        if not self.compared:
            raise ValueError(
                "results: none, and no argument has writes: nothing could be compared. Declare "
                "what the function returns, or writes = { k = ... } of what it writes"
            )
        for r in self.results:
            counts = [c for c in self.results if c.name == r.valid]
            if r.valid is not None and not any(c.dtype in ("int32", "int64") for c in counts):
                raise ValueError(
                    f"results.{r.name}: valid = {r.valid!r}: expected a result of one int32 or "
                    "int64"
                )
            if r.valid is not None and self.accept:
                raise ValueError(
                    f"results.{r.name}: valid, and the task has accept, which is asked about whole "
                    "results: remove one of the two"
                )
        names = [r.name for r in self.compared]
        if len(set(names)) != len(names):
            raise ValueError(
                f"results: a name appears twice in {names}, written arguments included"
            )
        for name in self.dims:
            if _identifier(name) in (*Case.model_fields, "itemsize"):
                raise ValueError(f"dims: {name} has a meaning of its own in cases: rename it")
        self._check_cases("gpu", self.gpu)
        self._check_cases("cpu", self.cpu)
        visible = [c.name for k in (self.gpu, self.cpu) for c in (*k.check, *k.bench)]
        for name in visible:
            if visible.count(name) > 1:
                raise ValueError(f"two cases are named {name}")
        return self

    def _check_cases(self, kind: Kind, cases: Cases) -> None:
        """Make sure that all cases of a kind of device, and some drawn ones, fit the task.

        Raises:
            ValueError: One does not; the text begins with its key.
        """
        for key, visible in (("check", cases.check), ("bench", cases.bench)):
            for case in visible:
                self._check_case(f"{kind}.{key}", case)
        for key, generators in (
            ("hidden_check", cases.hidden_check),
            ("hidden_bench", cases.hidden_bench),
        ):
            for number, generator in enumerate(generators, 1):
                where = f"{kind}.{key}, generator {number}"
                self._check_names(where, generator.dims)
                rng = random.Random(number)  # noqa: S311 - no secret
                try:
                    drawn = [Case(name="drawn", **v) for v in _draw(generator, rng, self.unmet)]
                except ValueError as e:
                    raise ValueError(f"{where}: {e}") from None
                for case in drawn:
                    self._check_case(where, case)
        # Libraries are timed on aligned inputs: they would be compared with another case.
        if any(c.offset for c in cases.bench) or any(any(g.offset) for g in cases.hidden_bench):
            raise ValueError(
                f"{kind}.bench: offset is for check and hidden_check: bench inputs are aligned"
            )

    def _check_names(self, where: str, dims: Iterable[str]) -> None:
        missing, odd = self.dims.keys() - set(dims), set(dims) - self.dims.keys()
        if missing or odd:
            raise ValueError(
                f"{where}: dimensions missing {sorted(missing)}, unknown {sorted(odd)}"
            )

    def _check_case(self, where: str, case: Case) -> None:
        where = f"{where}, case {case.name}"
        self._check_names(where, case.dims)
        for name, value in case.dims.items():
            if isinstance(value, str) and _TEXT.fullmatch(value):
                continue
            numbers = value if isinstance(value, tuple) else (value,)
            whole = not isinstance(value, tuple) or all(type(n) is int for n in value)
            small = all(isinstance(n, int | float) and abs(n) < _MOST_VALUE for n in numbers)
            if not small or not whole or len(numbers) > MOST_NUMBERS:
                raise ValueError(
                    f"{where}: {name} = {value!r}, expected a number, true or false, a text or a "
                    f"list of at most {MOST_NUMBERS} whole numbers"
                )

        for constraint in self.constraints:
            if not evaluate(constraint, self._names(case.dims, case.dtype)):
                raise ValueError(f"{where}: the constraint {constraint!r} does not hold")

        def check(key: str, value: Callable[[], object]) -> None:
            try:
                value()
            except ValueError as e:
                raise ValueError(f"{key} in {where}: {e}") from None

        for a in self.arguments:
            if a.optional is not None:
                check(f"arguments.{a.name}", functools.partial(self.formula, a.optional, case))
            if a.shape is not None:
                check(f"arguments.{a.name}", functools.partial(self.shape, a.shape, case))
            else:
                check(f"arguments.{a.name}", functools.partial(scalar, self, a, case))
        for r in self.compared:
            check(f"results.{r.name}", functools.partial(self._result, r, case))
        for key in ("bytes", "flops", "written"):
            check(key, functools.partial(self._positive, getattr(self, key), case))

    def _result(self, result: ResultSpec, case: Case) -> None:
        shapes = {r.name: self.shape(r.shape, case) for r in self.compared}
        if result.valid is not None and math.prod(shapes[result.valid]) != 1:
            raise ValueError(f"valid = {result.valid!r}, which is not one number")
        if self.dtype(result.dtype, case) in COPIED_DTYPES:
            raise ValueError(f"results in {case.dtype} cannot be compared: declare uint8")

    def _positive(self, text: str, case: Case) -> None:
        if (value := self.formula(text, case)) < 0:
            raise ValueError(f"{text!r} is {value:g}, expected 0 or more")


class Reference(Protocol):
    """Functions that a task's reference.py defines.

    Tensors of `inputs` are named like the task's tensor arguments; all functions take the arguments
    of the entry function by keyword (tensors and scalars) and return a tensor or a tuple of them.
    Where the task has arguments that are written, `reference` returns their new values after the
    results; `eager` and experts write them, as torch does, and return the results alone.
    """

    def inputs(
        self, case: Case, generator: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Fresh tensors of the case's distribution, by argument name, on `device`."""

    def reference(self, **arguments: object) -> object:
        """The result in float64 (float32 where memory forbids), from inputs in their own dtype."""

    def eager(self, **arguments: object) -> object:
        """Torch's own implementation in the inputs' dtype: baseline and yardstick of rounding. It
        gets arguments of its own to write.
        """

    def experts(self) -> Mapping[str, Callable[..., object]]:
        """Expert libraries that can be imported here, by name: further baselines. May be empty."""

    def accept(self, results: object, expected: object, **arguments: object) -> object:
        """Elements at which another value than the reference's is as right; only of tasks that
        declare `accept = true`. Per result True, False, or a mask of its shape.
        """


def load_task(folder: Path, *, calibrated: bool = True) -> Task:
    """Read a task folder.

    Args:
        folder: Folder with task.toml and reference.py, and perhaps calibration.json.
        calibrated: Whether calibration.json is read, if there is one. See `Task.calibrated`.

    Raises:
        TaskError: A file is missing, not TOML, or does not fit the schema; the text names key and
            remedy.
    """
    path = folder / "task.toml"
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise TaskError(f"{folder}: no task.toml there; see docs/tasks.md") from None
    except (OSError, ValueError, RecursionError) as e:
        raise TaskError(_one_line(f"{path}: {e}")) from None
    if not (folder / "reference.py").is_file():
        raise TaskError(f"{folder}: no reference.py there; see docs/tasks.md")
    for key in ("folder", "calibration", "tolerance_from"):
        if key in data:
            raise TaskError(f"{path}: {key}: no key of a task: remove it")
    try:
        task = Task.model_validate({**data, "folder": folder.resolve()})
        found = read_calibration(folder, task.digest) if calibrated else None
        return task.model_copy(update={"calibration": found}) if found is not None else task
    except pydantic.ValidationError as e:
        # Of a value with several forms (a list or a range), what is wrong with the one that fits.
        errors = sorted(e.errors(), key=lambda found: found["type"] != "value_error")
        keys = [p for p in errors[0]["loc"] if isinstance(p, int) or p.isidentifier()]
        where = ".".join(str(p) for p in keys if p != Range.__name__)
        text = errors[0]["msg"].removeprefix("Value error, ")
        raise TaskError(_one_line(f"{path}: {where + ': ' if where else ''}{text}")) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def load_reference(path: Path) -> Reference:
    """Import a trusted reference.py from its path.

    Raises:
        TaskError: It cannot be imported or lacks a function.
    """
    try:
        module = import_file(path, f"kagent_reference_{path.parent.name}")
    except Exception as e:  # noqa: BLE001 - whatever a user's module raises becomes one clear line
        raise TaskError(f"{path}: {type(e).__name__}: {e}") from None
    missing = [n for n in ("inputs", "reference", "eager", "experts") if not hasattr(module, n)]
    if missing:
        raise TaskError(f"{path}: does not define {', '.join(missing)}; see docs/tasks.md")
    return cast("Reference", module)


def draw_hidden(task: Task, kind: Kind, which: Literal["check", "bench"], seed: int) -> list[Case]:
    """Draw the hidden cases of a run from the task's generators.

    The cases of a generator divide each of its ranges: they lie on a grid that is even in the
    logarithm, has as many points as there are cases, and starts anywhere. So each size has the
    probability that a case of its own would give it, and no gap between two is wider than a step.
    Dimensions are paired at random.

    Args:
        task: The task.
        kind: "gpu" or "cpu".
        which: The generators: of check cases, or of benchmark cases for the final race.
        seed: The run's secret seed.

    Raises:
        TaskError: A cost cannot be computed for what was drawn.
    """
    rng = random.Random(f"{seed}/{task.name}/{kind}/{which}")  # noqa: S311 - secrecy is the seed's
    cases = task.cases(kind)
    generators = cases.hidden_check if which == "check" else cases.hidden_bench
    drawn: list[Case] = []
    try:
        for generator in generators:
            for values in _draw(generator, rng, task.unmet):
                drawn.append(Case(name=f"hidden_{which}_{len(drawn)}", **values))
    except ValueError as e:
        raise _unfit(task, f"{kind}.hidden_{which}", e) from None
    return drawn


def _unfit(task: Task, where: str, error: ValueError) -> TaskError:
    return TaskError(_one_line(f"{task.folder / 'task.toml'}: {where}: {error}"))


Unmet = Callable[[Mapping[str, Any], str], Iterator[str]]
"""The constraints that dimensions in a dtype do not meet."""


def _draw(generator: Generator, rng: random.Random, unmet: Unmet) -> Iterable[dict[str, Any]]:
    """Fields of a generator's cases.

    Raises:
        ValueError: No dimensions were found that meet the constraints.
    """
    count = generator.count
    fields = ("dtype", "inputs", "scale", "noncontiguous", "offset")
    columns = {f: _dealt(getattr(generator, f), count, rng) for f in fields}
    ranges: dict[str, tuple[Range, list[float]]] = {}
    for name, values in generator.dims.items():
        if isinstance(values, ListRange):
            columns[name] = [values.draw(rng) for _ in range(count)]
        elif isinstance(values, Range):
            shift = rng.random()
            ranges[name] = values, rng.sample([(i + shift) / count for i in range(count)], count)
        else:
            columns[name] = _dealt(values, count, rng)
    goals = [(i + rng.random()) / count for i in rng.sample(range(count), count)]
    for i in range(count):
        case = {name: values[i] for name, values in columns.items()}
        dims = {n: v for n, v in case.items() if n in generator.dims}
        least = dims | {n: r.min for n, (r, _) in ranges.items()}
        most = dims | {n: r.max for n, (r, _) in ranges.items()}
        limits = _limits(generator, goals[i])
        for n in rng.sample(list(ranges), len(ranges)):  # any may be small where the cost is large
            r, positions = ranges[n]
            size = _size(generator.cost, limits, r, n, least, most, positions[i])
            least[n] = most[n] = dims[n] = size
        dims = _constrained(generator, dims, case["dtype"], rng, unmet)
        yield {**case, **{n: dims[n] for n in generator.dims}}


def _limits(generator: Generator, position: float) -> tuple[float, float]:
    """The least and the largest cost of the case at `position` in [0, 1): around a cost that is
    drawn evenly in the logarithm. Else many dimensions together would hardly ever be large.
    """
    least, most = generator.least, generator.most
    if not least or most == math.inf:
        return least, most
    goal = least * (most / least) ** position
    return max(least, goal / 2), min(most, 2 * goal)


def _constrained(
    generator: Generator,
    dims: dict[str, Any],
    dtype: str,
    rng: random.Random,
    unmet: Unmet,
) -> dict[str, Any]:
    """The dimensions, or ones near them that meet the constraints (`nearest_met`); where there are
    none, those that a broken constraint names are drawn again.

    Raises:
        ValueError: None were found.
    """

    def fits(found: Mapping[str, Any]) -> bool:
        affordable = generator.cost is None or evaluate(generator.cost, found) <= generator.most
        return affordable and not any(unmet(found, dtype))

    if not any(unmet(dims, dtype)):
        return dims
    for _ in range(MOST_REDRAWS):
        if (found := nearest_met(generator.dims, dims, dtype, rng, unmet, fits)) is not None:
            return found
        broken = list(unmet(dims, dtype))
        named = [n for n in dims if any(re.search(rf"\b{n}\b", c) for c in broken)] or list(dims)
        dims = dims | {n: _any_of(generator.dims[n], rng) for n in named}
    broken = list(unmet(dims, dtype)) or ["the cost"]
    raise ValueError(f"nothing was found in its dimensions for which {' and '.join(broken)}")


def nearest_met(
    ranges: Mapping[str, Sequence[Any] | Range | ListRange],
    dims: dict[str, Any],
    dtype: str,
    rng: random.Random,
    unmet: Unmet,
    fits: Callable[[Mapping[str, Any]], bool],
) -> dict[str, Any] | None:
    """The dimensions if they fit, or ones in which one of those that a broken constraint names has
    the nearest value with which they do; None if there are no such.
    """
    if fits(dims):
        return dims
    broken = list(unmet(dims, dtype))
    named = [n for n in dims if any(re.search(rf"\b{n}\b", c) for c in broken)]
    for name in rng.sample(named, len(named)):
        for value in _near(ranges[name], dims[name]):
            if fits({**dims, name: value}):
                return {**dims, name: value}
    return None


def _near(values: Sequence[Any] | Range | ListRange, value: Any) -> Iterable[Any]:
    """Values of a dimension, the nearest first, and not all of a large range."""
    if isinstance(values, ListRange):
        return ()
    if not isinstance(values, Range):
        return values
    step = values.multiple
    steps = ((k + 1) // 2 * (step if k % 2 else -step) for k in range(1, MOST_NEAR))
    near = (value + s for s in steps)
    return (n for n in near if values.min <= n <= values.max and (not values.prime or _is_prime(n)))


def _any_of(values: Sequence[Any] | Range | ListRange, rng: random.Random) -> Any:
    """Any value of a dimension."""
    if isinstance(values, ListRange):
        return values.draw(rng)
    if not isinstance(values, Range):
        return rng.choice(values)
    at = values.min * ((values.max + 1) / values.min) ** rng.random()
    return values.nearest(at, values.max)


def _dealt(values: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    """`count` of the values in random order, none twice more often than another."""
    rounds = [rng.sample(values, len(values)) for _ in range(-(-count // len(values)))]
    return [v for values in rounds for v in values][:count]


def _size(
    cost: str | None,
    limits: tuple[float, float],
    sizes: Range,
    name: str,
    least: Mapping[str, Any],
    most: Mapping[str, Any],
    position: float,
) -> int:
    """The size at `position` in [0, 1) of what the limits of a cost leave of a range.

    `least` and `most` are the dimensions drawn already, with the smallest and the largest of the
    others: with some of those the cost lies between the limits.
    """
    low, high = sizes.min, sizes.max
    if cost is not None:
        rest = range(low, high + 1)

        def with_least(size: int) -> float:
            return evaluate(cost, {**least, name: size})

        def with_most(size: int) -> float:
            return evaluate(cost, {**most, name: size})

        high = rest[max(bisect.bisect_right(rest, limits[1], key=with_least) - 1, 0)]
        low = rest[min(bisect.bisect_left(rest, limits[0], key=with_most), len(rest) - 1)]
        low = min(low, high)
    found = sizes.nearest(low * ((high + 1) / low) ** position, high)
    return sizes.min if found is None else found


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def build_case(task: Task, case: Case) -> BuildCase:
    """The call that host code sees in a case; worked out once per case.

    Non-contiguous cases pad the last dimension: each row of an input starts 8 elements after the
    end of the one before. With an offset, inputs start as many elements behind an aligned address.

    Raises:
        TaskError: A formula has no value in this case, or a size is no whole number.
    """
    dims = sorted(case.dims.items(), key=lambda item: item[0])
    key = (case.name, case.dtype, case.noncontiguous, case.offset, *dims)
    if key not in task.known_build_cases:
        try:
            task.known_build_cases[key] = _build_case(task, case)
        except ValueError as e:
            raise _unfit(task, f"case {case.name}", e) from None
    return task.known_build_cases[key]


def _build_case(task: Task, case: Case) -> BuildCase:
    def spec(
        name: str,
        shape: Sequence[Size],
        dtype: str,
        *,
        layout: Layout = "contiguous",
        pad: bool = False,
        offset: int = 0,
    ) -> TensorSpec:
        sizes = task.shape(shape, case)
        strides = strides_of(sizes, layout, pad=pad)
        return TensorSpec(name, sizes, strides, task.dtype(dtype, case), offset)

    arguments: list[TensorSpec | ScalarSpec] = []
    for a in task.arguments:
        if a.optional is not None and not task.formula(a.optional, case):
            arguments.append(ScalarSpec(a.name, None))
        elif a.shape is not None:
            pad, offset = case.noncontiguous, case.offset
            arguments.append(
                spec(a.name, a.shape, a.dtype, layout=a.layout, pad=pad, offset=offset)
            )
        elif a.value is not None:
            arguments.append(ScalarSpec(a.name, scalar(task, a, case)))
    results = tuple(spec(r.name, r.shape, r.dtype) for r in task.results)
    writes = tuple(a.name for a in task.arguments if a.writes is not None)
    return BuildCase(case.name, tuple(arguments), results, writes)


def strides_of(
    sizes: Sequence[int], layout: Layout = "contiguous", *, pad: bool = False
) -> tuple[int, ...]:
    """Strides in elements of a tensor in a layout.

    Args:
        sizes: Its shape.
        layout: "transposed": the last two dimensions are swapped in memory; "channels_last": the
            second dimension is the innermost; "strided": every other element of its memory.
        pad: Whether the rows of a contiguous one lie 8 elements further apart.
    """
    order = list(range(len(sizes)))  # outermost first
    if layout == "transposed":
        order[-2:] = order[-1], order[-2]
    elif layout == "channels_last":
        order.append(order.pop(1))
    strides, step = [1] * len(sizes), 2 if layout == "strided" else 1
    for place, i in enumerate(reversed(order)):
        strides[i] = step
        gap = 8 if pad and layout == "contiguous" and place == 0 and len(sizes) > 1 else 0
        step *= sizes[i] + gap
    return tuple(strides)


def scalar(task: Task, argument: Argument, case: Case) -> Value:
    """Value of a scalar argument: a dimension keeps its type, a formula gives a number, and what is
    in quotes is a text.
    """
    value = argument.value
    if isinstance(value, str):
        if _QUOTED.fullmatch(value):
            return value[1:-1]
        return case.dims[value] if value in case.dims else task.formula(value, case)
    assert value is not None
    return value
