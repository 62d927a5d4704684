"""What `kagent runs` and `kagent show` print: runs, one run, one candidate."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from kagent_sandbox.errors import RunError, UserError
from kagent_sandbox.records import to_json
from kagent_sandbox.verdict import Passed, Rejected
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from kagent.display import clock, outcome, roofline, speed_text
from kagent.lineage import Candidate, Lineage
from kagent.planview import config_text, human_bytes, widths_text
from kagent.runs import list_runs
from kagent.store import History, RunStore


def numbers(*headers: str, title: str = "", left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers."""
    table = Table(title=title or None, title_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", overflow="fold")
    return table


def read_history(folder: Path) -> tuple[RunStore, History]:
    """A run, opened for reading only, and its history. The store is closed already."""
    store = RunStore.open(folder, write=False)
    try:
        return store, store.history()
    finally:
        store.close()


def runs_json(runs: Path) -> list[Mapping[str, object]]:
    """One object per run; a damaged one has `error` and nothing else."""
    rows: list[Mapping[str, object]] = []
    for folder in list_runs(runs):
        try:
            store, history = read_history(folder)
        except RunError as e:
            rows.append({"run": folder.name, "error": str(e)})
            continue
        best = history.lineage.incumbent
        rows.append(
            {
                "run": folder.name,
                "task": store.manifest.task,
                "device": store.manifest.environment.get("device"),
                "started": store.manifest.started,
                "evaluated": history.lineage.counted,
                "budget": history.budgets[-1][1] if history.budgets else None,
                "incumbent": best.id if best else None,
                "score": best.score if best else None,
                "stop": history.stop,
            }
        )
    return rows


def runs_view(rows: list[Mapping[str, object]]) -> RenderableType:
    """The table of `kagent runs`."""
    table = numbers("run", "task", "device", "ended", "evaluated", "best", "speed-up", left=4)
    for row in rows:
        if "error" in row:
            table.add_row(str(row["run"]), Text(str(row["error"]), style="red"))
            continue
        score = row["score"]
        table.add_row(
            str(row["run"]),
            str(row["task"]),
            str(row["device"]),
            str(row["stop"] or "not ended"),
            f"{row['evaluated']}/{row['budget']}",
            "–" if row["incumbent"] is None else f"#{row['incumbent']}",
            speed_text(score if isinstance(score, float) else None),
        )
    return table


def run_json(store: RunStore, history: History) -> Mapping[str, object]:
    """Everything but the sources."""
    lineage = history.lineage
    best = lineage.incumbent
    return {
        "run": store.folder.name,
        "manifest": to_json(store.manifest),
        "incumbent": best.id if best else None,
        "path": [c.id for c in lineage.path(best.id)] if best else [],
        "stop": history.stop,
        "elapsed_s": history.elapsed_s,
        "race": to_json(history.race) if history.race else None,
        "candidates": [candidate_json(c, source=False) for c in lineage],
        "pending": [p.id for p in history.pending],
    }


def candidate_json(candidate: Candidate, *, source: bool = True) -> Mapping[str, object]:
    """A candidate; its verdict has `outcome`: passed or rejected."""
    proposal = dict(_mapping(to_json(candidate.proposal)))
    if not source:
        proposal.pop("source")
    return {
        "proposal": proposal,
        "outcome": "passed" if isinstance(candidate.verdict, Passed) else "rejected",
        "verdict": to_json(candidate.verdict),
        "facts": to_json(candidate.facts) if candidate.facts else None,
    }


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, dict)
    return value


def run_view(store: RunStore, history: History) -> RenderableType:
    """Head, the incumbent's path edit by edit, its cases, the rejections with an example each."""
    lineage, manifest = history.lineage, store.manifest
    head = Text(f"{store.folder.name}   {manifest.task} on {manifest.environment.get('device')}\n")
    head.append(
        f"{lineage.counted} evaluated in {clock(history.elapsed_s)}, "
        f"{len(lineage.passed())} passed, ended: {history.stop or 'not yet'}"
    )
    best = lineage.incumbent
    if best is None:
        return Group(head, Text("no candidate has passed yet"), _rejections(lineage))
    return Group(head, path_view(lineage, best), timing_table(best), _rejections(lineage))


def path_view(lineage: Lineage, best: Candidate) -> Table:
    """From the seed to a candidate, edit by edit."""
    table = numbers("", "candidate", "what changed", "speed-up", title="path", left=3)
    for c in lineage.path(best.id):
        p = c.proposal
        table.add_row(f"#{c.id}", p.name, f"{p.operator}: {p.hypothesis}", speed_text(c.score))
    return table


def timing_table(candidate: Candidate) -> Table:
    """Cases of a passed candidate."""
    verdict = candidate.verdict
    assert isinstance(verdict, Passed)
    table = numbers(
        *("case", "configuration", "µs", "95 % interval", "GB/s", "TFLOP/s", "roofline"),
        *("baseline µs", "speed-up", "peak memory"),
        title=f"#{candidate.id} {candidate.proposal.name}",
        left=2,
    )
    for t in verdict.timings:
        ratio = t.baseline_us / t.kernel_us if t.baseline_us else None
        table.add_row(
            t.case,
            config_text(verdict.configs[t.config]),
            f"{t.kernel_us:.2f}",
            f"{t.low_us:.2f}–{t.high_us:.2f}",
            f"{t.gb_per_s:.0f}",
            f"{t.tflop_per_s:.2f}",
            f"{t.roofline_share:.0%}",
            f"{t.baseline_us:.2f}" if t.baseline_us else "–",
            Text(speed_text(ratio), style="red" if ratio is not None and ratio < 1 else ""),
            human_bytes(t.peak_bytes),
        )
    return table


def _rejections(lineage: Lineage) -> RenderableType:
    table = numbers("stage", "status", "count", "for example", title="rejected", left=2)
    table.columns[3].justify = "left"
    for (stage, status), count in sorted(lineage.rejections().items()):
        example = next(
            c
            for c in lineage
            if isinstance(c.verdict, Rejected)
            and (c.verdict.stage, c.verdict.status) == (stage, status)
        )
        table.add_row(stage, status, str(count), f"#{example.id}: {outcome_text(example)}")
    return table if table.row_count else Text("rejected: none")


def outcome_text(candidate: Candidate) -> str:
    """The first line of what became of it."""
    return outcome(candidate, promoted=False)[0]


def find_candidate(lineage: Lineage, candidate_id: int) -> Candidate:
    """A candidate by id.

    Raises:
        UserError: There is none.
    """
    if not 0 <= candidate_id < len(lineage):
        raise UserError(f"no candidate {candidate_id}: the run has 0 to {len(lineage) - 1}")
    return lineage[candidate_id]


def candidate_view(lineage: Lineage, candidate: Candidate) -> RenderableType:
    """Verdict, cases, errors, resources, and the source as a diff against its first parent."""
    p, verdict = candidate.proposal, candidate.verdict
    parents = ", ".join(f"#{i}" for i in p.parents) or "none"
    head = Text(f"#{candidate.id} {p.name}   {p.operator}, parents: {parents}\n")
    head.append(f"{p.hypothesis}\n", "dim")
    head.append(outcome(candidate, promoted=False)[0], "bold")
    parts: list[RenderableType] = [head]
    if isinstance(verdict, Rejected):
        parts.append(Text(verdict.message))
    else:
        share = f"{roofline(verdict):.0%} of the roofline, device held for {verdict.lane_s:.2f} s"
        parts += [Text(share), timing_table(candidate), error_table(verdict)]
        if verdict.resources:
            parts.append(resource_table(verdict))
    parts.append(Syntax(p.source, "python", line_numbers=True, word_wrap=True))
    if p.parents:
        parent = lineage[p.parents[0]]
        lines = difflib.unified_diff(
            parent.proposal.source.splitlines(),
            p.source.splitlines(),
            f"#{parent.id}",
            f"#{candidate.id}",
            lineterm="",
        )
        parts.append(Syntax("\n".join(lines), "diff", word_wrap=True))
    return Group(*parts)


def error_table(verdict: Passed) -> Table:
    """Errors against float64 beside torch's own in the same dtype."""
    table = numbers(
        *("case", "result", "row", "torch", "element", "torch", "bias", "torch", "of tolerance"),
        title="relative errors against float64",
        left=2,
    )
    for e in verdict.errors:
        table.add_row(
            *(e.case, e.output),
            *(f"{e.row:.1e}", f"{e.torch_row:.1e}", f"{e.element:.1e}", f"{e.torch_element:.1e}"),
            *(f"{e.bias:.1e}", f"{e.torch_bias:.1e}", f"{e.share_of_tolerance:.0%}"),
        )
    return table


def resource_table(verdict: Passed) -> Table:
    """Kernels with what the compiler says they use."""
    table = numbers("kernel", "registers", "spills", "static shared", "global loads")
    for r in verdict.resources:
        widths = r.get("load_bytes")
        loads = (
            widths_text({int(k): int(v) for k, v in widths.items()})
            if isinstance(widths, Mapping)
            else "–"
        )
        table.add_row(
            str(r.get("name", "?")),
            str(r.get("registers", "–")),
            str(r.get("spill_bytes", "–")),
            str(r.get("static_shared_bytes", "–")),
            loads,
        )
    return table
