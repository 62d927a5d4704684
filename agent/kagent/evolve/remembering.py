"""Memory at a run's start and end: seeds from earlier runs, and what later runs get of this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import ANY, languages_of
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import RunError, UserError

from kagent.config.settings import Config
from kagent.memory.library import keep
from kagent.memory.recall import Wanted, recall
from kagent.runs.history import History
from kagent.runs.kernel_files import read_kernel
from kagent.runs.lineage import Operator, Origin, Proposal
from kagent.runs.recalled import Recalled, RecalledSeed
from kagent.runs.store import RunStore
from kagent.text import plural, short

_MOST_HYPOTHESIS = 300  # characters


@dataclass(frozen=True, slots=True)
class SeedText:
    """A kernel that the search starts from. `origin` says who wrote it, where models did."""

    name: str
    source: str
    hypothesis: str = "one of the task's own kernels"
    origin: Origin | None = None

    def proposal(self, number: int) -> Proposal:
        """The seed as candidate `number`."""
        return Proposal(
            id=number,
            parents=(),
            operator=Operator.SEED,
            name=self.name,
            source=self.source,
            hypothesis=self.hypothesis,
            origin=self.origin,
        )


def wanted(
    task: Task, kind: Kind, target: str, lang: str, own: Sequence[SeedText], device: str = ""
) -> Wanted:
    """Query of the memory for a new run."""
    languages = tuple(each.name for each in languages_of(kind) if lang in (ANY, each.name))
    return Wanted(task, kind, target, languages, device, tuple(seed.source for seed in own))


def take(asked: Wanted, runs: Path, say: Callable[[str], None]) -> tuple[Recalled, Sequence[str]]:
    """Choose what a new run gets from memory, and say what it is. Returns it, with its seeds'
    texts, to be kept with the run.

    Raises:
        UserError: The list of runs that are not to be used cannot be read.
    """
    recalled, sources = recall(asked, runs, say)
    for line in described(recalled):
        say(line)
    return recalled, sources


def repeat(store: RunStore, recorded: History) -> None:
    """Give a run what a recorded one took from memory then."""
    if recorded.recalled is None:
        return
    proposals = [*(c.proposal for c in recorded.lineage.seeds), *recorded.pending]
    texts = {p.kernel: p.source for p in proposals}
    seeds = tuple(s for s in recorded.recalled.seeds if s.kernel in texts)
    store.recall(
        Recalled(seeds, recorded.recalled.effects, recorded.recalled.runs),
        [texts[s.kernel] for s in seeds],
    )


def seeds_from_memory(store: RunStore, recalled: Recalled | None) -> list[SeedText]:
    """A run's seeds beside its task's own, as it took them when it began.

    Raises:
        RunError: A text is missing or was changed.
    """
    return [
        SeedText(
            name=seed.name,
            source=read_kernel(store.folder, seed.kernel),
            hypothesis=short(f"{origin_text(seed)}: {seed.hypothesis}", _MOST_HYPOTHESIS),
            origin=Origin(", ".join(seed.models), calls=0) if seed.models else None,
        )
        for seed in (recalled.seeds if recalled is not None else ())
    ]


def described(recalled: Recalled) -> list[str]:
    """List the seeds that were taken, a line each, with the licences of their code."""
    lines = [
        f"memory: a seed from {origin_text(s)}; {math.exp(s.log_speed_up):.3f}× torch there; "
        f"{licence_text(s)}"
        for s in recalled.seeds
    ]
    lines += [f"memory: left out: {text}" for text in recalled.left_out]
    if recalled.effects:
        techniques = plural(len({e.technique for e in recalled.effects}), "technique")
        lines.append(
            f"memory: the results of {techniques} in {', '.join(recalled.runs)}: prompts for "
            "models show them, and propose those that gained most more often"
        )
    return lines or ["memory: nothing of a related task"]


def origin_text(seed: RecalledSeed) -> str:
    """'#7 of RUN (softmax on NVIDIA H100; the same task, on this device)'."""
    return f"#{seed.id} of {seed.run} ({seed.task} on {seed.device}; {seed.why})"


def licence_text(seed: RecalledSeed) -> str:
    """The licences that a seed's code is known to be under."""
    if not seed.licences:
        return "no licence is named in its code"
    return f"its code's licence: {', '.join(seed.licences)}"


def remember_run(store: RunStore, task: Task, config: Config, say: Callable[[str], None]) -> None:
    """Keep a run in memory, unless that is off, or was when the run was made. Where it cannot be
    written, say so and go on.
    """
    if not config.memory or store.history().recalled is None:
        return
    try:
        keep(store.folder, store.manifest, store.history(), task)
    except (RunError, UserError) as e:
        say(f"memory: the run is not kept in the library: {e}")
