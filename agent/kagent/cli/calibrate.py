"""`kagent calibrate`: a task's tolerances from other ways to compute it."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from kagent.cli.app import EVOLVE, DeviceOption, JsonOption, app, out, print_json, status


@app.command(rich_help_panel=EVOLVE)
def calibrate(
    task: Annotated[str, typer.Argument(help="A task of your own: its folder.")],
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Set a task's tolerances by how far other orders of rounding are from float64."""
    from kagent_sandbox.data.calibration import FILE
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.records import to_json
    from kagent_sandbox.device.table import available
    from kagent_sandbox.errors import UserError

    from kagent.authoring.calibrate import calibrate_folder
    from kagent.resources import resource
    from kagent.tasks import find_task
    from kagent.ui import tables

    plain = find_task(task, calibrated=False)
    if plain.folder.parent == resource("seeds"):
        raise UserError(
            f"{plain.name} is one of kagent's own tasks, whose tolerances are fixed: calibrate a "
            f"copy of {plain.folder}"
        )
    kinds = [kind for kind in get_args(Kind) if available(kind)]
    with status(quiet=json_) as say:
        found = calibrate_folder(plain, kinds, say)
    if json_:
        print_json({kind: to_json(each) for kind, each in found.kinds.items()})
        return
    for kind in kinds:
        out.print(tables.calibration_text(plain, kind, found.kinds[kind]))
    out.print(f"written: {plain.folder / FILE}", markup=False)
