"""Ablation: take the winner's edits back one at a time, and time each version beside the winner.

An edit is a step of the winner's path. Taking it back is a three-way merge: the winner, less what
changed from the step's parent to the step. Later steps may have built on it; then the merge
conflicts, or the result is wrong, and the step itself is timed instead: what it gained where it was
made. Tunables are set back to the values that they had where they first appeared on the path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.verdict import Comparison, Passed, Rejected
from kagent_sandbox.errors import RunError
from merge3 import Merge3

from kagent.evolve.machine import Machine
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Lineage
from kagent.search.tunables import Value, read_tunables, same, value_text


@dataclass(frozen=True, slots=True)
class Revert:
    """Something to take back. `source` is the winner without it; None where a merge conflicts."""

    label: str
    source: str | None
    step: int | None = None  # the candidate that brought it; None for the control and tunables


@dataclass(frozen=True, slots=True)
class Contribution:
    """The worth of an edit: time without it / time with it, so above 1 it helps.

    `in_place`: measured by taking it back from the winner; otherwise where it was made, against its
    own parent. `failed` says why it could not be measured at all.
    """

    label: str
    step: int | None
    in_place: bool
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    cases: Mapping[str, float] | None = None
    coarse: bool = False  # clearly different after a few samples: not timed further
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Ablation:
    """All contributions to one candidate; the control, itself against itself, is the first."""

    candidate: int
    device: str
    contributions: tuple[Contribution, ...]


CONTROL = "nothing (control)"


def reverts(lineage: Lineage, winner: Candidate) -> list[Revert]:
    """List the edits to take back, along the path from the seed."""
    path = lineage.path(winner.id)
    found = [Revert(CONTROL, winner.proposal.source)]
    for before, after in itertools.pairwise(path):
        text = merged(after.proposal.source, winner.proposal.source, before.proposal.source)
        label = f"#{after.id} {after.proposal.operator}: {after.proposal.hypothesis}"
        found.append(Revert(label, text, after.id))
    found += _tunables(path, winner)
    return found


def merged(base: str, mine: str, other: str) -> str | None:
    """`mine` with the changes from `base` to `other`; None where both changed the same lines."""
    texts = [t.splitlines(keepends=True) for t in (base, mine, other)]
    lines: list[str] = []
    for group in Merge3(texts[0], texts[1], texts[2]).merge_groups():
        if group[0] == "conflict":
            return None
        lines += group[1]
    return "".join(lines)


def _tunables(path: list[Candidate], winner: Candidate) -> Iterator[Revert]:
    final = read_tunables(winner.proposal.source)
    if final is None:
        return
    first: dict[str, Value] = {}
    for candidate in path:
        known = read_tunables(candidate.proposal.source)
        for item in known.items if known is not None else ():
            first.setdefault(item.name, item.current)
    for item in final.items:
        was = first.get(item.name, item.current)
        if not same(was, item.current):
            label = f"{item.name} = {value_text(item.current)} instead of {value_text(was)}"
            yield Revert(label, final.rewrite({item.name: was}))


class Ablator:
    """Measures contributions on a machine that is open for the run."""

    def __init__(self, machine: Machine, lineage: Lineage, say: Callable[[str], None]) -> None:
        self._machine = machine
        self._lineage = lineage
        self._say = say
        self._built: dict[str, Built | Rejected] = {}

    def run(self, winner: Candidate, device: str) -> Ablation:
        """Take back everything, one at a time.

        Raises:
            RunError: The winner no longer builds, or is no longer correct.
            MachineError: The machine failed.
        """
        wanted = reverts(self._lineage, winner)
        found = []
        for number, revert in enumerate(wanted, 1):
            self._say(f"{number} of {len(wanted)}: taking back {revert.label:.60}")
            found.append(self._contribution(revert, winner))
        return Ablation(winner.id, device, tuple(found))

    def _contribution(self, revert: Revert, winner: Candidate) -> Contribution:
        reason = "later edits changed the same lines"
        if revert.source is not None:
            verdict = self._measure(revert.source, winner, winner)
            if isinstance(verdict, Passed) and verdict.versus is not None:
                return _worth(Contribution(revert.label, revert.step, in_place=True), verdict)
            assert isinstance(verdict, Rejected)
            reason = f"{verdict.status}: {next(iter(verdict.message.splitlines()), '')}"
        if revert.step is None:
            return Contribution(revert.label, None, in_place=True, failed=reason)
        step = self._lineage[revert.step]
        base = self._lineage[step.proposal.parents[0]]
        empty = Contribution(revert.label, revert.step, in_place=False)
        if not isinstance(step.verdict, Passed) or not isinstance(base.verdict, Passed):
            return replace(empty, failed=f"{reason}; and it was not correct where it was made")
        # The step's parent, timed beside the step.
        verdict = self._measure(base.proposal.source, base, step)
        if isinstance(verdict, Passed) and verdict.versus is not None:
            return _worth(empty, verdict)
        assert isinstance(verdict, Rejected)
        return replace(empty, failed=f"{reason}; its parent now: {verdict.status}")

    def _measure(self, source: str, of: Candidate, against: Candidate) -> Passed | Rejected:
        """A text timed beside a candidate, both as freshly built."""
        other = self._build(against.proposal.source, against)
        if isinstance(other, Rejected):
            raise RunError(f"candidate {against.id} no longer builds: {other.message}")
        built = self._build(source, of)
        if isinstance(built, Rejected):
            return built
        judge = self._machine.judge
        errors = judge.check(built)
        if isinstance(errors, Rejected):
            if source == against.proposal.source:
                raise RunError(f"candidate {against.id} is no longer correct: {errors.message}")
            return errors
        verdict = against.verdict
        timings = verdict.timings if isinstance(verdict, Passed) else ()
        choice = {t.case: t.config for t in timings}
        return judge.measure(built, errors, other, str(against.id), choice=choice)

    def _build(self, source: str, of: Candidate) -> Built | Rejected:
        """Build once, with as many configurations as the candidate had."""
        if source not in self._built:
            request = self._machine.request(source)
            if of.proposal.configs is not None:
                request = replace(request, max_configs=of.proposal.configs)
            self._built[source] = self._machine.builder.build(request)
        return self._built[source]


def _worth(empty: Contribution, verdict: Passed) -> Contribution:
    """Return the worth from a comparison of the versions without and with the edit."""
    versus = verdict.versus
    assert isinstance(versus, Comparison)
    return replace(
        empty,
        ratio=1 / versus.ratio,
        low=1 / versus.high,
        high=1 / versus.low if versus.low > 0 else None,
        cases={case: 1 / ratio for case, ratio in versus.cases.items()},
        coarse=verdict.screened,
    )


def to_event(ablation: Ablation) -> Mapping[str, object]:
    """Return the ablation as it is stored."""
    stored = to_json(ablation)
    assert isinstance(stored, dict)
    return stored


def stored_ablation(history: History) -> Ablation | None:
    """The last one of a run."""
    events = [e for e in history.events if e.kind == "ablated"]
    return from_json(Ablation, events[-1].data) if events else None
