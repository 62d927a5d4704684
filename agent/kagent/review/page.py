"""The report: one HTML file with everything in it, which asks no network for anything."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from kagent_sandbox.runtime.text import printable

from kagent.review import plots, report_data, summary
from kagent.review.summary import winner_of
from kagent.runs.history import History
from kagent.runs.manifest import Manifest
from kagent.ui.live import clock
from kagent.ui.run_view import budget_of

_HERE = Path(__file__).parent
STYLE = _HERE / "page/report.css"
"""Colours and type of every page of kagent's."""
_SCRIPTS = ("vendor/diff2html.js", "page/report.js")
_STYLES = ("vendor/diff2html.css", "page/report.css")


def render(folder: str, manifest: Manifest, history: History, *, live: bool = False) -> str:
    """Render the page of a run.

    Args:
        folder: Name of the run's folder.
        manifest: The run.
        history: Its events.
        live: Whether the page polls its server, every two seconds.
    """
    scripts = [(_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    lineage, winner, final = history.lineage, winner_of(history), history.race
    path = [c.id for c in lineage.path(winner.id)] if winner is not None else []
    matrix = manifest.matrix
    return template("report.html.j2").render(
        run=folder,
        manifest=manifest,
        lineage=lineage,
        history=history,
        headline=summary.headline(history),
        losses=summary.losses(history),
        trust=summary.trust(manifest.environment, history),
        edits=summary.edits(history, path),
        waiting=summary.waiting(history),
        budget=budget_of(manifest, history),
        elapsed=clock(history.elapsed_s),
        rejected=sum(lineage.rejections().values()),
        environment=report_data.environment_rows(manifest),
        cost=report_data.cost_line(history),
        race=plots.race_plot(final, lineage) if final else None,
        race_notes=plots.race_notes(final, lineage) if final else [],
        race_times=report_data.race_rows(final, lineage, matrix=matrix) if final else [],
        rate="TFLOP/s" if matrix else "GB/s",
        search=plots.search_plot(lineage),
        visible=plots.visible_plot(history),
        front=plots.memory_front(lineage),
        rejections=report_data.rejection_rows(lineage),
        path=report_data.path_rows(lineage, path),
        tree=report_data.lineage_texts(lineage, path),
        race_shares=plots.race_shares(final, lineage, matrix=matrix) if final else None,
        search_shares=plots.search_shares(history, matrix=matrix),
        ceilings=plots.ceilings_text(history),
        ablation=plots.ablation_plot(history),
        data=embedded(report_data.page_data(manifest, history)),
        scripts=scripts,
        styles=[(_HERE / name).read_text(encoding="utf-8") for name in _STYLES],
        policy=policy(scripts, live=live),
        live=live,
    )


@functools.cache
def template(name: str, *folders: Path) -> jinja2.Template:
    """A page's template, compiled once: pages are written again while candidates are timed.

    Args:
        name: Its file.
        folders: Folders of templates, besides the one that all pages share.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _HERE / "page"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    return environment.get_template(name)


def visible(value: Any) -> Any:
    """A template's value; kagent's own scripts and styles are marked as safe, and left alone."""
    return printable(value) if type(value) is str else value


def embedded(data: Any) -> str:
    """JSON, packed: sources of hundreds of candidates share most of their lines.

    Base64 has no character that could end the element it stands in.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def policy(scripts: list[str], *, live: bool) -> str:
    """Content security policy: a page's own scripts, by their hashes, and nothing else.

    Candidates' sources and messages are written by models: should one get past the escaping, it
    is still not run.
    """
    hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
