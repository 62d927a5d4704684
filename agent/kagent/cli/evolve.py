"""`kagent evolve`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from kagent_sandbox.errors import KagentError
from rich.text import Text

from kagent.cli.app import INTERRUPTED, JobsOption, RunsOption, app, err, out
from kagent.config import Config, load_config
from kagent.events import Event, Observer, Started, Stop


@app.command()
def evolve(
    task: Annotated[str, typer.Argument(help="A task's name (kagent tasks), or its folder.")],
    budget: Annotated[
        int | None, typer.Option(help="Proposals to evaluate (50); seeds are free.", min=0)
    ] = None,
    lang: Annotated[
        Literal["triton", "cuda", "cpp", "any"] | None,
        typer.Option(help="Language of the seeds: any = Triton and CUDA on a GPU, else C++."),
    ] = None,
    proposer: Annotated[Literal["tune"] | None, typer.Option(help="What proposes kernels.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all random decisions (0).")] = None,
    jobs: JobsOption = None,
    in_flight: Annotated[
        int | None, typer.Option(help="Proposals worked on at once (4).", min=1)
    ] = None,
    configs: Annotated[
        int | None, typer.Option(help="Configurations tried per candidate (1).", min=1)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Start nothing new after this time.")
    ] = None,
    runs: RunsOption = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with a run: its name, path, or 'latest'.")
    ] = None,
) -> None:
    """Evolve a task's kernel: propose, build, check, measure, keep the fastest lineage."""
    from kagent import report, session
    from kagent.display import display_for
    from kagent.runs import find_run
    from kagent.tasks import find_task

    config = load_config(
        budget=budget,
        lang=lang,
        proposer=proposer,
        seed=seed,
        jobs=jobs,
        in_flight=in_flight,
        configs=configs,
        minutes=minutes,
        runs=runs,
    )
    folder = find_run(config.runs, resume) if resume is not None else None
    found = find_task(task)
    session.choose_seeds(found, config)  # what cannot work is said before anything starts
    out.print(_opening(config))
    runs_used = config.runs if folder is None else folder.parent
    flags = report.next_flags(runs_used, load_config().runs)
    begun: list[str] = []
    try:
        with display_for(out) as display:
            outcome = session.evolve(task, config, _noting(display, begun), folder)
    except (KagentError, KeyboardInterrupt) as e:
        if begun:
            again = report.resume_command(task, begun[0], flags)
            err.print(Text("what was recorded is kept. Go on with: ").append_text(again))
        elif isinstance(e, KeyboardInterrupt):
            err.print("kagent: interrupted before the run began; nothing was stored")
        raise
    for part in report.end_of_run(outcome, task, matrix=found.matrix, flags=flags):
        out.print(part, soft_wrap=isinstance(part, Text))  # commands and paths can be copied
    if outcome.stop in (Stop.INTERRUPTED, Stop.NO_SEED):
        raise typer.Exit(INTERRUPTED if outcome.stop is Stop.INTERRUPTED else 1)


def _opening(config: Config) -> Text:
    return Text(
        f"proposals come from the built-in tuner ({config.proposer}): no language model is used",
        style="dim",
    )


def _noting(display: Observer, begun: list[str]) -> Observer:
    """The display, and the run's name in `begun` once there is something to resume."""

    def observe(event: Event) -> None:
        if isinstance(event, Started):
            begun.append(event.run)
        display(event)

    return observe
