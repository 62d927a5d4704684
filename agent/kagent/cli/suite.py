"""`kagent suite`: a small search for every problem of a list, and one report over all."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

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
from kagent.text import local_time

if TYPE_CHECKING:
    from kagent_sandbox.data.kind import Kind
    from rich.console import RenderableType

    from kagent.suite.record import Suite
    from kagent.suite.results import SuiteResults

suites = typer.Typer(no_args_is_help=True, help="Search for kernels for every problem of a list.")
app.add_typer(suites, name="suite", rich_help_panel=EVOLVE)

BUDGET = 4
PAGE = "report.html"


PROBLEMS = "Tasks by name, folders of tasks or of other suites' problems, or such files."
ImportTimeOption = Annotated[
    str, typer.Option(help="Most CPU time that the import of a problem takes.")
]
IMPORT_TIME = "10m"
ToOption = Annotated[Path | None, typer.Option("--to", help="Folder of the suite (suites/NAME).")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with a suite; finished problems stay.")
]


@suites.command(name="import")
def import_(
    problems: Annotated[list[str], typer.Argument(metavar="PROBLEM...", help=PROBLEMS)],
    kind: Annotated[
        str, typer.Option("--kind", metavar="gpu|cpu", help="Kind of device that seeds are for.")
    ] = "gpu",
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    import_time: ImportTimeOption = IMPORT_TIME,
    to: ToOption = None,
    resume: ResumeOption = False,
    at_once: Annotated[
        int | None,
        typer.Option(help="Problems to import at once (half of the cores).", min=1, max=256),
    ] = None,
) -> None:
    """Make the tasks of a suite, without a GPU. `suite run --resume` goes on with the searches."""
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.process.cores import usable_cores

    from kagent.suite.problems import Problem
    from kagent.suite.record import Suite, read_record
    from kagent.suite.running import CORES_OF_IMPORT, SuiteRunner, require_devices
    from kagent.suite.view import imported_line, imported_text

    if kind not in get_args(Kind):
        raise UserError(f"--kind {kind}: expected gpu or cpu")
    import_s = _import_seconds(import_time)
    folder, sources = _folder(problems, to), _sources(problems)
    if resume:
        suite = _same_sources(read_record(folder, Suite), folder, sources).again()
        if suite.kind != kind:
            raise UserError(
                f"{folder}: a suite for a {suite.kind.upper()}, and --kind is {kind}: begin "
                "another with --to"
            )
    else:
        _require_none(folder)
        suite = _new(sources, {"budget": BUDGET}, "gpu" if kind == "gpu" else "cpu")
    if at_once is None:
        at_once = max(1, usable_cores() // CORES_OF_IMPORT) if kind == "gpu" else 1
    require_devices(suite.kind, (), at_once)
    with _begun(folder, suite, isolation) as say:

        def imported(problem: Problem) -> None:
            line = imported_line(problem, runner.suite.of(problem))
            (err if err.is_terminal else out).print(line, soft_wrap=True)

        session = {"jobs": jobs, "isolation": isolation}
        runner = SuiteRunner(folder, suite, session, import_s, say, lambda _: None)
        interrupted = False
        try:
            runner.import_all(at_once, imported)
        except KeyboardInterrupt:
            interrupted = True
    out.print(imported_text(runner.suite), soft_wrap=True)
    if interrupted:
        _say_resume("import", (*problems, "--kind", kind), to)
        raise typer.Exit(INTERRUPTED)
    words = shlex.join(["kagent", "suite", "run", "--resume", "--to", str(folder)])
    err.print(Text("where there is such a device, go on with: ").append(words, "bold"))


@suites.command()
def run(
    problems: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROBLEM...",
            help=f"{PROBLEMS} None with --resume and --to: those of the suite.",
        ),
    ] = None,
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
    import_time: ImportTimeOption = IMPORT_TIME,
    to: ToOption = None,
    resume: ResumeOption = False,
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
    from kagent.suite.problems import Problem
    from kagent.suite.record import Suite, read_record
    from kagent.suite.results import read_results, result_of
    from kagent.suite.running import SuiteRunner, require_devices
    from kagent.suite.view import problem_line, results_view

    import_s = _import_seconds(import_time)
    if devices == ["cpu"]:
        use_device("cpu")  # before anything asks whether there is a GPU
    problems = problems or []
    if not problems and not (resume and to):
        raise UserError("no problems are given: name some, or a suite with --resume --to FOLDER")
    folder, sources = _folder(problems, to), _sources(problems)
    given = {
        "budget": budget,
        "lang": lang,
        "model": ",".join(model) if model else None,
        "max_time": max_time,
    }
    if resume:
        suite = _resumed(read_record(folder, Suite), folder, sources, given)
    else:
        _require_none(folder)
        suite = _new(sources, {**given, "budget": BUDGET if budget is None else budget})
    places = tuple(devices or ())
    require_devices(suite.kind, places, at_once)
    with _begun(folder, suite, isolation) as say:

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
            _say_resume("run", problems, to)
            raise
    results = read_results(folder, runner.suite)
    _print(results_view(results))
    out.print(str(_write_page(results, folder / PAGE)), soft_wrap=True)
    if interrupted:
        _say_resume("run", problems, to)
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
    from kagent.runs.files import place_for
    from kagent.suite.record import Suite, read_record
    from kagent.suite.results import read_results, results_json
    from kagent.suite.view import results_view

    if output is not None and not json_:
        place_for(output)
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


def _sources(problems: Sequence[str]) -> tuple[str, ...]:
    from kagent.suite.problems import absolute

    return tuple(absolute(p) for p in problems)


def _import_seconds(text: str) -> float:
    """Most seconds of CPU time of an import.

    Raises:
        UserError: It is no time.
    """
    from kagent.config.values import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as e:
        raise UserError(f"--import-time: {e}") from None


def _require_none(folder: Path) -> None:
    """Make sure that no suite is there, and that one can be.

    Raises:
        UserError: One is, or the folder can be neither written nor made.
    """
    from kagent.runs.files import require_folder
    from kagent.suite.record import Suite

    if (folder / Suite.FILE).exists():
        raise UserError(
            f"{folder}: a suite is there: --resume goes on with it, --to begins another"
        )
    require_folder(folder)


def _new(sources: tuple[str, ...], given: Mapping[str, object], kind: Kind | None = None) -> Suite:
    """A suite that begins, for a kind of device or for the one at hand.

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
        kind=kind or kind_here(config, "these problems"),
        problems=tuple(find_problems(sources)),
        version=resources.version(),
        started=local_time(),
    )


def _resumed(
    suite: Suite, folder: Path, sources: tuple[str, ...], given: Mapping[str, object]
) -> Suite:
    """A suite that goes on as it began. Before the first search, its settings may change.

    Raises:
        UserError: Something else was given than it began with.
        RunError: It began on another kind of device.
    """
    from kagent.evolve.proposers import check_models
    from kagent.evolve.session import kind_here
    from kagent.suite.record import Settings

    suite = _same_sources(suite, folder, sources)
    if not any(progress.run for progress in suite.progress.values()):
        now = {name: value for name, value in given.items() if value is not None}
        config = load_config(**{**suite.settings.options, **now})
        check_models(config)
        suite = replace(suite, settings=Settings.of(config))
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


@contextlib.contextmanager
def _begun(folder: Path, suite: Suite, isolation: str | None) -> Iterator[Callable[[str], None]]:
    """A suite's folder, taken by this process and with the record; what is being done is shown."""
    from kagent.runs.files import clear_errors, take_lock
    from kagent.suite.record import write_record

    isolate(isolation)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    with lock:
        write_record(folder, suite)
        with status(quiet=False) as say:
            yield say


def _same_sources(suite: Suite, folder: Path, sources: tuple[str, ...]) -> Suite:
    """A suite, if it is of these sources; none stand for its own.

    Raises:
        UserError: It is one of others.
    """
    if sources and suite.sources != sources:
        raise UserError(
            f"{folder}: a suite of {' '.join(suite.sources)}, not of {' '.join(sources)}: name "
            "its folder with --to, or begin another there"
        )
    return suite


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _print(parts: Iterable[RenderableType]) -> None:
    for part in parts:
        out.print(part, soft_wrap=isinstance(part, Text))


def _write_page(results: SuiteResults, path: Path) -> Path:
    from kagent.runs.files import place_for, write_file
    from kagent.suite.page import render

    try:
        write_file(place_for(path), render(results))
    except OSError as e:
        raise UserError(f"{path}: cannot be written ({e.strerror})") from None
    return path


def _say_resume(command: str, problems: Sequence[str], to: Path | None) -> None:
    words = ["kagent", "suite", command, *problems, "--resume"]
    words += [] if to is None else ["--to", str(to)]
    err.print(
        Text("all finished problems are kept. Resume with: ").append(shlex.join(words), "bold")
    )
