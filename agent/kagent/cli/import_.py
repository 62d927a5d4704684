"""`kagent import`: tasks from other suites' files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kagent_sandbox.errors import KagentError, UserError
from rich.text import Text

from kagent.cli.app import EVOLVE, JsonOption, app, err, out, print_json, status
from kagent.cli.new import SeedsOption, made_json, made_text

imports = typer.Typer(no_args_is_help=True, help="Make task folders of other suites' files.")
app.add_typer(imports, name="import", rich_help_panel=EVOLVE)

ToOption = Annotated[Path, typer.Option("--to", help="Folder of the task folders (here).")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing task folders.")]


@imports.command()
def kernelbench(
    paths: Annotated[
        list[Path], typer.Argument(help="Files with Model and get_inputs, or folders of them.")
    ],
    to: Annotated[Path, typer.Option(help="Folder that the tasks' folders are made in.")] = Path(),
    seeds: SeedsOption = True,
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Make a task of each KernelBench problem, with seeds, and check it."""
    from kagent.authoring.importers.kernelbench import read_problem
    from kagent.authoring.importers.kernelbench_files import problem_files
    from kagent.authoring.new_task import make_task

    files = problem_files(paths)
    found: list[dict[str, object]] = []
    failed = holes = 0  # a task with holes is there, to be mended or used
    for file in files:
        try:
            with status(quiet=json_) as say:
                say(f"reading {file}")
                operation = read_problem(file)
                place = to / operation.name
                made = make_task(operation, place, seeds=seeds, force=force, say=say)
        except UserError as e:
            if len(files) == 1:
                raise
            failed += 1
            found.append({"file": str(file), "error": str(e)})
            if not json_:
                out.print(f"{file.name}: {e}\n")
            continue
        holes += bool(made.holes)
        found.append({"file": str(file), **made_json(made)})
        if not json_:
            out.print(made_text(made), "")
    if json_:
        print_json(found)
    elif len(files) > 1:
        out.print(f"{len(files) - failed - holes} of {len(files)} are tasks without fault or hole")
    if failed:
        raise typer.Exit(UserError.exit_code)


@imports.command()
def flashinfer(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="DEFINITION.json [WORKLOADS.jsonl]",
            help="Definitions and workloads, or folders.",
        ),
    ],
    to: ToOption = Path(),
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Import definitions of FlashInfer-Bench, SOL-ExecBench and others of their format."""
    from kagent.authoring.importers.flashinfer.exchange import find_definitions
    from kagent.authoring.importers.flashinfer.task import ImportedDefinition, import_definition

    done: list[ImportedDefinition] = []
    refused: dict[str, KagentError] = {}
    with status(quiet=json_) as say:
        for path, workloads in find_definitions(files):
            say(f"importing {path.name}")
            try:
                done.append(import_definition(path, workloads, to, force=force))
            except KagentError as e:
                refused[str(path)] = e
    _print_imported(
        {i.name: (i.folder, _notes(i.workloads, i.used, i.left_out)) for i in done},
        refused,
        json_=json_,
    )


@imports.command("kernelbench-hard")
def kernelbench_hard(
    folder: Annotated[Path, typer.Argument(help="A problem, or a folder of problems.")],
    to: ToOption = Path(),
    force: ForceOption = False,
    json_: JsonOption = False,
) -> None:
    """Import problems of KernelBench-Hard."""
    from kagent.authoring.importers.kernelbench_hard.task import find_problems, import_problem

    done: dict[str, tuple[Path, list[str]]] = {}
    refused: dict[str, KagentError] = {}
    with status(quiet=json_) as say:
        for problem in find_problems(folder):
            say(f"importing {problem.name}")
            try:
                made = import_problem(problem, to, force=force)
                done[made.name] = made, ["sizes of shapes.py"]
            except KagentError as e:
                refused[str(problem)] = e
    _print_imported(done, refused, json_=json_)


def _notes(workloads: int, used: int, left_out: tuple[str, ...]) -> list[str]:
    notes = []
    if workloads:
        notes.append(f"sizes of {used} of {workloads} workloads")
    else:
        notes.append("usual sizes: no workloads")
    if left_out:
        notes.append(f"without optional {', '.join(left_out)}")
    return notes


def _print_imported(
    done: dict[str, tuple[Path, list[str]]], refused: dict[str, KagentError], *, json_: bool
) -> None:
    """Print what was imported, and end with the code of the gravest error."""
    if json_:
        print_json(
            {
                "imported": {n: {"folder": str(f), "notes": s} for n, (f, s) in done.items()},
                "refused": {name: str(e) for name, e in refused.items()},
            }
        )
    else:
        for folder, notes in done.values():
            out.print(Text(f"{folder}  ({'; '.join(notes)})"))
        if done:
            out.print("check each before a search: kagent check FOLDER")
        for e in refused.values():
            err.print(Text(f"not imported: {e}", style="red"))
    if refused:
        raise typer.Exit(max(e.exit_code for e in refused.values()))
