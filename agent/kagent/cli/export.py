"""Commands that ship what was generated: export, certify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import (
    EXPORT,
    AcceleratorOption,
    DeviceOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    OnOption,
    RunsOption,
    app,
    complete_run,
    isolate,
    out,
    print_json,
    refuse_device,
    status,
)
from kagent.config.settings import Config, load_config
from kagent.fleet.fleet import LOCAL, fleet_of
from kagent.fleet.slurm import SLURM


@app.command(rich_help_panel=EXPORT)
def export(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Runs, by name, path or 'latest'; RUN:ID for another finalist.",
            autocompletion=complete_run,
        ),
    ],
    to: Annotated[
        Path, typer.Option("--to", help="Folder of the library (or files), new or existing.")
    ],
    single_file: Annotated[
        bool,
        typer.Option(
            "--single-file", help="Write TASK.py with its test instead, for a pull request."
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name of the Python package (the folder's).")
    ] = None,
    allow_slower: Annotated[
        bool, typer.Option("--allow-slower", help="Export winners that torch is as fast as, too.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files of the library that were edited.")
    ] = False,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    folder: RunsOption = None,
    json_: JsonOption = False,
    on: OnOption = None,
    accelerator: AcceleratorOption = None,
    device: DeviceOption = None,
) -> None:
    """Write the winners of runs into a kernel library: verified and measured once more."""
    from kagent.asktell.judging import can_judge
    from kagent.export.export import export as export_library
    from kagent.export.export import export_files
    from kagent.export.host import open_host
    from kagent.export.views import exported_json, exported_view, files_json, files_view
    from kagent.export.winners import find_winner
    from kagent.runs.files import require_folder

    if single_file and name is not None:
        raise UserError("--name is a library's; with --single-file, files have their task's name")
    config = _config(
        on, device, jobs=jobs, isolation=isolation, runs=folder, accelerator=accelerator
    )
    isolate(isolation)
    require_folder(to)
    winners = [find_winner(config.runs, run, allow_slower=allow_slower) for run in runs]
    for winner in winners:
        where = "run this command where there is one, on a copy of the folder"
        if config.on == LOCAL:
            where += ", or with --on ray"
        can_judge(winner.manifest, winner.folder, config, instead=where)
    if single_file:
        with status(quiet=json_) as say, open_host(config, say) as host:
            made = export_files(winners, to, host, say, allow_slower=allow_slower, force=force)
        if json_:
            print_json(files_json(made))
        else:
            out.print(files_view(made))
        return
    with status(quiet=json_) as say, open_host(config, say) as host:
        done = export_library(winners, to, name, host, say, allow_slower=allow_slower, force=force)
    if json_:
        print_json(exported_json(done))
    else:
        out.print(exported_view(done))


@app.command(rich_help_panel=EXPORT)
def certify(
    library: Annotated[Path, typer.Argument(help="An exported library's folder.")],
    update: Annotated[
        bool, typer.Option("--update", help="Put this device's measurements into the library.")
    ] = False,
    operators: Annotated[
        list[str] | None,
        typer.Option(
            "--operator", metavar="TASK", help="Only this operator (all); may be repeated."
        ),
    ] = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    json_: JsonOption = False,
    on: OnOption = None,
    accelerator: AcceleratorOption = None,
    device: DeviceOption = None,
) -> None:
    """Check and measure an exported library again: after a new compiler, driver or GPU."""
    from kagent.export.certify import certify as certify_library
    from kagent.export.export import update as update_library
    from kagent.export.host import open_host
    from kagent.export.reading import read_library
    from kagent.export.views import certificate_json, certificate_view
    from kagent.runs.files import require_folder

    config = _config(on, device, jobs=jobs, isolation=isolation, accelerator=accelerator)
    isolate(isolation)
    disk = read_library(library)
    if update:
        require_folder(library)
    with status(quiet=json_) as say, open_host(config, say) as host:
        found, sessions = certify_library(disk, host, say, operators or ())
        if update:
            wrong = [f"{k} {w}" for k, w in found.wrong.items()]
            if faults := [*found.changed, *wrong, *([found.tests] if found.tests else [])]:
                raise UserError(f"{library}: not updated: " + "; ".join(faults))
            update_library(disk, sessions, host, say)
    if json_:
        print_json(certificate_json(found))
    else:
        out.print(certificate_view(found, library))
    if not found.ok:
        raise typer.Exit(1)


def _config(on: str | None, device: str | None, **given: object) -> Config:
    """The configuration of an export or a certification.

    Raises:
        UserError: Options do not fit.
    """
    if on == SLURM:
        raise UserError(
            "--on slurm writes scripts for evolve and campaign alone: call this command with --on "
            "ray in a job of yours, or give kagent campaign --export"
        )
    config = load_config(on=on, **given)
    refuse_device(device, config.on)
    fleet_of(config)  # options that do not fit, before anything is read
    return config
