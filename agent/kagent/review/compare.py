"""Candidates beside each other: two of one run, and the best of all runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kagent_sandbox.data.language import reports_resources
from kagent_sandbox.data.race import Race, RaceCase, Ratio
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import Comparison, Passed, Rejected, SpeedVerdict
from kagent_sandbox.errors import RunError
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Lineage, roofline_share
from kagent.runs.manifest import list_runs
from kagent.runs.store import read_history
from kagent.text import human_bytes, interval_text, kernel_label, ms_text, range_text, rate_text
from kagent.ui.candidate_view import source_diff, styled_diff
from kagent.ui.live import speed_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import case_shape, ratio_text, rejected_text, verdict_text

Row = Mapping[str, object]


def diff_json(history: History, before: Candidate, after: Candidate) -> Row:
    """Unified diff, what race and search say of the two, kernels of each.

    Ratios are time before / time after. `race` is None unless both ran in the final race; its times
    and ratios are from the same blocks. `search` is None if one was rejected; without `low` and
    `high` its ratios come through a chain of comparisons.
    """
    race = _raced_beside(history, before, after)
    found = searched(history.lineage, before, after)
    return {
        "before": before.id,
        "after": after.id,
        "diff": source_diff(before, after),
        "race": None if race is None else _race_json(race, before, after),
        "search": None if found is None else _mapping(found),
        "kernels": [
            {"name": name, "before": old, "after": new}
            for name, old, new in _kernels(before, after)
        ],
    }


def diff_view(
    history: History, before: Candidate, after: Candidate, *, matrix: bool
) -> RenderableType:
    """Show the differences of two candidates in the source, the times and the compiled kernels.

    A table's times and ratios are from the same interleaved blocks: what the race found and what
    the search estimated have a table each.
    """
    names = f"#{before.id} {before.proposal.name}", f"#{after.id} {after.proposal.name}"
    parts: list[RenderableType] = [
        Text(f"{names[0]} → {names[1]}", "bold"),
        Text(f"{after.proposal.hypothesis}\n", "dim"),
        styled_diff(before, after) if before.proposal.source != after.proposal.source
        else Text("the sources are the same"),
    ]  # fmt: skip
    for candidate, name in zip((before, after), names, strict=True):
        if isinstance(candidate.verdict, Rejected):
            parts += [Text(), rejected_text(name, candidate.verdict)]
    race = _raced_beside(history, before, after)
    if race is not None:
        parts += [Text(), _race_table(race, before, after, names, matrix=matrix)]
    found = searched(history.lineage, before, after)
    if found is not None:
        parts += [Text(), _search_table(found, names)]
        kernels = _kernels(before, after)
        if kernels:
            parts += [Text(), _kernel_table(kernels)]
    return Group(*parts)


def _raced_beside(history: History, before: Candidate, after: Candidate) -> Race | None:
    """The final race, where both ran in it to the end."""
    final = history.race
    both = final is not None and {str(before.id), str(after.id)} <= set(final.race.overall)
    return final.race if final is not None and both else None


def _against(comparisons: Sequence[Comparison], other: Candidate) -> Comparison | None:
    return next((c for c in comparisons if c.against == str(other.id)), None)


def _race_json(race: Race, before: Candidate, after: Candidate) -> Row:
    overall = _against(race.overall[str(after.id)], before)
    return {
        "overall": None if overall is None else {**_mapping(overall), "verdict": overall.verdict},
        "cases": [
            {
                "case": case_shape(case),
                "before_us": case.candidates[str(before.id)].kernel_us,
                "after_us": case.candidates[str(after.id)].kernel_us,
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "verdict": ratio.verdict,
            }
            for case, ratio in _race_cases(race, before, after)
        ],
    }


def _mapping(record: object) -> Row:
    return cast("Row", to_json(record))


def _race_cases(race: Race, before: Candidate, after: Candidate) -> list[tuple[RaceCase, Ratio]]:
    pairs = ((case, case.ratio(str(after.id), str(before.id))) for case in race.cases)
    return [(case, ratio) for case, ratio in pairs if ratio is not None]


def _race_table(
    race: Race, before: Candidate, after: Candidate, names: tuple[str, str], *, matrix: bool
) -> TextTable:
    rate = "TFLOP/s" if matrix else "GB/s"
    title = "in the final race, on hidden cases"
    overall = _against(race.overall[str(after.id)], before)
    if overall is not None:
        beside = "with" if overall.verdict is SpeedVerdict.TIE else "than"
        interval = interval_text(overall.ratio, overall.low, overall.high)
        title += f": {names[1]} is {overall.verdict} {beside} {names[0]}, {interval}"
    table = TextTable(
        (
            Column("case"),
            Column(f"#{before.id}, ms", right=True),
            Column(f"#{after.id}, ms", right=True),
            Column(f"#{after.id}, {rate}", right=True, drop=2),
            Column("roofline", right=True, drop=3),
            Column("×", right=True),
            Column("95 % interval", right=True, drop=1),
            Column("verdict"),
        ),
        title=title,
    )
    for case, ratio in _race_cases(race, before, after):
        t = case.candidates[str(after.id)]
        table.add_row(
            case_shape(case),
            ms_text(case.candidates[str(before.id)].kernel_us),
            ms_text(t.kernel_us),
            rate_text(t, matrix=matrix),
            f"{t.roofline_share:.0%}",
            ratio_text(ratio),
            range_text(ratio.low, ratio.high),
            verdict_text(ratio.verdict),
        )
    return table


@dataclass(frozen=True, slots=True)
class Searched:
    """A search's estimates for two candidates: time before / after, over all cases and on each.

    `low` and `high` bound the ratio of two that were timed beside each other. Without them it is an
    estimate through the chain of comparisons. Times of different moments do not compare, so there
    are none.
    """

    ratio: float
    cases: Mapping[str, float]
    low: float | None = None
    high: float | None = None


def searched(lineage: Lineage, before: Candidate, after: Candidate) -> Searched | None:
    """The comparison of two candidates in the search; None if one of them was rejected."""
    old, new = lineage.speed(before.id), lineage.speed(after.id)
    if not (isinstance(before.verdict, Passed) and isinstance(after.verdict, Passed)):
        return None
    assert old is not None
    assert new is not None
    for one, other, inverse in ((after, before, False), (before, after, True)):
        assert isinstance(one.verdict, Passed)
        c = one.verdict.versus
        if c is not None and c.against == str(other.id):
            if inverse:
                cases = {case: 1 / ratio for case, ratio in c.cases.items()}
                return Searched(1 / c.ratio, cases, 1 / c.high, 1 / c.low)
            return Searched(c.ratio, c.cases, c.low, c.high)
    cases = {n: math.exp(new.cases[n] - old.cases[n]) for n in old.cases if n in new.cases}
    return Searched(math.exp(new.log - old.log), cases)


def _search_table(found: Searched, names: tuple[str, str]) -> TextTable:
    title = f"in the search, on visible cases: {names[1]} is "
    if found.low is not None and found.high is not None:
        interval = interval_text(found.ratio, found.low, found.high)
        title += f"{interval} as fast as {names[0]}, interleaved with it"
    else:
        title += f"{speed_text(found.ratio)} as fast as {names[0]}, estimated through others"
    table = TextTable((Column("case"), Column("×", right=True)), title=title)
    for case, ratio in found.cases.items():
        table.add_row(case, speed_text(ratio))
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


def top_rows(runs: Path, task: str | None, count: int) -> tuple[list[Row], int]:
    """The best candidates of all runs, and the number of runs that cannot be read.

    A run's winner of the final race carries its result there; others have what the search found,
    and stand below all that were raced.

    Args:
        runs: Folder of runs.
        task: Only its runs; None for those of all tasks. A run that cannot be read may be of any.
        count: Candidates at most, for each task and device.
    """
    unread = 0
    groups: dict[tuple[str, str], list[dict[str, object]]] = {}
    for folder in list_runs(runs):
        try:
            store, history = read_history(folder)
        except RunError:
            unread += 1  # `kagent runs` says what is wrong with it
            continue
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
    rows: list[Row] = [
        row
        for _, group in sorted(groups.items())
        for row in sorted(group, key=_worth, reverse=True)[:count]
    ]
    return rows, unread


def _worth(row: Row) -> tuple[bool, float]:
    value = row["final"] if row["final"] is not None else row["search"]
    assert isinstance(value, float)
    return row["final"] is not None, value


def top_view(rows: Sequence[Row]) -> RenderableType:
    """The tables of `kagent top`: one for each task and device."""
    parts: list[RenderableType] = []
    for (task, device), group in itertools.groupby(rows, lambda r: (r["task"], r["device"])):
        table = TextTable(
            (
                Column("run", drop=1),
                Column("candidate"),
                Column("final race, × torch", right=True),
                Column("95 % interval", right=True, drop=2),
                Column("verdict"),
                Column("in the search", right=True, drop=4),
            ),
            title=f"{task} on {device}",
        )
        for row in group:
            interval = f"{row['final_low']:.3f}–{row['final_high']:.3f}" if row["final"] else "–"
            table.add_row(
                str(row["run"]),
                f"#{row['candidate']} {row['name']}",
                _times(row["final"]),
                interval,
                str(row["verdict"] or "–"),
                _times(row["search"]),
            )
        parts += [Text(), table] if parts else [table]
    return Group(*parts)


def _times(value: object) -> str:
    return f"{value:.3f}×" if isinstance(value, float) else "–"
