"""`kagent memory`: what is kept of earlier runs, and what a task would get of it."""

from __future__ import annotations

from typing import Annotated

import typer
from kagent_sandbox.errors import RunError, UserError
from rich.text import Text

from kagent.cli.app import (
    LOOK,
    DeviceOption,
    JsonOption,
    LangOption,
    RunsOption,
    app,
    complete_task,
    err,
    out,
    print_json,
)
from kagent.config.settings import load_config

memories = typer.Typer(no_args_is_help=True, help="What runs remember of earlier ones.")
app.add_typer(memories, name="memory", rich_help_panel=LOOK)


@memories.command("list")
def list_(json_: JsonOption = False) -> None:
    """List the runs in memory."""
    from kagent.memory.library import known, memory_folder
    from kagent.ui.memory_view import record_json, runs_view

    records = known(err.print)
    if json_:
        print_json([record_json(r) for r in records])
    elif records:
        out.print(runs_view(records))
    else:
        kept = "a run is kept that has a kernel faster than its seeds, or has tried a technique"
        out.print(f"nothing is remembered yet in {memory_folder()}: {kept}")


@memories.command()
def show(
    task: Annotated[
        str,
        typer.Argument(
            help="A task's name (kagent tasks), or its folder.", autocompletion=complete_task
        ),
    ],
    lang: LangOption = None,
    target: Annotated[
        str | None,
        typer.Option(help="Target: sm_90a, ..., cpu (this machine's GPU, else its CPU)."),
    ] = None,
    runs: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Show what a run of a task would get, and why."""
    from kagent_sandbox.data.records import to_json

    from kagent.asktell.open_run import target_for
    from kagent.asktell.prompt_preview import own_device
    from kagent.evolve.remembering import wanted
    from kagent.evolve.session import seeds_for
    from kagent.memory.recall import recall
    from kagent.tasks import find_task
    from kagent.ui.memory_view import show_view

    config = load_config(lang=lang, runs=runs)
    found = find_task(task)
    kind, target = target_for(config.lang, target)
    own = seeds_for(found, kind, config.lang)
    device = own_device(target)
    asked = wanted(found, kind, target, config.lang, own, device.name if device else "")
    recalled, _ = recall(asked, config.runs, lambda text: err.print(text))
    if json_:
        print_json(to_json(recalled))
    else:
        for part in show_view(recalled):
            out.print(part, soft_wrap=isinstance(part, Text))


@memories.command()
def forget(
    run: Annotated[
        str | None, typer.Argument(help="A run's id, or its name (kagent memory list).")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every run.")] = False,
    runs: RunsOption = None,
) -> None:
    """Keep a run from being used again. Its folder stays as it is."""
    from kagent.memory.library import forget as forget_run
    from kagent.memory.library import known
    from kagent.runs.manifest import find_run, identity, list_runs, read_manifest

    if all_ == (run is not None):
        raise UserError("name one run, or give --all")
    records, folder = known(), load_config(runs=runs).runs
    if all_:
        gone = {r.run for r in records}
        for place in list_runs(folder):
            try:
                gone.add(identity(place, read_manifest(place)))
            except RunError as e:  # nothing can be taken from it anyway
                err.print(f"left out: {e}", markup=False)
    else:
        gone = {r.run for r in records if run in (r.run, r.folder)}
        if not gone:
            assert run is not None
            found = find_run(folder, run)  # of a folder of runs, but not in memory
            gone = {identity(found, read_manifest(found))}
        if len(gone) > 1:
            raise UserError(f"{run}: {len(gone)} runs have this name: give the id")
    for each in sorted(gone):
        forget_run(each)
    out.print(f"{len(gone)} forgotten")
