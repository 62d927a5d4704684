"""Output of `kagent patch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kagent_sandbox.data.verdict import SpeedVerdict
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.text import interval_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import VERDICT_STYLES
from kagent.workload.patch import Patch, Patched, numbers_text, rests_text, step_text


def patch_view(found: Patch) -> RenderableType:
    """Every replacement, the step before and after, and the file."""
    table = TextTable(
        (
            Column("replaced"),
            Column("by"),
            Column("calls per step", right=True, drop=1),
            Column("rest of graphs", drop=1),
            Column("step's speed-up", right=True),
            Column("verdict"),
            Column("", wrap=True),
        )
    )
    for site in found.sites:
        for row in _rows(site):
            table.add_row(*row)
    text = Text(f"\n{numbers_text(found)}\n")
    if found.before_us is not None:
        text.append(f"{step_text(found)}\n", "bold")
    for line in (*rests_text(found), *found.notes):
        text.append(f"{line}\n")
    if found.disturbed:
        text.append(f"disturbed: {'; '.join(found.disturbed)}. Intervals are wider than alone\n")
    if found.file is None:
        text.append("nothing pays: no file is written", "bold")
    else:
        module = Path(found.file).stem
        text.append(f"{found.file}", "bold").append(f" puts it in: import {module}; ")
        text.append(f"{module}.enable()")
    return Group(table, text)


def _rows(site: Patched) -> Iterator[list[str | Text]]:
    """One row of each trial, the one that counts first."""
    first: list[str | Text] = [site.site, site.operator, f"{site.calls:g}"]
    outcome = "kept" if site.kept else site.why
    if not site.trials:
        yield [*first, "", "-", "-", outcome]
    for i, trial in enumerate(site.trials):
        r = trial.ratio
        yield [
            *(first if i == 0 else ["", "", ""]),
            trial.rest or "",
            interval_text(r.value, r.low, r.high),
            Text(trial.verdict.value, VERDICT_STYLES[SpeedVerdict(trial.verdict)]),
            outcome if i == 0 else trial.why or "the other is faster",
        ]
