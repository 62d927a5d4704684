"""A rejection as the author of the next attempt needs it: what, where in the file, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.runtime.text import printable

from kagent.prompting.cases import case_line
from kagent.prompting.ledger import HIDDEN
from kagent.prompting.text import clipped

AROUND = 3  # lines shown before and after the one that an error names
MESSAGE_LINES = 16
_AT = re.compile(r"\bline (\d+)\b")
_QUOTED = re.compile(r"^\s*(\d+) \| (.+)$", re.MULTILINE)  # a line of a kernel's own source

HINTS: Mapping[Status, str] = {
    Status.COMPILE_ERROR: "The file does not compile.",
    Status.POLICY: "Host code did what it may not do; the message names what to write instead.",
    Status.RESOURCE_LIMIT: "More shared memory, threads, registers or memory than there is.",
    Status.TIMEOUT: (
        "It ran or compiled for too long: a barrier that not every thread reaches, a wait for a "
        "signal that never comes, a loop whose bound is wrong; or a tile too large to compile."
    ),
    Status.RUNTIME_ERROR: "Host code raised, or a kernel's process died.",
    Status.GPU_FAULT: (
        "An access outside of a buffer, or one wider than its address is aligned: look at the tail "
        "of rows, at odd sizes, and at strides that are not the shape's."
    ),
    Status.INCORRECT_SHAPE: "A result has the wrong shape, or results are missing.",
    Status.INCORRECT_DTYPE: "A result has the wrong dtype.",
    Status.INCORRECT_NUMERICAL: (
        "Wrong values. A large error is an indexing mistake or a lost tail; a small one rounding: "
        "accumulate in fp32, subtract before scaling, round once at the end."
    ),
    Status.NONDETERMINISTIC: (
        "Two runs on one input differ: a race (a barrier is missing), or memory that is read "
        "before anything was written to it."
    ),
    Status.SUSPECT: "Its time cannot be true.",
    Status.TAMPER: "It wrote outside of its buffers, or into an input.",
    Status.NO_KERNEL: "The reply held no kernel file.",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A rejection, distilled. `excerpt` is numbered lines of the file, empty where none is
    named.
    """

    status: Status
    stage: Stage
    hint: str
    case: str  # the visible case's shape and strides; of a hidden one only that it is one
    message: str  # every character visible; data, not instructions
    excerpt: str


def distil(rejected: Rejected, source: str, task: Task, kind: Kind) -> Fault:
    """Distil a rejection for the next attempt."""
    return Fault(
        status=rejected.status,
        stage=rejected.stage,
        hint=HINTS.get(rejected.status, ""),
        case=_case(rejected.case, task, kind),
        message=clipped(rejected.message, MESSAGE_LINES, 300),
        excerpt=excerpt(rejected.message, source),
    )


def _case(name: str | None, task: Task, kind: Kind) -> str:
    if not name:
        return ""
    if name.startswith(HIDDEN):
        return "a hidden case, whose shape differs from all visible ones"
    cases: list[Case] = [*task.cases(kind).check, *task.cases(kind).bench]
    found = next((c for c in cases if c.name == name), None)
    return case_line(task, found) if found is not None else name


def excerpt(message: str, source: str) -> str:
    """The lines around the one that an error names, with their numbers in the file."""
    lines = printable(source).splitlines()  # at newlines alone, as compilers count
    at = _line_of(message, lines)
    if at is None:
        return ""
    first, last = max(1, at - AROUND), min(len(lines), at + AROUND)
    width = len(str(last))
    return "\n".join(
        f"{'>' if n == at else ' '} {n:>{width}} | {lines[n - 1]}" for n in range(first, last + 1)
    )


def _line_of(message: str, lines: list[str]) -> int | None:
    """Line of the file: errors of CUDA and C++ count within their own string and quote the text."""
    quoted = _QUOTED.search(message)
    if quoted is not None:
        number, text = int(quoted[1]), quoted[2].strip()
        places = [i for i, line in enumerate(lines, 1) if line.strip() == text]
        # Line 1 of a kernel's source is the one with the opening quotes.
        counted = [i for i in places if i >= number and '"""' in lines[i - number]]
        return next(iter([*counted, *places]), None)
    named = _AT.search(message)
    if named is None or "kernel " in message[: named.start()]:
        return None
    at = int(named[1])
    return at if 1 <= at <= len(lines) else None
