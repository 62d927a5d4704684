"""Data of a report's page, as JSON: computed here, drawn by page/report.js."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kagent_sandbox.data.language import language_of_source
from kagent_sandbox.data.race import TORCH, RaceCase
from kagent_sandbox.data.records import RecordError, from_json
from kagent_sandbox.data.verdict import (
    CaseTiming,
    Passed,
    Rejected,
    SpeedVerdict,
    speed_verdict,
)
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.runtime.text import printable

from kagent.review.ablate import stored_ablation
from kagent.review.ablation_view import how, ranked, short, worth_text
from kagent.review.sources import Lines, changes
from kagent.runs.final_race import FinalRace
from kagent.runs.lineage import Candidate, Lineage, roofline_share
from kagent.runs.manifest import Manifest
from kagent.runs.selftest_record import told as selftest_told
from kagent.runs.store import History
from kagent.text import config_text, kernel_label
from kagent.ui.live import outcome, spent_text
from kagent.ui.tables import candidate_labels, case_shape

Json = dict[str, Any]
MOST_MESSAGE = 1500  # characters of a rejection: a report of hundreds of them stays small

TONES: Mapping[SpeedVerdict | None, str] = {
    SpeedVerdict.FASTER: "good",
    SpeedVerdict.TIE: "",
    SpeedVerdict.SLOWER: "bad",
    None: "",
}
"""Class names of verdicts on the page."""


def page_data(manifest: Manifest, history: History) -> Json:
    """All that charts, diffs and candidates' pages are drawn from."""
    lineage, lines = history.lineage, Lines()
    sources = {c.id: lines.add(c.proposal.source) for c in lineage}
    times = _recorded_at(history)
    winner = winner_of(history)
    data: Json = {
        "matrix": manifest.matrix,
        "kind": manifest.kind,
        "winner": winner.id if winner else None,
        "path": [c.id for c in lineage.path(winner.id)] if winner else [],
        "promotions": [c.id for c in lineage.promotions],
        "candidates": [_candidate(lineage, c, sources, times.get(c.id)) for c in lineage],
        "bars": _bars(history, winner),
        "roofline": _roofline(history, manifest),
        "ablation": [c for c in ablation_rows(history) if c["ratio"] is not None],
        "lines": lines.html,
    }
    return {k: shown(v) for k, v in data.items()}


def shown(value: Any) -> Any:
    """The same as a page shows it: null for numbers that JSON does not have, visible characters."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: shown(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(v) for v in value]
    return value


def winner_of(history: History) -> Candidate | None:
    """The final race's winner, otherwise the incumbent."""
    final = history.race
    if final is not None and final.winner is not None:
        return history.lineage[final.winner]
    return history.lineage.incumbent


def _recorded_at(history: History) -> dict[int, float]:
    """Seconds since the run's first event at which each candidate got its verdict."""
    if not history.events:
        return {}
    first = history.events[0].at
    recorded = (e for e in history.events if e.kind == "recorded")
    return {int(e.data["id"]): e.at - first for e in recorded}


def _candidate(
    lineage: Lineage, c: Candidate, sources: Mapping[int, list[int]], at_s: float | None
) -> Json:
    p, verdict = c.proposal, c.verdict
    speed = lineage.speed(c.id)
    parent = p.parents[0] if p.parents else None
    data: Json = {
        "id": c.id,
        "name": p.name,
        "language": language_of_source(p.source).name if p.source else "",
        "operator": p.operator.value,
        "parents": list(p.parents),
        "hypothesis": p.hypothesis,
        "predicted": p.predicted,
        "gain": lineage.gain(c.id),
        "speed": math.exp(speed.log) if speed else None,
        "promoted": c in lineage.promotions,
        "counted": c.counts,
        "at": at_s,
        "kernel": p.kernel,
        "lines": sources[c.id],
        "edits": changes(sources[parent], sources[c.id]) if parent is not None else [],
        "outcome": outcome(c, math.exp(lineage.log_speed(c.id)))[0],
    }
    if p.origin is not None:
        data["model"], data["card"] = p.origin.model, p.origin.card
    if isinstance(verdict, Rejected):
        data |= {
            "stage": verdict.stage.value,
            "status": verdict.status.value,
            "message": verdict.message[:MOST_MESSAGE],
            "case": verdict.case,
        }
    else:
        data |= {
            "share": roofline_share(verdict),
            "screened": verdict.screened,
            "lane_s": verdict.lane_s,
            "timings": [_timing(verdict, t) for t in verdict.timings],
            "kernels": [_kernel(r) for r in verdict.resources],
            "tolerance": max((e.share_of_tolerance for e in verdict.errors), default=None),
        }
    return data


def _timing(verdict: Passed, t: CaseTiming) -> Json:
    return {
        "case": t.case,
        "us": t.kernel_us,
        "low": t.low_us,
        "high": t.high_us,
        "share": t.roofline_share,
        "gb": t.gb_per_s,
        "tflop": t.tflop_per_s,
        "torch": t.baseline_us,
        "config": config_text(verdict.configs[t.config]) if len(verdict.configs) > 1 else "",
    }


def _kernel(resource: Mapping[str, object]) -> Json:
    return {
        "name": kernel_label(str(resource.get("name", "?"))),
        "language": resource.get("language"),
        "registers": resource.get("registers"),
        "spills": resource.get("spill_bytes"),
        "shared": resource.get("shared_bytes"),
    }


# -- the winner against everyone, case by case ----------------------------------------------------


def _bars(history: History, winner: Candidate | None) -> Json | None:
    """Speed-up of the winner over each baseline, with intervals where they were interleaved."""
    if winner is None:
        return None
    final = history.race
    if final is not None and str(winner.id) in final.race.overall:
        cases = [c for c in final.race.cases if str(winner.id) in c.candidates]
        return {"hidden": True, "cases": [_race_bar(c, str(winner.id)) for c in cases]}
    verdict = winner.verdict
    assert isinstance(verdict, Passed)
    baselines = (history.baselines or {}).get("baselines", {}).get("us", {})
    return {
        "hidden": False,
        "cases": [
            {
                "case": t.case,
                "ratios": [
                    # Not interleaved: the candidate's own interval is all that is known.
                    [name, us / t.kernel_us, us / t.high_us, us / t.low_us]
                    for name, us in baselines.get(t.case, {}).items()
                ],
            }
            for t in verdict.timings
        ],
    }


def _race_bar(case: RaceCase, winner: str) -> Json:
    ratios = [r for r in case.ratios if r.candidate == winner and r.against in case.baselines]
    ordered = sorted(ratios, key=lambda r: (r.against not in TORCH, r.against))
    return {
        "case": case_shape(case),
        "ratios": [[r.against, r.value, r.low, r.high] for r in ordered],
    }


# -- roofline -------------------------------------------------------------------------------------


def _roofline(history: History, manifest: Manifest) -> Json | None:
    """Ceilings, and for each visible case its intensity: FLOPs per byte of the task's formulas."""
    known = history.baselines or {}
    ceilings = known.get("ceilings")
    timed = [c for c in history.lineage if isinstance(c.verdict, Passed) and c.verdict.timings]
    if not ceilings or not timed:
        return None
    best = timed[0].verdict
    assert isinstance(best, Passed)
    points = {t.case: t for t in best.timings}
    cases = [
        {
            "case": name,
            "gbytes": t.gb_per_s * t.kernel_us / 1e6,
            "tflops": t.tflop_per_s * t.kernel_us / 1e6,
            "baselines": known.get("baselines", {}).get("us", {}).get(name, {}),
        }
        for name, t in points.items()
    ]
    return {
        "copy_gb_per_s": ceilings["copy_gb_per_s"],
        "tflop_per_s": ceilings["tflop_per_s"],
        "cases": cases,
        "device": manifest.device,
    }


# -- what stands in the page as text --------------------------------------------------------------


def environment_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows about the device and environment of the figures."""
    env = manifest.environment
    rows = [("device", manifest.device)]
    key = str(env.get("key", ""))
    if key:
        rows.append(("driver and versions", key))
    versions = env.get("versions")
    if isinstance(versions, Mapping):
        rows.append(("packages", ", ".join(f"{k} {v}" for k, v in versions.items())))
    found = (
        ("isolation", env.get("isolation")),
        ("self-test", selftest_told(env)),
        ("noise", _noise(env)),
        ("host", env.get("host")),
        ("Python", env.get("python")),
    )
    rows += [(name, str(text)) for name, text in found if text]
    rows += [
        ("kagent", manifest.version),
        ("task", f"{manifest.task}, digest {manifest.task_digest}"),
        ("proposals by", manifest.proposed_by),
        ("seed", str(manifest.seed)),
        ("started", manifest.started),
    ]
    return rows


def _noise(environment: Mapping[str, object]) -> str | None:
    """Findings of the A/A test at the start of a run; None where there was none."""
    try:
        return from_json(Noise, environment.get("noise")).text
    except RecordError:
        return None


def cost_line(history: History) -> str:
    """Describe the cost of the models' calls; empty where there were none."""
    return spent_text(history.spent) if history.spent.calls else ""


def race_rows(final: FinalRace, lineage: Lineage, *, matrix: bool) -> list[Json]:
    """Everyone on every hidden case, the fastest first."""
    labels = candidate_labels(lineage)
    rows = []
    for case in final.race.cases:
        timings = {**case.baselines, **case.candidates}
        for i, (name, t) in enumerate(sorted(timings.items(), key=lambda n: n[1].kernel_us)):
            mine = name in case.candidates
            ratio = case.ratio(name, "torch") if mine else None
            rows.append(
                {
                    "first": i == 0,
                    "span": len(timings),
                    "case": case_shape(case),
                    "name": labels.get(name, name) if mine else name,
                    "id": int(name) if mine and name.isdecimal() else None,
                    "mine": mine,
                    "ms": f"{t.kernel_us / 1e3:.4f}",
                    "interval": f"{t.low_us / 1e3:.4f}–{t.high_us / 1e3:.4f}",
                    "rate": f"{t.tflop_per_s:.1f}" if matrix else f"{t.gb_per_s:.0f}",
                    "share": f"{t.roofline_share:.0%}",
                    "ratio": f"{ratio.value:.3f}×" if ratio else "",
                    "ratio_interval": f"{ratio.low:.3f}–{ratio.high:.3f}" if ratio else "",
                    "verdict": ratio.verdict.value if ratio else "",
                    "tone": TONES[ratio.verdict] if ratio else "",
                }
            )
    return rows


def rejection_rows(lineage: Lineage) -> list[Json]:
    """Stage, status, how many, and one of them."""
    rows = []
    for (stage, status), number in sorted(lineage.rejections().items()):
        example = next(
            c
            for c in lineage
            if isinstance(c.verdict, Rejected)
            and (c.verdict.stage, c.verdict.status) == (stage, status)
        )
        assert isinstance(example.verdict, Rejected)
        rows.append(
            {
                "stage": stage.value,
                "status": status.value,
                "count": number,
                "id": example.id,
                "message": next(iter(example.verdict.message.splitlines()), ""),
            }
        )
    return rows


def ablation_rows(history: History) -> list[Json]:
    """Rows with the measured worth of each edit of the winner; empty where nothing was ablated."""
    ablation = stored_ablation(history)
    return [
        {
            "label": short(c.label),
            "step": c.step,
            "ratio": c.ratio,
            "low": c.low,
            "high": c.high,
            "text": worth_text(c).plain,
            "tone": TONES[speed_verdict(c.low, c.high)]
            if c.low is not None and c.high is not None
            else "",
            "how": c.failed or how(c),
        }
        for c in (ranked(ablation) if ablation is not None else ())
    ]


def path_rows(lineage: Lineage, path: Sequence[int]) -> list[Json]:
    """The way from a seed to the winner."""
    return [
        {
            "id": c.id,
            "name": c.proposal.name,
            "operator": c.proposal.operator.value,
            "hypothesis": c.proposal.hypothesis,
            "predicted": c.proposal.predicted,
            "gain": lineage.gain(c.id),
            "speed": math.exp(lineage.log_speed(c.id)),
        }
        for c in (lineage[i] for i in path)
    ]
