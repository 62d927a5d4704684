"""A short record of what was tried: the idea, what it promised, what it did, why it failed."""

from __future__ import annotations

import math

from kagent_sandbox.data.verdict import Rejected

from kagent.prompting.text import quoted, ratio
from kagent.runs.ask import Ask
from kagent.runs.ideas import Effect, effects
from kagent.runs.lineage import Candidate, Lineage, Operator
from kagent.text import interval_text

MOST = 12
MOST_TUNED = 3  # changes of constants: each tells little
IDEA_CHARS = 200
REASON_CHARS = 140
HIDDEN = "hidden_"  # prefix of the names of hidden cases


def ledger(ask: Ask) -> list[str]:
    """One line per attempt: the parent's own line first, then what was tried on the parent, then
    the rest; each the newest first.
    """
    lineage, parent = ask.lineage, ask.parent
    own = lineage.path(parent.id)[::-1]
    line = {c.id for c in own}
    if isinstance(parent.verdict, Rejected):
        own = own[1:]  # a repair shows it in full
    newest = [c for c in reversed(list(lineage)) if c.id not in line]
    tried = [c for c in newest if parent.id in c.proposal.parents]
    rest = [c for c in newest if parent.id not in c.proposal.parents]
    chosen: list[Candidate] = []
    places: dict[tuple[int | None, str], int] = {}  # of ideas among the chosen
    tuned = 0
    for candidate in (*own, *tried, *rest):
        if not _counts(candidate):
            continue
        if candidate.proposal.operator is Operator.TUNE:
            tuned += 1
            if tuned > MOST_TUNED:
                continue
        # Of answers to one ask that say the same, the fastest tells enough.
        idea = candidate.proposal.ask, candidate.proposal.hypothesis
        twin = None if candidate.proposal.ask is None else places.get(idea)
        if twin is None:
            if len(chosen) < MOST:
                places.setdefault(idea, len(chosen))
                chosen.append(candidate)
        elif lineage.log_speed(candidate.id) > lineage.log_speed(chosen[twin].id):
            chosen[twin] = candidate
    return [entry(c, lineage) for c in chosen]


def technique_lines(ask: Ask) -> list[str]:
    """Gains of techniques here and in earlier runs, one line for each technique and regime: those
    of this run first, the most tried first.
    """
    lines = []
    for where, found in (("", effects(ask.lineage)), (" in earlier runs", ask.setting.priors)):
        most_first = sorted(found, key=lambda e: (-e.tries, e.technique, e.regime))
        lines += [f"`{e.technique}`{where}, {e.regime.value}: {_effect(e)}" for e in most_first]
    return lines[:MOST]


def _effect(effect: Effect) -> str:
    counts = f"tried {effect.tries}, worked {effect.passed}, faster {effect.faster}"
    gain, interval = effect.gain, effect.interval
    if gain is None or interval is None:
        return counts
    return f"{counts}; those that worked {interval_text(gain, *interval)}"


def _counts(candidate: Candidate) -> bool:
    """Seeds have no idea to tell; a duplicate was not tried; a sweep is the harness's work."""
    free = (Operator.SEED, Operator.SWEEP)
    return candidate.proposal.operator not in free and not candidate.is_duplicate


def entry(candidate: Candidate, lineage: Lineage) -> str:
    """'#31 structure of #19: IDEA (predicted 1.15×) → 0.970× #19'."""
    p = candidate.proposal
    parents = " and ".join(f"#{i}" for i in p.parents)
    idea = quoted(p.hypothesis, IDEA_CHARS) or "(no hypothesis)"
    promise = f" (predicted {ratio(p.predicted)})" if p.predicted else ""
    return f"#{p.id} {p.operator} of {parents}: {idea}{promise} → {outcome(candidate, lineage)}"


def outcome(candidate: Candidate, lineage: Lineage) -> str:
    """Describe a candidate's outcome against its base (see `Lineage.base`)."""
    verdict = candidate.verdict
    if isinstance(verdict, Rejected):
        return f"{verdict.status}{where(verdict)}: {quoted(verdict.message, REASON_CHARS)}"
    if not verdict.timings:
        return "correct, not measured"
    promoted = ", new incumbent" if candidate.id in {c.id for c in lineage.promotions} else ""
    base, gain = lineage.base(candidate.id), lineage.gain(candidate.id)
    if base is None or gain is None:  # all that it was made from was rejected: against torch
        speed = math.exp(lineage.log_speed(candidate.id))
        return f"works, {ratio(speed)} the best of torch{promoted}"
    coarse = ", few samples" if verdict.screened else ""
    torch = ratio(math.exp(lineage.log_speed(candidate.id)))
    return f"{ratio(gain)} #{base.id} ({torch} the best of torch{coarse}){promoted}"


def where(verdict: Rejected) -> str:
    """' in case bf16_33x4096'; of a hidden case only that it is one."""
    if not verdict.case:
        return ""
    return " in a hidden case" if verdict.case.startswith(HIDDEN) else f" in {verdict.case}"
