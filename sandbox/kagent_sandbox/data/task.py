"""A task: an operation, the cases that matter, and what counts as correct. Read from a folder.

`task.toml` declares everything that is data; `reference.py` beside it holds the rest as code (see
`kagent_sandbox.data.reference`). docs/tasks.md is the guide for writing one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
from pydantic import Field

from kagent_sandbox.data.arguments import Argument, ResultSpec
from kagent_sandbox.data.build import BuildCase, Value
from kagent_sandbox.data.calibration import FILE as CALIBRATION
from kagent_sandbox.data.calibration import Calibration, read_calibration
from kagent_sandbox.data.case import CASE_DTYPE, Identifier, Name, Size, StrictModel, identifier
from kagent_sandbox.data.case import Case as Case  # reference.py of tasks imports it from here
from kagent_sandbox.data.formula import MOST_NUMBERS, evaluate
from kagent_sandbox.data.generator import Generator, draw_fields
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.plan import COPIED_DTYPES, ITEMSIZE
from kagent_sandbox.data.ranges import Range
from kagent_sandbox.data.reference import Reference, load_reference
from kagent_sandbox.errors import TaskError

_MOST_VALUE = 1 << 63
_TEXT = re.compile(r"[A-Za-z_][\w .-]*")  # as a dimension: it must not look like a number
_QUOTED = re.compile(r"'[^']*'")


class Cases(StrictModel):
    """Visible cases and generators of hidden ones, for one kind of device."""

    check: tuple[Case, ...] = Field(min_length=1)
    bench: tuple[Case, ...] = Field(min_length=1)
    hidden_check: tuple[Generator, ...] = ()
    hidden_bench: tuple[Generator, ...] = ()


class Idle(StrictModel):
    """An operation of the reference that changes no result, whatever the inputs."""

    operation: str = Field(min_length=1)  # as the check of the task names it
    reason: str = Field(min_length=1)


class Task(StrictModel):
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
    without_effect: tuple[Idle, ...] = ()  # operations that the check may find no use of
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

    @functools.cached_property
    def undeclared_digest(self) -> str:
        """Hash of what task.toml says, but for `without_effect`, and of reference.py."""
        said = tomllib.loads((self.folder / "task.toml").read_text())
        said.pop("without_effect", None)
        text = json.dumps(said).encode()  # the order of dimensions decides which cases are drawn
        reference = (self.folder / "reference.py").read_bytes()
        return hashlib.sha256(b"\0".join((text, reference))).hexdigest()[:16]

    def shape(self, shape: Sequence[Size], case: Case) -> tuple[int, ...]:
        """Sizes of a declared shape in a case.

        Raises:
            ValueError: One is no whole number, or negative.
        """
        sizes = []
        names = self._names(case.dims, case.dtype)
        for declared in shape:
            size = evaluate(declared, names) if isinstance(declared, str) else declared
            if isinstance(names.get(str(declared)), bool | float) and size == int(size):
                raise ValueError(f"size {declared!r} is {size!r}, expected a whole number")
            if size != int(size) or size < 0:
                raise ValueError(f"size {declared!r} is {size:g}, expected a whole number")
            sizes.append(int(size))
        return tuple(sizes)

    def dtype(self, declared: str, case: Case) -> str:
        """Torch dtype name of a declaration in a case."""
        return case.dtype if declared == CASE_DTYPE else declared

    def product_dtype(self, case: Case) -> str:
        """Dtype whose matrix products are the ceiling of a call: that of the arguments with two
        dimensions or more if all of them have the same 8 bits, else the case's.
        """
        operands = {self.dtype(a.dtype, case) for a in self.arguments if len(a.shape or ()) > 1}
        if operands == {"int8"}:
            return "int8"
        narrow = bool(operands) and all(d.startswith("float8") for d in operands)
        return "float8_e4m3fn" if narrow else case.dtype

    def has_narrow_arguments(self, case: Case) -> bool:
        """Whether an argument holds numbers of 8 bits or fewer."""
        dtypes = {self.dtype(a.dtype, case) for a in self.arguments} - {"bool"}
        return any(ITEMSIZE.get(d) == 1 for d in dtypes)

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

    def scalar(self, argument: Argument, case: Case) -> Value:
        """Value of a scalar argument. A dimension keeps its type, a formula gives a number, and a
        text in quotes is a text.
        """
        value = argument.value
        if isinstance(value, str):
            if _QUOTED.fullmatch(value):
                return value[1:-1]
            return case.dims[value] if value in case.dims else self.formula(value, case)
        assert value is not None
        return value

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
        if not self.signature.startswith(f"{self.entry}("):
            raise ValueError(
                f"signature: {self.signature!r:.80}, expected one of the entry: {self.entry}(...)"
            )
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
        idle = [e.operation for e in self.without_effect]
        if len(set(idle)) != len(idle):
            raise ValueError(f"without_effect: an operation appears twice in {idle}")
        for name in self.dims:
            if identifier(name) in (*Case.model_fields, "itemsize"):
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
                    drawn = [
                        Case(name="drawn", **v) for v in draw_fields(generator, rng, self.unmet)
                    ]
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

        try:
            broken = next(self.unmet(case.dims, case.dtype), None)
        except ValueError as e:
            raise ValueError(f"constraints in {where}: {e}") from None
        if broken is not None:
            raise ValueError(f"{where}: the constraint {broken!r} does not hold")

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
                check(f"arguments.{a.name}", functools.partial(self.scalar, a, case))
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
        text = path.read_text()
    except FileNotFoundError:
        raise TaskError(f"{folder}: no task.toml there; see docs/tasks.md") from None
    except (OSError, ValueError) as e:
        raise TaskError(_one_line(f"{path}: {e}")) from None
    if not (folder / "reference.py").is_file():
        raise TaskError(f"{folder}: no reference.py there; see docs/tasks.md")
    try:
        task = _task_of(text, folder.resolve()).model_copy()
        found = read_calibration(folder, task.digest) if calibrated else None
        return task.model_copy(update={"calibration": found}) if found is not None else task
    except pydantic.ValidationError as e:
        # Of a value with several forms (a list or a range), what is wrong with the one that fits.
        errors = sorted(e.errors(), key=lambda found: _misfit(found["type"]))
        keys = [p for p in errors[0]["loc"] if isinstance(p, int) or p.isidentifier()]
        where = ".".join(str(p) for p in keys if p != Range.__name__)
        text = errors[0]["msg"].removeprefix("Value error, ")
        raise TaskError(_one_line(f"{path}: {where + ': ' if where else ''}{text}")) from None
    except (ValueError, RecursionError) as e:
        raise TaskError(_one_line(f"{path}: {e}")) from None


@functools.lru_cache(maxsize=32)
def _task_of(text: str, folder: Path) -> Task:
    """The task of a task.toml. It is copied for each reader, since a task keeps what is worked out
    from it, the hash of its files among that.

    Raises:
        ValueError: It is not TOML, or does not fit the schema.
    """
    data = tomllib.loads(text)
    for key in ("folder", "calibration", "tolerance_from"):
        if key in data:
            raise ValueError(f"{key}: no key of a task: remove it")
    return Task.model_validate({**data, "folder": folder})


def _misfit(kind: str) -> int:
    """Rank of an error by its type: those about another form than the value has come last."""
    return {"value_error": 0, "tuple_type": 2, "model_type": 3}.get(kind, 1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


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
            for values in draw_fields(generator, rng, task.unmet):
                drawn.append(Case(name=f"hidden_{which}_{len(drawn)}", **values))
    except ValueError as e:
        raise unfit(task, f"{kind}.hidden_{which}", e) from None
    return drawn


def unfit(task: Task, where: str, error: ValueError) -> TaskError:
    """The error of a task whose declarations make no sense at one place of task.toml."""
    return TaskError(_one_line(f"{task.folder / 'task.toml'}: {where}: {error}"))
