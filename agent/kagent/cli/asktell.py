"""`kagent ask`, `tell`, `judge` and `merge`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import RunError, UserError
from rich.text import Text

from kagent.cli.app import (
    DRIVE,
    INTERRUPTED,
    DeviceOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    LangName,
    MemoryOption,
    RunArgument,
    RunsOption,
    app,
    complete_run_or_task,
    isolate,
    out,
    print_json,
    status,
)
from kagent.config.settings import load_config
from kagent.config.values import parse_seconds
from kagent.runs.events import (
    Event,
    Observer,
    PhaseBegan,
    Progress,
    Recorded,
    Stop,
    Withdrawn,
)
from kagent.ui.terminal import Terminal

if TYPE_CHECKING:
    from kagent.runs.store import RunStore


@app.command(rich_help_panel=DRIVE)
def ask(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TASK",
            help="A run to continue, or a task for a new run.",
            autocompletion=complete_run_or_task,
        ),
    ],
    count: Annotated[int, typer.Option("-n", help="Prompts to write.", min=1)] = 1,
    list_: Annotated[
        bool, typer.Option("--list", help="List prompts without an answer; write none.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            help="Target of a new run: sm_90a, ..., cpu (this machine's GPU, else its CPU)."
        ),
    ] = None,
    lang: Annotated[
        LangName | None,
        typer.Option(help="Of a new run: language of the seeds (any)."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of a new run's random decisions (0).")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Folder with prompt templates and cards of your own.")
    ] = None,
    memory: MemoryOption = None,
    runs: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Write a run's next prompts as files, for whoever answers them."""
    from kagent.asktell import open_asks, open_run, views
    from kagent.asktell.state import read_state
    from kagent.runs.manifest import find_run
    from kagent.runs.store import RunStore
    from kagent.tasks import is_task, task_names

    config = load_config(lang=lang, seed=seed, prompts=prompts, runs=runs, memory=memory)
    if is_task(run):
        if list_:
            raise UserError(f"{run}: a task; --list is for a run (kagent runs)")
        with status(quiet=json_) as say:
            folder = open_run.new_run(run, config, target, say)
    else:
        given = {"--target": target, "--lang": lang, "--seed": seed, "--memory": memory}
        try:
            folder = find_run(config.runs, run)
        except RunError as e:
            names = ", ".join(task_names())
            raise UserError(f"{e}; nor is it a task: there are {names}, or a folder") from None
        for flag in (f for f, value in given.items() if value is not None):
            raise UserError(f"{flag} is for a new run, and {folder} exists")
    made = [] if list_ else open_asks.ask(folder, count, config)
    with RunStore.open(folder, write=False) as store:
        manifest, state = store.manifest, read_state(store.history())
        shown = open_asks.open_asks(store, state) if list_ else made
    flags = _flags(folder)
    if json_:
        rows = [views.question_json(q) for q in shown]
        print_json({"run": folder.name, "folder": str(folder), "asks": rows})
        return
    out.print(Text(f"{folder}: {manifest.task} for {manifest.device}", "bold"))
    if not shown:
        out.print("no prompt waits for an answer")
        return
    out.print(views.questions_view(shown, state))
    for line in views.how_to_answer(folder.name, manifest, flags):
        out.print(line, soft_wrap=True)


@app.command(rich_help_panel=DRIVE)
def tell(
    run: RunArgument,
    files: Annotated[
        list[Path],
        typer.Argument(help="Replies (0007.md: of ask 7), or kernels (.py) without an ask."),
    ],
    queue: Annotated[
        bool, typer.Option("--queue", help="Accept without timing: kagent judge does that.")
    ] = False,
    ask: Annotated[
        int | None, typer.Option("--ask", help="The ask that the file answers.", min=0)
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Who answered: a model's name, or a person's.")
    ] = None,
    parent: Annotated[
        int | None,
        typer.Option(help="Parent of an unasked kernel (the incumbent).", min=0),
    ] = None,
    race: Annotated[
        bool, typer.Option("--race", help="Race the finalists on hidden cases at the end.")
    ] = False,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    runs: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Take answers into a run, and evaluate them here unless they are queued."""
    from kagent.asktell import answers, judging, views
    from kagent.asktell.open_run import ready
    from kagent.asktell.precheck import precheck
    from kagent.asktell.state import read_state
    from kagent.evolve.stored_run import task_of_run
    from kagent.runs.manifest import find_run
    from kagent.runs.store import RunStore

    if queue and race:
        raise UserError("--race needs answers that are evaluated here: omit --queue")
    config = load_config(jobs=jobs, runs=runs, isolation=isolation)
    isolate(isolation)
    folder = find_run(config.runs, run)
    flags = _flags(folder)
    with RunStore.open(folder) as store:
        manifest = store.manifest
        task = task_of_run(folder, manifest)
        ready(store, task)
        if not queue:
            judging.can_judge(manifest, folder, config)
        read = answers.read_answers(files, store, read_state(store.history()), task.entry, ask)
        read = [answers.answered_by(each, by) for each in read]
        accepted = answers.accept(store, task, read, config.budget, parent)
        if not json_:
            for each in accepted:
                out.print(views.accepted_text(each), soft_wrap=True)
        if queue:
            state = read_state(store.history())
            new = [a.id for a in accepted if not a.again]
            show = _beside_spinner(json_)
            with status(quiet=json_) as say:
                for looked in precheck(store, task, state, new, config.jobs, say):
                    show(views.looked_text(looked, state.proposals[looked.id].name))
            judged = None
        else:
            with _watching(store, json_) as observe:
                judged = judging.judge_all(store, task, config, observe, race=race)
        history = store.history()
    if json_:
        print_json(views.told_json(accepted, read_state(history).looked, history))
    elif judged is not None:
        for part in views.judged_view(judged, store.manifest, flags):
            out.print(part, soft_wrap=isinstance(part, Text))
    else:
        for line in views.queued_text(history, folder, flags):
            out.print(line, soft_wrap=True)
    _exit(judged.stop if judged is not None else None)


@app.command(rich_help_panel=DRIVE)
def judge(
    run: RunArgument,
    deadline: Annotated[
        str | None, typer.Option(help="End after 90s, 8m, 1h30m; the rest waits.")
    ] = None,
    race: Annotated[
        bool, typer.Option("--race", help="Race the finalists on hidden cases at the end.")
    ] = False,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    runs: RunsOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Judge what waits in a run, from its folder alone: on the machine that has the device."""
    from kagent.asktell import judging, views
    from kagent.evolve.stored_run import task_of_run
    from kagent.runs.manifest import find_run
    from kagent.runs.store import RunStore

    begun_s = time.monotonic()
    config = load_config(jobs=jobs, runs=runs, isolation=isolation)
    isolate(isolation)
    deadline_s = None if deadline is None else judging.deadline_of(begun_s, _seconds(deadline))
    folder = find_run(config.runs, run)
    flags = _flags(folder)
    with RunStore.open(folder) as store:
        task = task_of_run(folder, store.manifest)
        with _watching(store, json_) as observe:
            judged = judging.judge_all(
                store, task, config, observe, deadline_s=deadline_s, race=race
            )
        manifest = store.manifest
    if json_:
        print_json(views.judged_json(judged))
    else:
        for part in views.judged_view(judged, manifest, flags):
            out.print(part, soft_wrap=isinstance(part, Text))
    _exit(judged.stop)


@app.command(rich_help_panel=DRIVE)
def merge(
    run: RunArgument,
    copy: Annotated[
        Path, typer.Argument(metavar="FROM", help="Folder of a copy that was judged elsewhere.")
    ],
    runs: RunsOption = None,
    json_: JsonOption = False,
) -> None:
    """Bring verdicts home from a copy of a run that was judged elsewhere."""
    from kagent_sandbox.data.records import to_json

    from kagent.asktell import merging, views
    from kagent.runs.manifest import find_run
    from kagent.runs.store import read_history

    folder = find_run(load_config(runs=runs).runs, run)
    merged = merging.merge(folder, copy)
    if json_:
        print_json(to_json(merged))
        return
    _, history = read_history(folder)
    out.print(views.merged_text(merged, history), soft_wrap=True)
    out.print(views.best_text(history, folder), soft_wrap=True)


@contextlib.contextmanager
def _watching(store: RunStore, quiet: bool) -> Iterator[Observer]:
    """A run's verdicts on stdout, a line each; what is being done on stderr."""
    from kagent.ui.live import record_line, withdrawn_text
    from kagent.ui.run_view import budget_of

    budget = budget_of(store.manifest, store.history())
    show = _beside_spinner(quiet)
    with status(quiet=quiet) as say:

        def observe(event: Event) -> None:
            if isinstance(event, PhaseBegan):
                say(event.phase.value)
            elif isinstance(event, Progress):
                say(event.text)
            elif isinstance(event, Withdrawn):
                show(Text(withdrawn_text(event), "red"))
            elif isinstance(event, Recorded):
                show(record_line(event, budget))

        yield observe


def _beside_spinner(quiet: bool) -> Callable[[Text], None]:
    """Prints lines on stdout. A spinner on a terminal takes all that is printed for its own: where
    stdout goes elsewhere, lines must not follow it.
    """
    if quiet:
        return lambda _line: None
    if sys.stdout.isatty():
        return lambda line: out.print(line, soft_wrap=True, crop=False)
    plain = Terminal(file=sys.stdout, highlight=False, markup=False, width=out.width)
    return lambda line: plain.print(line, soft_wrap=True, crop=False)


def _flags(folder: Path) -> list[str]:
    """Options that a next command needs to find the run by its name."""
    return ["--runs", str(folder.parent)] if folder.parent != load_config().runs else []


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as e:
        raise UserError(f"--deadline {text}: {e}") from None


def _exit(stop: Stop | None) -> None:
    if stop in (Stop.INTERRUPTED, Stop.NO_SEED):
        raise typer.Exit(INTERRUPTED if stop is Stop.INTERRUPTED else 1)
