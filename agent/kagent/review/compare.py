"""Candidates beside each other: two of one run, and the best of all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kagent_sandbox.data.language import reports_resources
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.errors import RunError
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.runs.lineage import Candidate, Lineage, roofline_share
from kagent.runs.manifest import list_runs
from kagent.runs.store import read_history
from kagent.text import human_bytes, kernel_label
from kagent.ui.candidate_view import source_diff, styled_diff
from kagent.ui.live import speed_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import rejected_text

Row = Mapping[str, object]


def diff_json(lineage: Lineage, before: Candidate, after: Candidate) -> Row:
    """Unified diff, times per case, kernels of each. Ratios are time before / time after."""
    return {
        "before": before.id,
        "after": after.id,
        "diff": source_diff(before, after),
        "speed_up": _speed_up(lineage, before, after),
        "cases": [
            {"case": case, "before_us": old, "after_us": new, "ratio": ratio}
            for case, old, new, ratio in _cases(lineage, before, after)
        ],
        "kernels": [
            {"name": name, "before": old, "after": new}
            for name, old, new in _kernels(before, after)
        ],
    }


def diff_view(
    lineage: Lineage, before: Candidate, after: Candidate, *, matrix: bool
) -> RenderableType:
    """Show the differences of two candidates in the source, the times and the compiled kernels."""
    names = f"#{before.id} {before.proposal.name}", f"#{after.id} {after.proposal.name}"
    parts: list[RenderableType] = [
        Text(f"{names[0]} → {names[1]}", "bold"),
        Text(f"{after.proposal.hypothesis}\n", "dim"),
        styled_diff(before, after) if before.proposal.source != after.proposal.source
        else Text("the sources are the same"),
        Text(),
    ]  # fmt: skip
    for candidate, name in zip((before, after), names, strict=True):
        if isinstance(candidate.verdict, Rejected):
            parts.append(rejected_text(name, candidate.verdict))
    if isinstance(before.verdict, Passed) and isinstance(after.verdict, Passed):
        overall = _speed_up(lineage, before, after)
        title = f"{names[1]} is {speed_text(overall or 0.0)} as fast as {names[0]}"
        title += ", through the chain of interleaved comparisons"
        parts += [_times_table(lineage, before, after, title, matrix=matrix), Text()]
        kernels = _kernels(before, after)
        if kernels:
            parts.append(_kernel_table(kernels))
    return Group(*parts)


def _speed_up(lineage: Lineage, before: Candidate, after: Candidate) -> float | None:
    old, new = lineage.speed(before.id), lineage.speed(after.id)
    return math.exp(new.log - old.log) if old is not None and new is not None else None


def _cases(
    lineage: Lineage, before: Candidate, after: Candidate
) -> list[tuple[str, float, float, float]]:
    """Case, µs before and after, and the ratio, which is not theirs but that of speeds: times of
    different moments do not compare.
    """
    old, new = lineage.speed(before.id), lineage.speed(after.id)
    if not (isinstance(before.verdict, Passed) and isinstance(after.verdict, Passed)):
        return []
    assert old is not None
    assert new is not None
    times = {t.case: t.kernel_us for t in after.verdict.timings}
    return [
        (t.case, t.kernel_us, times[t.case], math.exp(new.cases[t.case] - old.cases[t.case]))
        for t in before.verdict.timings
        if t.case in times
    ]


def _times_table(
    lineage: Lineage, before: Candidate, after: Candidate, title: str, *, matrix: bool
) -> TextTable:
    rate = "TFLOP/s" if matrix else "GB/s"
    table = TextTable(
        (
            Column("case"),
            Column(f"#{before.id}, ms", right=True),
            Column(f"#{after.id}, ms", right=True),
            Column(f"#{after.id}, {rate}", right=True, drop=2),
            Column("roofline", right=True, drop=1),
            Column("×", right=True),
        ),
        title=title,
    )
    assert isinstance(after.verdict, Passed)
    timings = {t.case: t for t in after.verdict.timings}
    for case, old, new, ratio in _cases(lineage, before, after):
        t = timings[case]
        style = "green" if ratio > 1.005 else "red" if ratio < 0.995 else ""
        table.add_row(
            case,
            f"{old / 1e3:.4f}",
            f"{new / 1e3:.4f}",
            f"{t.tflop_per_s:.1f}" if matrix else f"{t.gb_per_s:.0f}",
            f"{t.roofline_share:.0%}",
            Text(speed_text(ratio), style),
        )
    return table


def _kernels(before: Candidate, after: Candidate) -> list[tuple[str, Row | None, Row | None]]:
    """Kernels by name, with what the compiler says of each; those of one side alone included."""
    sides = [_by_name(c) for c in (before, after)]
    return [(n, sides[0].get(n), sides[1].get(n)) for n in dict.fromkeys([*sides[0], *sides[1]])]


def _by_name(candidate: Candidate) -> dict[str, Row]:
    verdict = candidate.verdict
    found: dict[str, Row] = {}
    for resource in verdict.resources if isinstance(verdict, Passed) else ():
        if reports_resources(resource.get("language")):
            name = kernel_label(str(resource.get("name", "?")))
            number = sum(n == name or n.startswith(f"{name} (") for n in found)
            found[f"{name} ({number + 1})" if number else name] = resource
    return found


def _kernel_table(kernels: Sequence[tuple[str, Row | None, Row | None]]) -> TextTable:
    table = TextTable(
        (
            Column("kernel", wrap=True),
            Column("registers", right=True),
            Column("spills", right=True),
            Column("shared memory", right=True),
        ),
        title="compiled code, before → after",
    )
    for name, old, new in kernels:
        table.add_row(
            name,
            _change(old, new, "registers", str),
            _change(old, new, "spill_bytes", lambda v: human_bytes(int(v))),
            _change(old, new, "shared_bytes", lambda v: human_bytes(int(v))),
        )
    return table


def _change(old: Row | None, new: Row | None, key: str, show: Callable[[str], str]) -> Text:
    texts = [
        "–" if side is None or side.get(key) is None else show(str(side[key]))
        for side in (old, new)
    ]
    if texts[0] == texts[1]:
        return Text(texts[0], "dim")
    return Text(" → ".join(texts))


# -- across runs ----------------------------------------------------------------------------------


def top_rows(runs: Path, task: str | None, count: int) -> list[Row]:
    """The best candidates of all runs: at most `count` for each task and device.

    A run's winner of the final race carries its result there; others have what the search found,
    and stand below all that were raced.
    """
    groups: dict[tuple[str, str], list[dict[str, object]]] = {}
    for folder in list_runs(runs):
        try:
            store, history = read_history(folder)
        except RunError:
            continue  # `kagent runs` says what is wrong with it
        manifest, lineage = store.manifest, history.lineage
        if task not in (None, manifest.task):
            continue
        raced = {}
        if history.race is not None:
            raced = {
                int(name): history.race.race.versus_torch(name)
                for name in history.race.race.overall
                if name.isdecimal()
            }
        for c in lineage.passed()[:count] + [lineage[i] for i in raced]:
            result = raced.get(c.id)
            row = {
                "task": manifest.task,
                "device": manifest.device,
                "run": folder.name,
                "candidate": c.id,
                "name": c.proposal.name,
                "kernel": c.proposal.kernel,
                "final": None if result is None else result.ratio,
                "final_low": None if result is None else result.low,
                "final_high": None if result is None else result.high,
                "verdict": None if result is None else result.verdict.value,
                "search": math.exp(lineage.log_speed(c.id)),
                "roofline": roofline_share(c.verdict),
            }
            group = groups.setdefault((manifest.task, manifest.device), [])
            if not any((r["run"], r["candidate"]) == (folder.name, c.id) for r in group):
                group.append(row)
    return [
        row
        for _, group in sorted(groups.items())
        for row in sorted(group, key=_worth, reverse=True)[:count]
    ]


def _worth(row: Row) -> tuple[bool, float]:
    value = row["final"] if row["final"] is not None else row["search"]
    assert isinstance(value, float)
    return row["final"] is not None, value


def top_view(rows: Sequence[Row]) -> TextTable:
    """The table of `kagent top`."""
    table = TextTable(
        (
            Column("task"),
            Column("device", drop=3),
            Column("run", drop=1),
            Column("candidate"),
            Column("final race, × torch", right=True),
            Column("95 % interval", right=True, drop=2),
            Column("verdict"),
            Column("in the search", right=True, drop=4),
        )
    )
    before: object = None
    for row in rows:
        group = (row["task"], row["device"])
        if group != before:
            table.add_section()
        first, before = group != before, group
        interval = f"{row['final_low']:.3f}–{row['final_high']:.3f}" if row["final"] else "–"
        table.add_row(
            Text(str(row["task"]) if first else "", "bold"),
            str(row["device"]) if first else "",
            str(row["run"]),
            f"#{row['candidate']} {row['name']}",
            _times(row["final"]),
            interval,
            str(row["verdict"] or "–"),
            _times(row["search"]),
        )
    return table


def _times(value: object) -> str:
    return f"{value:.3f}×" if isinstance(value, float) else "–"
