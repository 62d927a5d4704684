"""Tables of `kagent tasks`, `check`, `bench` and of a race."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kagent_sandbox.data.calibration import KindCalibration
from kagent_sandbox.data.race import BEST_OF_TORCH, Race, RaceCase, Ratio
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import CaseError, Comparison, Passed, Rejected, SpeedVerdict
from kagent_sandbox.judge.task_check import TaskCheck
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.runs.final_race import FinalRace
from kagent.runs.lineage import Lineage
from kagent.tasks import seeds_of
from kagent.text import interval_text, ms_text, range_text, rate_text
from kagent.ui.table import Column, TextTable

VERDICT_STYLES: Mapping[SpeedVerdict | None, str] = {
    SpeedVerdict.FASTER: "green",
    SpeedVerdict.TIE: "",
    SpeedVerdict.SLOWER: "red",
    None: "",
}
Labels = Mapping[str, str]
"""Names of a race's contenders, by id. A contender without a name is called by its id."""


def tasks_table(tasks: Iterable[Task]) -> TextTable:
    """Names, what they are, signatures and seeds."""
    table = TextTable((Column("task"), Column("what it is, signature, seeds", wrap=True)))
    for task in tasks:
        table.add_section()
        names = ", ".join(s.name for s in seeds_of(task))
        about = Text(f"{task.summary}\n")
        about.append(f"{task.signature}\n", "dim").append(names, "cyan")
        table.add_row(Text(task.name, "bold"), about)
    return table


def errors_table(errors: Sequence[CaseError], title: str) -> TextTable:
    """Each result's errors beside torch's own in the same dtype."""
    table = TextTable(
        (
            Column("case"),
            Column("result"),
            Column("row", right=True),
            Column("torch's", right=True),
            Column("element", right=True, drop=1),
            Column("torch's", right=True, drop=2),
            Column("bias", right=True, drop=3),
            Column("torch's", right=True, drop=4),
            Column("of tolerance", right=True),
        ),
        title=title,
    )
    for e in errors:
        table.add_row(
            *(e.case, e.output),
            *(f"{e.row:.1e}", f"{e.torch_row:.1e}", f"{e.element:.1e}", f"{e.torch_element:.1e}"),
            *(f"{e.bias:.1e}", f"{e.torch_bias:.1e}", f"{e.share_of_tolerance:.0%}"),
        )
    return table


def rejected_text(name: str, verdict: Rejected) -> Text:
    """Stage, status, case and the whole message."""
    where = f" in case {verdict.case}" if verdict.case else ""
    text = Text(f"{name}: ", style="bold")
    text.append(f"{verdict.status} ({verdict.stage}){where}\n", "bold red")
    text.append(verdict.message, "red")
    return text


def failures_text(name: str, failed: Sequence[Rejected]) -> RenderableType:
    """The first failure in full, and a line for each further case."""
    first, *others = failed
    if not others:
        return rejected_text(name, first)
    table = TextTable((Column("also failed"), Column("what", wrap=True)))
    for each in others:
        what = "" if each.status is first.status else f"{each.status}: "
        numbers, _, place = each.message.partition(" (torch's own ")
        _, _, got = place.partition("]: ")
        table.add_row(each.case or "", f"{what}{numbers}" + (f"; {got}" if got else ""))
    count = f"{name}: {len(failed)} cases failed: the first in full, {len(others)} in the table"
    return Group(rejected_text(name, first), Text(), table, Text(count, "bold red"))


def task_check_text(name: str, found: Iterable[TaskCheck]) -> Text:
    """Table of a task's check on each kind of device: cases, seconds and holes."""
    text = Text()
    for check in found:
        text.append(f"{name}, {check.kind} cases: ", "bold")
        passing = f"{len(check.holes)} of {check.wrong} wrong results pass"
        text.append(passing if check.holes else f"all {check.wrong} wrong results fail")
        text.append(
            f"; {check.cases} cases computed, eager errs by {check.eager_eps:.2g} machine epsilons "
            f"at most ({check.seconds:.1f} s)\n"
        )
        if check.skipped:
            names = ", ".join(check.skipped)
            text.append(f"  too large for this CPU, in a GPU's place: {names}\n", "yellow")
        for hole in check.holes:
            text.append(f"  {hole}\n", "red")
        for line in check.without_effect:
            text.append(f"  without effect, says task.toml: {line}\n", "dim")
    text.rstrip()
    return text


def calibration_text(task: Task, kind: str, found: KindCalibration) -> Text:
    """The tolerances of a calibration, beside those of `task` as task.toml has it, and why."""
    text = Text()
    text.append(f"{task.name}, {kind} ({found.device})", "bold")
    text.append(f": {found.cases} cases, {len(found.ways)} ways: {'; '.join(found.ways)}\n")
    before = {r.name: r for r in task.compared}
    for name, each in found.results.items():
        text.append(f"  {name}: k = {each.k:g}, floor = {each.floor:g}", "bold green")
        was = before[name]
        text.append(
            f" (task.toml: {was.k:g}, {was.floor:g}); largest error {each.of_torch:.3g} times "
            f"torch's, {each.of_eps:.3g} eps\n    {each.why}\n"
        )
    if not found.results:
        text.append("  no result that rounding changes: all must be equal\n")
    for way, why in found.left_out.items():
        text.append(f"  left out: {way}: {why}\n", "yellow")
    text.rstrip()
    return text


def candidate_labels(lineage: Lineage) -> Labels:
    """'#57 cpp_rows' for every candidate of a run."""
    return {str(c.id): f"#{c.id} {c.proposal.name}" for c in lineage}


def case_shape(case: RaceCase) -> str:
    """'bf16_16384x1024', or for a hidden case its dtype and dimensions."""
    if not case.case.startswith("hidden_"):
        return case.case
    return f"{case.dtype} " + " ".join(f"{k}={v}" for k, v in case.dims.items())


def race_table(race: Race, *, matrix: bool, labels: Labels | None = None) -> RenderableType:
    """Every case: candidates and baselines by time, each candidate beside the best of torch."""
    rate = "TFLOP/s" if matrix else "GB/s"
    table = TextTable(
        (
            Column("case"),
            Column("kernel"),
            Column("ms", right=True),
            Column("95 % interval", right=True, drop=4),
            Column(rate, right=True, drop=1),
            Column("roofline", right=True, drop=2),
            Column("× torch", right=True),
            Column("95 % interval", right=True, drop=3),
            Column("verdict"),
        )
    )
    for case in race.cases:
        table.add_section()
        timings = {**case.baselines, **case.candidates}
        for i, (name, t) in enumerate(sorted(timings.items(), key=lambda n: n[1].kernel_us)):
            mine = name in case.candidates
            ratio = case.ratio(name, BEST_OF_TORCH) if mine else None
            table.add_row(
                case_shape(case) if i == 0 else "",
                Text((labels or {}).get(name, name), style="bold" if mine else "dim"),
                ms_text(t.kernel_us),
                f"{ms_text(t.low_us)}–{ms_text(t.high_us)}",
                rate_text(t, matrix=matrix),
                f"{t.roofline_share:.0%}",
                ratio_text(ratio),
                range_text(ratio.low, ratio.high) if ratio else "",
                verdict_text(ratio.verdict) if ratio else "",
            )
    failed = [rejected_text((labels or {}).get(n, n), v) for n, v in race.failed.items()]
    disturbed = [disturbed_text(case_shape(c), c.notes) for c in race.disturbed]
    return Group(*([table] if race.cases else []), *_missing(race), *disturbed, *failed)


def measured_table(measured: Mapping[str, Passed], *, matrix: bool, title: str) -> TextTable:
    """Candidates' own times per case. Baselines were measured before, so no ratio stands here."""
    rate = "TFLOP/s" if matrix else "GB/s"
    table = TextTable(
        (
            Column("candidate"),
            Column("case"),
            Column("ms", right=True),
            Column("95 % interval", right=True, drop=2),
            Column(rate, right=True, drop=1),
            Column("roofline", right=True),
        ),
        title=title,
    )
    for name, passed in measured.items():
        table.add_section()
        for i, t in enumerate(passed.timings):
            table.add_row(
                Text(name if i == 0 else "", "bold"),
                t.case,
                ms_text(t.kernel_us),
                f"{ms_text(t.low_us)}–{ms_text(t.high_us)}",
                rate_text(t, matrix=matrix),
                f"{t.roofline_share:.0%}",
            )
    return table


def _missing(race: Race) -> list[Text]:
    """Baselines that did not run, with where and why."""
    cases: dict[tuple[str, str], list[str]] = {}
    for case in race.cases:
        for name, reason in case.missing.items():
            cases.setdefault((name, reason), []).append(case_shape(case))
    return [
        Text(f"{name} did not run on {', '.join(where)}: {reason}", "dim")
        for (name, reason), where in cases.items()
    ]


def lacking_text(race: Race) -> str:
    """Reason why the best of torch is not known where memory lacked; "" if that is not it.

    What lacked memory may be the fastest: a ratio to the best of the others would be too good.
    """
    found = [f"{m} on {n} of {len(race.cases)} cases" for m, n in race.lacking_modes.items()]
    lacked = "the best of torch is not known: memory of the device was not enough for"
    return f"{lacked} {', '.join(found)}" if found else ""


def disturbed_text(what: str, notes: Sequence[str]) -> Text:
    """Disturbances by other programs while times were taken."""
    return Text(f"{what} was disturbed: {'; '.join(notes)}", "yellow")


def ratio_text(ratio: Ratio | Comparison | None) -> Text:
    """The speed-up, in its verdict's colour."""
    if ratio is None:
        return Text("")
    value = ratio.value if isinstance(ratio, Ratio) else ratio.ratio
    return Text(f"{value:.3f}×", style=VERDICT_STYLES[ratio.verdict])


def verdict_text(verdict: SpeedVerdict | None) -> Text:
    """FASTER, TIE or SLOWER in its colour; a dash where there is none."""
    return Text("–" if verdict is None else verdict.value, style=VERDICT_STYLES[verdict])


def headline(final: FinalRace) -> Text:
    """The run's verdict in a few words: "FASTER than torch, 1.238× (95 %: 1.021–1.505)"."""
    found = final.versus_torch
    if final.winner is None:
        return Text("no finalist passed the final race", "bold red")
    if found is None:
        why = lacking_text(final.race) or "no baseline of torch ran"
        return Text(f"no verdict, {why}", "bold yellow")
    beside = "with" if found.verdict is SpeedVerdict.TIE else "than"
    interval = interval_text(found.ratio, found.low, found.high)
    style = f"bold {VERDICT_STYLES[found.verdict]}".strip()
    text = Text().append(f"{found.verdict} {beside} torch, {interval}", style)
    disturbed, cases = len(final.race.disturbed), len(final.race.cases)
    return (
        text.append(f"; disturbed in {disturbed} of {cases} cases", "yellow") if disturbed else text
    )


def overall_table(
    race: Race, labels: Labels | None = None, *, only: str | None = None, title: str
) -> TextTable:
    """Each candidate (or `only` one) against everyone else, over all cases."""
    table = TextTable(
        (
            Column("candidate"),
            Column("against"),
            Column("speed-up", right=True),
            Column("95 % interval", right=True),
            Column("P(faster)", right=True, drop=1),
            Column("verdict"),
        ),
        title=title,
    )
    named = {**(labels or {}), BEST_OF_TORCH: "best of torch, case by case"}
    for name, comparisons in race.overall.items():
        if only not in (None, name):
            continue
        table.add_section()
        ordered = sorted(comparisons, key=lambda c: c.against != BEST_OF_TORCH)
        for i, c in enumerate(ordered):
            table.add_row(
                Text(named.get(name, name) if i == 0 else "", "bold"),
                named.get(c.against, c.against),
                ratio_text(c),
                range_text(c.low, c.high),
                f"{c.p_faster:.2f}",
                verdict_text(c.verdict),
            )
    return table


def cases_with(race: Race, candidate: str, verdict: SpeedVerdict) -> list[str]:
    """Cases where a candidate has this verdict beside the best of torch, with the speed-up."""
    found = race.cases_with(candidate, verdict)
    return [f"{case_shape(case)} ({ratio.value:.3f}×)" for case, ratio in found]


def case_verdicts(race: Race, candidate: str) -> str:
    """One line: on how many cases a candidate is FASTER, and on which ones it is not."""
    found = {v: cases_with(race, candidate, v) for v in SpeedVerdict}
    count = sum(map(len, found.values()))
    parts = [f"FASTER on {len(found[SpeedVerdict.FASTER])} of {count} cases"]
    others = (SpeedVerdict.TIE, SpeedVerdict.SLOWER)
    parts += [f"{v} on {', '.join(found[v])}" for v in others if found[v]]
    return "; ".join(parts)
