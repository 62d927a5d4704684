"""Contents of a kernel library, as data: operators, their kernels, and each device's measurements.

A library on disk is one of these records (PROVENANCE.json) with its texts in files beside it, so
that a later export, or `kagent certify`, reads back exactly what was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.language import LANGUAGES, Language, language
from kagent_sandbox.data.verdict import SpeedVerdict

TORCH = "torch"
"""Stands among the times of a point for the fastest of eager and the torch.compile modes, and as
`best` for torch's own implementation."""

FORMAT = 2


@dataclass(frozen=True, slots=True)
class OriginRecord:
    """The origin of a kernel, and the findings of its run.

    `ratio`, `low` and `high` are the final race's, on hidden cases: time of the fastest of eager
    and the torch.compile modes / its own time, with the 95 % interval.
    """

    run: str  # the run's folder name
    run_id: str
    candidate: int
    path: tuple[str, ...]  # from the seed on: operator and hypothesis of each step
    proposer: str
    models: tuple[str, ...]  # that wrote a step of the path
    evaluated: int  # candidates of the run
    ratio: float
    low: float
    high: float
    started: str  # local time, ISO 8601
    kagent: str  # version that made the run
    task_digest: str
    selftest: str  # digest of the selftest on that machine; "" where none was run


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """Shapes at which a kernel was found correct.

    A dimension of many checked sizes lies between the least and the largest of them; one of few (a
    head dimension), and a flag, must be among those checked. The product of the dimensions between
    bounds is at most `volume`, the largest that was checked: indices overflow beyond some size.
    """

    dtype: str
    low: Mapping[str, int]
    high: Mapping[str, int]
    flags: Mapping[str, tuple[int | bool, ...]] = field(default_factory=dict)
    volume: int = 0
    cases: int = 0  # number of checked cases
    element_error: float | None = None  # the largest of an element in them, as `CaseError` has it


@dataclass(frozen=True, slots=True)
class CompiledRecord:
    """A CUDA or C++ source that a kernel's host code compiles, as observed on real tensors.

    `key` is the name of its binary for one target: cubins/KEY.cubin.
    """

    key: str
    target: str
    language: str
    name: str  # of the kernel, an instance of a template included
    text: str = field(repr=False)
    options: tuple[str, ...]
    defines: tuple[tuple[str, int | float | str], ...]

    def __post_init__(self) -> None:
        language(self.language)


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One winner: a file of host code and kernels, as it was judged."""

    id: str  # task and the beginning of its source's hash: softmax_1a2b3c4d
    task: str
    language: str
    source: str = field(repr=False)
    sha256: str
    targets: tuple[str, ...]  # it was compiled and checked for: "sm_90a", "cpu"
    configs: tuple[Mapping[str, object], ...]  # values of its tunables; points name them by index
    regions: tuple[RegionRecord, ...]
    pitched: bool  # rows may be further apart than they are long: checked with such inputs
    origin: OriginRecord
    compiled: tuple[CompiledRecord, ...] = ()

    def __post_init__(self) -> None:
        language(self.language)

    @property
    def written_in(self) -> Language:
        """Language of the kernel."""
        return language(self.language)


@dataclass(frozen=True, slots=True)
class Timing:
    """Device time of one call in µs: median, and its 95 % interval."""

    us: float
    low_us: float
    high_us: float


@dataclass(frozen=True, slots=True)
class PointRecord:
    """One measured shape: what everyone took there, and who is to be used.

    `times` has kernels by id, baselines by name ("eager", "compile", ...), and `TORCH`, the fastest
    of eager and the torch.compile modes. `config` is the index of each kernel's configuration.
    `verdicts` has each kernel's beside the best of torch, from interleaved blocks; libraries of
    before 2026-11-23 have none.
    """

    case: str
    dtype: str
    dims: Mapping[str, Value]
    times: Mapping[str, Timing]
    config: Mapping[str, int]
    best: str  # a kernel's id, or TORCH where none is FASTER than eager, the operator's other way
    verdicts: Mapping[str, SpeedVerdict] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """Measurements on one model of device.

    `capability` is what must agree for its figures to stand in for those of another model: "sm_90"
    of a GPU; of a CPU its architecture and vector level, "x86_64-v4".
    """

    name: str
    kind: Literal["gpu", "cpu"]
    capability: str
    environment: Mapping[str, object]  # driver, versions, isolation, as a run stores it
    date: str
    points: tuple[PointRecord, ...]


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """One task in a library: its kernels, and where each of them is used."""

    task: str
    entry: str
    signature: str
    summary: str
    dims: tuple[str, ...]
    kernels: tuple[KernelRecord, ...]
    devices: tuple[DeviceRecord, ...]
    task_toml: str = field(repr=False)
    reference_py: str = field(repr=False)
    operator_py: str = field(repr=False)

    def kernel(self, kernel_id: str) -> KernelRecord:
        """Return the kernel with an id.

        Raises:
            KeyError: There is none.
        """
        found = next((k for k in self.kernels if k.id == kernel_id), None)
        if found is None:
            raise KeyError(kernel_id)
        return found


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """One export into a library."""

    version: str
    date: str
    lines: tuple[str, ...]  # additions, replacements and removals, in words


@dataclass(frozen=True, slots=True)
class LibraryRecord:
    """A whole library."""

    name: str  # of the Python package
    version: str
    kagent: str  # version that wrote it
    operators: tuple[OperatorRecord, ...]
    history: tuple[ChangeRecord, ...]  # the newest first
    format: int = FORMAT

    @property
    def languages(self) -> list[Language]:
        """Languages of its kernels, in the order of the languages."""
        found = {k.language for o in self.operators for k in o.kernels}
        return [each for each in LANGUAGES.values() if each.name in found]


def valid_name(name: str) -> bool:
    """Whether a library can be called so: a Python package, also as a file name and on an index."""
    return re.fullmatch(r"[a-z][a-z0-9_]{0,48}[a-z0-9]", name) is not None
