"""A campaign's page: one HTML file that needs nothing else, written anew at every step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kagent.campaign import view
from kagent.campaign.record import Campaign
from kagent.suite import page
from kagent.suite.results import read_results

_PAGE = Path(__file__).parent / "page"
RELOAD_S = 5
"""Seconds after which a browser reads the page of a campaign that goes on once more."""


def render(folder: Path, campaign: Campaign, doing: Mapping[str, str] | None = None) -> str:
    """Render the page of a campaign.

    Args:
        folder: The campaign's folder.
        campaign: The campaign.
        doing: What is being done, by names of runs and of final races; None where nothing is any
            more, and the page stays as it is.
    """
    runs = view.runs_of(folder, campaign, doing or ())
    return page.render(
        read_results(folder, campaign),
        "campaign.html.j2",
        _PAGE,
        reload_s=0 if doing is None else RELOAD_S,
        doing=view.doing_lines(doing or {}),
        written=time.strftime("%Y-%m-%d %H:%M:%S"),
        runs=runs,
        spent=view.spent_line(campaign, runs.rows),
        estimates=view.ESTIMATES,
    )
