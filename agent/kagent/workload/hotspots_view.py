"""Output of `kagent hotspots`."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from kagent.ui.table import Column, TextTable
from kagent.workload.hotspots import Hotspot, Hotspots


def hotspots_view(found: Hotspots, count: int) -> RenderableType:
    """The step, what it is bound by, and the first `count` regions."""
    head = Text(f"{found.script}: ", "bold")
    what = "training" if found.trains else "inference"
    head.append(f"a step of {what} takes {millis(found.step_us)} ms on {found.device}", "default")
    if found.busy_us is not None and found.launches is not None:
        head.append(
            f"; kernels run in {millis(found.busy_us)} ms of it ({found.launches:.0f} launches)",
            "default",
        )
    head.append("\n")
    for note in found.notes:
        head.append(f"{note}\n", "yellow")
    table = TextTable(
        (
            Column("#", right=True),
            Column("id"),
            Column("region", wrap=True),
            Column("where", wrap=True),
            Column("direction", drop=4),
            Column("times", right=True, drop=3),
            Column("ms", right=True),
            Column("of step", right=True),
            Column("of ceiling", right=True, drop=2),
            Column("headroom ms", right=True),
            Column("step at most", right=True, drop=1),
        )
    )
    for region in found.regions[:count]:
        table.add_row(*_cells(region))
    left = len(found.regions) - count
    end = Text(f"{left} more regions: -n {len(found.regions)}\n" if left > 0 else "", "dim")
    end.append(
        "headroom: time above the measured ceilings; step at most: its speed-up without that time",
        "dim",
    )
    return Group(head, table, end)


def _cells(region: Hotspot) -> list[str]:
    return [
        str(region.number),
        region.key,
        region.title,
        region.place,
        region.phase,
        str(region.count),
        millis(region.us),
        f"{region.share:.1%}",
        f"{min(region.of_ceiling, 1.0):.0%}",
        millis(region.headroom_us),
        f"{region.step_gain:.3f}×",
    ]


def taken_view(region: Hotspot, path: Path) -> RenderableType:
    """The file of a region, and what makes a task of it."""
    text = Text(f"\n{path}", "bold").append(f": {region.title}, {region.place}\n", "default")
    command = ["kagent", "new", f"{path}:region", "--inputs", "make_inputs"]
    return text.append("next:  ").append(shlex.join(command), "bold")


def millis(us: float) -> str:
    """µs as milliseconds with three digits that count."""
    ms = us / 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
