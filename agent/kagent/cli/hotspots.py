"""`kagent hotspots`: where the steps of a script spend their time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import (
    MODELS,
    DeviceOption,
    JsonOption,
    app,
    err,
    out,
    print_json,
    status,
)
from kagent.workload.step_kind import StepKind

ScriptArgument = Annotated[
    Path, typer.Argument(help="Your script: a Python file, run as you, as it is.")
]
ArgsArgument = Annotated[
    list[str] | None, typer.Argument(help="The script's own arguments, after --.")
]
WarmupOption = Annotated[int, typer.Option(help="Steps before the first that counts.", min=0)]
StepOption = Annotated[
    StepKind,
    typer.Option(
        "--step",
        help="What ends a step: optimizer.step(), a call of the outermost module, or whichever "
        "there is.",
    ),
]


@app.command(rich_help_panel=MODELS)
def hotspots(
    script: ScriptArgument,
    args: ArgsArgument = None,
    steps: Annotated[int, typer.Option(help="Steps of each measurement.", min=1)] = 5,
    warmup: WarmupOption = 3,
    step: StepOption = "auto",
    count: Annotated[int, typer.Option("-n", help="Regions to list.", min=1)] = 15,
    page: Annotated[
        Path | None, typer.Option("--page", help="Write an icicle of the step, as one HTML file.")
    ] = None,
    take: Annotated[
        str | None,
        typer.Option(metavar="ID|N", help="Write a region, by id or row, for kagent new."),
    ] = None,
    to: Annotated[Path, typer.Option("--to", help="Folder for --take.")] = Path(),
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Rank what a script's steps do by the time above this device's ceilings."""
    from kagent.runs.files import place_for, require_folder, write_file
    from kagent.workload.hotspots import find_hotspots, to_json, write_region
    from kagent.workload.hotspots_page import render
    from kagent.workload.hotspots_view import hotspots_view, taken_view

    place = None if page is None else place_for(page)  # before minutes of profiling
    if take is not None:
        require_folder(to)
    with status(quiet=json_) as say:
        found = find_hotspots(script, args or [], warmup=warmup, steps=steps, kind=step, say=say)
    if not json_:
        out.print(hotspots_view(found, count))
    path: Path | None = None
    fault: UserError | None = None  # what was measured is still shown
    if take is not None:
        try:
            path = write_region(found, take, to)
        except UserError as e:
            fault = e
    if json_:
        print_json({**to_json(found), "taken": None if path is None else str(path)})
    elif path is not None and take is not None:
        out.print(taken_view(found.find(take), path))
    if page is not None and place is not None:
        try:
            write_file(place, render(found))
        except OSError as e:
            raise UserError(f"{page}: cannot be written ({e.strerror})") from None
        if not json_:
            err.print(f"{page} has the whole step")
    if fault is not None:
        raise fault
