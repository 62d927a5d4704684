"""Whether a run's folder is as it was written. Nothing is changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kagent_sandbox.errors import RunError

from kagent.runs.checksums import has_checksums, read_rows
from kagent.runs.files import clear_errors, connect_to_read
from kagent.runs.kernel_files import read_kernel
from kagent.runs.manifest import read_digest, read_manifest
from kagent.runs.store import read_history, refuse_missing
from kagent.runs.stored_event import MANIFEST, StoredEvent, checked_event


@dataclass(frozen=True, slots=True)
class Verified:
    """Number of comparisons, and what differs from what was written."""

    run: str
    events: int
    checksums: bool  # False: a run of an earlier version, whose events have none
    kernels: int
    findings: tuple[str, ...]  # a line each; none: all is as it was written


def verify(folder: Path) -> Verified:
    """Compare every event with its checksum and every kernel with its name, and replay the run.

    run.json is compared with the checksum in the run's first event, but for who answered, which may
    be added later. Runs of earlier versions have none. Prompts, replies and logs decide nothing,
    and have no checksum either.

    Args:
        folder: Of the run.

    Returns:
        All findings, in the order of events.

    Raises:
        RunError: There is no run.
    """
    path = folder / "lineage.sqlite"
    if not (folder / "run.json").exists():
        read_manifest(folder)  # says that there is no run
    findings: list[str] = []
    events: list[StoredEvent] = []
    checksums = False
    digest: str | None = None  # of run.json, if it can be read
    with _noting(findings):
        digest = read_digest(folder)
    with _noting(findings), clear_errors(folder):
        refuse_missing(path)
        with contextlib.closing(connect_to_read(path)) as db:
            checksums = has_checksums(db)
            for row in read_rows(db):
                with _noting(findings):
                    events.append(checked_event(folder, row))
    kept = [event.data.get("digest") for event in events if event.kind == MANIFEST]
    if kept and digest is not None and kept[0] != digest:
        findings.append(f"{folder / 'run.json'}: changed after it was stored")
    # Those that events name and those that are there: a damaged event names none.
    kernels = dict.fromkeys(kernel for event in events for kernel in _kernels(event))
    kernels |= dict.fromkeys(sorted(path.stem for path in folder.glob("kernels/*.py")))
    for kernel in kernels:
        with _noting(findings):
            read_kernel(folder, kernel)
    if not findings:
        with _noting(findings):
            read_history(folder)  # what no single event shows: such as a verdict without a proposal
    return Verified(folder.name, len(events), checksums, len(kernels), tuple(findings))


@contextlib.contextmanager
def _noting(findings: list[str]) -> Iterator[None]:
    try:
        yield
    except RunError as e:
        findings.append(str(e))


def _kernels(event: StoredEvent) -> Iterator[str]:
    """Names of the kernels that an event needs."""
    names: dict[str, Any] = {"proposed": "kernel", "recorded": "tuned"}
    found = [event.data.get(names.get(event.kind, ""))]
    if event.kind == "recalled":
        found = [seed.get("kernel") for seed in event.data.get("seeds", ())]
    yield from (kernel for kernel in found if isinstance(kernel, str) and kernel)
