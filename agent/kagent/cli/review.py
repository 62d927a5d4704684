"""Commands that look at what was generated: report, diff, top, ablate, profile."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import RunError, UserError
from rich.text import Text

from kagent.cli.app import (
    LOOK,
    DeviceOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    RunArgument,
    RunsOption,
    app,
    complete_task,
    err,
    isolate,
    out,
    print_json,
    runs_to_list,
    status,
)
from kagent.config.settings import load_config
from kagent.text import plural

if TYPE_CHECKING:
    from kagent.runs.store import RunStore


@app.command(rich_help_panel=LOOK)
def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page's file (RUN.html).")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve it on loopback; it follows the run.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="Port of --live (0: a free one).", min=0, max=65535)
    ] = None,
    folder: RunsOption = None,
) -> None:
    """Write a run as one HTML page that needs nothing else, or serve it while the run goes on."""
    from kagent.review.live import PageServer
    from kagent.review.page import render
    from kagent.runs.files import place_for, write_file
    from kagent.runs.manifest import find_run
    from kagent.runs.store import read_history

    if port is not None and not live:
        raise UserError(f"--port is for --live: add --live, or omit --port {port}")
    found = find_run(load_config(runs=folder).runs, run)
    if live:
        if output is not None:
            raise UserError("--live serves a page and writes none: omit --output")
        read_history(found)  # report a faulty run here, not in a browser
        try:
            server = PageServer(found, port or 0)
        except OSError as e:
            raise UserError(f"port {port} on 127.0.0.1: {e.strerror}; try --port 0") from None
        with server:
            err.print(f"{server.url} shows {found.name}; Ctrl-C ends it")
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return
    target = output if output is not None else Path(f"{found.name}.html")
    place = place_for(target)
    store, history = read_history(found)
    try:
        write_file(place, render(found.name, store.manifest, history))
    except OSError as e:
        raise UserError(f"{target}: cannot be written ({e.strerror})") from None
    out.print(str(target), soft_wrap=True)


@app.command(rich_help_panel=LOOK)
def diff(
    run: RunArgument,
    before: Annotated[int, typer.Argument(help="A candidate's id.", min=0)],
    after: Annotated[int, typer.Argument(help="Another one's.", min=0)],
    folder: RunsOption = None,
    json_: JsonOption = False,
) -> None:
    """Compare two candidates of a run: sources, times, and what the compiler made of them."""
    from kagent.review import compare
    from kagent.runs.lineage import find_candidate
    from kagent.runs.manifest import find_run
    from kagent.runs.store import read_history

    store, history = read_history(find_run(load_config(runs=folder).runs, run))
    lineage = history.lineage
    pair = find_candidate(lineage, before), find_candidate(lineage, after)
    if json_:
        print_json(compare.diff_json(history, *pair))
    else:
        out.print(compare.diff_view(history, *pair, matrix=store.manifest.matrix))


@app.command(rich_help_panel=LOOK)
def top(
    task: Annotated[
        str | None, typer.Argument(help="Only runs of this task.", autocompletion=complete_task)
    ] = None,
    count: Annotated[int, typer.Option("-n", help="Candidates per task and device.", min=1)] = 5,
    folder: RunsOption = None,
    json_: JsonOption = False,
) -> None:
    """List the best candidates of all runs, by task and device."""
    from kagent.review import compare
    from kagent.tasks import is_task

    where = runs_to_list(folder)
    rows, unread = compare.top_rows(where, task, count)
    if unread:
        words = ["kagent", "runs", *(["--runs", str(where)] if folder is not None else [])]
        told = f"{plural(unread, 'run')} cannot be read: {shlex.join(words)} says why"
        err.print(Text(told, "yellow"), soft_wrap=True)
    if task is not None and not rows and not is_task(task):
        raise UserError(
            f"no task {task!r}, and no finished candidates of one in {where}: kagent tasks lists "
            "the tasks"
        )
    if json_:
        print_json(rows)
    elif rows:
        out.print(compare.top_view(rows))
    else:
        of = f" of {task}" if task else ""
        out.print(f"no finished candidates{of} in {where}: kagent evolve starts a run")


@app.command(rich_help_panel=LOOK)
def ablate(
    run: RunArgument,
    candidate: Annotated[
        int | None, typer.Argument(help="A candidate's id (the winner).", min=0)
    ] = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    folder: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Take the winner's edits back one at a time, and measure what each of them is worth."""
    from kagent_sandbox.data.verdict import Rejected

    from kagent.asktell.judging import can_judge, open_bench
    from kagent.evolve.stored_run import is_same_task, todays_task
    from kagent.review import ablate as ablation
    from kagent.review.ablation_view import ablation_view
    from kagent.review.summary import winner_of
    from kagent.runs.lineage import find_candidate
    from kagent.runs.manifest import find_run
    from kagent.runs.store import RunStore

    config = load_config(jobs=jobs, isolation=isolation, runs=folder)
    isolate(isolation)
    found = find_run(config.runs, run)
    with RunStore.open(found, write=False) as store:
        history, manifest = store.history(), store.manifest
        task = todays_task(found, manifest)  # each version is timed anew beside another
        lineage = history.lineage
        winner = winner_of(history) if candidate is None else find_candidate(lineage, candidate)
        if winner is None:
            raise UserError(f"{found}: no candidate has passed yet, so there is nothing to ablate")
        if isinstance(winner.verdict, Rejected):
            raise UserError(
                f"#{winner.id} was rejected ({winner.verdict.status}): name a candidate that passed"
            )
        elsewhere = "run this command where there is one, on a copy of the folder"
        can_judge(manifest, found, config, elsewhere)
        with status(quiet=json_) as say:
            if not is_same_task(task, manifest):
                say(f"{found.name}: made with an earlier version of {task.name}; timed on today's")
            say("starting builder and judge")
            with open_bench(task, manifest, config, say) as bench:
                bench.machine.prepare(say)
                ablator = ablation.Ablator(bench.machine, lineage, say)
                result = ablator.run(winner, str(bench.environment["device"]))
    _keep(store, "ablated", ablation.to_event(result))
    if json_:
        print_json(ablation.to_event(result))
    else:
        out.print(ablation_view(result, winner.proposal.name))


def _keep(store: RunStore, kind: str, data: Mapping[str, object]) -> None:
    """Keep an analysis beside the run; where that cannot be, say so: the result is still shown."""
    from kagent.runs.analyses import add_analysis

    try:
        add_analysis(store.folder, store.manifest.id, kind, data)
    except RunError as e:
        err.print(Text(f"kagent: this result is shown and not kept: {e}", "yellow"))


@app.command(rich_help_panel=LOOK)
def profile(
    run: RunArgument,
    candidate: Annotated[
        int | None, typer.Argument(help="A candidate's id (the winner).", min=0)
    ] = None,
    case: Annotated[
        str | None, typer.Option(help="A benchmark case (the one furthest from the roofline).")
    ] = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    folder: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Say what a GPU candidate's kernels do: occupancy and waves, and counters where ncu is."""
    from kagent_sandbox.data.verdict import Passed
    from kagent_sandbox.device.table import own_unit
    from kagent_sandbox.process.device_lock import DeviceLock

    from kagent.evolve import profile as profiling
    from kagent.evolve.stored_run import todays_task
    from kagent.prompting.hardware import hardware
    from kagent.prompting.run_facts import run_facts_of
    from kagent.review import artifacts
    from kagent.review.summary import winner_of
    from kagent.runs.lineage import find_candidate
    from kagent.runs.manifest import find_run
    from kagent.runs.profiles import to_event
    from kagent.runs.store import RunStore
    from kagent.ui.profile_view import profile_view

    config = load_config(jobs=jobs, isolation=isolation, runs=folder)
    isolate(isolation)
    found = find_run(config.runs, run)
    with RunStore.open(found, write=False) as store:
        history, manifest = store.history(), store.manifest
        if manifest.kind != "gpu":
            raise UserError(
                f"{found}: a run on the CPU: kagent show {found.name} ID --sass prints a "
                "candidate's assembly; profiles are for GPU candidates"
            )
        lineage = history.lineage
        shown = winner_of(history) if candidate is None else find_candidate(lineage, candidate)
        if shown is None or not isinstance(shown.verdict, Passed):
            raise UserError(f"{found}: name a candidate that passed")
        cases = sorted(t.case for t in shown.verdict.timings)
        if case is not None and case not in cases:
            raise UserError(f"no benchmark case {case!r}: there are {', '.join(cases)}")
        task = todays_task(found, manifest)  # nothing is compared
        with status(quiet=json_) as say:
            say("building")
            built = artifacts.rebuilt(store, shown, config.jobs, say)
            say("profiling")
            here = run_facts_of(manifest, history)
            device = hardware(manifest.target, here.device, here.ceilings)
            chosen = case or profiling.worst_case(shown)
            with DeviceLock(own_unit("gpu"), say).turn("timing"):
                result = profiling.profile(shown, task, chosen, built, device)
    _keep(store, "profiled", to_event(result))
    if json_:
        print_json(to_event(result))
    else:
        out.print(profile_view(result, shown.proposal.name, device))
