"""A task as it is being made: its cases and tolerances."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from kagent_sandbox.data.calibration import ResultCalibration
from kagent_sandbox.data.formula import evaluate

from kagent.authoring.proofs import Proof
from kagent.authoring.tracing.choices import IndexResult, find_choices
from kagent.authoring.tracing.drawing import Drawing
from kagent.authoring.tracing.example_call import Example
from kagent.authoring.tracing.rounded import RoundedResult, find_rounded
from kagent.authoring.tracing.trace import TracedOperation

HALVES = (torch.float16, torch.bfloat16)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


NORMAL, MIXED, NONFINITE, BLANK = "normal", "mixed", "nonfinite", "blank"
THRESHOLDS, COARSE, MASKS = "thresholds", "coarse", "masks"
WEIGHTS, UNORDERED, WIDE = "weights", "unordered", "wide"
SHIFTED, SUNK = "shifted", "sunk"
"""Names of distributions, as `inputs` of a reference.py has them."""
KINDS_AROUND = (THRESHOLDS, "far_thresholds", "farthest_thresholds")
"""Names of distributions around thresholds, by magnitude. Numbers beside much larger ones would be
compared as loosely as those."""
_FAR = (1e4, 1e16)
"""Magnitudes above which thresholds have a distribution of their own."""
ROWS: Mapping[str, str] = {
    "constant": "one value",
    "tiny": "times 0.001",
    "large": "times 8",
    "spiked": "one element times 100",
    SHIFTED: "plus 16 where it is not 0",
    "zeros": "0",
    "negative": "times -1",
    "sparse": "half of it 0",
    SUNK: "minus 128 where it is not 0",
    "minute": "times 1e-18",
    "subnormal": "times the least normal number",
}
"""Kinds of rows beside those that are drawn as the example is, each a distribution, too."""
ALONE = (SHIFTED, SUNK)
"""Kinds of rows that are in no other distribution: torch errs more there, and others would be
compared as loosely."""
FAINT = ("minute", "subnormal")
"""Kinds of rows that are 0 beside others, but where the operation asks for a sign, or for 0."""


@dataclass(frozen=True)
class DraftCase:
    """A case: sizes, and what else differs from the plainest."""

    sizes: Mapping[str, int]
    dtype: str
    inputs: str = NORMAL
    scale: float = 1.0
    noncontiguous: bool = False
    offset: int = 0
    words: str = ""

    def name(self, kind: str) -> str:
        """Name among the cases of one kind."""
        short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
        size = "x".join(str(s) for s in self.sizes.values()) or "fixed"
        return "_".join(p for p in (kind, short.get(self.dtype, self.dtype), size, self.words) if p)


@dataclass(frozen=True)
class DraftGenerator:
    """A generator of hidden cases. `dims` are TOML values."""

    count: int
    fields: Mapping[str, Sequence[Any]]
    dims: Mapping[str, str]
    cost: str = ""
    least: float = 0.0
    most: float = 0.0


@dataclass(frozen=True)
class DraftKind:
    """The cases for one kind of device; `bench_words` is a comment on the benchmark's."""

    check: tuple[DraftCase, ...]
    bench: tuple[DraftCase, ...]
    hidden_check: tuple[DraftGenerator, ...] = ()
    hidden_bench: tuple[DraftGenerator, ...] = ()
    bench_words: str = ""


@dataclass(frozen=True)
class TaskDraft:
    """A task as it is being made.

    Attributes:
        trace: The operation.
        rows: Kinds of rows that `mixed` inputs have.
        nonfinite: Whether the operation is tried on infinities and NaN.
        blank: Whether it is tried with all numbers 0, those of a module, too.
        thresholds: By argument the numbers around which `thresholds` draws, each with the least
            distance from it in machine epsilons: there the operation's branches change.
        coarse: Whether `coarse` rounds all numbers to few: the operation compares what several
            arguments make, and what is equal may be a branch of its own.
        masks: Whether `masks` draws rows of masks anew: "any" also all false, "some" none of these,
            "" none at all.
        wide: Arguments of whole numbers that `wide` draws of either sign and any magnitude.
        constraints: Formulas over dimensions that hold in every case.
        gpu: Cases for GPUs.
        cpu: Cases for CPUs.
        k: Tolerance: times torch's own error.
        floor: Tolerance: machine epsilons beside that.
        idle: Operations that change no result.
        on_cpu: Tolerance of CPU cases whose dtype is another than that of GPU cases.
    """

    trace: TracedOperation
    gpu: DraftKind
    cpu: DraftKind
    rows: tuple[str, ...] = ()
    nonfinite: bool = False
    k: float = 3.0
    floor: float = 2.0
    notes: tuple[str, ...] = field(default=())
    idle: tuple[Proof, ...] = ()
    blank: bool = False
    thresholds: Mapping[str, Mapping[float, int]] = field(default_factory=dict)
    coarse: bool = False
    masks: Literal["", "some", "any"] = ""
    wide: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    on_cpu: ResultCalibration | None = None

    def with_(self, **changes: Any) -> TaskDraft:
        """A copy with other values."""
        return replace(self, **changes)

    @property
    def arguments(self) -> list[Example]:
        """Tensors that results depend on."""
        return [self.trace.operation.examples[i] for i in self.trace.used]

    @property
    def varied(self) -> list[Example]:
        """Tensors that cases scale and give rows of several kinds."""
        return [
            e
            for e in self.arguments
            if e.dtype.is_floating_point and not e.parameter and e.shape and not e.drawing.flags
        ]

    @property
    def flat(self) -> bool:
        """Whether no tensor that varies has rows of its own: vectors are cut into some."""
        return all(len(e.shape) == 1 for e in self.varied)

    @property
    def weights(self) -> list[Example]:
        """Vectors beside tensors that have rows, a module's parameters too: `weights` draws them of
        several magnitudes.
        """
        vectors = [e for e in self.arguments if e.dtype.is_floating_point and len(e.shape) == 1]
        return [] if self.flat else [e for e in vectors if not e.drawing.flags]

    @property
    def masked(self) -> list[Example]:
        """Tensors of truth values, or of whole numbers that are 0 or 1."""
        return [
            e
            for e in self.arguments
            if e.shape
            and not e.parameter
            and (e.dtype == torch.bool or (not e.dtype.is_floating_point and _is_0_or_1(e.drawing)))
        ]

    @property
    def whole(self) -> list[Example]:
        """Tensors of whole numbers that are no truth values, as far as their distribution tells."""
        return [
            e
            for e in self.arguments
            if e.shape
            and not e.parameter
            and e.dtype in _WHOLE
            and e.drawing.kind == "integers"
            and not _is_0_or_1(e.drawing)
        ]

    @property
    def kinds_around(self) -> list[str]:
        """Names of the distributions around thresholds."""
        return list(KINDS_AROUND[: len(self._magnitudes)])

    @property
    def _magnitudes(self) -> list[int]:
        every = (n for own in self.thresholds.values() for n in own)
        return sorted({bisect.bisect(_FAR, abs(n)) for n in every})

    def around(self, name: str) -> Mapping[str, Mapping[float, int]]:
        """Thresholds of an argument, by distribution."""
        own = sorted(self.thresholds.get(name, {}).items())
        found: dict[str, dict[float, int]] = {}
        for kind, magnitude in zip(KINDS_AROUND, self._magnitudes, strict=False):
            among = {n: d for n, d in own if bisect.bisect(_FAR, abs(n)) == magnitude}
            found |= {kind: among} if among else {}
        return found

    @functools.cached_property
    def undecided(self) -> list[IndexResult | RoundedResult]:
        """Results of whole numbers of which torch, or rounding, decides between several."""
        if self.trace.written:
            return []
        graph = self.trace.graph
        return [*find_choices(graph), *find_rounded(graph)]

    @property
    def dtype(self) -> torch.dtype:
        """The cases' dtype on a GPU: that of most floating-point inputs."""
        return case_dtype(self.trace)

    def declared(self, dtype: torch.dtype) -> str:
        """A dtype as task.toml has it."""
        return "$dtype" if dtype == self.dtype else plain(dtype)

    @property
    def matrix(self) -> bool:
        """Whether most of its operations are matrix products."""
        dims = self.trace.dims
        return evaluate(self.trace.products, dims) > evaluate(self.trace.elements, dims)


def _is_0_or_1(drawing: Drawing) -> bool:
    """Whether all numbers of a distribution are 0 or 1, as far as it tells."""
    numbers = drawing.a, drawing.b
    if drawing.kind == "integers":
        return numbers == (0, 2)
    return drawing.flags or (drawing.kind in ("lower", "upper") and {*numbers} == {0, 1})


def case_dtype(trace: TracedOperation) -> torch.dtype:
    """The dtype of most floating-point inputs; float32 where there is none."""
    used = [trace.operation.examples[i] for i in trace.used]
    floats = [e for e in used if e.dtype.is_floating_point and e.dtype.itemsize > 1]
    floats = [e for e in floats if not e.parameter] or floats
    found = [e.dtype for e in floats]
    return max(found, key=found.count) if found else torch.float32


def plain(dtype: torch.dtype) -> str:
    """A dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
