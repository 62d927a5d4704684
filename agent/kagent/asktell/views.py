"""Output of `kagent ask`, `tell`, `judge` and `merge`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kagent_sandbox.data.records import to_json
from kagent_sandbox.device.table import available
from rich.console import RenderableType
from rich.text import Text

from kagent.asktell.answers import Accepted
from kagent.asktell.judging import JudgeResult
from kagent.asktell.merging import Merged
from kagent.asktell.open_asks import OpenAsk
from kagent.asktell.state import AskTellState, Precheck
from kagent.runs.events import Stop
from kagent.runs.history import History
from kagent.runs.manifest import Manifest
from kagent.text import plural
from kagent.ui.end_of_run import race_view
from kagent.ui.live import first_line, speed_text
from kagent.ui.run_view import final_race_json
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import headline


def command(*words: object, flags: Sequence[str]) -> Text:
    """A `kagent` command to copy, quoted as a shell needs it; `FILE...` stays as it is."""
    given = ("kagent", *map(str, words), *flags)
    return Text(" ".join(w if w == "FILE..." else shlex.quote(w) for w in given), "bold")


def questions_view(questions: Sequence[OpenAsk], state: AskTellState) -> TextTable:
    """List open prompts: their task and their file."""
    table = TextTable(
        (
            Column("ask", right=True),
            Column("operator"),
            Column("parent"),
            Column("card", drop=1),
            Column("prompt", wrap=True),
        )
    )
    names = {p.id: p.name for p in state.proposals}
    for q in questions:
        parent = f"#{q.parent} {names[q.parent]}"
        table.add_row(str(q.id), q.operator, parent, q.card or "–", str(q.path))
    return table


def question_json(question: OpenAsk) -> Mapping[str, object]:
    """A question without its text, which is in the file."""
    return {
        "ask": question.id,
        "operator": question.operator,
        "parent": question.parent,
        "card": question.card,
        "file": str(question.path),
    }


def how_to_answer(name: str, manifest: Manifest, flags: Sequence[str]) -> Iterator[Text]:
    """Explain how to answer open prompts."""
    yield Text("answer each in a file that begins with its number (0000.md), then:")
    if available(manifest.kind):
        here = "evaluates them on this machine"
        yield command("tell", name, "FILE...", flags=flags).append(f"   {here}", "default")
    there = f"accepts them without a device ({manifest.target}); kagent judge and merge follow"
    told = command("tell", name, "FILE...", "--queue", flags=flags)
    yield told.append(f"   {there}", "default")


def accepted_text(accepted: Accepted) -> Text:
    """One line about an answer."""
    ask = "" if accepted.ask is None else f", ask {accepted.ask}"
    if accepted.again:
        return Text(
            f"{accepted.label}{ask}: told before, as candidate #{accepted.id}; nothing was added",
            "dim",
        )
    text = Text(f"{accepted.label}{ask}: candidate #{accepted.id}")
    return text.append(f"; NO_KERNEL: {accepted.fault}", "red") if accepted.fault else text


def looked_text(looked: Precheck, name: str) -> Text:
    """One line about what building and interpreting showed."""
    text = Text(f"#{looked.id:<3} ").append(f"{name} ", "cyan")
    if looked.build_s is not None:
        text.append(f"builds for {looked.target} in {looked.build_s:.1f} s")
    if looked.rejected is not None:
        verdict = looked.rejected
        where = f" ({verdict.case})" if verdict.case else ""
        joint = "; " if looked.build_s is not None else ""
        text.append(f"{joint}{verdict.stage} {verdict.status}{where}: {first_line(verdict)}", "red")
    elif looked.interpreted:
        skipped = f" ({len(looked.skipped)} cases are too large for it)" if looked.skipped else ""
        text.append(f"; right in {looked.where}{skipped}", "green")
    elif looked.unchecked:
        text.append(f"; not checked: {looked.unchecked}", "yellow")
    return text


def queued_text(history: History, folder: Path, flags: Sequence[str]) -> Iterator[Text]:
    """Explain how queued candidates get their verdicts."""
    name = folder.name
    yield Text(
        f"{len(history.pending)} wait for a judge, seeds included. On a machine with the device, "
        "on this folder or on a copy of it:"
    )
    yield command("judge", name, flags=flags)
    yield Text("then, where a copy was judged:")
    yield command("merge", name, f"COPY/{name}", flags=flags)


def judged_view(
    judged: JudgeResult, manifest: Manifest, flags: Sequence[str]
) -> Iterator[RenderableType]:
    """Show the number of verdicts, the best candidate, the race, and the work that is left."""
    history, name = judged.history, judged.folder.name
    yield Text(f"{len(judged.recorded)} judged, {judged.left} left", "bold")
    yield best_text(history, judged.folder)
    if history.race is not None and _raced_now(judged):
        yield from race_view(history.race, history.lineage, matrix=manifest.matrix)
    if judged.left:
        why = " (the deadline was reached)" if judged.stop is Stop.TIME else ""
        yield Text(f"continue{why}: ").append_text(command("judge", name, flags=flags))
    else:
        yield Text("next: ").append_text(command("ask", name, flags=flags))


def _raced_now(judged: JudgeResult) -> bool:
    """Whether the race is of the session that just ended."""
    kinds = [e.kind for e in judged.history.events]
    return "race" in kinds and kinds[::-1].index("race") < kinds[::-1].index("session")


def best_text(history: History, folder: Path) -> Text:
    """The last race's verdict, and the incumbent where it took no part in one; and the file."""
    lineage, race = history.lineage, history.race
    shown = lineage.incumbent
    if shown is None:
        return Text("nothing has passed yet")
    text = Text()
    if race is not None:
        text.append("final race: ")
        if race.winner is not None:
            text.append(f"#{race.winner} {lineage[race.winner].proposal.name}, ")
        text.append_text(headline(race)).append("\n")
    if race is not None and race.winner is not None and shown.id in race.finalists:
        shown = lineage[race.winner]
    else:
        speed = speed_text(math.exp(lineage.log_speed(shown.id)))
        text.append(f"the best so far: #{shown.id} {shown.proposal.name}, ")
        text.append(f"{speed} the best of torch in the search\n")
    return text.append(str(folder / "kernels" / f"{shown.proposal.kernel}.py"), "dim")


def merged_text(merged: Merged, history: History) -> Text:
    """Describe the result of a merge."""
    if not merged.events:
        return Text("nothing new: everything is here already")
    parts = [plural(len(merged.verdicts), "verdict")]
    told = plural(len(merged.accepted), "candidate")
    parts += [f"{told} told there"] if merged.accepted else []
    parts += [plural(len(merged.asks), "ask")] if merged.asks else []
    parts += ["the final race"] if merged.race else []
    return Text(f"{', '.join(parts)} came home; {len(history.pending)} still wait")


def told_json(
    accepted: Sequence[Accepted], looked: Mapping[int, Precheck], history: History
) -> list[Mapping[str, object]]:
    """One object per answer, with its verdict where there is one."""
    rows: list[Mapping[str, object]] = []
    for a in accepted:
        row: dict[str, object] = {
            "label": a.label,
            "ask": a.ask,
            "candidate": a.id,
            "told_before": a.again,
            "fault": a.fault or None,
        }
        if a.id in looked:
            row["looked"] = to_json(looked[a.id])
        if a.id < len(history.lineage):
            row["verdict"] = to_json(history.lineage[a.id].verdict)
            row["speed_up"] = math.exp(history.lineage.log_speed(a.id))
        rows.append(row)
    return rows


def judged_json(judged: JudgeResult) -> Mapping[str, object]:
    """The end of judging as JSON."""
    best = judged.history.lineage.incumbent
    return {
        "run": judged.folder.name,
        "stop": judged.stop,
        "judged": list(judged.recorded),
        "left": judged.left,
        "incumbent": best.id if best is not None else None,
        "race": final_race_json(judged.history.race) if judged.history.race is not None else None,
    }
