"""Data of a report's page: rows and positions for its template, and JSON for its script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kagent_sandbox.data.verdict import (
    CaseTiming,
    Passed,
    Rejected,
)
from kagent_sandbox.runtime.text import printable

from kagent.review.lineage_rows import LineageRow, lineage_rows
from kagent.review.sources import Lines, changes
from kagent.review.summary import TONES, noise_of, winner_of
from kagent.runs.final_race import FinalRace
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Lineage, Speed, roofline_share
from kagent.runs.manifest import Manifest
from kagent.runs.profiles import stored_profiles
from kagent.runs.selftest_record import told as selftest_told
from kagent.text import (
    config_text,
    kernel_label,
    loop_lines,
    ms_text,
    range_text,
    rate_text,
    remark_lines,
)
from kagent.ui.live import outcome, speed_text, spent_text
from kagent.ui.tables import candidate_labels, case_shape

Json = dict[str, Any]
MOST_LOOPS = 8  # of a candidate
MOST_MESSAGE = 1500  # characters of a rejection: a report of hundreds of them stays small


def page_data(manifest: Manifest, history: History) -> Json:
    """All that the page's script shows: the table of candidates, their sources and differences."""
    lineage, lines = history.lineage, Lines()
    sources = {c.id: lines.add(c.proposal.source) for c in lineage}
    winner = winner_of(history)
    profiles = _profiles(manifest, history)
    data: Json = {
        "matrix": manifest.matrix,
        "path": [c.id for c in lineage.path(winner.id)] if winner else [],
        "candidates": [
            {**_candidate(lineage, c, sources), "profile": profiles.get(c.id, [])} for c in lineage
        ],
        "lines": lines.html,
    }
    return {k: shown(v) for k, v in data.items()}


def shown(value: Any) -> Any:
    """Convert data for a page: numbers that JSON does not have become null, invisible characters
    visible.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: shown(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(v) for v in value]
    return value


def _candidate(lineage: Lineage, c: Candidate, sources: Mapping[int, list[int]]) -> Json:
    p, verdict = c.proposal, c.verdict
    speed = lineage.speed(c.id)
    parent = p.parents[0] if p.parents else None
    data: Json = {
        "id": c.id,
        "name": p.name,
        "operator": p.operator.value,
        "parents": list(p.parents),
        "hypothesis": p.hypothesis,
        "predicted": p.predicted,
        "gain": lineage.gain(c.id),
        "speed": math.exp(speed.log) if speed else None,
        "promoted": c in lineage.promotions,
        "kernel": p.kernel,
        "lines": sources[c.id],
        "edits": changes(sources[parent], sources[c.id]) if parent is not None else [],
        "outcome": outcome(c, math.exp(lineage.log_speed(c.id)))[0],
    }
    if c.facts is not None:
        data["remarks"] = remark_lines(c.facts.remarks)
        data["loops"] = loop_lines(c.facts.loops, MOST_LOOPS)
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
            "notes": list(verdict.notes),
            "lane_s": verdict.lane_s,
            "timings": [_timing(verdict, t, speed) for t in verdict.timings],
            "kernels": [_kernel(r) for r in verdict.resources],
            "tolerance": max((e.share_of_tolerance for e in verdict.errors), default=None),
        }
    return data


def _profiles(manifest: Manifest, history: History) -> Mapping[int, list[str]]:
    """Lines of each candidate that was profiled."""
    stored = stored_profiles(history)
    if not stored:
        return {}
    from kagent.prompting import run_facts_of  # few runs have profiles
    from kagent.prompting.hardware import hardware
    from kagent.prompting.profiles import profile_lines

    facts = run_facts_of(manifest, history)
    device = hardware(manifest.target, facts.device, facts.ceilings)
    found: dict[int, list[str]] = {}
    for (number, _), profile in stored.items():
        found.setdefault(number, []).extend(profile_lines(profile, device))
    return found


def _timing(verdict: Passed, t: CaseTiming, speed: Speed | None) -> Json:
    return {
        "case": t.case,
        "us": t.kernel_us,
        "low": t.low_us,
        "high": t.high_us,
        "share": t.roofline_share,
        "gb": t.gb_per_s,
        "tflop": t.tflop_per_s,
        "speed": math.exp(speed.cases[t.case])
        if speed is not None and t.case in speed.cases
        else None,
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
    noise = noise_of(env)
    found = (
        ("isolation", env.get("isolation")),
        ("selftest", selftest_told(env)),
        ("noise", noise and noise.text),
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
                    "ms": ms_text(t.kernel_us),
                    "interval": f"{ms_text(t.low_us)}–{ms_text(t.high_us)}",
                    "rate": rate_text(t, matrix=matrix),
                    "share": f"{t.roofline_share:.0%}",
                    "ratio": f"{ratio.value:.3f}×" if ratio else "",
                    "ratio_interval": range_text(ratio.low, ratio.high) if ratio else "",
                    "verdict": ratio.verdict.value if ratio else "",
                    "tone": TONES[ratio.verdict] if ratio else "",
                }
            )
    return rows


def rejection_rows(lineage: Lineage) -> list[Json]:
    """Stage, status, how many, and one of them."""
    rows = []
    for (stage, status), number in sorted(lineage.rejections().items()):
        example, verdict = lineage.first_rejected(stage, status)
        rows.append(
            {
                "stage": stage.value,
                "status": status.value,
                "count": number,
                "id": example,
                "message": next(iter(verdict.message.splitlines()), ""),
            }
        )
    return rows


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


def lineage_texts(lineage: Lineage, path: Sequence[int]) -> list[tuple[LineageRow, Json]]:
    """Rows of the lineage, each with what the page says of its candidate."""
    return [(row, _row_text(lineage, row)) for row in lineage_rows(lineage, path)]


def _row_text(lineage: Lineage, row: LineageRow) -> Json:
    if row.id is None:
        return {}
    c = lineage[row.id]
    base, gain = lineage.base(c.id), lineage.gain(c.id)
    return {
        "label": f"#{c.id} {c.proposal.name}",
        "operator": c.proposal.operator.value,
        "rejected": c.verdict.status.value if isinstance(c.verdict, Rejected) else "",
        "gain": f"{gain:.3f}× over #{base.id}" if gain is not None and base is not None else "",
        "speed": speed_text(math.exp(lineage.log_speed(c.id))),
    }
