"""`kagent patch`: a library's kernels in a script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import (
    MODELS,
    NOT_FASTER,
    DeviceOption,
    JsonOption,
    app,
    out,
    print_json,
    status,
)
from kagent.cli.hotspots import ArgsArgument, ScriptArgument, StepOption

RestChoice: TypeAlias = Literal["both", "operations", "inductor"]


@app.command(rich_help_panel=MODELS)
def patch(
    script: ScriptArgument,
    library: Annotated[Path, typer.Argument(help="An exported library: its folder, or TASK.py.")],
    args: ArgsArgument = None,
    more: Annotated[
        list[Path] | None, typer.Option("--with", help="A further library.", show_default=False)
    ] = None,
    replace: Annotated[
        list[str] | None,
        typer.Option(
            "--replace",
            help="Replace a function or method of yours: 'MODULE:NAME(PARAMETERS) = CALL'.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="File to write (SCRIPT_patch.py, here).")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps whose numbers are compared.", min=1)] = 3,
    pairs: Annotated[int, typer.Option(help="Steps to time, of each kind.", min=4)] = 16,
    warmup: Annotated[int, typer.Option(help="Steps of each kind before.", min=1)] = 2,
    rest: Annotated[
        RestChoice,
        typer.Option(help="What is tried with the rest of a graph in which a region is replaced."),
    ] = "both",
    step: StepOption = "auto",
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Put a library's kernels into a script: same numbers, step before and after, a file."""
    from kagent.workload.patch import patch as patch_script
    from kagent.workload.patch import to_json
    from kagent.workload.patch_view import patch_view

    target = to if to is not None else Path(f"{script.stem}_patch.py")
    if target.suffix != ".py" or not target.stem.isidentifier():
        raise UserError(f"--to {target}: expected a Python module's file, such as my_patch.py")
    with status(quiet=json_) as say:
        found = patch_script(
            script,
            [library, *(more or [])],
            args or [],
            replace=replace or [],
            to=target,
            kind=step,
            steps=steps,
            pairs=pairs,
            warmup=warmup,
            rests=["operations", "inductor"] if rest == "both" else [rest],
            say=say,
        )
    if json_:
        print_json(to_json(found))
    else:
        out.print(patch_view(found))
    if found.file is None:
        raise typer.Exit(NOT_FASTER)
