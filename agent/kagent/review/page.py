"""The report: one HTML file with everything in it, which asks no network for anything."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.runtime.text import printable

from kagent.review import report_data
from kagent.runs.manifest import Manifest
from kagent.runs.selftest_record import told as selftest_told
from kagent.runs.store import History
from kagent.ui.end_of_run import verdict as race_verdict
from kagent.ui.live import clock
from kagent.ui.tables import candidate_labels, cases_with

_HERE = Path(__file__).parent
_SCRIPTS = ("vendor/echarts.js", "vendor/diff2html.js", "page/report.js")
_STYLES = ("vendor/diff2html.css", "page/report.css")


def render(folder: str, manifest: Manifest, history: History, *, live: bool = False) -> str:
    """Render the page of a run.

    Args:
        folder: Name of the run's folder.
        manifest: The run.
        history: Its events.
        live: Whether the page polls its server, every two seconds.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    scripts = [(_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    lineage, winner = history.lineage, report_data.winner_of(history)
    data = report_data.page_data(manifest, history)
    final = history.race
    headline, tone = _headline(history)
    return environment.get_template("report.html.j2").render(
        run=folder,
        manifest=manifest,
        lineage=lineage,
        history=history,
        winner=winner,
        headline=headline,
        tone=tone,
        cases=_case_verdicts(history),
        elapsed=clock(history.elapsed_s),
        rejected=sum(lineage.rejections().values()),
        environment=report_data.environment_rows(manifest),
        selftest=selftest_told(manifest.environment) or "not recorded",
        cost=report_data.cost_line(history),
        race=report_data.race_rows(final, lineage, matrix=manifest.matrix) if final else [],
        rate="TFLOP/s" if manifest.matrix else "GB/s",
        rejections=report_data.rejection_rows(lineage),
        path=report_data.path_rows(lineage, data["path"]),
        ablation=report_data.ablation_rows(history),
        data=embedded(data),
        scripts=scripts,
        styles=[(_HERE / name).read_text(encoding="utf-8") for name in _STYLES],
        policy=_policy(scripts, live=live),
        live=live,
    )


def _visible(value: Any) -> Any:
    """A template's value; kagent's own scripts and styles are marked as safe, and left alone."""
    return printable(value) if type(value) is str else value


def embedded(data: Any) -> str:
    """JSON, packed: sources of hundreds of candidates share most of their lines.

    Base64 has no character that could end the element it stands in.
    """
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _policy(scripts: list[str], *, live: bool) -> str:
    """Content security policy: the page's own scripts, by their hashes, and nothing else.

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


def _headline(history: History) -> tuple[str, str]:
    """The run's result in a sentence, and how it should look."""
    lineage, final = history.lineage, history.race
    if final is not None and final.winner is not None:
        text = race_verdict(final, candidate_labels(lineage))
        tone = report_data.TONES.get(final.verdict, "") or "plain"
        return text.plain.strip().splitlines()[0], tone
    if final is not None:
        return "Every finalist failed on the hidden cases: there is no verdict", "bad"
    best = lineage.incumbent
    if best is None:
        return "No candidate has passed yet", "plain"
    speed = f"{report_data.path_rows(lineage, [best.id])[0]['speed']:.3f}×"
    return (
        f"#{best.id} {best.proposal.name}: {speed} the best of torch on the visible cases, "
        "in the search; there was no final race yet",
        "plain",
    )


def _case_verdicts(history: History) -> dict[str, list[str]]:
    """Cases of the final race by the verdict of the fastest finalist; empty without a race."""
    final = history.race
    if final is None or final.winner is None:
        return {}
    winner = str(final.winner)
    return {v.value: cases_with(final.race, winner, v) for v in SpeedVerdict}
