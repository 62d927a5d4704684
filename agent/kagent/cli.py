"""The `kagent` command. All printing of the program happens here and in `display`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from kagent_sandbox.errors import KagentError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kagent.config import load_config

if TYPE_CHECKING:
    from kagent.config import Config
    from kagent.race import FinalRace
    from kagent.session import Outcome

app = typer.Typer(
    help="Evolve GPU kernels, and keep only the speed-ups that can be proved.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Tables need room, and a pipe has no width of its own.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
err = Console(stderr=True, highlight=False, soft_wrap=True)

TaskOption = Annotated[str, typer.Option("--task", help="A task's name, or its folder's path.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
JobsOption = Annotated[int | None, typer.Option(help="Builds at once (all cores).", min=1)]
RunsOption = Annotated[Path | None, typer.Option(help="Folder of run folders (runs/).")]


def main() -> None:
    """Run the command line; every error is one clear text and a non-zero exit."""
    try:
        app(standalone_mode=True)
    except KagentError as e:
        err.print(Text(f"kagent: {e}", style="red"))
        sys.exit(e.exit_code)
    except KeyboardInterrupt:
        err.print("kagent: interrupted")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away: nothing is left to tell it
        sys.exit(1)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, a line each elsewhere; on stderr, so that stdout stays clean."""
    if quiet:
        yield lambda _text: None
    elif err.is_terminal:
        with err.status("starting") as status:
            yield status.update
    else:
        yield lambda text: err.print(text)


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
    from kagent import session
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
    with display_for(out) as display:
        outcome = session.evolve(task, config, display, folder)
    _report(outcome, task, matrix=found.matrix)
    if outcome.stop in ("interrupted", "no seed"):
        raise typer.Exit(130 if outcome.stop == "interrupted" else 1)


def _opening(config: Config) -> Text:
    return Text(
        f"proposals come from the built-in tuner ({config.proposer}): no language model is used",
        style="dim",
    )


def _report(outcome: Outcome, task: str, *, matrix: bool) -> None:
    """The end of a run: winner, hidden cases against baselines, losses, path, next command."""
    from kagent import tables
    from kagent.display import clock
    from kagent.show import path_view

    lineage, run = outcome.history.lineage, outcome.folder
    rejected = sum(lineage.rejections().values())
    out.print(
        f"\n[bold]{run}[/bold]: {lineage.counted} evaluated in {clock(outcome.history.elapsed_s)}, "
        f"{len(lineage.passed())} passed, {rejected} rejected; ended: {outcome.stop.value}"
    )
    best = lineage.incumbent
    if best is None:
        out.print("no candidate passed; kagent show tells why: " + f"kagent show {run}")
        return
    final = outcome.history.race
    winner = lineage[final.winner] if final is not None and final.winner is not None else best
    out.print(path_view(lineage, winner))
    if final is not None:
        out.print(Text("final race, on hidden cases, beside the baselines", style="bold"))
        out.print(tables.race_table(final.race, matrix=matrix))
        out.print(_verdict(final, winner.id, winner.proposal.name))
    source = run / "kernels" / f"{winner.proposal.kernel}.py"
    out.print(f"winner: {source}")
    if outcome.stop in ("interrupted", "time"):
        out.print(f"go on:  kagent evolve {task} --resume {run.name}", style="bold")
    out.print(f"next:   kagent show {run.name} {winner.id}", style="bold")


def _verdict(final: FinalRace, winner: int, name: str) -> Text:
    from kagent_sandbox.race_result import BEST_OF_TORCH

    from kagent import tables

    overall = final.race.overall.get(str(winner), ())
    result = next((c for c in overall if c.against == BEST_OF_TORCH), None)
    if result is None:
        return Text("the race has no result for the winner", style="red")
    text = Text(
        f"#{winner} {name}: {result.ratio:.3f}× the best of eager and torch.compile "
        f"(95 %: {result.low:.3f}–{result.high:.3f})",
        style="bold green" if result.low > 1 else "bold",
    )
    lost = tables.losses(final.race, str(winner))
    text.append("\nit loses on: " + ", ".join(lost) if lost else "\nit loses on no case", "default")
    return text


@app.command()
def tasks(json_: JsonOption = False) -> None:
    """List the tasks that ship with kagent, and their seeds."""
    from kagent import tables
    from kagent.tasks import find_task, seeds_of, task_names

    known = [find_task(name) for name in task_names()]
    if json_:
        _print_json(
            [
                {
                    "name": t.name,
                    "summary": t.summary,
                    "signature": t.signature,
                    "folder": str(t.folder),
                    "seeds": [{"name": s.name, "language": s.language} for s in seeds_of(t)],
                    "gpu_bench": [c.name for c in t.gpu.bench],
                    "cpu_bench": [c.name for c in t.cpu.bench],
                }
                for t in known
            ]
        )
        return
    out.print(tables.tasks_table(known))


@app.command()
def build(
    file: Annotated[Path, typer.Argument(help="A candidate.")],
    task: TaskOption,
    target: Annotated[
        str | None, typer.Option(help="sm_80, sm_90a, sm_100, ... (sm_90a; C++: cpu).")
    ] = None,
    configs: Annotated[int, typer.Option(help="Configurations to build.", min=1)] = 1,
    full: Annotated[bool, typer.Option("--full", help="Print every plan line by line.")] = False,
    jobs: JobsOption = None,
    json_: JsonOption = False,
) -> None:
    """Compile a candidate, also without a GPU, and show its plans and kernels."""
    from kagent_sandbox.records import to_json
    from kagent_sandbox.verdict import Rejected

    from kagent import planview
    from kagent.tables import rejected_text
    from kagent.tasks import find_task
    from kagent.workbench import build_file

    with _status(quiet=json_) as say:
        say(f"building {file.name}")
        jobs = jobs or load_config().jobs
        built = build_file(find_task(task), file, target, configs=configs, jobs=jobs)
    if isinstance(built, Rejected):
        if json_:
            _print_json({"outcome": "rejected", "verdict": to_json(built)})
        else:
            out.print(rejected_text(file.name, built))
        raise typer.Exit(1)
    if json_:
        _print_json(planview.built_json(built))
    else:
        out.print(planview.built_view(built, full=full))
        out.print(f"built in {built.build_s:.2f} s")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A candidate.")],
    task: TaskOption,
    jobs: JobsOption = None,
    json_: JsonOption = False,
) -> None:
    """Check a candidate on all cases, against float64 and torch's own error."""
    from kagent_sandbox.records import to_json
    from kagent_sandbox.verdict import Rejected

    from kagent import tables
    from kagent.tasks import find_task
    from kagent.workbench import check_file

    with _status(quiet=json_) as say:
        say(f"building and checking {file.name}")
        checked = check_file(find_task(task), file, jobs=jobs or load_config().jobs)
    verdict = checked.verdict
    failed = isinstance(verdict, Rejected)
    if json_:
        _print_json(
            {
                "outcome": "rejected" if failed else "passed",
                "device": checked.device,
                "interpreted": checked.interpreted,
                "skipped": list(checked.skipped),
                "verdict": to_json(verdict) if isinstance(verdict, Rejected) else None,
                "errors": [] if isinstance(verdict, Rejected) else [to_json(e) for e in verdict],
            }
        )
    elif isinstance(verdict, Rejected):
        out.print(tables.rejected_text(file.name, verdict))
    else:
        out.print(tables.errors_table(verdict, checked.device))
        if checked.interpreted:
            skipped = f"; too large for it: {', '.join(checked.skipped)}" if checked.skipped else ""
            out.print(f"interpreted, not run on a GPU: values only{skipped}", style="yellow")
        out.print(f"{file.name}: correct in {len(verdict)} results", style="bold green")
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    files: Annotated[list[Path], typer.Argument(help="Candidates.")],
    task: TaskOption,
    configs: Annotated[int, typer.Option(help="Configurations tried per candidate.", min=1)] = 1,
    jobs: JobsOption = None,
    json_: JsonOption = False,
) -> None:
    """Time candidates beside every baseline on the task's benchmark cases."""
    from kagent_sandbox.records import to_json

    from kagent import tables
    from kagent.tasks import find_task
    from kagent.workbench import bench_files

    found = find_task(task)
    with _status(quiet=json_) as say:
        result = bench_files(
            found, files, jobs=jobs or load_config().jobs, configs=configs, say=say
        )
    if json_:
        _print_json(
            {
                "device": to_json(result.facts),
                "race": to_json(result.race),
                "rejected": {n: to_json(v) for n, v in result.rejected.items()},
            }
        )
    else:
        out.print(f"{found.name} on {result.facts.name}")
        if result.names:
            out.print(tables.race_table(result.race, matrix=found.matrix))
            out.print(tables.overall_table(result.race))
        for name, verdict in result.rejected.items():
            out.print(tables.rejected_text(name, verdict))
    if result.rejected:
        raise typer.Exit(1)


@app.command()
def runs(folder: RunsOption = None, json_: JsonOption = False) -> None:
    """List the runs."""
    from kagent import show as views

    where = load_config(runs=folder).runs
    rows = views.runs_json(where)
    if json_:
        _print_json(rows)
    elif rows:
        out.print(views.runs_view(rows))
    else:
        out.print(f"no runs in {where}: kagent evolve softmax starts one")


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="A run's name, path, or 'latest'.")],
    candidate: Annotated[int | None, typer.Argument(help="A candidate's id.", min=0)] = None,
    folder: Annotated[Path | None, typer.Option("--runs", help="Folder of run folders.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show a run, or one of its candidates."""
    from kagent import show as views
    from kagent import tables
    from kagent.runs import find_run

    store, history = views.read_history(find_run(load_config(runs=folder).runs, run))
    lineage = history.lineage
    if candidate is not None:
        found = views.find_candidate(lineage, candidate)
        if json_:
            _print_json(views.candidate_json(found))
        else:
            out.print(views.candidate_view(lineage, found))
        return
    if json_:
        _print_json(views.run_json(store, history))
        return
    out.print(views.run_view(store, history))
    matrix = store.manifest.matrix
    final = history.race
    if final is not None:
        out.print(Text("final race, on hidden cases", style="bold"))
        out.print(tables.race_table(final.race, matrix=matrix))
        if final.winner is not None:
            name = lineage[final.winner].proposal.name
            out.print(_verdict(final, final.winner, name))


@app.command()
def doctor(json_: JsonOption = False) -> None:
    """Say what this machine can do: compilers, GPU, versions, isolation as observed."""
    from kagent.doctor import Level, examine

    with _status(quiet=json_) as say:
        found = examine(say)
    if json_:
        _print_json([{"level": f.level.value, "name": f.name, "text": f.text} for f in found])
    else:
        styles: dict[Any, str] = {Level.OK: "green", Level.MISSING: "yellow", Level.BROKEN: "red"}
        table = Table.grid(padding=(0, 2))
        for f in found:
            table.add_row(Text(f.level.value, styles[f.level]), Text(f.name, "bold"), f.text)
        out.print(table)
    if any(f.level is Level.BROKEN for f in found):
        raise typer.Exit(3)


if __name__ == "__main__":
    main()
