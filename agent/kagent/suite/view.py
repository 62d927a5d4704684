"""A suite's results as text."""

from __future__ import annotations

from collections.abc import Iterator

from kagent_sandbox.data.race import BEST_OF_TORCH
from kagent_sandbox.data.verdict import Comparison, SpeedVerdict
from rich.console import RenderableType
from rich.text import Text

from kagent.suite.problems import Form, Problem
from kagent.suite.record import ProblemProgress, Record, Suite
from kagent.suite.results import THRESHOLDS, Figures, ProblemResult, SpeedupStatistics, SuiteResults
from kagent.text import interval_text, range_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import ratio_text, verdict_text

RACES = "All ratios are of final races on hidden cases; the searches' estimates have no part"
_FAST = (
    "{fast} is the share of finished {item}s that are correct and more than p times as fast, by "
    "the ratio alone: a TIE may be. A {item} that failed, or where the other did not run, counts "
    "as not faster"
)
_UNKNOWN = "Left out of {fast} and of the means, for the other lacked memory of the device"
_MEANS = "Geometric means are over correct {item}s alone, as many as are named"


def results_view(results: SuiteResults) -> Iterator[RenderableType]:
    """Describe every problem, then the figures over all of them."""
    yield Text(results.name, "bold").append(f": {progress_text(results)}", "default")
    yield Text(setting_text(results), "dim")
    yield problems_table(results)
    for p in results.problems:
        if p.progress.reason:
            text = Text(f"{p.name}: ", "bold").append(f"{p.progress.step}: ", "red")
            yield text.append(p.progress.reason, "red")
        for note in notes_of(p):
            yield Text(f"{p.name}: {note}", "yellow")
    yield Text()
    yield figures_table(results)
    if results.opponents:
        yield Text()
        yield opponents_table(results)
    if unknown := unknown_text(results):
        yield Text(f"\n{unknown}", "yellow")
    yield Text(f"\n{explained(results.record)} {RACES}.", "dim")
    if len(results.devices) > 1:
        yield Text(devices_text(results), "yellow")
    if results.record.left:
        yield Text(f"not finished: {len(results.record.left)}; --resume goes on")


def explained(record: Record) -> str:
    """Definitions of the figures over all problems."""
    return f"{_worded(record, _FAST)}. {_worded(record, _MEANS)}."


def _worded(record: Record, text: str) -> str:
    return text.format(item=record.ITEM, fast=record.FAST.format("p"))


def progress_text(results: SuiteResults) -> str:
    """'2 of 3 problems finished: 1 correct, 1 failed (1 seed)'."""
    f, item = results.all, results.record.ITEM
    text = f"{f.finished} of {f.problems} {item}s finished: {f.correct} correct"
    steps = ", ".join(f"{count} {step}" for step, count in f.failed.items())
    return f"{text}, {f.finished - f.correct} failed" + (f" ({steps})" if steps else "")


def setting_text(results: SuiteResults) -> str:
    """Budget of the searches, and the device they ran on."""
    where = ", ".join(results.devices) or results.record.device_text
    return f"{searches_text(results.record)}, on {where}; {results.record.started}"


def searches_text(record: Record) -> str:
    """Budget of the searches."""
    given = record.settings
    by = f"by {', '.join(given.model)}" if given.model else f"proposals by {given.proposer}"
    return f"{record.budget_text}, language {given.lang}, {by}"


def devices_text(results: SuiteResults) -> str:
    """The warning where races ran on several devices."""
    items = f"{results.record.ITEM}s"
    return f"races ran on {len(results.devices)} devices: figures over all {items} mix them"


def notes_of(p: ProblemResult) -> tuple[str, ...]:
    """Remark on a problem's result."""
    absent = (
        f"{mode} did not run on {count} of {p.cases} cases: {_no_result(p, mode)}"
        for mode, count in p.missing.items()
    )
    disturbed = (f"disturbed in {p.disturbed} of {p.cases} cases",) if p.disturbed else ()
    return (*p.progress.notes, *absent, *disturbed)


def _no_result(p: ProblemResult, mode: str) -> str:
    if mode in p.lacking:
        return "it lacked memory of the device, so the best of torch is not known"
    return "this is no result against it"


def unknown_text(results: SuiteResults) -> str:
    """Problems that figures leave out for lack of memory, by opponent; "" if there are none."""
    left_out = (
        f"{opponent_text(o)}: {len(speed.unknown)} ({', '.join(speed.unknown)})"
        for o, speed in results.all.beside.items()
        if speed.unknown
    )
    listed = "; ".join(left_out)
    return f"{_worded(results.record, _UNKNOWN)}: {listed}" if listed else ""


def state_text(p: ProblemResult) -> str:
    """'correct', 'failed', 'begun' or 'waiting'."""
    return "correct" if p.correct else p.progress.state.value


def state_cell(p: ProblemResult) -> Text:
    """The state in its colour."""
    return Text(state_text(p), "green" if p.correct else "red" if p.progress.finished else "dim")


def opponent_text(opponent: str) -> str:
    """Name of an opponent."""
    return "best of torch" if opponent == BEST_OF_TORCH else opponent


def ratio_of(c: Comparison | None) -> str:
    """'1.234×', or nothing."""
    return f"{c.ratio:.3f}×" if c is not None else ""


def interval_of(c: Comparison | None) -> str:
    """'1.200–1.300', or nothing."""
    return range_text(c.low, c.high) if c is not None else ""


def problems_table(results: SuiteResults) -> TextTable:
    """Every problem beside the best of torch, then beside each of its ways."""
    ways = [o for o in results.opponents if o != BEST_OF_TORCH]
    table = TextTable(
        (
            Column(results.record.ITEM),
            Column("state"),
            Column("× best of torch", right=True),
            Column("95 % interval", right=True, drop=1),
            Column("verdict"),
            *(Column(f"× {way}", right=True, drop=2) for way in ways),
            Column("time, s", right=True, drop=3),
        )
    )
    for p in results.problems:
        table.add_row(
            Text(p.name, "bold"),
            state_cell(p),
            ratio_text(p.versus_torch),
            interval_of(p.versus_torch),
            verdict_text(p.verdict),
            *(ratio_of(p.beside.get(way)) for way in ways),
            f"{p.progress.seconds:.0f}" if p.progress.seconds else "",
        )
    return table


def figures_table(results: SuiteResults) -> TextTable:
    """Figures over all problems, and over each group, beside the best of torch."""
    table = empty_figures_table(results.record)
    for f in (*results.groups, results.all):
        table.add_row(*figures_row(f, results.record))
    return table


def empty_figures_table(record: Record) -> TextTable:
    """The table that `figures_row` makes rows of."""
    title, *headers = figures_head(record)
    numbers = (Column(h, right=True, drop=h == "finished") for h in headers)
    return TextTable((Column(""), *numbers), title=title)


def opponents_table(results: SuiteResults) -> TextTable:
    """Figures over all problems, beside each opponent."""
    table = TextTable(
        tuple(Column(h, right=i > 0) for i, h in enumerate(beside_head(results.record)))
    )
    for row in opponents_rows(results):
        table.add_row(*row)
    return table


def figures_head(record: Record) -> tuple[str, ...]:
    """Headers of `figures_row`."""
    return ("beside the best of torch", "finished", "correct", *SpeedVerdict, *_speed_head(record))


def beside_head(record: Record) -> tuple[str, ...]:
    """Headers of `opponents_rows`."""
    return (f"all {record.ITEM}s, beside", *_speed_head(record))


def _speed_head(record: Record) -> tuple[str, ...]:
    return (*(record.FAST.format(f"{p:g}") for p in THRESHOLDS), "geometric mean")


def figures_row(f: Figures, record: Record) -> tuple[str, ...]:
    """Cells of the table of figures."""
    return (
        f.group or f"all {record.ITEM}s",
        f"{f.finished} of {f.problems}",
        str(f.correct),
        *(str(f.verdicts[v]) for v in SpeedVerdict),
        *_speed_cells(f.beside[BEST_OF_TORCH]),
    )


def opponents_rows(results: SuiteResults) -> list[tuple[str, ...]]:
    """Cells of the table of opponents."""
    speeds = results.all.beside
    return [(opponent_text(o), *_speed_cells(speeds[o])) for o in results.opponents]


def _speed_cells(speed: SpeedupStatistics) -> tuple[str, ...]:
    shares = ("–" if share is None else f"{share:.1%}" for share in speed.fast.values())
    return (*shares, mean_text(speed.mean, speed.problems))


def mean_text(mean: float | None, count: int) -> str:
    """'1.234× of 17'."""
    return "–" if mean is None else f"{mean:.3f}× of {count}"


def imported_line(problem: Problem, progress: ProblemProgress) -> Text:
    """A problem that was imported, in one line."""
    text = Text(f"{problem.name}: ", "bold")
    if progress.finished:
        return text.append(f"failed: {progress.step}: {progress.reason}", "red")
    return text.append(f"a task; no seed: {progress.no_seed}" if progress.no_seed else "a task")


def imported_text(suite: Suite) -> str:
    """Number of problems that are tasks, with a seed or without one."""
    progress = [suite.of(p) for p in suite.problems]
    tasks = [
        found
        for problem, found in zip(suite.problems, progress, strict=True)
        if found.task or problem.form is Form.TASK
    ]
    failed = sum(found.step is not None for found in progress)
    no_seed = sum(bool(found.no_seed) for found in tasks)
    return (
        f"{len(tasks)} of {len(progress)} problems are tasks"
        f" ({no_seed} of them without a seed), {failed} failed"
    )


def problem_line(p: ProblemResult) -> Text:
    """A finished problem in one line."""
    text = Text(f"{p.name}: ", "bold")
    if not p.correct:
        return text.append(f"failed: {p.progress.step}: {p.progress.reason}", "red")
    if p.versus_torch is None:
        known = "the best of torch is not known" if p.lacking else "nothing of torch ran"
        text.append(f"correct; {known} on every case")
    else:
        c = p.versus_torch
        beside = interval_text(c.ratio, c.low, c.high)
        text.append_text(verdict_text(p.verdict)).append(f" beside the best of torch, {beside}")
    ways = (f"{ratio_of(c)} {o}" for o, c in p.beside.items() if o != BEST_OF_TORCH)
    return text.append("".join(f"; {way}" for way in ways))
