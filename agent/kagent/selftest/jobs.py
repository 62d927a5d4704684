"""Jobs for candidates of the corpus, and a job under way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import KagentError

from kagent.selftest.assemble import candidate_text
from kagent.selftest.bait import Bait
from kagent.selftest.catalogue import Runs, Variant


@dataclass(frozen=True, slots=True)
class Job:
    """A candidate's text and what is to be done with it. Equal jobs are done once."""

    text: str
    task: Path
    runs: Runs
    measured: bool
    hangs: bool = False  # as expected: a limit that its build reaches says nothing of the machine
    endless: bool = False  # its build reaches whatever limit there is

    @property
    def kind(self) -> Kind:
        """The kind of device whose cases it is built for."""
        return "cpu" if self.runs == "cpu" else "gpu"


def job_of(variant: Variant, *, twin: bool = False) -> Job:
    """A variant's job, or its honest twin's.

    Raises:
        UserError: The file cannot be read.
    """
    text = candidate_text(variant.twin if twin else variant.path)
    hangs = not twin and f"{Stage.BUILD} {Status.TIMEOUT}" in variant.expect
    endless = not twin and variant.endless
    return Job(text, variant.task, variant.runs, variant.measured, hangs, endless)


@dataclass
class Attempt:
    """A job under way: its baits, its text with their names in it, and the result of building."""

    job: Job
    bait: Bait
    text: str
    built: Built | Rejected | None = None
    error: KagentError | None = None
    seconds: float = 0.0
