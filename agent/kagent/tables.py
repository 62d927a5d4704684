"""Tables of `kagent tasks`, `check`, `bench` and of a run's end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kagent_sandbox.race_result import BEST_OF_TORCH, Race, RaceCase, Ratio
from kagent_sandbox.task import Task
from kagent_sandbox.verdict import CaseError, CaseTiming, Rejected
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kagent.show import numbers
from kagent.tasks import seeds_of


def tasks_table(tasks: Iterable[Task]) -> Table:
    """Names, signatures and seeds."""
    table = Table()
    for header in ("task", "what it is", "signature", "seeds"):
        table.add_column(header, overflow="fold")
    for task in tasks:
        names = ", ".join(s.name for s in seeds_of(task))
        table.add_row(task.name, task.summary, task.signature, names)
    return table


def errors_table(errors: Sequence[CaseError], device: str) -> Table:
    """Each result's errors beside torch's own in the same dtype."""
    table = numbers(
        *("case", "result", "row", "torch", "element", "torch", "bias", "torch", "of tolerance"),
        title=f"relative errors against the reference, on {device}",
        left=2,
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


def case_shape(case: RaceCase) -> str:
    """'bf16_16384x1024', or for a hidden case its dtype and dimensions."""
    if not case.case.startswith("hidden_"):
        return case.case
    return f"{case.dtype} " + " ".join(f"{k}={v}" for k, v in case.dims.items())


def _ratio(case: RaceCase, candidate: str, against: str) -> Ratio | None:
    matches = (r for r in case.ratios if (r.candidate, r.against) == (candidate, against))
    return next(matches, None)


def race_table(race: Race, *, matrix: bool) -> RenderableType:
    """Every case: candidates, then baselines, with each candidate's ratio to the best of torch."""
    parts: list[RenderableType] = []
    rate = "TFLOP/s" if matrix else "GB/s"
    table = numbers(
        *("case", "kernel", "ms", "95 % interval", rate, "roofline", "× best of torch", "95 %"),
        left=2,
    )
    for case in race.cases:
        table.add_section()
        rows: list[tuple[str, CaseTiming, bool]] = [
            *((n, t, True) for n, t in case.candidates.items()),
            *((n, t, False) for n, t in case.baselines.items()),
        ]
        for i, (name, t, candidate) in enumerate(sorted(rows, key=lambda r: r[1].kernel_us)):
            ratio = _ratio(case, name, BEST_OF_TORCH) if candidate else None
            table.add_row(
                case_shape(case) if i == 0 else "",
                Text(name, style="bold" if candidate else "dim"),
                f"{t.kernel_us / 1e3:.4f}",
                f"{t.low_us / 1e3:.4f}–{t.high_us / 1e3:.4f}",
                f"{t.tflop_per_s if matrix else t.gb_per_s:.0f}",
                f"{t.roofline_share:.0%}",
                ratio_text(ratio),
                f"{ratio.low:.3f}–{ratio.high:.3f}" if ratio else "",
            )
    parts.append(table)
    parts.extend(rejected_text(name, verdict) for name, verdict in race.failed.items())
    return Group(*parts)


def ratio_text(ratio: Ratio | None) -> Text:
    """Green when faster beyond its interval, red when slower beyond it."""
    if ratio is None:
        return Text("")
    style = "green" if ratio.low > 1 else "red" if ratio.high < 1 else ""
    return Text(f"{ratio.value:.3f}", style=style)


def overall_table(race: Race) -> Table:
    """Each candidate against everyone else, over all cases."""
    table = numbers(
        "candidate",
        "against",
        "ratio",
        "95 % interval",
        "P(faster)",
        title="over all cases",
        left=2,
    )
    for name, comparisons in race.overall.items():
        for c in comparisons:
            against = "best of torch, case by case" if c.against == BEST_OF_TORCH else c.against
            interval = f"{c.low:.3f}–{c.high:.3f}"
            table.add_row(name, against, f"{c.ratio:.3f}", interval, f"{c.p_faster:.2f}")
    return table


def losses(race: Race, candidate: str) -> list[str]:
    """Cases where a candidate is slower than the best of torch beyond its interval."""
    found = []
    for case in race.cases:
        ratio = _ratio(case, candidate, BEST_OF_TORCH)
        if ratio is not None and ratio.high < 1:
            found.append(f"{case_shape(case)} ({ratio.value:.3f}×)")
    return found
