"""Output of `kagent ablate`."""

from __future__ import annotations

from kagent_sandbox.data.verdict import speed_verdict
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.review.ablate import CONTROL, Ablation, Contribution
from kagent.text import range_text, short
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import VERDICT_STYLES

MOST_LABEL = 140  # characters of a hypothesis


def ablation_view(ablation: Ablation, name: str) -> RenderableType:
    """The contributions, the largest first, below the control."""
    table = TextTable(
        (
            Column("taken back", wrap=True),
            Column("worth", right=True),
            Column("95 % interval", right=True),
            Column("measured", drop=1),
        ),
        title=f"what each edit of #{ablation.candidate} {name} is worth: time without it / with it",
    )
    for c in ranked(ablation):
        table.add_row(
            short(c.label, MOST_LABEL),
            worth_text(c),
            range_text(c.low, c.high) if c.low is not None and c.high is not None else "–",
            how(c),
        )
    notes = [
        Text(f"{short(c.label, MOST_LABEL)}: {c.failed}", "dim")
        for c in ablation.contributions
        if c.failed
    ]
    return Group(table, *notes)


def ranked(ablation: Ablation) -> list[Contribution]:
    """The control, then the largest contributions first, then those that have no figure."""
    return sorted(
        ablation.contributions,
        key=lambda c: (c.label != CONTROL, c.ratio is None, -(c.ratio or 0.0)),
    )


def how(c: Contribution) -> str:
    """Describe how the worth was measured."""
    if c.failed:
        return "not measured"
    if c.label == CONTROL:
        return "against itself"
    where = "taken from the kernel" if c.in_place else "where it was made, against its parent"
    return f"{where}, a few samples" if c.coarse else where


def worth_text(c: Contribution) -> Text:
    """The ratio in its verdict's colour."""
    if c.ratio is None:
        return Text("–")
    found = None if c.low is None or c.high is None else speed_verdict(c.low, c.high)
    return Text(f"{c.ratio:.3f}×", VERDICT_STYLES[found])
