"""The verdict on a candidate: `Passed` or `Rejected`, two types for two outcomes.

A bad kernel is data. A broken machine is an exception (`kagent_sandbox.errors`) and is never blamed
on the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kagent_sandbox.errors import KagentError


class Stage(StrEnum):
    """The step at which a candidate stopped."""

    PARSE = "parse"
    BUILD = "build"
    CHECK = "check"
    MEASURE = "measure"


class Status(StrEnum):
    """The reason why a candidate was rejected."""

    NO_KERNEL = "NO_KERNEL"
    """The reply holds no kernel file: prose, several files, another language, or cut short."""
    COMPILE_ERROR = "COMPILE_ERROR"
    """The compiler, or Python, refused the source."""
    POLICY = "POLICY"
    """It broke a rule for candidates, or leaves the process that calls it changed; the message
    names the rewrite.
    """
    RESOURCE_LIMIT = "RESOURCE_LIMIT"
    """Shared memory, threads, memory or plan size over the device's or the sandbox's limit."""
    TIMEOUT = "TIMEOUT"
    """Tracing, compiling or running took longer than its limit."""
    RUNTIME_ERROR = "RUNTIME_ERROR"
    """Host code raised, or its process died."""
    GPU_FAULT = "GPU_FAULT"
    """The device reported a fault: illegal address, misaligned access, illegal instruction."""
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    """A result has another shape than the task declares, or there are too few or too many."""
    INCORRECT_DTYPE = "INCORRECT_DTYPE"
    """A result has another dtype than the task declares."""
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    """A result differs from the reference by more than the task's tolerance."""
    NONDETERMINISTIC = "NONDETERMINISTIC"
    """Two runs on the same inputs differ by more than rounding explains."""
    SUSPECT = "SUSPECT"
    """Faster than the bytes that must move allow, or the clocks disagree."""
    DUPLICATE = "DUPLICATE"
    """It has the text, syntax tree or plans of an earlier candidate."""
    TAMPER = "TAMPER"
    """It changed memory outside of its buffers or an input, or its plan is not what it does."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The candidate is out. `message` is what helps the next attempt."""

    stage: Stage
    status: Status
    message: str
    case: str | None = None


@dataclass(frozen=True, slots=True)
class CaseError:
    """A result's error against the float64 reference, beside torch's own error (same dtype).

    Errors are relative (see `kagent_sandbox.judge.check.numerics`): `row` the worst row's L2
    error over its norm, `element` the worst element's, `bias` the scale error of the whole result.
    """

    case: str
    output: str
    row: float
    element: float
    bias: float
    torch_row: float
    torch_element: float
    torch_bias: float
    share_of_tolerance: float  # worst of the three over what is allowed; passes when at most 1


@dataclass(frozen=True, slots=True)
class Examined:
    """A check of every case, also after one that failed: correct where nothing `failed`.

    Attributes:
        errors: The error of each result, of cases that passed.
        failed: A rejection for each case that failed; or one of the whole candidate.
    """

    errors: tuple[CaseError, ...]
    failed: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True)
class CaseTiming:
    """Device time of one benchmark case. `low_us` and `high_us` bound the median with 95 %
    confidence.
    """

    case: str
    kernel_us: float
    low_us: float
    high_us: float
    samples: int
    roofline_share: float  # attainable time / kernel time, ceilings measured on this device
    gb_per_s: float  # task's bytes over kernel time
    tflop_per_s: float
    config: int = 0  # index into Passed.configs
    baseline_us: float | None = None  # fastest of eager and the torch.compile modes
    launches: int = 1
    peak_bytes: int = 0


class SpeedVerdict(StrEnum):
    """Verdict on a speed-up by its 95 % interval. `speed_verdict` is the only rule."""

    FASTER = "FASTER"
    """The interval lies above 1."""
    TIE = "TIE"
    """The interval contains 1."""
    SLOWER = "SLOWER"
    """The interval lies below 1."""


def speed_verdict(low: float, high: float) -> SpeedVerdict:
    """The verdict on a speed-up with this 95 % interval."""
    if low > 1:
        return SpeedVerdict.FASTER
    return SpeedVerdict.SLOWER if high < 1 else SpeedVerdict.TIE


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidate against incumbent, interleaved: ratio = incumbent time / candidate time."""

    against: str  # id of the incumbent
    ratio: float  # geometric mean over cases
    low: float
    high: float
    p_faster: float
    cases: Mapping[str, float] = field(default_factory=dict)  # ratio per case

    @property
    def verdict(self) -> SpeedVerdict:
        """Whether the candidate is faster, over all cases together."""
        return speed_verdict(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Passed:
    """The candidate is correct on every case and was timed on every benchmark case."""

    timings: tuple[CaseTiming, ...]
    errors: tuple[CaseError, ...]
    score: float  # geometric mean over cases of baseline time / time
    score_stderr: float  # standard error of log(score)
    configs: tuple[Mapping[str, object], ...] = ({},)
    resources: tuple[Mapping[str, object], ...] = ()  # one per kernel: name, registers, spills, ...
    versus: Comparison | None = None
    screened: bool = False  # hopeless after a few samples: times are coarse
    lane_s: float = 0.0  # seconds on the device, the check included
    lane: Mapping[str, float] = field(default_factory=dict)  # the same by part (`PhaseTimer`)
    notes: tuple[str, ...] = ()  # disturbances while it was timed


Verdict: TypeAlias = Passed | Rejected


class IncumbentWrong(KagentError):  # noqa: N818
    """The incumbent failed beside a candidate, or was wrong. Nothing is known of the candidate."""

    def __init__(self, against: str, verdict: Rejected) -> None:
        """`against` is its id, `verdict` what it did."""
        what = f"{verdict.stage} {verdict.status}: {verdict.message}"
        super().__init__(f"the incumbent, #{against}, is wrong or fails beside a candidate: {what}")
        self.verdict = verdict
