"""`kagent suite`: a small search for every problem of a list, and one report over all."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import KagentError, RunError, UserError
from rich.text import Text

from kagent import resources
from kagent.cli.app import (
    EVOLVE,
    INTERRUPTED,
    DeviceOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    LangOption,
    ModelOption,
    app,
    err,
    isolate,
    out,
    print_json,
    status,
)
from kagent.config.settings import load_config

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kagent.suite.record import Suite
    from kagent.suite.results import SuiteResults

suites = typer.Typer(no_args_is_help=True, help="Search for kernels for every problem of a list.")
app.add_typer(suites, name="suite", rich_help_panel=EVOLVE)

BUDGET = 4
PAGE = "report.html"


@suites.command()
def run(
    problems: Annotated[
        list[str],
        typer.Argument(
            metavar="PROBLEM...",
            help="Tasks by name, folders of tasks or of other suites' problems, or such files.",
        ),
    ],
    budget: Annotated[
        int | None,
        typer.Option(help=f"Proposals to evaluate for each problem ({BUDGET}).", min=0),
    ] = None,
    lang: LangOption = None,
    model: ModelOption = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    max_time: Annotated[
        str | None,
        typer.Option(help="End each search after 90s, 8m, 1h30m; its final race follows."),
    ] = None,
    import_time: Annotated[
        str, typer.Option(help="Most time that the import of a problem takes.")
    ] = "10m",
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder of the suite (suites/NAME).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a suite; finished problems stay.")
    ] = False,
    at_once: Annotated[
        int, typer.Option(help="Problems of each GPU to work on at once.", min=1, max=64)
    ] = 1,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="cpu|cuda:N|UUID",
            help="Device to use (the first GPU, else the CPU); GPUs may be repeated.",
            envvar="KAGENT_DEVICE",
        ),
    ] = None,
) -> None:
    """Run a small search for each problem; one that fails is recorded, and the next one follows."""
    from kagent.config.devices import use_device
    from kagent.config.values import parse_seconds
    from kagent.runs.files import clear_errors, take_lock
    from kagent.suite.problems import Problem, absolute
    from kagent.suite.record import Suite, read_record, write_record
    from kagent.suite.results import read_results, result_of
    from kagent.suite.running import SuiteRunner, require_devices
    from kagent.suite.view import problem_line, results_view

    try:
        import_s = parse_seconds(import_time)
    except ValueError as e:
        raise UserError(f"--import-time: {e}") from None
    if devices == ["cpu"]:
        use_device("cpu")  # before anything asks whether there is a GPU
    folder = _folder(problems, to)
    sources = tuple(absolute(p) for p in problems)
    given = {
        "budget": budget,
        "lang": lang,
        "model": ",".join(model) if model else None,
        "max_time": max_time,
    }
    if resume:
        suite = _resumed(read_record(folder, Suite), folder, sources, given)
    elif (folder / Suite.FILE).exists():
        raise UserError(
            f"{folder}: a suite is there: --resume goes on with it, --to begins another"
        )
    else:
        suite = _new(sources, {**given, "budget": BUDGET if budget is None else budget})
    places = tuple(devices or ())
    require_devices(suite.kind, places, at_once)
    isolate(isolation)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    with lock:
        write_record(folder, suite)
        with status(quiet=False) as say:

            def finished(problem: Problem) -> None:
                line = problem_line(result_of(folder, runner.suite, problem))
                # Above the spinner, where there is one.
                (err if err.is_terminal else out).print(line, soft_wrap=True)

            session = {"jobs": jobs, "isolation": isolation}
            runner = SuiteRunner(folder, suite, session, import_s, say, finished, places, at_once)
            interrupted = False
            try:
                runner.run()
            except KeyboardInterrupt:
                interrupted = True
            except KagentError:
                _say_resume(problems, to)
                raise
    results = read_results(folder, runner.suite)
    _print(results_view(results))
    out.print(str(_write_page(results, folder / PAGE)), soft_wrap=True)
    if interrupted:
        _say_resume(problems, to)
        raise typer.Exit(INTERRUPTED)
    if not results.all.correct:
        raise typer.Exit(1)


@suites.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A suite's folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"The page's file (FOLDER/{PAGE}).")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Print a suite's results, and write them as one HTML page that needs nothing else."""
    from kagent.suite.record import Suite, read_record
    from kagent.suite.results import read_results, results_json
    from kagent.suite.view import results_view

    results = read_results(folder, read_record(folder, Suite))
    if json_:
        if output is not None:
            raise UserError("--json prints and writes no page: omit --output")
        print_json(results_json(results))
        return
    _print(results_view(results))
    out.print(str(_write_page(results, output or folder / PAGE)), soft_wrap=True)


@suites.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A suite's folder.")],
    after: Annotated[Path, typer.Argument(help="Another one's, over the same problems.")],
    race: Annotated[
        bool, typer.Option("--race", help="Race the two winners of every problem now.")
    ] = False,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Compare two suites: only problems with the same task, raced on the same device."""
    from kagent.suite.compare import NOT_RACED, pair_json, pair_up, pair_view, race_winners
    from kagent.suite.record import TASKS, Suite, read_record
    from kagent.suite.results import read_results

    folders = before, after
    sides = [read_results(folder, read_record(folder, Suite)) for folder in folders]
    found = pair_up(*sides)
    if race:
        config = load_config(jobs=jobs, isolation=isolation)
        isolate(config.isolation)
        with status(quiet=json_) as say:
            found = race_winners(found, folders, config, say)
    if json_:
        print_json(pair_json(found))
    else:
        _print(pair_view(found))
    if any(p.no_race == NOT_RACED for p in found.pairs):
        raise typer.Exit(INTERRUPTED)
    if not found.pairs:
        raise RunError(
            f"{before} and {after}: no problem compares. A suite over the tasks that another one "
            f"made has the same problems: kagent suite run {before / TASKS} --to FOLDER"
        )


def _folder(problems: Sequence[str], to: Path | None) -> Path:
    """Folder of a suite.

    Raises:
        UserError: There are several sources, and it has no name.
    """
    if to is None and len(problems) > 1:
        raise UserError(f"{len(problems)} sources have no common name: name the suite with --to")
    return (to or Path("suites") / Path(problems[0]).resolve().stem).resolve()


def _new(sources: tuple[str, ...], given: Mapping[str, object]) -> Suite:
    """A suite that begins.

    Raises:
        UserError: There are no such problems, or a setting does not fit.
    """
    from kagent.evolve.proposers import check_models
    from kagent.evolve.session import kind_here
    from kagent.suite.problems import find_problems
    from kagent.suite.record import Settings, Suite

    config = load_config(**given)
    check_models(config)
    return Suite(
        sources=sources,
        settings=Settings.of(config),
        kind=kind_here(config, "these problems"),
        problems=tuple(find_problems(sources)),
        version=resources.version(),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _resumed(
    suite: Suite, folder: Path, sources: tuple[str, ...], given: Mapping[str, object]
) -> Suite:
    """A suite that goes on as it began.

    Raises:
        UserError: Something else was given than it began with.
        RunError: It began on another kind of device.
    """
    from kagent.evolve.session import kind_here

    if suite.sources != sources:
        raise UserError(
            f"{folder}: a suite of {' '.join(suite.sources)}, not of {' '.join(sources)}: name "
            "its folder with --to, or begin another there"
        )
    config = load_config(**{**given, "lang": given.get("lang") or suite.settings.lang})
    for name, value in given.items():
        own, now = getattr(suite.settings, name), getattr(config, name)
        if value is not None and now != own:
            raise UserError(
                f"{folder}: began with {name} {_text(own)}, and {_text(now)} was given: its "
                "problems would not compare; begin another suite with --to"
            )
    if kind_here(config, "these problems") != suite.kind:
        raise RunError(
            f"{folder}: began on a {suite.kind.upper()}, and this is none: begin another suite "
            "with --to"
        )
    return suite.again()


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _print(parts: Iterable[RenderableType]) -> None:
    for part in parts:
        out.print(part, soft_wrap=isinstance(part, Text))


def _write_page(results: SuiteResults, path: Path) -> Path:
    from kagent.runs.files import write_file
    from kagent.suite.page import render

    try:
        write_file(path, render(results))
    except OSError as e:
        raise UserError(f"{path}: cannot be written ({e.strerror})") from None
    return path


def _say_resume(problems: Sequence[str], to: Path | None) -> None:
    words = ["kagent", "suite", "run", *problems, "--resume"]
    words += [] if to is None else ["--to", str(to)]
    err.print(
        Text("all finished problems are kept. Resume with: ").append(shlex.join(words), "bold")
    )
