"""Output of `kagent memory`, and what `kagent show` and the end of a run say of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kagent_sandbox.data.verdict import Rejected
from rich.console import RenderableType
from rich.text import Text

from kagent.evolve.remembering import described, licence_text, origin_text
from kagent.memory.record import Remembered
from kagent.runs.history import History
from kagent.runs.ideas import Effect
from kagent.runs.lineage import Candidate, Operator
from kagent.runs.recalled import Recalled, RecalledSeed
from kagent.text import interval_text
from kagent.ui.live import speed_text
from kagent.ui.table import Column, TextTable


def recalled_text(history: History) -> Text | None:
    """Outcomes of a run's seeds from memory, a line each; None where it has none."""
    recalled = history.recalled
    if recalled is None or not recalled.seeds:
        return None
    seeds = {c.proposal.kernel: c for c in history.lineage.seeds}
    waiting = {p.kernel for p in history.pending if p.operator is Operator.SEED}
    return Text("\n").join(
        Text(f"from memory: {origin_text(s)}: ")
        .append_text(_outcome(s, seeds.get(s.kernel), history, waits=s.kernel in waiting))
        .append(f"; {licence_text(s)}")
        for s in recalled.seeds
    )


def _outcome(
    seed: RecalledSeed, candidate: Candidate | None, history: History, *, waits: bool
) -> Text:
    if candidate is None:
        return Text("not judged yet" if waits else "not taken up yet")
    verdict = candidate.verdict
    if isinstance(verdict, Rejected):
        return Text(f"#{candidate.id} is left out: {verdict.status}", "yellow")
    here = math.exp(history.lineage.log_speed(candidate.id))
    there = math.exp(seed.log_speed_up)
    return Text(f"#{candidate.id} passed, {here:.3f}× the best of torch here ({there:.3f}× there)")


def runs_view(records: Sequence[Remembered]) -> RenderableType:
    """The runs in memory, a row for each."""
    table = TextTable(
        (
            Column("id"),
            Column("run"),
            Column("task"),
            Column("device", drop=2),
            Column("evaluated", right=True, drop=3),
            Column("best", right=True),
            Column("techniques", right=True, drop=4),
            Column("licence", drop=1),
        )
    )
    for record in records:
        best = record.kernels[0] if record.kernels else None
        named = dict.fromkeys(n for k in record.kernels for n in k.licences)
        table.add_row(
            record.run,
            record.folder,
            record.task,
            record.device,
            str(record.evaluations),
            speed_text(math.exp(best.log_speed_up)) if best is not None else "–",
            str(len({e.technique for e in record.effects})),
            ", ".join(named) or "none named",
        )
    return table


def show_view(recalled: Recalled) -> Iterator[RenderableType]:
    """Show the seeds and effects that a run of a task would get."""
    yield from (Text(line) for line in described(recalled))
    if recalled.effects:
        yield Text("\nwhat techniques did, over what they were tried on", "bold")
        yield effects_table(recalled.effects)


def effects_table(effects: Sequence[Effect]) -> RenderableType:
    """Effects by technique and regime."""
    table = TextTable(
        (
            Column("technique"),
            Column("on"),
            Column("tries", right=True),
            Column("passed", right=True),
            Column("faster", right=True),
            Column("mean of those that passed", right=True),
        )
    )
    for effect in effects:
        gain, interval = effect.gain, effect.interval
        mean = "–" if gain is None or interval is None else interval_text(gain, *interval)
        counts = map(str, (effect.tries, effect.passed, effect.faster))
        table.add_row(effect.technique, effect.regime.value, *counts, mean)
    return table


def record_json(record: Remembered) -> Mapping[str, object]:
    """A run in memory without its sources."""
    best = record.kernels[0] if record.kernels else None
    return {
        "id": record.run,
        "run": record.folder,
        "task": record.task,
        "device": record.device,
        "evaluated": record.evaluations,
        "speed_up": math.exp(best.log_speed_up) if best is not None else None,
        "techniques": sorted({e.technique for e in record.effects}),
        "licences": list(dict.fromkeys(n for k in record.kernels for n in k.licences)),
    }
