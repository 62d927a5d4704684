"""Seeds that a run took from memory, as an event (`recalled`): resuming and replays read this, and
never the memory of their own day.
"""

from __future__ import annotations

from dataclasses import dataclass

from kagent.runs.ideas import Effect


@dataclass(frozen=True, slots=True)
class RecalledSeed:
    """A kernel of an earlier run that this one starts from, beside its task's own.

    Attributes:
        run: Folder of the run that it comes from, by name.
        id: Its number there.
        task: The task of that run.
        device: The device of that run.
        name: Of its structure.
        kernel: Id of its text, which is among this run's kernels.
        why: How the task and the device are related to this run's.
        hypothesis: What it changed there.
        log_speed_up: Over the best of torch there, on that run's visible cases.
        models: Who wrote it and what it descends from.
        licences: That its code is known to be under; see `kagent.memory.record.RememberedKernel`.
    """

    run: str
    id: int
    task: str
    device: str
    name: str
    kernel: str
    why: str
    hypothesis: str
    log_speed_up: float
    models: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recalled:
    """Seeds, what techniques did, and what was left out and why, a line each."""

    seeds: tuple[RecalledSeed, ...] = ()
    effects: tuple[Effect, ...] = ()
    runs: tuple[str, ...] = ()  # whose effects these are, by their folders' names
    left_out: tuple[str, ...] = ()
