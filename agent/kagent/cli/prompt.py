"""`kagent prompt`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import (
    DRIVE,
    DeviceOption,
    JsonOption,
    LangName,
    RunsOption,
    app,
    complete_run,
    complete_task,
    print_json,
)
from kagent.config.settings import load_config


@app.command(rich_help_panel=DRIVE)
def prompt(
    task: Annotated[
        str | None,
        typer.Argument(
            help="A task's name, or its folder; with --run, where it is now.",
            autocompletion=complete_task,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="A run's name, path, or 'latest': its next prompt.", autocompletion=complete_run
        ),
    ] = None,
    operator: Annotated[
        Literal["structure", "rewrite", "crossover", "repair", "tune"] | None,
        typer.Option(help="Operator of the prompt, instead of the run's own choice."),
    ] = None,
    parent: Annotated[
        str | None, typer.Option(help="The parent: a candidate's id; without a run, a seed's name.")
    ] = None,
    card: Annotated[str | None, typer.Option(help="The technique in it (prompts/cards/).")] = None,
    target: Annotated[
        str | None, typer.Option(help="sm_90a, ..., cpu (the machine's own). Not with --run.")
    ] = None,
    lang: Annotated[
        LangName | None,
        typer.Option(help="Language of the kernels (any). Not with --run."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Folder of templates and cards that replace kagent's.")
    ] = None,
    runs: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Print exactly what a model would be sent."""
    if task is None and run is None:
        raise UserError(
            "name a task (kagent prompt softmax), or a run (kagent prompt --run latest)"
        )
    if run is not None and (target is not None or lang is not None):
        raise UserError("a run has its own target and language: omit --target and --lang")
    from kagent.asktell.prompt_preview import of_run, of_task
    from kagent.llm.drafts import text_of
    from kagent.runs.lineage import Operator
    from kagent.runs.manifest import find_run

    config = load_config(runs=runs, lang=lang, prompts=prompts)
    wanted = Operator(operator) if operator is not None else None
    if run is not None:
        preview = of_run(config, find_run(config.runs, run), task)
        preview = preview.instead(wanted, _id(parent)) if wanted or parent else preview
    else:
        assert task is not None
        preview = of_task(config, task, target, parent)
        preview = preview.instead(wanted, None) if wanted else preview
    written = preview.write(card)
    if not json_:
        sys.stdout.write(text_of(written))
        return
    print_json(
        {
            "operator": preview.ask.operator.value,
            "parent": preview.ask.parent.id,
            "card": written.card,
            "system": written.system,
            "user": written.user,
        }
    )


def _id(parent: str | None) -> int | None:
    if parent is None:
        return None
    try:
        return int(parent.removeprefix("#"))
    except ValueError:
        raise UserError(
            f"--parent {parent}: expected the id of one of the run's candidates"
        ) from None
