"""Commands that only read: runs, show, verify, doctor."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import MachineError, RunError, UserError
from rich.table import Table
from rich.text import Text

from kagent.cli.app import (
    LOOK,
    TRUST,
    DeviceOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    RunArgument,
    RunsOption,
    app,
    isolate,
    out,
    print_json,
    runs_to_list,
    status,
)
from kagent.config.settings import load_config
from kagent.text import plural

if TYPE_CHECKING:
    from kagent.runs.history import History
    from kagent.runs.lineage import Candidate
    from kagent.runs.store import RunStore


@app.command(rich_help_panel=LOOK)
def runs(folder: RunsOption = None, json_: JsonOption = False) -> None:
    """List the runs."""
    from kagent.ui import run_view

    where = runs_to_list(folder)
    rows = run_view.runs_json(where)
    if json_:
        print_json(rows)
    elif rows:
        out.print(run_view.runs_view(rows))
    else:
        out.print(f"no runs in {where}: kagent evolve softmax starts one")


@app.command(rich_help_panel=LOOK)
def show(
    run: RunArgument,
    candidate: Annotated[int | None, typer.Argument(help="A candidate's id.", min=0)] = None,
    source: Annotated[bool, typer.Option("--source", help="Print its file.")] = False,
    prompt: Annotated[bool, typer.Option("--prompt", help="Print its prompt.")] = False,
    reply: Annotated[bool, typer.Option("--reply", help="Print its reply.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Build it again and print its plans.")
    ] = False,
    sass: Annotated[
        bool, typer.Option("--sass", help="Print its machine code (C++: the host's assembly).")
    ] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="Print the PTX of its kernels (Triton and CUDA).")
    ] = False,
    jobs: JobsOption = None,
    folder: RunsOption = None,
    json_: JsonOption = False,
) -> None:
    """Show a run, or one of its candidates."""
    from kagent.runs.lineage import find_candidate
    from kagent.runs.manifest import find_run
    from kagent.runs.profiles import stored_profiles
    from kagent.runs.store import read_history
    from kagent.ui import candidate_view, end_of_run, run_view

    store, history = read_history(find_run(load_config(runs=folder).runs, run))
    lineage = history.lineage
    texts = {"source": source, "prompt": prompt, "reply": reply, "plan": plan}
    texts |= {"sass": sass, "ptx": ptx}
    wanted = [name for name, asked in texts.items() if asked]
    if wanted and (candidate is None or json_ or len(wanted) > 1):
        flags = ", ".join(f"--{name}" for name in wanted)
        if len(wanted) > 1:
            raise UserError(f"{flags}: give one of them")
        if json_:
            raise UserError(f"{flags} prints a text: omit --json, or {flags}")
        example = lineage.incumbent.id if lineage.incumbent is not None else 0
        command = shlex.join(["kagent", "show", str(run), str(example), flags])
        raise UserError(f"{flags} needs a candidate: {command}")
    if candidate is not None:
        found = find_candidate(lineage, candidate)
        if wanted:
            _show_text(store, history, found, wanted[0], load_config(jobs=jobs).jobs)
        elif json_:
            print_json(
                candidate_view.candidate_json(lineage, found, stored_profiles(history).values())
            )
        else:
            out.print(candidate_view.candidate_view(store, history, found))
        return
    if json_:
        print_json(run_view.run_json(store, history))
        return
    out.print(run_view.run_view(store, history))
    if history.race is not None:
        for part in end_of_run.race_view(history.race, lineage, matrix=store.manifest.matrix):
            out.print(part)


def _show_text(
    store: RunStore, history: History, candidate: Candidate, what: str, jobs: int
) -> None:
    """One text of a candidate, for a pager or a file."""
    from kagent.review import artifacts
    from kagent.ui.plan_view import built_view

    if what == "source":
        out.out(candidate.proposal.source, end="")
    elif what in ("prompt", "reply"):
        out.out(artifacts.kept_text(store, history, candidate, what), end="")
    else:
        with status(quiet=False) as say:
            built = artifacts.rebuilt(store, candidate, jobs, say, ptx=what == "ptx")
        if what == "plan":
            out.print(built_view(built, full=True))
            return
        read = artifacts.ptx_texts if what == "ptx" else artifacts.machine_code
        for name, text in read(built):
            out.print(Text(f"// {name}", "bold"))
            out.out(text)


@app.command(rich_help_panel=TRUST)
def verify(run: RunArgument, folder: RunsOption = None, json_: JsonOption = False) -> None:
    """Say whether a run's events and kernels are as they were written."""
    from kagent_sandbox.data.records import to_json

    from kagent.runs.manifest import find_run
    from kagent.runs.verify import verify as verify_run

    found = verify_run(find_run(load_config(runs=folder).runs, run))
    if json_:
        print_json(to_json(found))
    else:
        for finding in found.findings:
            out.print(Text(finding, "red"), soft_wrap=True)
        if found.findings:
            end = plural(len(found.findings), "finding")
        elif found.checksums:
            end = "all is as it was written"
        else:
            end = (
                "nothing is amiss, but events have no checksums (a run of an earlier version), so "
                "that a changed value would not be seen"
            )
        read = f"{found.run}: {found.events} events, {found.kernels} kernels"
        out.print(f"{read}: {end}", soft_wrap=True)
    if found.findings:
        raise typer.Exit(RunError.exit_code)


@app.command(rich_help_panel=TRUST)
def doctor(
    model: Annotated[
        list[str] | None, typer.Option(help="A model to try; may be repeated.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="Its address.")] = None,
    isolation: IsolationOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Say what works here: compilers, GPU, isolation as observed, and the models that are set."""
    from kagent.doctor import Level, examine

    isolate(isolation)
    with status(quiet=json_) as say:
        found = examine(say, model=model or None, base_url=base_url)
    if json_:
        print_json([{"level": f.level.value, "name": f.name, "text": f.text} for f in found])
    else:
        styles = {Level.OK: "green", Level.MISSING: "yellow", Level.BROKEN: "red"}
        table = Table.grid(padding=(0, 2))
        for f in found:
            table.add_row(Text(f.level.value, styles[f.level]), Text(f.name, "bold"), Text(f.text))
        out.print(table)
    if any(f.level is Level.BROKEN for f in found):
        raise typer.Exit(MachineError.exit_code)
