"""Rules for host code while it is traced, and a rewrite for each refusal.

Two exceptions, for two audiences. `PolicyError` is raised inside the candidate's own frames, where
the line is known; `BuildRejected` leaves the builder with that line in its message. The policy
steers honest candidates and gives them good messages; it is no security boundary (that is the
builder's confinement, and the judge's validation of every plan).
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType

from kagent_sandbox.data.language import how_to_write
from kagent_sandbox.data.verdict import Stage, Status

CANDIDATE_FILE = "candidate.py"
_MOST_CHARS = 3500  # of what an exception says


class BuildRejected(Exception):  # noqa: N818
    """The candidate is out; `message` has its own line number and text, and the remedy."""

    def __init__(self, stage: Stage, status: Status, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.status = status
        self.message = message


class ConfigDropped(BuildRejected):
    """This configuration does not apply to this case (pruned by the candidate's own rule)."""


class PolicyError(Exception):
    """Host code did what a candidate may not do. `line` is 0 outside of the candidate's file."""

    def __init__(
        self, what: str, remedy: str, *, status: Status = Status.POLICY, line: int | None = None
    ) -> None:
        super().__init__(f"{what}: {remedy}")
        self.status = status
        self.line, self.text = (
            _innermost_line(inspect.currentframe()) if line is None else (line, "")
        )


def candidate_path(filename: str) -> bool:
    """Whether a code object's file name is the candidate's."""
    return Path(filename).name == CANDIDATE_FILE


def _innermost_line(frame: FrameType | None) -> tuple[int, str]:
    while frame is not None:
        if candidate_path(frame.f_code.co_filename):
            return frame.f_lineno, source_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return 0, ""


def source_line(filename: str, line: int) -> str:
    """Text of a line of the candidate, stripped and cut."""
    return linecache.getline(filename, line).strip()[:200]


def at_line(line: int, text: str) -> str:
    """The line as messages begin with it, or nothing where no line is known."""
    if not line:
        return ""
    return f"line {line}: `{text}`: " if text else f"line {line}: "


def where(error: BaseException) -> str:
    """The candidate's innermost line in an exception's traceback, as `at_line` writes it."""
    line, text = 0, ""
    for frame in traceback.extract_tb(error.__traceback__):
        if candidate_path(frame.filename):
            line, text = frame.lineno or 0, (frame.line or "").strip()[:200]
    return at_line(line, text)


def rejected(error: BaseException, stage: Stage) -> BuildRejected:
    """Turn what host code raised into a rejection that names the candidate's innermost line."""
    if isinstance(error, BuildRejected):
        return error
    if isinstance(error, PolicyError):
        return BuildRejected(stage, error.status, at_line(error.line, error.text) + str(error))
    if isinstance(error, SyntaxError) and candidate_path(error.filename or ""):
        text = (error.text or "").strip()[:200]
        message = f"{at_line(error.lineno or 0, text)}SyntaxError: {error.msg}"
        return BuildRejected(Stage.PARSE, Status.COMPILE_ERROR, message)
    text = str(error)[:_MOST_CHARS]  # it may be a gigabyte: cut before anything copies it
    message = f"{where(error)}{type(error).__name__}: {text}".rstrip(": ")
    hint = _hint(error, text)
    if hint:
        message = f"{message}\n{hint}"
    return BuildRejected(stage, Status.RUNTIME_ERROR, message)


def _hint(error: BaseException, text: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            "Only the standard library, torch, triton, numpy and kagent_sandbox.lang can be "
            f"imported; write the kernel with {how_to_write()}."
        )
    if "no allocator was set" in text:
        return (
            "The kernel needs global scratch (for example device-made tensor descriptors): call "
            "triton.set_allocator(lambda size, align, stream: "
            "torch.empty(size, device='cuda', dtype=torch.int8)) before the launch."
        )
    if isinstance(error, RecursionError | MemoryError):
        return "Host code should only allocate results and launch kernels."
    return ""


# -- operations ----------------------------------------------------------------------------------

ALLOCATE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Undefined contents: an allocation and nothing else."""

FILL: Mapping[str, float | None] = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "zero_": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "full": None,
    "full_like": None,
    "new_full": None,
    "fill_": None,
    "scalar_tensor": None,
}
"""One value everywhere; None: the value is an argument."""

READS = frozenset(
    {
        "_local_scalar_dense",
        "item",
        "equal",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "unique",
        "_unique2",
    }
)
"""Operations whose result, or its shape, depends on values."""

RANDOM = frozenset(
    {
        "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "normal",
        "normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "dropout", "native_dropout",
        "multinomial", "exponential_", "geometric_", "cauchy_", "log_normal_", "poisson",
    }
)  # fmt: skip
"""Operations that draw numbers."""

METADATA_IN_PLACE = frozenset(
    {
        "t_", "transpose_", "unsqueeze_", "squeeze_", "as_strided_", "resize_", "resize_as_",
        "set_", "swapaxes_", "swapdims_", "detach_", "resize",
    }
)  # fmt: skip
"""Operations that change a tensor's shape or storage under its name."""

CONSTANT = frozenset({"arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices"})
"""Factories whose values follow from their arguments: small results become constants."""


def base_name(name: str) -> str:
    """`aten::mm.out` -> `mm`; in-place forms keep their underscore."""
    return name.split("::")[-1].split(".")[0]


def allows(allow: Collection[str], name: str) -> bool:
    """Whether a task allows an operation: `aten::mm`, `mm`, `torch.mm` name all its overloads."""
    wanted = base_name(name).strip("_")
    return any(a.split("::")[-1].split(".")[-1].strip("_") == wanted for a in map(_bare, allow))


def _bare(entry: str) -> str:
    """`aten::mm.out` -> `aten::mm`, but `torch.mm` stays: there the name follows the dot."""
    return entry.split(".")[0] if "::" in entry else entry


def forbidden(name: str, allow: Collection[str]) -> PolicyError:
    """The refusal of a torch operation, naming what is allowed."""
    shown = base_name(name).lstrip("_")
    also = f" (this task also allows {', '.join(sorted(allow))})" if allow else ""
    return PolicyError(
        f"torch operation {shown!r} is not allowed in this task",
        "compute it in a kernel; host code may allocate, view, copy, convert and fill" + also,
    )


def reads_value(what: str) -> PolicyError:
    """The refusal of host code that needs a tensor's value."""
    return PolicyError(
        f"host code reads a tensor's value ({what})",
        "host code sees shapes, strides and dtypes, not values; compute it in a kernel, pass the "
        "tensor itself and load it there, or choose by shape",
    )
