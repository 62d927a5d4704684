"""Choice of the other candidates that a prompt shows beside the parent, and of their excerpts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kagent.prompting.cases import BenchCase
from kagent.prompting.excerpts import SHORT_LINES, essentials, outline
from kagent.prompting.measured import NAME_CHARS, case_logs
from kagent.prompting.text import fenced, one_line, ratio
from kagent.runs.ask import Ask
from kagent.runs.lineage import Candidate, Lineage
from kagent.search.tunables import read_tunables

MOST = 2
DIFF_LINES = 50
SECOND_LINES = 150  # of the second parent of a crossover
LOST = 0.05  # log speed-up by which an ancestor must still be ahead in a case: less may be noise
FAR = 0.25  # log speed-up behind the parent that takes the interest out of another structure
WORTH = 0.01  # log speed-up in some case that makes a candidate of a known structure worth showing


@dataclass(frozen=True, slots=True)
class Elite:
    """Another candidate: how it compares with the parent, and its source or its essence."""

    id: int
    name: str
    speed: str  # against the parent over all cases
    cases: str  # against the parent, case by case
    body: str  # Markdown


def diverse(ask: Ask, count: int = MOST) -> list[Candidate]:
    """Elites that add something to the parent: another structure, or cases that they win.

    Each next one is chosen for what it adds to the parent and those before it, the faster first
    among equals.
    """
    chosen = [ask.parent]
    within = _ancestors(ask.parent, ask.lineage)
    while len(chosen) <= count:
        rest = [c for c in ask.elites if c.id not in {x.id for x in chosen}]
        gains = {c.id: _adds(c, chosen, ask.lineage, known=c.id in within) for c in rest}
        best = max(rest, key=lambda c: gains[c.id], default=None)  # the first among equals
        if best is None or gains[best.id] <= WORTH:
            break
        chosen.append(best)
    return chosen[1:]


def _adds(
    candidate: Candidate, others: Sequence[Candidate], lineage: Lineage, *, known: bool
) -> float:
    """Log speed-up that it adds in some cases, and a little for a structure that is not known."""
    mine = case_logs(candidate, lineage)
    theirs = [case_logs(c, lineage) for c in others]
    least = LOST if known else 0.0
    gain = 0.0
    for case, log in mine.items():
        best = max((t[case] for t in theirs if case in t), default=log)
        if math.isfinite(log) and math.isfinite(best):
            gain += log - best if log - best > least else 0.0
    behind = lineage.log_speed(others[0].id) - lineage.log_speed(candidate.id)
    new = not known and _family(candidate) not in {_family(c) for c in others}
    return gain + (2 * WORTH if new and not behind > FAR else 0.0)


def _ancestors(candidate: Candidate, lineage: Lineage) -> set[int]:
    """Return all candidates that the candidate was made of, whose ideas it holds."""
    found: set[int] = set()
    pending = list(candidate.proposal.parents)
    while pending:
        number = pending.pop()
        if number not in found:
            found.add(number)
            pending.extend(lineage[number].proposal.parents)
    return found


def _family(candidate: Candidate) -> str:
    """Key that candidates share if they differ in the values of tunables alone."""
    file = read_tunables(candidate.proposal.source)
    return file.family if file is not None else candidate.proposal.source


def elite(
    candidate: Candidate,
    ask: Ask,
    cases: Sequence[BenchCase],
    *,
    second: bool,
) -> Elite:
    """Describe an elite; more of it if it is the second parent of a crossover."""
    lineage, parent = ask.lineage, ask.parent
    mine, theirs = case_logs(candidate, lineage), case_logs(parent, lineage)
    both = [c.name for c in cases if c.name in mine and c.name in theirs]
    versus = ", ".join(f"{name} {ratio(math.exp(mine[name] - theirs[name]))}" for name in both)
    total = math.exp(sum(mine[n] - theirs[n] for n in both) / len(both)) if both else 0.0
    return Elite(
        id=candidate.id,
        name=one_line(candidate.proposal.name, NAME_CHARS),
        speed=ratio(total) if both else "",
        cases=versus,
        body=body(candidate, parent, ask.setting.task.entry, second=second),
    )


def body(candidate: Candidate, parent: Candidate, entry: str, *, second: bool) -> str:
    """The source if it is short, else how it differs from the parent, else what is essential."""
    source, before = candidate.proposal.source, parent.proposal.source
    if source.count("\n") < (SECOND_LINES if second else SHORT_LINES):
        return fenced(source, "python")
    lines = difflib.unified_diff(before.splitlines(), source.splitlines(), lineterm="", n=2)
    diff = list(lines)[2:]
    if 0 < len(diff) <= (SECOND_LINES if second else DIFF_LINES):
        return f"It differs from #{parent.id} in this:\n\n" + fenced("\n".join(diff), "diff")
    about = outline(source, entry)
    rest = essentials(source, before, entry, SECOND_LINES) if second else ""
    return f"{about}\n\nIts essential pieces:\n\n{rest}" if rest else about
