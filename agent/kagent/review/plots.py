"""Charts of the report, as rows and positions: the template draws them, at any width.

A chart shows figures of the race or estimates of the search, never both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kagent_sandbox.data.language import language, language_of_source
from kagent_sandbox.data.race import BEST_OF_TORCH, TORCH, Ratio
from kagent_sandbox.data.verdict import (
    CaseTiming,
    Comparison,
    Passed,
    Rejected,
    Stage,
    speed_verdict,
)

from kagent.review.ablate import stored_ablation
from kagent.review.ablation_view import MOST_LABEL, how, ranked, worth_text
from kagent.review.scales import RatioScale, whole_ticks
from kagent.review.summary import TONES, winner_of
from kagent.runs.final_race import FinalRace
from kagent.runs.history import History
from kagent.runs.lineage import Lineage
from kagent.text import human_bytes, range_text, short
from kagent.ui.live import first_line
from kagent.ui.tables import candidate_labels, case_shape

APART = 16.0  # % between ticks, where an axis is 250 pixels long at least
FAR_APART = 30.0  # % between ticks in a narrow window, where it is 120 pixels long at least

AnyRatio = TypeVar("AnyRatio", Ratio, Comparison)


# -- the final race -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RatioRow:
    """The winner's speed-up over something, with its bar and its 95 % interval, in %.

    `whisker` is None where there is no interval, `tone` "none" where there is no verdict.
    """

    name: str
    value: str
    bar: tuple[float, float]
    whisker: tuple[float, float] | None = None
    interval: str = ""
    p_faster: str = ""
    verdict: str = ""
    tone: str = "none"
    id: int | None = None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows below one heading."""

    name: str
    rows: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Plot:
    """Groups of rows on one axis. `one` is the place of 1× on it, in %; a narrow window has fewer
    ticks.
    """

    groups: Sequence[RowGroup]
    one: float
    ticks: Sequence[tuple[float, str]]
    few_ticks: Sequence[tuple[float, str]]


def plot_of(groups: Sequence[RowGroup], scale: RatioScale) -> Plot:
    """Groups of rows on an axis of ratios."""
    return Plot(groups, scale.at(1.0), scale.ticks(APART), scale.ticks(FAR_APART))


def race_plot(final: FinalRace, lineage: Lineage) -> Plot | None:
    """The winner against everyone: over all hidden cases, then case by case. Baselines have the
    same order everywhere.
    """
    if final.winner is None:
        return None
    winner, race = str(final.winner), final.race
    labels = {**candidate_labels(lineage), BEST_OF_TORCH: "best of torch, case by case"}
    cases = [c for c in race.cases if winner in c.candidates]
    ratios = {
        c.case: _ordered(
            [r for r in c.ratios if r.candidate == winner and r.against in c.baselines]
        )
        for c in cases
    }
    overall = _ordered(race.overall.get(winner, ()))
    every: list[Ratio | Comparison] = list(overall)
    every += [r for found in ratios.values() for r in found]
    scale = RatioScale.around(v for r in every for v in (_value(r), r.low, r.high))
    whole = "All hidden cases" if len(cases) > 1 else "The hidden case"
    all_cases = [ratio_row(c, labels.get(c.against, c.against), scale) for c in overall]
    groups = [RowGroup(whole, all_cases)]
    for case in cases:
        fastest = case.fastest_of_torch
        rows = [
            ratio_row(r, r.against, scale, fastest=r.against == fastest) for r in ratios[case.case]
        ]
        groups.append(RowGroup(case_shape(case), rows))
    return plot_of([g for g in groups if g.rows], scale)


def _ordered(found: Iterable[AnyRatio]) -> list[AnyRatio]:
    """The best of torch first, then torch's own ways, expert libraries and other finalists."""
    order = {name: i for i, name in enumerate((BEST_OF_TORCH, *TORCH))}

    def key(r: AnyRatio) -> tuple[int, bool, str]:
        return order.get(r.against, len(order)), r.against.isdecimal(), r.against

    return sorted(found, key=key)


def ratio_row(
    r: Ratio | Comparison, name: str, scale: RatioScale, *, fastest: bool = False
) -> RatioRow:
    """A ratio as a row. `fastest`: it is beside the fastest of torch's ways."""
    return RatioRow(
        name=f"{name}, the fastest of torch" if fastest else name,
        value=f"{_value(r):.3f}×",
        bar=scale.span(1.0, _value(r)),
        whisker=scale.span(r.low, r.high),
        interval=range_text(r.low, r.high),
        p_faster=f"{r.p_faster:.2f}" if isinstance(r, Comparison) else "",
        verdict=r.verdict.value,
        tone=TONES[r.verdict],
        id=int(r.against) if r.against.isdecimal() else None,
    )


def _value(r: Ratio | Comparison) -> float:
    return r.ratio if isinstance(r, Comparison) else r.value


def race_notes(final: FinalRace, lineage: Lineage) -> list[str]:
    """List what did not run, and why: baselines case by case, and finalists that failed."""
    labels = candidate_labels(lineage)
    notes = [
        f"{labels.get(name, name)} failed: {v.status} ({v.stage}) {first_line(v)}"
        for name, v in final.race.failed.items()
    ]
    for case in final.race.cases:
        notes += [
            f"{n} did not run on {case_shape(case)}: {why}" for n, why in case.missing.items()
        ]
    return notes


# -- the search -----------------------------------------------------------------------------------


def visible_plot(history: History) -> Plot | None:
    """The search's estimates of the winner beside the best of torch, one row per visible case."""
    won = winner_of(history)
    speed = history.lineage.speed(won.id) if won is not None else None
    if speed is None or not speed.cases:
        return None
    ratios = {name: math.exp(log) for name, log in speed.cases.items()}
    scale = RatioScale.around(ratios.values())
    rows = [RatioRow(n, f"{r:.3f}×", scale.span(1.0, r)) for n, r in ratios.items()]
    return plot_of([RowGroup("", rows)], scale)


@dataclass(frozen=True, slots=True)
class Dot:
    """A candidate on the plot of the search: from the left and from the top, in %."""

    id: int
    left: float
    top: float
    title: str
    language: str = ""
    promoted: bool = False


@dataclass(frozen=True, slots=True)
class SearchPlot:
    """All candidates in their order. `best` is the line of the best so far, as an SVG's points;
    `stages` are the rejected ones, by the stage that stopped them.
    """

    dots: Sequence[Dot]
    languages: Sequence[str]
    titles: Sequence[str]  # of the languages, for people
    best: str
    one: float
    ticks_y: Sequence[tuple[float, str]]
    ticks_x: Sequence[tuple[float, int]]
    stages: Mapping[str, Sequence[Dot]]


def search_plot(lineage: Lineage) -> SearchPlot | None:
    """The search's estimates over all visible cases, by candidate; None before there is one."""
    if not len(lineage):
        return None
    last = max(1, len(lineage) - 1)
    speeds = {c.id: math.exp(lineage.log_speed(c.id)) for c in lineage.passed()}
    scale = RatioScale.around(speeds.values())
    promoted = [c.id for c in lineage.promotions]
    dots, stages, languages = [], {s.value: list[Dot]() for s in Stage}, []
    for c in lineage:
        left, title = round(100 * c.id / last, 2), f"#{c.id} {c.proposal.name}, "
        if isinstance(c.verdict, Rejected):
            title += f"{c.verdict.status} ({c.verdict.stage})"
            stages[c.verdict.stage.value].append(Dot(c.id, left, 0.0, title))
            continue
        name = language_of_source(c.proposal.source).name
        languages += [name] if name not in languages else []
        title += f"{c.proposal.operator}: {speeds[c.id]:.3f}×"
        top = round(100 - scale.at(speeds[c.id]), 2)
        dots.append(Dot(c.id, left, top, title, name, c.id in promoted))
    points = []
    for i, end in zip(promoted, [*promoted[1:], last], strict=True):
        y = round(100 - scale.at(speeds[i]), 2)
        points += [f"{100 * i / last:.2f},{y}", f"{100 * end / last:.2f},{y}"]
    return SearchPlot(
        dots=dots,
        languages=languages,
        titles=[language(name).title for name in languages],
        best=" ".join(points),
        one=round(100 - scale.at(1.0), 2),
        ticks_y=[(round(100 - at, 2), text) for at, text in scale.ticks(10.0)],
        ticks_x=[(round(100 * n / last, 2), n) for n in whole_ticks(len(lineage) - 1, 8)],
        stages={name: found for name, found in stages.items() if found},
    )


_LESS = 0.99
"""Most of a faster candidate's memory that counts as less: a scalar result less does not."""


@dataclass(frozen=True, slots=True)
class FrontRow:
    """A candidate than which no other is both faster and smaller."""

    id: int
    name: str
    speed: str
    memory: str


def memory_front(lineage: Lineage) -> list[FrontRow]:
    """The front of time against memory, the fastest candidate first. Memory is that of scratch and
    results in the visible case that needs the most. Empty where none needs less than the fastest.
    """
    known = []
    for c in lineage.passed():
        if isinstance(c.verdict, Passed) and c.verdict.timings:
            memory = max(t.peak_bytes for t in c.verdict.timings)
            known.append((lineage.log_speed(c.id), memory, c))
    rows: list[FrontRow] = []
    least = math.inf
    for log, memory, c in sorted(known, key=lambda k: (-k[0], k[1], k[2].id)):
        if memory < _LESS * least:
            least = memory
            name = f"#{c.id} {c.proposal.name}"
            rows.append(FrontRow(c.id, name, f"{math.exp(log):.3f}×", human_bytes(memory)))
    return rows if len(rows) > 1 else []


# -- roofline -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShareRow:
    """A kernel's share of the roofline on one case: the bar's length in %, and in words."""

    name: str
    length: float
    share: str
    rate: str
    mine: bool = False


@dataclass(frozen=True, slots=True)
class Shares:
    """Cases with their kernels' shares. `ceiling` is the place of 100 % on the axis, in %."""

    groups: Sequence[RowGroup]
    ceiling: float


def race_shares(final: FinalRace, lineage: Lineage, *, matrix: bool) -> Shares | None:
    """The winner and the fastest of torch on each hidden case, as raced."""
    if final.winner is None:
        return None
    label, found = candidate_labels(lineage)[str(final.winner)], []
    for case in final.race.cases:
        mine = case.candidates.get(str(final.winner))
        torch = case.fastest_of_torch
        theirs = [(torch, case.baselines[torch])] if torch is not None else []
        if mine is not None:
            rows = [
                (name, t.roofline_share, _rate(t, matrix=matrix))
                for name, t in [(label, mine), *theirs]
            ]
            found.append((case_shape(case), rows))
    return _shares(found)


def search_shares(history: History, *, matrix: bool) -> Shares | None:
    """The winner and the best of torch on each visible case. Torch's time of another moment does
    not compare: its share is the winner's over the estimated speed-up.
    """
    won = winner_of(history)
    speed = history.lineage.speed(won.id) if won is not None else None
    if won is None or speed is None or not isinstance(won.verdict, Passed):
        return None
    found = []
    for t in won.verdict.timings:
        rows = [(f"#{won.id} {won.proposal.name}", t.roofline_share, _rate(t, matrix=matrix))]
        if t.case in speed.cases:
            slower = math.exp(-speed.cases[t.case])
            rate = _rate(t, matrix=matrix, scale=slower)
            rows.append(("best of torch", t.roofline_share * slower, rate))
        found.append((t.case, rows))
    return _shares(found)


def _shares(found: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]) -> Shares | None:
    """Bars of cases: of each the kernels' names, shares and rates, the winner's first."""
    shares = [share for _, rows in found for _, share, _ in rows]
    if not any(shares):
        return None
    most = max(1.0, *shares) * 1.02
    groups = [
        RowGroup(
            case,
            [
                ShareRow(name, round(100 * share / most, 2), f"{share:.0%}", rate, mine=i == 0)
                for i, (name, share, rate) in enumerate(rows)
            ],
        )
        for case, rows in found
    ]
    return Shares(groups, round(100 / most, 2))


def _rate(t: CaseTiming, *, matrix: bool, scale: float = 1.0) -> str:
    if matrix:
        return f"{t.tflop_per_s * scale:.3g} TFLOP/s"
    return f"{t.gb_per_s * scale:,.0f} GB/s"


def ceilings_text(history: History) -> str:
    """The device's ceilings; empty where none were measured."""
    known = (history.baselines or {}).get("ceilings")
    if not known:
        return ""
    rates = [f"copy {known['copy_gb_per_s']:,.0f} GB/s"]
    rates += [f"{dtype} {rate:.3g} TFLOP/s" for dtype, rate in known["tflop_per_s"].items()]
    return ", ".join(rates)


# -- ablation -------------------------------------------------------------------------------------


def ablation_plot(history: History) -> Plot | None:
    """The measured worth of each edit of the winner; None where nothing was ablated."""
    ablation = stored_ablation(history)
    if ablation is None:
        return None
    found = ranked(ablation)
    scale = RatioScale.around(v for c in found for v in (c.ratio, c.low, c.high))
    rows = [
        RatioRow(
            name=short(c.label, MOST_LABEL),
            value=worth_text(c).plain,
            bar=scale.span(1.0, c.ratio) if c.ratio is not None else (scale.at(1.0), 0.0),
            whisker=scale.span(c.low, c.high) if c.low is not None and c.high is not None else None,
            interval=range_text(c.low, c.high) if c.low is not None and c.high is not None else "",
            verdict=c.failed or how(c),
            tone=TONES[speed_verdict(c.low, c.high)]
            if c.low is not None and c.high is not None
            else "none",
            id=c.step,
        )
        for c in found
    ]
    return plot_of([RowGroup("", rows)], scale)
