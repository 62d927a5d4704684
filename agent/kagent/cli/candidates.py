"""Commands about tasks and single files: tasks, build, check, bench."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import UserError
from rich.text import Text

from kagent.cli.app import (
    EVOLVE,
    TASK,
    DeviceOption,
    FreshOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    TaskOption,
    app,
    isolate,
    out,
    print_json,
    status,
)
from kagent.config.settings import load_config

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Task

DefinitionOption = Annotated[
    Path | None,
    typer.Option("--definition", help="A FlashInfer-Bench definition, in the place of --task."),
]


@contextlib.contextmanager
def _given_task(task: str | None, definition: Path | None) -> Iterator[Task]:
    """The task that --task names, or the one that --definition becomes, while it is needed.

    Raises:
        UserError: Neither or both are given, or there is no such task.
    """
    from kagent.tasks import find_task

    if task is not None and definition is not None:
        raise UserError("--task and --definition: one of the two was expected")
    if definition is not None:
        # Imports torch, which takes seconds.
        from kagent.authoring.importers.flashinfer.task import import_definition

        with tempfile.TemporaryDirectory() as folder:
            yield find_task(import_definition(definition, None, Path(folder)).folder)
    elif task is not None:
        yield find_task(task)
    else:
        raise UserError("no task: name it with --task, or a definition with --definition")


@contextlib.contextmanager
def _as_candidates(files: Sequence[Path], task: Task) -> Iterator[list[Path]]:
    """Files of candidates; solutions (.json) become such while they are needed.

    Raises:
        UserError: A solution cannot be a candidate.
    """
    from kagent.authoring.importers.flashinfer.exchange import read_solution
    from kagent.authoring.importers.flashinfer.solution import candidate_of

    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for i, file in enumerate(files):
            path = file
            if file.suffix == ".json":
                path = Path(folder) / str(i) / f"{file.stem}.py"
                path.parent.mkdir()
                path.write_text(candidate_of(read_solution(file), task), encoding="utf-8")
            paths.append(path)
        yield paths


@app.command(rich_help_panel=EVOLVE)
def tasks(json_: JsonOption = False) -> None:
    """List the tasks that ship with kagent, and their seeds."""
    from kagent.tasks import find_task, seeds_of, task_names
    from kagent.ui import tables

    known = [find_task(name) for name in task_names()]
    if json_:
        print_json(
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


@app.command(rich_help_panel=EVOLVE)
def build(
    file: Annotated[Path, typer.Argument(help="A candidate.")],
    task: TaskOption,
    target: Annotated[
        str | None, typer.Option(help="sm_80, sm_90a, sm_100, ... (sm_90a; C++: cpu).")
    ] = None,
    configs: Annotated[int, typer.Option(help="Configurations to build.", min=1)] = 1,
    full: Annotated[bool, typer.Option("--full", help="Print every plan line by line.")] = False,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    json_: JsonOption = False,
) -> None:
    """Compile a candidate, also without a GPU, and show its plans and kernels."""
    from kagent_sandbox.data.records import to_json
    from kagent_sandbox.data.verdict import Rejected

    from kagent.candidate_file import build_file
    from kagent.tasks import find_task
    from kagent.ui import plan_view
    from kagent.ui.tables import rejected_text

    isolate(isolation)
    with status(quiet=json_) as say:
        jobs = jobs or load_config().jobs
        built = build_file(find_task(task), file, target, say, configs=configs, jobs=jobs)
    if isinstance(built, Rejected):
        if json_:
            print_json({"outcome": "rejected", "verdict": to_json(built)})
        else:
            out.print(rejected_text(file.name, built))
        raise typer.Exit(1)
    if json_:
        print_json(plan_view.built_json(built))
    else:
        out.print(plan_view.built_view(built, full=full))
        out.print(f"built in {built.build_s:.2f} s")


@app.command(rich_help_panel=EVOLVE)
def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|TASK",
            help="A candidate, or a solution (.json); or a task, to check it itself.",
        ),
    ],
    task: Annotated[str | None, TASK] = None,
    definition: DefinitionOption = None,
    bench_shapes: Annotated[
        bool,
        typer.Option("--bench-shapes", help="Benchmark and hidden benchmark cases, too."),
    ] = False,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Check a candidate on all cases, against float64 and torch's own error; or a task itself."""
    from kagent_sandbox.data.records import to_json
    from kagent_sandbox.data.verdict import Rejected

    from kagent.candidate_file import check_file
    from kagent.tasks import is_task, meant
    from kagent.ui import tables

    if task is None and definition is None:
        if not is_task(file):
            hint = "" if Path(file).exists() else meant(file)
            what = f"{hint} For" if hint else "for"
            raise UserError(f"{file}: no task: {what} a candidate, name its task with --task")
        if bench_shapes:
            raise UserError("--bench-shapes is for a candidate: name its task with --task")
        _check_task(file, json_=json_)
        return
    isolate(isolation)
    with (
        status(quiet=json_) as say,
        _given_task(task, definition) as found,
        _as_candidates([Path(file)], found) as (path,),
    ):
        checked = check_file(
            found, path, jobs=jobs or load_config().jobs, bench_shapes=bench_shapes, say=say
        )
    verdict = checked.verdict
    failed = isinstance(verdict, Rejected)
    if json_:
        print_json(
            {
                "outcome": "rejected" if failed else "passed",
                "device": checked.device,
                "interpreted": checked.interpreted,
                "unseen": checked.unseen,
                "skipped": list(checked.skipped),
                "verdict": to_json(verdict) if isinstance(verdict, Rejected) else None,
                "failed": [to_json(f) for f in checked.failed],
                "errors": [] if isinstance(verdict, Rejected) else [to_json(e) for e in verdict],
            }
        )
    elif isinstance(verdict, Rejected):
        out.print(tables.failures_text(path.name, checked.failed))
    else:
        where = f"{'in' if checked.interpreted else 'on'} {checked.device}"
        title = f"relative errors against the reference, {where}"
        out.print(tables.errors_table(verdict, title))
        if checked.interpreted:
            names = ", ".join(checked.skipped)
            skipped = f"; too large for it, or too slow in it: {names}" if names else ""
            unseen = f"interpreted, not run on a GPU: values only, no {checked.unseen}{skipped}"
            out.print(Text(unseen, "yellow"))
        count = f"{len(verdict)} result" + ("s" if len(verdict) != 1 else "")
        out.print(Text(f"{path.name}: correct in {count}", "bold green"))
    if failed:
        raise typer.Exit(1)


def _check_task(name: str, *, json_: bool) -> None:
    """Check a task itself, for both kinds of device."""
    from kagent_sandbox.data.records import to_json
    from kagent_sandbox.judge.task_check import check_kinds

    from kagent.tasks import find_task
    from kagent.ui import tables

    task = find_task(name)
    with status(quiet=json_) as say:
        found = check_kinds(task, say=say)
    holes = any(f.holes for f in found)
    calibrated = {} if task.calibration is None else task.calibration.kinds
    if json_:
        outcome = "holes" if holes else "passed"
        print_json(
            {
                "outcome": outcome,
                "checks": [to_json(f) for f in found],
                "calibration": {kind: to_json(each) for kind, each in calibrated.items()},
            }
        )
    else:
        out.print(tables.task_check_text(task.name, found))
        for kind, each in calibrated.items():
            out.print(tables.calibration_text(task, kind, each))
    if holes:
        raise typer.Exit(1)


@app.command(rich_help_panel=EVOLVE)
def bench(
    files: Annotated[
        list[Path], typer.Argument(help="Candidates; or solutions of FlashInfer-Bench (.json).")
    ],
    task: Annotated[str | None, TASK] = None,
    definition: DefinitionOption = None,
    configs: Annotated[int, typer.Option(help="Configurations tried per candidate.", min=1)] = 1,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    fresh: FreshOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Time candidates beside every baseline on the task's benchmark cases."""
    from kagent_sandbox.data.records import to_json

    from kagent.candidate_file import bench_files
    from kagent.ui import tables
    from kagent.ui.run_view import race_json

    isolate(isolation)
    with (
        status(quiet=json_) as say,
        _given_task(task, definition) as found,
        _as_candidates(files, found) as paths,
    ):
        config = load_config(jobs=jobs, fresh=fresh)
        result = bench_files(
            found, paths, jobs=config.jobs, configs=configs, say=say, fresh=config.fresh
        )
    alone = {n: v for n, v in result.measured.items() if n not in result.race.overall}
    if json_:
        print_json(
            {
                "device": None if result.facts is None else to_json(result.facts),
                "race": race_json(result.race),
                "measured": {n: to_json(v) for n, v in result.measured.items()},
                "rejected": {n: to_json(v) for n, v in result.rejected.items()},
                "failure": None if result.failure is None else str(result.failure),
            }
        )
    else:
        if len(result.rejected) == len(files):
            which = "the candidate was" if len(files) == 1 else f"all {len(files)} candidates were"
            where = f"not timed: {which} rejected"
        elif result.facts is None:
            where = "not timed: there is no GPU here"
        else:
            where = f"on {result.facts.name}"
        out.print(f"{found.name} {where}\n")
        if result.race.cases or result.race.failed:
            out.print(tables.race_table(result.race, matrix=found.matrix))
        if result.race.overall:
            out.print(tables.overall_table(result.race, title="\nover all cases"))
        if alone:
            title = "timed by themselves, not beside each other: the race did not finish for them"
            out.print(tables.measured_table(alone, matrix=found.matrix, title=title))
        for name, verdict in result.rejected.items():
            out.print(tables.rejected_text(name, verdict))
    if result.failure is not None:
        raise result.failure
    if result.rejected or result.race.failed:
        raise typer.Exit(1)
