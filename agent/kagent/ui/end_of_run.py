"""The end of a run: the path, the final race on hidden cases, where it loses, and what to do
next.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kagent_sandbox.data.race import TORCH, Race
from kagent_sandbox.data.verdict import SpeedVerdict
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.runs.events import Stop
from kagent.runs.final_race import FinalRace, Repeat
from kagent.runs.history import History
from kagent.runs.lineage import Lineage
from kagent.runs.manifest import read_manifest
from kagent.runs.selftest_record import line as selftest_line
from kagent.text import interval_text
from kagent.ui import tables
from kagent.ui.live import spent_text
from kagent.ui.memory_view import recalled_text
from kagent.ui.run_view import evaluated_text, exhausted_text, path_view

if TYPE_CHECKING:
    from kagent.evolve.session import Outcome

NO_FINALIST = "every finalist failed on the hidden cases: there is no verdict"
RESUMABLE = (Stop.INTERRUPTED, Stop.TIME, Stop.FAILED, Stop.COST, Stop.TOKENS)


def end_of_run(
    outcome: Outcome, task: str, *, matrix: bool, flags: Mapping[str, str]
) -> Iterator[RenderableType]:
    """Describe the end of a run. `flags` are the options that a next command has to repeat."""
    lineage, folder = outcome.history.lineage, outcome.folder
    best, final = lineage.incumbent, outcome.history.race
    head = Text(f"\n{folder}", "bold")
    head.append(": ", "default")
    if final is not None:
        head.append_text(tables.headline(final)).append("; ")
    head.append(f"{evaluated_text(outcome.history)}; ended: {outcome.stop.value}\n", "default")
    yield head
    if outcome.stop is Stop.EXHAUSTED:
        yield exhausted_text(outcome.history, read_manifest(folder).proposer)
    if outcome.history.spent.calls:
        yield cost_text(outcome.history)
    if (selftest := selftest_line(read_manifest(folder).environment)) is not None:
        yield Text(selftest)
    if (memory := recalled_text(outcome.history)) is not None:
        yield Group(memory)  # wrapped between words, as `kagent show` has it
    if not len(lineage):
        yield Text("nothing was evaluated before the run ended")
    elif best is None:
        yield Text("no candidate passed; run the next command to see why")
    else:
        won = lineage[final.winner] if final is not None and final.winner is not None else best
        yield path_view(lineage, won)
        if final is not None:
            yield from race_view(final, lineage, matrix=matrix)
        # Only a kernel that is FASTER has won anything.
        faster = final is not None and final.verdict is SpeedVerdict.FASTER
        yield Text("\nwinner: " if faster else "\nchosen: ").append(
            str(folder / "kernels" / f"{won.proposal.kernel}.py"),
            "bold green" if faster else "bold",
        )
        if final is None:
            speed = math.exp(lineage.log_speed(won.id))
            yield Text(f"not raced: {speed:.3f}× is the search's estimate")
    if outcome.stop is Stop.SETTLED:
        yield Text("ended early: what was not tried promises less than a measurement can show")
        yield Text("go on:  ").append_text(
            resume_command(task, folder.name, {**flags, "--no-early-stop": ""})
        )
    if outcome.stop in RESUMABLE:
        yield Text("resume: ").append_text(resume_command(task, folder.name, flags))
    more = [str(won.id)] if best is not None else []
    runs = {k: v for k, v in flags.items() if k == "--runs"}
    yield Text("next:   ").append_text(
        _command("kagent", "show", folder.name, *more, *_words(runs))
    )


def cost_text(history: History) -> Text:
    """Describe the cost of the models' calls, in all and per accepted improvement."""
    spent, lineage = history.spent, history.lineage
    origins = [c.proposal.origin for c in lineage.promotions]
    gains = [o for o in origins if o is not None and o.calls]  # kernels from elsewhere cost none
    text = Text(f"cost: {spent_text(spent)}")
    if gains and spent.dollars:
        each = spent.dollars / len(gains)
        text.append(f"; {len(gains)} accepted improvements by models, ${each:.2f} each")
    elif gains:
        tokens = (spent.input_tokens + spent.output_tokens) // len(gains)
        text.append(f"; {len(gains)} accepted improvements by models, {tokens:,} tokens each")
    return text


def _words(flags: Mapping[str, str]) -> Iterator[str]:
    for name, value in flags.items():
        yield from (name, value) if value else (name,)


def _command(*words: str) -> Text:
    """A command to copy, quoted as a shell needs it."""
    return Text(shlex.join(words), "bold")


def resume_command(task: str, run: str, flags: Mapping[str, str]) -> Text:
    """Return the command that resumes a run."""
    return _command("kagent", "evolve", task, *_words({**flags, "--resume": run}))


def race_view(final: FinalRace, lineage: Lineage, *, matrix: bool) -> Iterator[RenderableType]:
    """The final race: all cases, the winner against everyone, and where it loses."""
    labels = tables.candidate_labels(lineage)
    yield Text("\nfinal race, on hidden cases", "bold")
    yield tables.race_table(final.race, matrix=matrix, labels=labels)
    if final.winner is None:
        yield Text(NO_FINALIST, "bold red")
        return
    title = (
        "\nthe chosen finalist over all hidden cases: the search's best, unless another one "
        "is faster beyond doubt"
    )
    yield tables.overall_table(final.race, labels, only=str(final.winner), title=title)
    yield verdict(final, labels)
    for repeat in final.repeats:
        yield repeated(repeat, final, labels)


def repeated(repeat: Repeat, final: FinalRace, labels: Mapping[str, str]) -> Text:
    """The race's result on another device, in one line."""
    found = repeat.race.versus_torch(str(final.winner))
    where = f"raced again on {repeat.unit}: "
    if found is None:
        return Text(f"{where}{labels[str(final.winner)]} has no result there", "yellow")
    text = f"{where}{found.verdict}, {interval_text(found.ratio, found.low, found.high)}"
    return Text(text, "" if found.verdict is final.verdict else "yellow")


def verdict(final: FinalRace, labels: Mapping[str, str]) -> Text:
    """The run's result in one line, and its verdict case by case in another."""
    winner = str(final.winner)
    result = final.versus_torch
    if result is None:
        if lacking := tables.lacking_text(final.race):
            return Text(f"\nno verdict on {labels[winner]}: {lacking}", "bold yellow")
        return Text(f"\n{labels[winner]} raced without a baseline: none ran on every hidden case")
    absent = missing_modes(final.race)
    best = "the best of eager and torch.compile" if not absent else "the best of torch that ran"
    style = f"bold {tables.VERDICT_STYLES[result.verdict]}".strip()
    text = Text("\n").append(
        f"{result.verdict}: {labels[winner]} beside {best}, "
        f"{interval_text(result.ratio, result.low, result.high)}",
        style if not absent else "bold yellow",
    )
    for mode, count in absent.items():
        cases = f"{count} of {len(final.race.cases)} cases"
        text.append(f"\n{mode} did not run on {cases}: this is no result against it", "yellow")
    return text.append(f"\n{tables.case_verdicts(final.race, winner)}")


def missing_modes(race: Race) -> Mapping[str, int]:
    """Torch's modes that a result claims to be compared with, by the cases they did not run on."""
    modes = [mode for case in race.cases for mode in case.missing if mode in TORCH]
    return Counter(modes)


def next_flags(runs: Path, usual: Path) -> Mapping[str, str]:
    """Options that a next command needs to find the run."""
    return {"--runs": str(runs)} if runs != usual else {}
