"""`kagent evolve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import KagentError, TaskError
from rich.text import Text

from kagent.cli.app import (
    EVOLVE,
    INTERRUPTED,
    NOT_FASTER,
    AcceleratorOption,
    DeviceOption,
    FreshOption,
    IsolationOption,
    JobsOption,
    LangOption,
    MemoryOption,
    ModelOption,
    OnOption,
    RunsOption,
    app,
    complete_run,
    complete_task,
    err,
    out,
    refuse_device,
    write_slurm_script,
)
from kagent.config.settings import Config, load_config
from kagent.fleet.slurm import SLURM, Continuation, run_continues
from kagent.runs.events import Event, Observer, Started, Stop

if TYPE_CHECKING:
    from kagent.evolve.session import Outcome


@app.command(rich_help_panel=EVOLVE)
def evolve(
    task: Annotated[
        str,
        typer.Argument(
            help="A task's name (kagent tasks), or its folder.", autocompletion=complete_task
        ),
    ],
    budget: Annotated[
        int | None, typer.Option(help="Proposals to evaluate (50); seeds are free.", min=0)
    ] = None,
    lang: LangOption = None,
    model: ModelOption = None,
    base_url: Annotated[
        str | None, typer.Option(help="Address of an OpenAI-compatible endpoint.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of the sampling (the endpoint's).")
    ] = None,
    bandit: Annotated[
        bool | None,
        typer.Option(
            "--bandit", help="Prefer the models that gain most per dollar.", show_default=False
        ),
    ] = None,
    proposer: Annotated[
        str | None,
        typer.Option(help="tune, model or replay:RUN (model if one is set, else tune)."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Folder with prompt templates and cards of your own.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random decisions (0).")] = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    judges: Annotated[
        int | None, typer.Option(help="Judges, each on a device of its own (1).", min=1)
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(help="Model calls, or proposals, at once (4).", min=1)
    ] = None,
    configs: Annotated[
        int | None, typer.Option(help="Configurations tried per candidate (1).", min=1)
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            help="Configurations of a model's kernel tried before its verdict (16; 1: none).",
            min=1,
        ),
    ] = None,
    fresh: FreshOption = None,
    max_cost: Annotated[
        float | None, typer.Option(help="Dollars that the run may cost, calls in flight included.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the run may use, calls in flight included.")
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(help="End the search after 90s, 8m, 1h30m; the final race follows."),
    ] = None,
    stop_at: Annotated[
        float | None, typer.Option(help="End at this share of the roofline, such as 0.95.")
    ] = None,
    early_stop: Annotated[
        bool | None,
        typer.Option(
            "--early-stop/--no-early-stop",
            help="End when there is nothing left to gain (on).",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        bool | None,
        typer.Option(
            "--profile/--no-profile",
            help="Take ncu's counters of each incumbent on a GPU, where ncu works (on).",
            show_default=False,
        ),
    ] = None,
    memory: MemoryOption = None,
    runs: RunsOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue a run: its name, path, or 'latest'.", autocompletion=complete_run
        ),
    ] = None,
    on: OnOption = None,
    accelerator: AcceleratorOption = None,
    device: DeviceOption = None,
) -> None:
    """Evolve a task's kernel: propose, build, check, measure, keep the fastest lineage."""
    from kagent.evolve import session
    from kagent.runs.manifest import find_run, read_manifest
    from kagent.runs.store import read_history
    from kagent.tasks import find_task
    from kagent.ui import end_of_run
    from kagent.ui.live import display_for

    where = SLURM if on == SLURM else load_config(on=on).on
    refuse_device(device, where)
    if where == SLURM:
        name = find_task(task).name
        runs_of_jobs = load_config(runs=runs).runs
        write_slurm_script(name, Continuation() if resume else run_continues(runs_of_jobs))
        return
    config = load_config(
        budget=budget,
        lang=lang,
        model=",".join(model) if model else None,
        base_url=base_url,
        temperature=temperature,
        bandit=bandit,
        proposer=proposer,
        prompts=prompts,
        seed=seed,
        jobs=jobs,
        isolation=isolation,
        judges=judges,
        in_flight=in_flight,
        configs=configs,
        tune=tune,
        fresh=fresh,
        max_cost=max_cost,
        max_tokens=max_tokens,
        max_time=max_time,
        stop_at=stop_at,
        early_stop=early_stop,
        profile=profile,
        memory=memory,
        runs=runs,
        on=on,
        accelerator=accelerator,
    )
    folder = find_run(config.runs, resume) if resume is not None else None
    found = find_task(task)
    manifest = read_manifest(folder) if folder is not None else None
    # Report impossible settings before anything starts.
    will_be = session.resolve_config(config, found, manifest, folder, config.flags)
    session.choose_seeds(found, will_be)
    if folder is not None and budget is not None:
        session.require_budget(budget, folder, read_history(folder)[1])
    out.print(_opening(will_be))
    runs_used = config.runs if folder is None else folder.parent
    flags = dict(end_of_run.next_flags(runs_used, load_config().runs))
    if will_be.proposer == "model":
        given = {"--model": ",".join(model or ()), "--base-url": base_url or ""}
        flags.update({name: value for name, value in given.items() if value})
    begun: list[str] = []
    try:
        with display_for(out, max_dollars=config.max_cost) as display:
            outcome = session.evolve(task, config, _noting(display, begun), folder)
    except (KagentError, KeyboardInterrupt) as e:
        if begun and not isinstance(e, TaskError):  # a task that was mended is another one
            again = end_of_run.resume_command(task, begun[0], flags)
            err.print(Text("all recorded work is kept. Resume with: ").append_text(again))
        elif isinstance(e, KeyboardInterrupt):
            err.print("kagent: interrupted before the run began; nothing was stored")
        if isinstance(e, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise
    for part in end_of_run.end_of_run(outcome, task, matrix=found.matrix, flags=flags):
        out.print(part, soft_wrap=isinstance(part, Text))  # commands and paths can be copied
    raise typer.Exit(exit_code(outcome))


def exit_code(outcome: Outcome) -> int:
    """0: FASTER, or a run that goes on another time. 3: TIE or SLOWER. 1: nothing passed."""
    final = outcome.history.race
    if outcome.stop is Stop.INTERRUPTED:
        return INTERRUPTED
    best = outcome.history.lineage.incumbent if final is None else final.winner
    if best is None:
        return 1
    return NOT_FASTER if final is not None and final.verdict is not SpeedVerdict.FASTER else 0


def _opening(config: Config) -> Text:
    if config.proposer == "model":
        models = ", ".join(f"{m.name} at {m.host}" for m in config.model_configs())
        text = f"proposals come from {models}"
    elif config.proposer == "tune":
        text = "proposals come from the built-in tuner (tune): no language model is used"
    else:
        run = config.proposer.removeprefix("replay:")
        text = f"proposals are those of {run}, measured anew: no language model is used"
    return Text(text, style="dim")


def _noting(display: Observer, begun: list[str]) -> Observer:
    """The display, and the run's name in `begun` once there is something to resume."""

    def observe(event: Event) -> None:
        if isinstance(event, Started):
            begun.append(event.run)
        display(event)

    return observe
