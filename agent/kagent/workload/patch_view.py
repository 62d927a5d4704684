"""Output of `kagent patch`."""

from __future__ import annotations

from pathlib import Path

from kagent_sandbox.data.verdict import SpeedVerdict
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.text import interval_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import VERDICT_STYLES
from kagent.workload.patch import Patch, Patched, numbers_text, step_text


def patch_view(found: Patch) -> RenderableType:
    """Every replacement, the step before and after, and the file."""
    table = TextTable(
        (
            Column("replaced"),
            Column("by"),
            Column("calls per step", right=True, drop=1),
            Column("step's speed-up", right=True),
            Column("verdict"),
            Column("", wrap=True),
        )
    )
    for site in found.sites:
        table.add_row(*_cells(site))
    text = Text(f"\n{numbers_text(found)}\n")
    if found.before_us is not None:
        text.append(f"{step_text(found)}\n", "bold")
    if found.disturbed:
        text.append(f"disturbed: {'; '.join(found.disturbed)}. Intervals are wider than alone\n")
    if found.file is None:
        text.append("nothing pays: no file is written", "bold")
    else:
        module = Path(found.file).stem
        text.append(f"{found.file}", "bold").append(f" puts it in: import {module}; ")
        text.append(f"{module}.enable()")
    return Group(table, text)


def _cells(site: Patched) -> list[str | Text]:
    ratio, verdict = site.ratio, site.verdict
    return [
        site.site,
        site.operator,
        f"{site.calls:g}",
        "-" if ratio is None else interval_text(ratio.value, ratio.low, ratio.high),
        Text("-")
        if verdict is None
        else Text(verdict.value, VERDICT_STYLES[SpeedVerdict(verdict)]),
        "kept" if site.kept else site.why,
    ]
