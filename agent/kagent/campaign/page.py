"""A campaign's page: one HTML file that needs nothing else, written anew at every step."""

from __future__ import annotations

from pathlib import Path

from kagent.campaign import view
from kagent.campaign.record import Campaign
from kagent.suite import page
from kagent.suite.results import read_results

_PAGE = Path(__file__).parent / "page"
RELOAD_S = 5
"""Seconds after which a browser reads the page of a campaign that goes on once more."""


def render(folder: Path, campaign: Campaign, doing: str = "") -> str:
    """Render the page of a campaign.

    Args:
        folder: The campaign's folder.
        campaign: The campaign.
        doing: What is being done; "" where nothing is, and the page stays as it is.
    """
    rows = view.run_rows(folder, campaign)
    return page.render(
        read_results(folder, campaign),
        "campaign.html.j2",
        _PAGE,
        reload_s=RELOAD_S if doing else 0,
        doing=doing,
        runs_head=view.HEAD,
        runs=rows,
        spent=view.spent_line(campaign, rows),
        estimates=view.ESTIMATES,
    )
