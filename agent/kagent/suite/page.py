"""A suite's results as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.race import BEST_OF_TORCH

from kagent.review.page import STYLE, policy, template
from kagent.review.plots import Plot, RatioRow, RowGroup, plot_of, ratio_row
from kagent.review.scales import RatioScale
from kagent.suite import view
from kagent.suite.results import ProblemResult, SuiteResults

_PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A problem, with its place on the axis.

    Attributes:
        result: What became of it.
        ratio: Its winner beside the best of torch; None where there is none.
        ways: Ratios to each of torch's ways, in the order of the headers.
    """

    result: ProblemResult
    ratio: RatioRow | None
    ways: tuple[str, ...]


def render(
    results: SuiteResults, name: str = "suite.html.j2", *folders: Path, **more: object
) -> str:
    """Render the page of a suite, or of what is shown like one.

    Args:
        results: What is shown.
        name: File of the template: the suite's, or one that extends it.
        folders: Folders of such templates.
        more: What they show besides.
    """
    ways = [o for o in results.opponents if o != BEST_OF_TORCH]
    return template(name, *folders, _PAGE).render(
        results=results,
        what=results.record.WHAT,
        item=results.record.ITEM,
        progress=view.progress_text(results),
        setting=view.setting_text(results),
        several_devices=view.devices_text(results) if len(results.devices) > 1 else "",
        figures_head=view.figures_head(results.record),
        figures=[view.figures_row(f, results.record) for f in (*results.groups, results.all)],
        beside_head=view.beside_head(results.record),
        beside=view.opponents_rows(results),
        ways=ways,
        plot=_plot(results.problems, ways),
        state=view.state_text,
        notes=view.notes_of,
        unknown=view.unknown_text(results),
        explained=view.explained(results.record),
        races=view.RACES,
        style=STYLE.read_text(encoding="utf-8"),
        policy=policy([], live=False),
        **more,
    )


def _plot(problems: Iterable[ProblemResult], ways: Iterable[str]) -> Plot:
    """Every problem, by group, on one axis."""
    found = list(problems)
    ratios = [c for p in found if (c := p.versus_torch) is not None]
    scale = RatioScale.around(v for c in ratios for v in (c.ratio, c.low, c.high))
    groups = dict.fromkeys(p.problem.group for p in found)
    return plot_of(
        [
            RowGroup(g, [_row(p, ways, scale) for p in found if p.problem.group == g])
            for g in groups
        ],
        scale,
    )


def _row(p: ProblemResult, ways: Iterable[str], scale: RatioScale) -> ProblemRow:
    c = p.versus_torch
    row = None if c is None else ratio_row(c, p.name, scale)
    return ProblemRow(p, row, tuple(view.ratio_of(p.beside.get(way)) for way in ways))
