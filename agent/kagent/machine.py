"""What the loop needs of the rest: something that builds, and something that judges.

`kagent_sandbox.build.client.Builder` and `kagent_sandbox.judge_client.JudgeClient` are these; a
test's are a few lines of arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kagent_sandbox.build.request import BuildRequest, Built
from kagent_sandbox.verdict import CaseError, Passed, Rejected


class Builder(Protocol):
    """Turns source into plans and binaries. Called from several threads at once."""

    def build(self, request: BuildRequest) -> Built | Rejected:
        """Block until it is built or rejected."""


class Judge(Protocol):
    """Decides on what was built. Called from one thread at a time."""

    def check(self, built: Built) -> tuple[CaseError, ...] | Rejected:
        """Whether it is correct on every case, hidden ones included."""

    def measure(
        self, built: Built, errors: tuple[CaseError, ...], incumbent: Built | None, against: str
    ) -> Passed | Rejected:
        """Its time on every benchmark case, interleaved with the incumbent, whose id is
        `against`.
        """


@dataclass(frozen=True)
class Machine:
    """What candidates are built and judged with."""

    builder: Builder
    judge: Judge
    jobs: int  # builds at once
    quiet: bool  # nothing may be built while it times: kernels run on the cores that build
    request: Callable[[str], BuildRequest]  # of a source, for all cases but the final race's
