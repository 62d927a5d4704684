"""Output of `kagent runs` and `kagent show RUN`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kagent_sandbox.data.race import Race
from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.data.verdict import Passed, Rejected, SpeedVerdict
from kagent_sandbox.errors import RunError
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from kagent.runs.ask import Nobody
from kagent.runs.events import Stop
from kagent.runs.final_race import FinalRace
from kagent.runs.history import History
from kagent.runs.ideas import effects
from kagent.runs.lineage import DUPLICATES_IN_A_ROW, Candidate, Lineage, Operator
from kagent.runs.manifest import Manifest, list_runs
from kagent.runs.profiles import stored_profiles
from kagent.runs.selftest_record import line as selftest_line
from kagent.runs.store import RunStore, read_history
from kagent.text import plural
from kagent.ui.candidate_view import candidate_json, timing_table
from kagent.ui.live import clock, first_line, speed_text, spent_text
from kagent.ui.memory_view import recalled_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import headline, verdict_text

_TUNE, _REPLAY = "tune", "replay:"  # proposers, as manifests have them
_SAME_S = 60.0  # baselines that are younger were measured for the run
MOST_WAITING = 12  # candidates that are named
MOST_CHILDREN = 3  # of one parent, besides those that led somewhere


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
                "target": store.manifest.target,
                "started": store.manifest.started,
                "evaluated": history.lineage.counted,
                "budget": budget_of(store.manifest, history),
                "incumbent": best.id if best else None,
                "speed_up": math.exp(history.lineage.log_speed(best.id)) if best else None,
                **_raced(history),
                "stop": history.stop,
            }
        )
    return rows


def budget_of(manifest: Manifest, history: History) -> int | None:
    """Evaluations that a run may use; None where it has no limit: it is answered from outside."""
    limited = history.budgets and manifest.proposer != Nobody.name
    return history.budget if limited else None


def _raced(history: History) -> Mapping[str, object]:
    """Result of the final race; nothing of the search is mixed with it."""
    final = history.race
    found = final.versus_torch if final is not None else None
    return {
        "raced": final.winner if final is not None else None,
        "race_ratio": found.ratio if found is not None else None,
        "verdict": found.verdict.value if found is not None else None,
        "disturbed_cases": len(final.race.disturbed) if final is not None else None,
    }


def runs_view(rows: list[Mapping[str, object]]) -> RenderableType:
    """The table of `kagent runs`, and below it the runs that cannot be read."""
    table = TextTable(
        (
            Column("run"),
            Column("task", drop=3),
            Column("device", drop=4),
            Column("ended", drop=1),
            Column("evaluated", right=True, drop=2),
            Column("best", right=True),
            Column("in the search", right=True, drop=5),
            Column("final race", right=True),
            Column("verdict"),
        )
    )
    broken = []
    for row in rows:
        if "error" in row:
            broken.append(Text(f"{row['run']}: {row['error']}", style="red"))
            continue
        speed_up, ratio, verdict = row["speed_up"], row["race_ratio"], row["verdict"]
        best = row["incumbent"] if row["raced"] is None else row["raced"]
        table.add_row(
            str(row["run"]),
            str(row["task"]),
            str(row["device"] or f"{row['target']} (not measured yet)"),
            str(row["stop"] or "not ended"),
            str(row["evaluated"]) + ("" if row["budget"] is None else f"/{row['budget']}"),
            "–" if best is None else f"#{best}",
            speed_text(speed_up if isinstance(speed_up, float) else 0.0),
            speed_text(ratio if isinstance(ratio, float) else 0.0),
            verdict_text(None if verdict is None else SpeedVerdict(str(verdict))),
        )
    return Group(*([table] if table.row_count else []), *broken)


def run_json(store: RunStore, history: History) -> Mapping[str, object]:
    """Everything but the sources."""
    lineage = history.lineage
    best = lineage.incumbent
    profiles = [*stored_profiles(history).values()]
    return {
        "run": store.folder.name,
        "manifest": to_json(store.manifest),
        "incumbent": best.id if best else None,
        "path": [c.id for c in lineage.path(best.id)] if best else [],
        "stop": history.stop,
        "elapsed_s": history.elapsed_s,
        "spent": to_json(history.spent),
        "memory": to_json(history.recalled) if history.recalled is not None else None,
        "race": final_race_json(history.race) if history.race else None,
        "candidates": [candidate_json(lineage, c, profiles, source=False) for c in lineage],
        "timed_configs": {
            str(number): [to_json(c) for c in configs]
            for number, configs in history.timed_configs.items()
        },
        "effects": [to_json(e) for e in effects(lineage)],
        "pending": [p.id for p in history.pending],
        "open_asks": [a.number for a in history.asks],
    }


def race_json(race: Race) -> Mapping[str, object]:
    """A race with the verdict of each ratio and comparison."""
    data: Any = to_json(race)
    for case, found in zip(data["cases"], race.cases, strict=True):
        for ratio, r in zip(case["ratios"], found.ratios, strict=True):
            ratio["verdict"] = r.verdict
    for name, comparisons in race.overall.items():
        for one, c in zip(data["overall"][name], comparisons, strict=True):
            one["verdict"] = c.verdict
    return cast("Mapping[str, object]", data)


def final_race_json(final: FinalRace) -> Mapping[str, object]:
    """A final race with its verdicts: `verdict` of the whole, and those of `race_json`."""
    return {
        "finalists": list(final.finalists),
        "winner": final.winner,
        "race": race_json(final.race),
        "verdict": final.verdict,
        "repeats": [{"unit": r.unit, "race": race_json(r.race)} for r in final.repeats],
    }


def evaluated_text(history: History) -> str:
    """'6 evaluated in 2:18, 8 passed, 0 rejected (2 seeds included)'.

    Only those that the budget pays for are counted as evaluated.
    """
    lineage = history.lineage
    passed, rejected = len(lineage.passed()), sum(lineage.rejections().values())
    seeds = len(lineage.seeds)
    more = len(lineage) - lineage.counted - seeds
    parts = [plural(seeds, "seed")] if seeds else []
    parts += [f"{more} more outside the budget"] if more > 0 else []
    included = f" ({' and '.join(parts)} included)" if parts else ""
    return (
        f"{lineage.counted} evaluated in {clock(history.elapsed_s)}, {passed} passed, "
        f"{rejected} rejected{included}"
    )


def exhausted_text(history: History, proposer: str) -> Text:
    """Cause of an exhausted run's end, and what to do.

    Args:
        history: The run's.
        proposer: Its proposer, as its manifest has it.
    """
    evaluations = f"{history.lineage.counted} of {plural(history.budget, 'evaluation')}"
    text = Text(f"exhausted after {evaluations}: ")
    if history.lineage.is_repeating:
        return text.append(
            f"the last {DUPLICATES_IN_A_ROW} proposals were duplicates of earlier candidates. For "
            "more, begin another run: with another model (--model NAME) or another --seed"
        )
    if proposer == _TUNE:
        return text.append(
            "the tuner has no untried value left in the TUNE of a kernel that passed. For more, "
            "begin another run: with a model (kagent evolve TASK --model NAME), or with a kernel "
            "that lists more tunables or values in TUNE"
        )
    if proposer.startswith(_REPLAY):
        return text.append(f"that is all that {proposer.removeprefix(_REPLAY)} has proposed")
    return text.append(f"the proposer {proposer} has proposed all that it had")


def run_view(store: RunStore, history: History) -> RenderableType:
    """Head, the incumbent's path edit by edit, its cases, the rejections with an example each."""
    lineage, manifest = history.lineage, store.manifest
    head = Text(f"{store.folder.name}   {manifest.task} on {manifest.device}\n")
    head.append(f"{evaluated_text(history)}; ended: {history.stop or 'not yet'}\n")
    if history.stop is Stop.EXHAUSTED:
        head.append_text(exhausted_text(history, manifest.proposer)).append("\n")
    if manifest.answered_by:
        head.append(f"answered by {manifest.answered_by}\n")
    if history.spent.calls:
        head.append(f"cost: {spent_text(history.spent)}\n")
    if (selftest := selftest_line(manifest.environment)) is not None:
        head.append(f"{selftest}\n")
    if (memory := recalled_text(history)) is not None:
        head.append_text(memory).append("\n")
    if history.race is not None:
        won = "" if history.race.winner is None else f"#{history.race.winner}, "
        head.append(f"final race: {won}").append_text(headline(history.race)).append("\n")
    if (baselines := _baselines_text(history)) is not None:
        head.append(f"{baselines}\n")
    head.append_text(_waiting(history))
    best = lineage.incumbent
    if best is None:
        return Group(head, Text("no candidate has passed yet\n"), _rejections(lineage))
    return Group(
        head,
        path_view(lineage, best),
        Text("\nlineage, by first parents", "bold"),
        lineage_tree(lineage),
        Text(),
        timing_table(best, matrix=manifest.matrix),
        Text(),
        _rejections(lineage),
    )


def _baselines_text(history: History) -> str | None:
    """Time at which the search's baselines were measured; None if it is not known."""
    events = [e for e in history.events if e.kind == "baselines"]
    if not events:
        return None
    from kagent_sandbox.judge.timing.baselines import Baselines, age_text  # imports numpy

    try:
        found = from_json(Baselines, events[-1].data["baselines"])
    except (RecordError, KeyError):
        return None
    if not found.measured_at:
        return None
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.measured_at))
    age_s = events[-1].at - found.measured_at
    before = f", {age_text(age_s)} before they were used" if age_s > _SAME_S else ""
    return f"baselines of the search: measured {at}{before}; {found.noise.text}"


def _waiting(history: History) -> Text:
    """List candidates without a verdict and asks without an answer, where there are any."""
    text = Text()
    if history.pending:
        names = ", ".join(f"#{p.id} {p.name}" for p in history.pending[:MOST_WAITING])
        more = len(history.pending) - MOST_WAITING
        text.append(f"waiting for a verdict: {names}{f' and {more} more' if more > 0 else ''}\n")
    if history.asks:
        numbers = ", ".join(str(a.number) for a in history.asks)
        text.append(f"waiting for an answer: ask {numbers}\n")
    return text


def path_view(lineage: Lineage, best: Candidate) -> TextTable:
    """Show the path from the seed to a candidate, edit by edit.

    Speed-ups are those of the search: over the fastest of eager and torch.compile, through the
    chain of interleaved comparisons, on the visible cases.
    """
    table = TextTable(
        (
            Column("candidate"),
            Column("what changed", wrap=True),
            Column("× torch, in the search", right=True),
        ),
        title="path",
    )
    for c in lineage.path(best.id):
        p, speed_up = c.proposal, math.exp(lineage.log_speed(c.id))
        changed = p.hypothesis if p.operator is Operator.SEED else f"{p.operator}: {p.hypothesis}"
        table.add_row(f"#{c.id} {p.name}", changed, speed_text(speed_up))
    return table


def lineage_tree(lineage: Lineage) -> Tree:
    """Draw the lineage with gains. Of a parent's children the important ones are named: those on
    the way to the incumbent, those that once were the best, and the three fastest. The rest is
    counted.
    """
    best = lineage.incumbent
    path = {c.id for c in lineage.path(best.id)} if best is not None else set()
    promoted = {c.id for c in lineage.promotions}
    children: dict[int | None, list[Candidate]] = {}
    for c in lineage:
        if not c.is_duplicate:
            children.setdefault(next(iter(c.proposal.parents), None), []).append(c)

    def grow(node: Tree, parent: int | None) -> None:
        mine = children.get(parent, [])
        fast = sorted(mine, key=lambda c: -lineage.log_speed(c.id))[:MOST_CHILDREN]
        named = [
            c
            for c in mine
            if parent is None
            or c.id in path | promoted
            or c.id in children
            or (c in fast and isinstance(c.verdict, Passed))
        ]
        for c in named:
            grow(node.add(_tree_label(lineage, c, on_path=c.id in path)), c.id)
        rest = [c for c in mine if c not in named]
        if rest:
            failed = sum(isinstance(c.verdict, Rejected) for c in rest)
            slower = len(rest) - failed
            parts = [f"{slower} slower"] if slower else []
            parts += [f"{failed} rejected"] if failed else []
            node.add(Text(f"and {' and '.join(parts)}", "dim"))

    tree = Tree("", hide_root=True, guide_style="dim")
    grow(tree, None)
    return tree


def _tree_label(lineage: Lineage, c: Candidate, *, on_path: bool) -> Text:
    """'#9 cuda_rows  tune  1.002× over #5, 1.32× torch'."""
    text = Text(f"#{c.id} {c.proposal.name}", "bold green" if on_path else "")
    if c.proposal.operator is not Operator.SEED:
        text.append(f"  {c.proposal.operator}", "dim")
    if isinstance(c.verdict, Rejected):
        return text.append(f"  {c.verdict.status}", "red")
    gain, base = lineage.gain(c.id), lineage.base(c.id)
    if gain is not None and base is not None:
        text.append(f"  {gain:.3f}× over #{base.id}", "green" if gain > 1 else "")
    return text.append(f"  {speed_text(math.exp(lineage.log_speed(c.id)))} torch", "dim")


def _rejections(lineage: Lineage) -> RenderableType:
    table = TextTable(
        (
            Column("stage"),
            Column("status"),
            Column("count", right=True),
            Column("for example", wrap=True),
        ),
        title="rejected",
    )
    for (stage, status), count in sorted(lineage.rejections().items()):
        example, verdict = lineage.first_rejected(stage, status)
        where = f" ({verdict.case})" if verdict.case else ""
        table.add_row(stage, status, str(count), f"#{example}{where}: {first_line(verdict)}")
    return table if table.row_count else Text("rejected: none")
