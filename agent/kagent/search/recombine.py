"""Recombination of two kernels: find the dimension of the task that separates the calls that each
is faster on.

The measurements per benchmark case say what a file that chooses between both would reach; its
prediction is exact but for the noise, since the choice costs nothing on the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import Task

from kagent.runs.ask import Draft, Setting
from kagent.runs.lineage import Candidate, Lineage, Operator
from kagent.search.merge_kernels import BranchCondition, Part, labels, merge
from kagent.search.tunables import read_tunables

GAIN = 0.004  # log speed-up over the better of the two that is worth a longer file; or their noise
ERRORS = 2.0  # standard errors of the two by which the file should beat the incumbent
MAX_PARTS = 3
FAMILIES = 12  # best structures that are paired
PER_FAMILY = 2  # best candidates of each of them
_NO_WIDTH = math.log(2)  # what a flag, or a number without a ratio, counts for beside gaps of sizes


@dataclass(frozen=True, slots=True)
class Crossing:
    """The first candidate on cases where the choice holds, the second on the others."""

    first: Candidate
    second: Candidate
    choice: BranchCondition
    gain: float  # log speed-up over the better of the two
    log: float  # predicted log speed-up over the baselines

    @property
    def parents(self) -> tuple[Candidate, Candidate]:
        """Both candidates."""
        return self.first, self.second


def best(setting: Setting, lineage: Lineage, is_new: Callable[[Draft], bool]) -> Draft | None:
    """The most promising file of two structures that is new, if it should beat the incumbent by
    more than noise.
    """
    incumbent = lineage.incumbent
    if incumbent is None:
        return None
    for crossing in crossings(setting, lineage):
        gain = crossing.log - lineage.log_speed(incumbent.id)
        if gain < GAIN:
            return None  # the incumbent is as good as all that follow
        if gain < ERRORS * math.hypot(*(_stderr(lineage, c) for c in crossing.parents)):
            continue
        draft = _draft(setting, lineage, crossing)
        if draft is not None and is_new(draft):
            return draft
    return None


def crossings(setting: Setting, lineage: Lineage) -> list[Crossing]:
    """Pairs of different structure that would gain, the most promising first."""
    families: dict[str, list[Candidate]] = {}
    for candidate in lineage.passed():
        tunables = read_tunables(candidate.proposal.source)
        if tunables is not None:
            if tunables.family not in families and len(families) == FAMILIES:
                continue
            members = families.setdefault(tunables.family, [])
            if len(members) < PER_FAMILY:
                members.append(candidate)
    groups = list(families.values())
    cases = setting.task.cases(setting.kind).bench
    choices = list(splits(setting.task, cases)) if len(groups) > 1 else []
    found: list[Crossing] = []
    for i, group in enumerate(groups):
        for other in groups[i + 1 :]:
            for a in group:
                for b in other:
                    parts = _parts(a) + _parts(b)
                    if len(parts) <= MAX_PARTS and len(set(parts)) == len(parts):
                        found += best_crossing(cases, choices, lineage, a, b)
    return sorted(found, key=lambda c: (-c.log, c.first.id, c.second.id))


def best_crossing(
    cases: Sequence[Case],
    choices: Sequence[tuple[BranchCondition, list[str]]],
    lineage: Lineage,
    a: Candidate,
    b: Candidate,
) -> list[Crossing]:
    """The best of some splits of the benchmark cases between two candidates, if one gains."""
    speed_a, speed_b = lineage.speed(a.id), lineage.speed(b.id)
    if speed_a is None or speed_b is None:
        return []
    if any(c.name not in speed_a.cases or c.name not in speed_b.cases for c in cases):
        return []
    lead = {c.name: speed_a.cases[c.name] - speed_b.cases[c.name] for c in cases}  # of a over b
    least = max(GAIN, math.hypot(_stderr(lineage, a), _stderr(lineage, b)))
    best: Crossing | None = None
    for choice, holds in choices:
        inside = sum(lead[n] for n in holds)
        outside = sum(lead.values()) - inside
        for first, second, ahead in ((a, b, inside), (b, a, outside)):
            # `ahead` is what taking a on its cases wins over b alone; a alone wins all of `lead`.
            gain = (ahead - max(0.0, sum(lead.values()))) / len(cases)
            if gain > least and (best is None or gain > best.gain + 1e-9):
                log = max(speed_a.log, speed_b.log) + gain
                best = Crossing(first, second, choice, gain, log)
    return [best] if best else []


def splits(task: Task, cases: Sequence[Case]) -> Iterator[tuple[BranchCondition, list[str]]]:
    """Conditions on a call's arguments that hold for some of the cases, and for which.

    Where several separate the cases alike, the first is the likeliest cause: that with the widest
    gap. 16 and 4096 tokens are further apart than 8192 and 14336 outputs.
    """
    found = {d: {c.dims[d] for c in cases} for d in _expressions(task)}
    values_of = {
        dim: sorted(cast("set[float]", values))
        for dim, values in found.items()
        if all(isinstance(v, int | float) for v in values)
    }
    expressions = {d: e for d, e in _expressions(task).items() if d in values_of}
    found_by_width: list[tuple[float, BranchCondition, list[str]]] = []
    # Of dimensions, the inner ones first: the length of a row rather than the number of rows.
    for dim, expression in list(expressions.items())[::-1]:
        values = values_of[dim]
        if len(values) < 2:
            continue
        if all(isinstance(v, bool) for v in values):
            holds = [c.name for c in cases if c.dims[dim]]
            choice = BranchCondition(expression, f"{dim}: {task.dims[dim]}")
            found_by_width.append((_NO_WIDTH, choice, holds))
            continue
        middles = tuple(_middle(a, b) for a, b in itertools.pairwise(values))
        for middle, (below, above) in zip(middles, itertools.pairwise(values), strict=True):
            choice = BranchCondition(
                condition=f"{expression} <= {{constant}}",
                because=f"{task.dims[dim]}; up to here the first kernel is faster",
                constant=f"{dim.upper()}_SPLIT",
                value=middle,
                values=middles,
            )
            holds = [c.name for c in cases if cast("float", c.dims[dim]) <= middle]
            found_by_width.append((_width(below, above), choice, holds))
    for _, choice, holds in sorted(found_by_width, key=lambda f: -f[0]):
        yield choice, holds
    dtypes = sorted({c.dtype for c in cases})
    tensor = next(
        (i for i, a in enumerate(task.arguments) if a.dtype == "$dtype" and a.shape), None
    )
    if len(dtypes) > 1 and tensor is not None:
        for dtype in dtypes:
            holds = [c.name for c in cases if c.dtype == dtype]
            yield (
                BranchCondition(f"{{{tensor}}}.dtype == torch.{dtype}", "faster for this dtype"),
                holds,
            )


def _width(below: float, above: float) -> float:
    """Distance of two values: the logarithm of their ratio, where they have one."""
    return math.log(above / below) if below > 0 else _NO_WIDTH


def _middle(below: float, above: float) -> float:
    """A value between two, or the lower one; what is known of neither side favours no side."""
    middle = math.sqrt(below * above) if below > 0 else below
    whole = isinstance(below, int) and isinstance(above, int)
    return int(middle) if whole else middle


def _draft(setting: Setting, lineage: Lineage, crossing: Crossing) -> Draft | None:
    """The file that chooses, or None where the two cannot be merged."""
    first, second = crossing.first.proposal, crossing.second.proposal
    label_a, label_b = labels([first.name, second.name])
    source = merge(
        Part(first.source, label_a, first.name),
        Part(second.source, label_b, second.name),
        setting.task.entry,
        crossing.choice,
    )
    if source is None:
        return None
    choice = crossing.choice
    names = [a.name for a in setting.task.arguments]
    shown = choice.condition.format(*names, constant=choice.value)
    return Draft(
        parents=(first.id, second.id),
        operator=Operator.RECOMBINE,
        name=f"{first.name}+{second.name}",
        source=source,
        hypothesis=f"{first.name} (#{first.id}) where {shown}, else {second.name} (#{second.id})",
        predicted=math.exp(crossing.log - lineage.log_speed(first.id)),
    )


def _parts(candidate: Candidate) -> list[str]:
    return candidate.proposal.name.split("+")


def _stderr(lineage: Lineage, candidate: Candidate) -> float:
    speed = lineage.speed(candidate.id)
    return speed.stderr if speed is not None else 0.0


def _expressions(task: Task) -> dict[str, str]:
    """Return host code's expressions for a dimension: `{0}.shape[-1]`, or `{3}` for a flag; `{N}`
    is argument N.
    """
    found: dict[str, str] = {}
    for position, argument in enumerate(task.arguments):
        if isinstance(argument.value, str) and argument.value in task.dims:
            found[argument.value] = f"{{{position}}}"
    for position, argument in enumerate(task.arguments):
        for i, size in enumerate(argument.shape or ()):
            if isinstance(size, str) and size in task.dims and not argument.optional:
                assert argument.shape is not None, "it has this size"
                index = -1 if i == len(argument.shape) - 1 else i
                found.setdefault(size, f"{{{position}}}.shape[{index}]")
    return found
