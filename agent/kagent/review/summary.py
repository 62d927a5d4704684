"""The report's first screen: the verdict, where the winner loses, whether to trust it, and why it
is fast.

Figures of the search and of the final race are never mixed: each has its own heading and sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kagent_sandbox.data.records import RecordError, from_json
from kagent_sandbox.data.verdict import Passed, SpeedVerdict
from kagent_sandbox.judge.timing.noise import Noise

from kagent.review.ablate import stored_ablation
from kagent.review.scales import RatioScale
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Speed
from kagent.runs.selftest_record import NOT_RUN, SelftestRecord
from kagent.text import plural, range_text, short
from kagent.ui.end_of_run import missing_modes
from kagent.ui.tables import cases_with, lacking_text

_NUMBER = re.compile(r"\d+(?:\.\d+)?")

MOST_EDITS = 6
MOST_NOTES = 3
MOST_WAITING = 6
LOUD_OFFSET = 0.05
"""A kernel against itself that comes out further from 1 than this calls for caution."""
LOUD_PAIRS = 0.5
"""Single pairs of blocks that differ by more than this share of a block call for caution. On two
shared cores they differed by 29 % (docs/tutorial.md).
"""
LOUD_DISTURBED_PAIRS = 0.2
"""The same where every timing was disturbed."""
MOST_EDIT_TEXT = 120  # characters of an edit on the first screen; its section has all of them

TONES: Mapping[SpeedVerdict | None, str] = {
    SpeedVerdict.FASTER: "good",
    SpeedVerdict.TIE: "even",
    SpeedVerdict.SLOWER: "bad",
    None: "none",
}
"""Class names of verdicts on the page."""

TIERS: Mapping[str, str] = {
    "T0": "limits alone, which stop accidents and no attack",
    "T1": "candidates ran without privileges, and Landlock and seccomp kept them from files, the "
    "network and other processes",
    "T2": "candidates ran without privileges, in namespaces of their own, and Landlock and seccomp "
    "kept them from files, the network and other processes",
    "T3": "candidates ran without privileges, in namespaces and a control group of their own, and "
    "Landlock and seccomp kept them from files, the network and other processes",
}
"""Tiers of isolation in words."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The run's result. `verdict` is None where no race gave one; `ratio` is the race's."""

    verdict: SpeedVerdict | None
    word: str
    ratio: str
    text: str
    detail: str
    role: str = ""
    winner: int | None = None
    name: str = ""

    @property
    def tone(self) -> str:
        """Class name of the verdict."""
        return TONES[self.verdict]


@dataclass(frozen=True, slots=True)
class Loss:
    """Cases that the winner does not win. `estimate`: of the search, and not of the race."""

    text: str
    tone: str = "none"
    word: str = ""
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class Trust:
    """A reason to trust the figures, or not to. `mark` is ok, caution, bad or unknown."""

    name: str
    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of the winner's path: what it changed, and what it gained over its parent in the
    search. `start` and `length` are its bar in %, `one` is the place of 1×. `id` is
    None for a count of smaller ones.
    """

    id: int | None
    operator: str
    text: str
    gain: float | None
    one: float
    start: float
    length: float
    worth: str = ""  # what an ablation found


def winner_of(history: History) -> Candidate | None:
    """The final race's winner, otherwise the incumbent."""
    final = history.race
    if final is not None and final.winner is not None:
        return history.lineage[final.winner]
    return history.lineage.incumbent


# -- the verdict ----------------------------------------------------------------------------------


def headline(history: History) -> Headline:
    """The run's result, from its final race alone."""
    final, won = history.race, winner_of(history)
    if won is None:
        return Headline(None, "NO RESULT", "", "No candidate has passed yet", "")
    name = won.proposal.name
    if final is None:
        text = "there was no final race yet"
        detail = "Speed-ups of the search are estimates and no result."
        return Headline(None, "NO VERDICT", "", text, detail, "best so far", won.id, name)
    if final.winner is None:
        text = "every finalist failed on the hidden cases"
        return Headline(None, "NO VERDICT", "", text, "", "best of the search", won.id, name)
    cases = f"final race on {plural(len(final.race.cases), 'hidden case')}"
    result = final.versus_torch
    if result is None:
        none_ran = "raced without a baseline: none ran on every hidden case"
        text = lacking_text(final.race) or none_ran
        return Headline(None, "NO VERDICT", "", text, cases, "chosen finalist", won.id, name)
    absent = missing_modes(final.race)
    return Headline(
        result.verdict,
        result.verdict.value,
        f"{result.ratio:.3f}×",
        "the best of torch that ran" if absent else "the best of eager and torch.compile",
        f"95 %: {range_text(result.low, result.high)}, P(faster) {result.p_faster:.2f}, {cases}",
        "winner" if result.verdict is SpeedVerdict.FASTER else "chosen finalist",
        won.id,
        name,
    )


# -- where it loses -------------------------------------------------------------------------------


def losses(history: History) -> list[Loss]:
    """Hidden cases by the race's verdicts, then visible cases by the search's estimates."""
    won, final = winner_of(history), history.race
    found: list[Loss] = []
    if final is not None and final.winner is not None:
        cases = {v: cases_with(final.race, str(final.winner), v) for v in SpeedVerdict}
        count, ahead = sum(map(len, cases.values())), len(cases[SpeedVerdict.FASTER])
        if count:
            tone = TONES[SpeedVerdict.FASTER if ahead else None]
            found.append(Loss(f"on {ahead} of {count} hidden cases", tone, "FASTER"))
        found += [
            Loss(f"on {', '.join(cases[v])}", TONES[v], v.value)
            for v in (SpeedVerdict.TIE, SpeedVerdict.SLOWER)
            if cases[v]
        ]
    speed = history.lineage.speed(won.id) if won is not None else None
    if speed is not None and speed.cases:
        text = f"visible cases, the search's estimate: {_visible_cases(speed)}"
        found.append(Loss(text, estimate=True))
    return found


def _visible_cases(speed: Speed) -> str:
    """Describe the cases in which a candidate is slower than the best of torch, or else the case
    where it gains the least.
    """
    texts = {n: f"{n} ({math.exp(log):.3f}×)" for n, log in speed.cases.items()}
    behind = [texts[n] for n, log in speed.cases.items() if log < 0]
    if behind:
        ahead = len(texts) - len(behind)
        return f"below torch on {', '.join(behind)}; above it on {ahead} of {len(texts)}"
    least = texts[min(speed.cases, key=lambda n: speed.cases[n])]
    if len(texts) == 1:
        return f"above torch on {least}"
    return f"above torch on all {len(texts)}, the least on {least}"


def waiting(history: History) -> str:
    """Candidates without a verdict and asks without an answer, as after Ctrl-C; "" if none wait."""
    parts = []
    if history.pending:
        named = ", ".join(f"#{p.id} {p.name}" for p in history.pending[:MOST_WAITING])
        more = len(history.pending) - MOST_WAITING
        parts.append(f"for a verdict: {named}" + (f" and {more} more" if more > 0 else ""))
    if history.asks:
        numbers = [str(a.number) for a in history.asks]
        more = len(numbers) - MOST_WAITING
        listed = ", ".join(numbers[:MOST_WAITING]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"for an answer: ask {listed}")
    return "; ".join(parts)


# -- whether to trust it --------------------------------------------------------------------------


def trust(environment: Mapping[str, object], history: History) -> list[Trust]:
    """Noise, disturbances, isolation and selftest of the judge, each in words."""
    found = [_noise(environment, history), _disturbances(history), _isolation(environment, history)]
    found.append(_selftest(environment))
    final = history.race
    if final is not None and final.winner is not None:
        total = len(final.race.cases)
        for mode, count in missing_modes(final.race).items():
            text = f"{mode} did not run on {count} of {total} cases: this is no result against it"
            found.append(Trust("baselines", "caution", text))
    return found


def noise_of(environment: Mapping[str, object]) -> Noise | None:
    """The A/A test at the start of a run; None where there was none."""
    try:
        return from_json(Noise, environment.get("noise"))
    except RecordError:
        return None


def _noise(environment: Mapping[str, object], history: History) -> Trust:
    noise = noise_of(environment)
    if noise is None or not noise.kernel_us:
        return Trust("noise", "unknown", "this run has no record of timing a kernel against itself")
    text = (
        f"a kernel against itself came out at {noise.ratio:.3f}×, and single pairs of its blocks "
        f"differed by {noise.pair_sd:.0%}; "
    )
    if noise.factor > 1:
        wider = f"all intervals are {noise.factor:.1f}× wider"
        return Trust("noise", "caution", f"{text}that is worse than known machines: {wider}")
    if abs(noise.ratio - 1) > LOUD_OFFSET or noise.pair_sd > LOUD_PAIRS:
        loud = "so noisy a machine shows large differences only"
        return Trust("noise", "caution", f"{text}the intervals account for both, but {loud}")
    timed = _timed(history)
    if noise.pair_sd > LOUD_DISTURBED_PAIRS and timed and all(v.notes for v in timed):
        loud = "every timing of the search was disturbed: small differences do not show"
        return Trust("noise", "caution", f"{text}the intervals account for both, but {loud}")
    return Trust("noise", "ok", f"{text}the intervals account for both")


def _timed(history: History) -> list[Passed]:
    return [c.verdict for c in history.lineage if isinstance(c.verdict, Passed)]


def _disturbances(history: History) -> Trust:
    """Disturbances of the race, which decides, and the count of disturbed timings of the search."""
    timed = _timed(history)
    if not timed:
        return Trust("disturbance", "unknown", "nothing was timed yet")
    disturbed = sum(bool(v.notes) for v in timed)
    search = f"{disturbed or 'none'} of {len(timed)} timings of the search were disturbed"
    if history.race is None:
        return Trust("disturbance", "caution" if disturbed else "ok", search)
    cases = history.race.race.disturbed
    if not cases:
        return Trust("disturbance", "ok", f"none noted in the final race; {search}")
    notes = worst_of_each_kind(n for c in cases for n in c.notes)
    more = f" and {len(notes) - MOST_NOTES} more" if len(notes) > MOST_NOTES else ""
    shown = f"{'; '.join(notes[:MOST_NOTES])}{more}"
    where = f"in {len(cases)} of {len(history.race.race.cases)} cases of the final race"
    return Trust("disturbance", "caution", f"{where}: {shown}; {search}")


def worst_of_each_kind(notes: Iterable[str]) -> list[str]:
    """Notes that differ in their numbers alone become one, that with the largest first number."""
    worst: dict[str, str] = {}
    for note in notes:
        kind = _NUMBER.sub("", note)
        worst[kind] = max(worst.get(kind, note), note, key=_first_number)
    return list(worst.values())


def _first_number(note: str) -> float:
    found = _NUMBER.search(note)
    return float(found.group()) if found else 0.0


def _isolation(environment: Mapping[str, object], history: History) -> Trust:
    tier = str(environment.get("isolation") or "")
    if tier not in TIERS:
        return Trust("isolation", "unknown", "this run has no record of it")
    text = f"{tier}: {TIERS[tier]}"
    attacks = environment.get("canaries")
    if isinstance(attacks, Mapping) and attacks:
        stopped = sum(by is not None for by in attacks.values())
        text += f"; {stopped} of {len(attacks)} attacks from inside were stopped"
    later = sorted({str(e.data.get("tier")) for e in history.events if e.kind == "isolation"})
    if later:
        text += f"; a later session ran under {' and '.join(later)}"
    weaker = any(other < tier for other in later)
    return Trust("isolation", "caution" if weaker or tier == "T0" else "ok", text)


def _selftest(environment: Mapping[str, object]) -> Trust:
    stored = environment.get("selftest")
    if stored is None:
        return Trust("selftest", "unknown", "this run has no record of one")
    try:
        record = from_json(SelftestRecord, stored)
    except RecordError:
        text = f"{NOT_RUN} on that machine with those versions (kagent selftest)"
        return Trust("selftest", "caution", text)
    right = f"the judge was right on {record.ran - len(record.missed)} of {record.ran}"
    text = f"{right} attacks, faults and honest twins ({record.when[:10]}, tier {record.tier})"
    if record.missed:
        return Trust("selftest", "bad", f"{text}; wrong on {', '.join(record.missed[:MOST_NOTES])}")
    return Trust("selftest", "ok", text)


# -- why ------------------------------------------------------------------------------------------


def edits(history: History, path: list[int]) -> list[PathStep]:
    """The winner's edits along its path with their gains: the largest, and the rest as one."""
    lineage = history.lineage
    steps, worth = [lineage[i] for i in path], _worth(history)
    gains = {c.id: lineage.gain(c.id) for c in steps}
    ranked = sorted((c.id for c in steps[1:]), key=lambda i: -abs(math.log(gains[i] or 1.0)))
    kept = set(ranked if len(ranked) <= MOST_EDITS else ranked[: MOST_EDITS - 1])
    rest = [i for i in ranked if i not in kept]
    together = math.prod(gains[i] or 1.0 for i in rest)
    scale = RatioScale.around([*(gains[i] for i in kept), together])

    def bar(gain: float | None) -> tuple[float, float, float]:
        return scale.at(1.0), *scale.span(1.0, 1.0 if gain is None else gain)

    found = []
    for c in steps:
        p, gain = c.proposal, gains[c.id]
        if c.id in kept or not p.parents:
            text = short(p.hypothesis, MOST_EDIT_TEXT) if p.parents else p.name
            about = worth.get(c.id, "")
            found.append(PathStep(c.id, p.operator.value, text, gain, *bar(gain), about))
    if rest:
        text = f"{plural(len(rest), 'smaller edit')} together"
        found.append(PathStep(None, "", text, together, *bar(together)))
    return found


def _worth(history: History) -> dict[int, str]:
    """The worth of each step, where it was measured by taking the step back."""
    ablation = stored_ablation(history)
    return {
        c.step: f"{c.ratio:.3f}× ({range_text(c.low, c.high)})"
        for c in (ablation.contributions if ablation is not None else ())
        if c.step is not None and c.low is not None and c.high is not None
    }
