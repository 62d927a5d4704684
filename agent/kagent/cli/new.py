"""`kagent new`: a task from a PyTorch function or module."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import UserError
from rich.text import Text

from kagent.cli.app import EVOLVE, JsonOption, app, out, print_json, status

if TYPE_CHECKING:
    from kagent.authoring.new_task import Made

SeedsOption = Annotated[
    bool, typer.Option("--seeds/--no-seeds", help="Derive a Triton and a C++ seed (Inductor's).")
]
ToOption = Annotated[Path | None, typer.Option(help="Folder of the task (./NAME).")]


@app.command(rich_help_panel=EVOLVE)
def new(
    target: Annotated[
        str, typer.Argument(metavar="FILE:NAME", help="A function, nn.Module or class of a file.")
    ],
    inputs: Annotated[
        str, typer.Option(help="Function of the file that returns example arguments.")
    ] = "make_inputs",
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG:DIM=NAME", help="A dimension that varies, as in x:0=B (all that can)."
        ),
    ] = None,
    to: ToOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the task (that of the target).")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Make its gradient a task.")] = False,
    seeds: SeedsOption = True,
    json_: JsonOption = False,
) -> None:
    """Make a task of a PyTorch function or module, with seeds, and check it."""
    from kagent.authoring.draft.rooms import parse_vary
    from kagent.authoring.new_task import make_task
    from kagent.authoring.tracing.operation import make_operation
    from kagent.authoring.tracing.source_file import load_module, named
    from kagent.runs.files import require_folder

    path, _, attribute = target.rpartition(":")
    if not path:
        raise UserError(f"{target}: expected FILE:NAME, as in my_module.py:RMSNorm")
    if to is not None:
        require_folder(to)
    axes = parse_vary(vary or [])
    file = Path(path).expanduser()
    # What the file prints must not be part of the outcome.
    with status(quiet=json_) as say, contextlib.redirect_stdout(sys.stderr):
        say(f"reading {file}")
        module = load_module(file)
        wanted = named(module, attribute, file)
        try:
            example = named(module, inputs, file)
        except UserError as e:
            way = "--inputs NAME takes them from another function or tensor"
            if hasattr(module, "get_inputs") and hasattr(module, "get_init_inputs"):
                way = f"for a file in KernelBench's form: kagent import kernelbench {file}"
            raise UserError(f"{e}. It returns example arguments; {way}") from None
        operation = make_operation(
            wanted,
            example,
            name=name or attribute,
            origin=f"{file.name}:{attribute}",
            backward=backward,
            own=True,
        )
        made = make_task(operation, to or Path(operation.name), vary=axes, seeds=seeds, say=say)
    if json_:
        print_json(made_json(made))
    else:
        out.print(made_text(made))


def made_json(made: Made) -> dict[str, object]:
    """The new task as JSON."""
    task = made.task
    return {
        "name": task.name,
        "folder": str(made.folder),
        "signature": task.signature,
        "dims": dict(made.trace.dims),
        "seeds": [s.name for s in made.seeds],
        "notes": list(made.notes),
        "holes": list(made.holes),
        "seconds": made.seconds,
    }


def _none_varies(made: Made) -> str:
    """Words for a task of one size."""
    from kagent.authoring.draft.rooms import LEAST_SIZE

    largest = max((n for e in made.trace.operation.examples for n in e.shape), default=0)
    if largest < LEAST_SIZE:
        return (
            f"none, for those below {LEAST_SIZE} stay as they are unless --vary ARG:DIM=NAME names "
            "them"
        )
    return "none, for the operation takes no other sizes (--vary ARG:DIM=NAME says of one why)"


def made_text(made: Made) -> Text:
    """The new task, and the next command."""
    from kagent.tasks import command_word

    task = made.task
    text = Text(f"{task.signature}\n")
    sizes = ", ".join(f"{n} = {s}" for n, s in made.trace.dims.items())
    text.append(f"dimensions that vary, in the example: {sizes or _none_varies(made)}\n")
    cases = [len(c) for k in (task.gpu, task.cpu) for c in (k.check, k.bench)]
    here = made.draft.on_cpu
    own = f", on CPUs {here.k:g} and {here.floor:g}" if here is not None else ""
    text.append(
        f"GPU: {cases[0]} check and {cases[1]} benchmark cases; CPU: {cases[2]} and {cases[3]}; "
        f"tolerance: {task.compared[0].k:g} times torch's error + {task.compared[0].floor:g} eps"
        f"{own}\n"
    )
    for note in made.notes:
        text.append(f"note: {note}\n", "yellow")
    for hole in made.holes:
        text.append(f"hole: {hole}\n", "yellow")
    if made.holes:
        text.append(
            "a wrong result would pass there: add a case to task.toml that shows it, have `inputs` "
            "of reference.py draw what does, or name an operation that changes nothing under "
            "`without_effect` (docs/tasks.md), then "
            f"kagent check {command_word(task)}\n"
        )
    text.append(f"{made.folder}/task.toml, reference.py", "bold green")
    text.append(f" written and checked in {made.seconds:.0f} s\n")
    if made.seeds:
        names = ", ".join(f"{s.name} ({s.language})" for s in made.seeds)
        text.append(f"seeds: {names}\nnext: kagent evolve {command_word(task)} --budget 50")
    else:
        text.append(
            "no seed: write a first kernel as triton_NAME.py, cuda_NAME.py or cpp_NAME.py there "
            "(docs/candidates.md); kagent evolve begins with it"
        )
    return text
