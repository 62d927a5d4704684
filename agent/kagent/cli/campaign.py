"""`kagent campaign`: one budget for several tasks, devices and seeds."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import KagentError, UserError
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kagent.cli.app import (
    EVOLVE,
    INTERRUPTED,
    NOT_FASTER,
    IsolationOption,
    JobsOption,
    LangOption,
    ModelOption,
    OnOption,
    app,
    complete_task,
    err,
    out,
    write_slurm_script,
)
from kagent.config.settings import load_config
from kagent.fleet.fleet import LOCAL
from kagent.fleet.slurm import SLURM, campaign_continues

if TYPE_CHECKING:
    from kagent.campaign.file import CampaignFile
    from kagent.campaign.record import Campaign
    from kagent.campaign.running import CampaignRunner
    from kagent.suite.results import Figures

PAGE = "report.html"


@app.command(rich_help_panel=EVOLVE)
def campaign(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|TASK...",
            help="A campaign's TOML file, or tasks by name or folder.",
            autocompletion=complete_task,
        ),
    ],
    budget: Annotated[
        int | None, typer.Option(help="Proposals to evaluate over all runs (50).", min=1)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs of each task on each device (1).", min=1)
    ] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="cpu|cuda:N|UUID|TYPE",
            help="Device to use, TYPE on a cluster; may be repeated (the first GPU, or cpu).",
            envvar="KAGENT_DEVICE",
        ),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(help="End all searches after 90s, 8m, 1h30m; the final races follow."),
    ] = None,
    max_cost: Annotated[float | None, typer.Option(help="Dollars that all runs may cost.")] = None,
    lang: LangOption = None,
    model: ModelOption = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder of the campaign (campaigns/NAME).")
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Library to write the winners into, at the end.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a campaign; verdicts stay.")
    ] = False,
    on: OnOption = None,
) -> None:
    """Spend one budget over tasks x devices x seeds, where it gains most; race all finalists."""
    from kagent.campaign.file import asked_for, places_of, plan
    from kagent.campaign.record import Campaign
    from kagent.campaign.running import CampaignRunner
    from kagent.config.values import parse_seconds
    from kagent.runs.files import clear_errors, require_folder, take_lock
    from kagent.suite.problems import absolute
    from kagent.suite.record import read_record, write_record

    try:
        max_s = None if max_time is None else parse_seconds(max_time)
    except ValueError as e:
        raise UserError(f"--max-time: {e}") from None
    if max_cost is not None and not max_cost > 0:
        raise UserError(f"--max-cost {max_cost:g}: expected dollars above 0")
    if export is not None:
        require_folder(export)
    names = tuple(absolute(s) for s in sources)
    options = {"lang": lang, "model": ",".join(model) if model else None}
    given: dict[str, object] = {
        "budget": budget,
        "seeds": seeds,
        "devices": devices,
        "max_time": max_s,
        "max_cost": max_cost,
        "options": options,
    }
    asked = asked_for(sources, given)
    folder = _folder(sources, to)
    where = SLURM if on == SLURM else load_config(on=on).on
    if where == SLURM:
        write_slurm_script(folder.name, campaign_continues(folder))
        return
    if (folder / Campaign.FILE).exists() and not resume:
        raise UserError(
            f"{folder}: a campaign is there: --resume goes on with it, --to begins another"
        )
    if resume:
        work = _resumed(read_record(folder, Campaign), folder, names, asked, options)
    else:
        require_folder(folder)
        work = plan(names, asked, where)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder)
    with lock:
        write_record(folder, work)
        session = {"jobs": jobs, "isolation": isolation, "on": where}
        places = {device: places_of(device, where) for device in work.devices}
        runner = CampaignRunner(folder, work, session, _ignore, _ignore, places)
        interrupted = False
        try:
            with _shown(runner):
                runner.run()
        except KeyboardInterrupt:
            interrupted = True
        except KagentError:
            _say_resume(sources, to)
            raise
        finally:
            _write_page(folder, runner.campaign)
    results = _print(folder, runner.campaign)
    if interrupted:
        _say_resume(sources, to)
        raise typer.Exit(INTERRUPTED)
    if export is not None:
        _export(folder, runner.campaign, export, session)
    raise typer.Exit(exit_code(results))


def exit_code(found: Figures) -> int:
    """0: at least one task is FASTER. 3: none of those with a winner is. 1: none has a winner."""
    if not found.correct:
        return 1
    return 0 if found.verdicts[SpeedVerdict.FASTER] else NOT_FASTER


def _folder(sources: Sequence[str], to: Path | None) -> Path:
    """Folder of a campaign.

    Raises:
        UserError: There are several tasks, and it has no name.
    """
    if to is None and len(sources) > 1:
        raise UserError(f"{len(sources)} tasks have no common name: name the campaign with --to")
    return (to or Path("campaigns") / Path(sources[0]).resolve().stem).resolve()


def _resumed(
    before: Campaign,
    folder: Path,
    sources: tuple[str, ...],
    asked: CampaignFile,
    options: Mapping[str, object],
) -> Campaign:
    """A campaign that goes on. Its budgets may be others now; nothing else may.

    Raises:
        UserError: Something else was given than it began with.
    """
    if before.sources != sources:
        raise UserError(
            f"{folder}: a campaign of {' '.join(before.sources)}, not of {' '.join(sources)}: name "
            "its folder with --to, or begin another there"
        )
    same: dict[str, tuple[object, object]] = {"seeds": (asked.seeds or before.seeds, before.seeds)}
    same["devices"] = tuple(asked.devices) or before.devices, before.devices
    for name, value in options.items():
        own = [r.options.get(name) for r in before.runs]
        same[name] = (value, own[0]) if value is not None and value not in own else (None, None)
    for name, (now, then) in same.items():
        if now != then:
            raise UserError(
                f"{folder}: began with {name} {then}, and {now} was given: its runs would not "
                "compare; begin another campaign with --to"
            )
    settings = replace(
        before.settings,
        budget=asked.budget or before.settings.budget,
        max_time=asked.max_time or before.settings.max_time,
    )
    max_cost = asked.max_cost or before.max_cost
    return replace(before, settings=settings, max_cost=max_cost).resumed()


@contextmanager
def _shown(runner: CampaignRunner) -> Iterator[None]:
    """Show a campaign as it goes: the table of its runs on a terminal, lines elsewhere; and write
    its page.
    """
    from kagent.campaign.view import doing_lines, runs_of, runs_table, spent_line

    doing = {"": "starting"}
    runs = runs_of(runner.folder, runner.campaign)
    turn = threading.RLock()  # slices of several devices speak at once
    next_s = 0.0  # verdicts may come faster than all runs are read

    def parts() -> RenderableType:
        """The table as it was read last, with the time until now."""
        spent = spent_line(replace(runner.campaign, seconds=runner.seconds), runs.rows)
        lines = [
            Text(line, "dim", no_wrap=True, overflow="ellipsis")  # as many lines as before
            for line in (spent, *doing_lines(doing))
        ]
        return Group(runs_table(runs), Text(), *lines)

    live = None
    if err.is_terminal:
        live = Live(console=err, refresh_per_second=1, transient=True, get_renderable=parts)

    def say(name: str, text: str) -> None:
        with turn:
            doing.pop("", None)
            if text:
                doing[name] = text
            else:
                doing.pop(name, None)
            if live is None and text:
                err.print(Text(*doing_lines({name: text})), soft_wrap=True)
            refresh()

    def changed(text: str) -> None:
        with turn:
            if text:
                (err if live is not None else out).print(Text(text), soft_wrap=True)
            if text or time.monotonic() >= next_s:
                refresh()

    def refresh() -> None:
        nonlocal runs, next_s
        began_s = time.monotonic()
        runs = runs_of(runner.folder, runner.campaign, doing)
        if live is not None:
            live.refresh()
        _write_page(runner.folder, runner.campaign, doing)
        next_s = time.monotonic() + 10 * (time.monotonic() - began_s)

    runner.say, runner.changed = say, changed
    if live is None:
        yield
        return
    with live:
        yield


def _write_page(folder: Path, campaign: Campaign, doing: Mapping[str, str] | None = None) -> Path:
    from kagent.campaign.page import render
    from kagent.runs.files import clear_errors, write_file

    path = folder / PAGE
    with clear_errors(folder):
        write_file(path, render(folder, campaign, doing))
    return path


def _print(folder: Path, campaign: Campaign) -> Figures:
    """Print all there is; the figures over all tasks."""
    from kagent.campaign.view import ESTIMATES, runs_of, runs_table, spent_line
    from kagent.suite.results import read_results
    from kagent.suite.view import results_view

    runs = runs_of(folder, campaign)
    out.print(runs_table(runs))
    for row in runs.rows:
        if row.run.reason:
            out.print(Text(f"{row.run.name}: {row.run.step}: {row.run.reason}", "red"))
    out.print(Text(f"{spent_line(campaign, runs.rows)}. {ESTIMATES}.\n", "dim"), soft_wrap=True)
    results = read_results(folder, campaign)
    for part in results_view(results):
        out.print(part, soft_wrap=isinstance(part, Text))
    out.print(str(folder / PAGE), soft_wrap=True)
    return results.all


def _export(folder: Path, campaign: Campaign, to: Path, session: Mapping[str, object]) -> None:
    """Write the winners that are FASTER into a library, each on its own device. One that is refused
    there, since it is not FASTER once more, or whose machine fails, does not keep the others out.

    Raises:
        UserError: All were refused, or an export failed; the lines before say why.
    """
    from kagent.suite.record import RUNS
    from kagent.suite.results import result_of

    environment = {n: v for n, v in os.environ.items() if n != "KAGENT_DEVICE"}
    asked = written = 0
    failed: list[str] = []
    for device in campaign.devices:
        found = [
            result_of(folder, campaign, p)
            for p in campaign.problems
            if campaign.runs_of(p)[0].device == device
        ]
        faster = [p for p in found if p.verdict is SpeedVerdict.FASTER]
        for p in found:
            if p not in faster:
                err.print(f"{p.name}: not exported: {p.verdict or 'no winner'}")
        for p in faster:
            run = str(folder / RUNS / p.progress.run)
            words = [sys.executable, "-m", "kagent", "export", run, "--to", str(to)]
            words += _export_options(device, session)
            done = subprocess.run(words, env=environment, check=False)
            if done.returncode not in (0, UserError.exit_code):
                failed.append(p.name)
            written += not done.returncode
            asked += 1
    if failed:
        raise UserError(f"{to}: {', '.join(failed)}: not exported; see above")
    if asked and not written:
        raise UserError(f"{to}: no winner was exported; the lines above say why")


def _export_options(device: str, session: Mapping[str, object]) -> list[str]:
    """Options of an export on a campaign's device, for a session with these (None: not given)."""
    from kagent.campaign.file import accelerator_of

    local = session["on"] == LOCAL
    place = {"device": device} if local else {"accelerator": accelerator_of(device)}
    return [
        word
        for n, v in {**session, **place}.items()
        if v is not None
        for word in (f"--{n}", str(v))
    ]


def _say_resume(sources: Sequence[str], to: Path | None) -> None:
    words = ["kagent", "campaign", *sources, "--resume"]
    words += [] if to is None else ["--to", str(to)]
    err.print(Text("all verdicts are kept. Resume with: ").append(shlex.join(words), "bold"))


def _ignore(*_: str) -> None:
    """Nothing to show yet."""
