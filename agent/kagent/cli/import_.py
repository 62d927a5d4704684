"""`kagent import`: tasks from other suites' files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import EVOLVE, JsonOption, app, out, print_json, status
from kagent.cli.new import made_json, made_text

imports = typer.Typer(no_args_is_help=True, help="Make tasks of other suites' files.")
app.add_typer(imports, name="import", rich_help_panel=EVOLVE)


@imports.command()
def kernelbench(
    paths: Annotated[
        list[Path], typer.Argument(help="Files with Model and get_inputs, or folders of them.")
    ],
    to: Annotated[Path, typer.Option(help="Folder that the tasks' folders are made in.")] = Path(),
    json_: JsonOption = False,
) -> None:
    """Make a task of each KernelBench problem, and check it."""
    from kagent.authoring.kernelbench import problem_files, read_problem
    from kagent.authoring.new_task import make_task

    files = problem_files(paths)
    found: list[dict[str, object]] = []
    failed = 0
    for file in files:
        try:
            with status(quiet=json_) as say:
                say(f"reading {file}")
                operation = read_problem(file)
                made = make_task(operation, to / operation.name, say=say)
        except UserError as e:
            if len(files) == 1:
                raise
            failed += 1
            found.append({"file": str(file), "error": str(e)})
            if not json_:
                out.print(f"{file.name}: {e}\n")
            continue
        failed += bool(made.holes)
        found.append({"file": str(file), **made_json(made)})
        if not json_:
            out.print(made_text(made), "")
    if json_:
        print_json(found)
    elif len(files) > 1:
        out.print(f"{len(files) - failed} of {len(files)} are tasks without fault or hole")
    if failed:
        raise typer.Exit(1)
