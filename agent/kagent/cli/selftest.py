"""`kagent selftest`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from kagent_sandbox.errors import UserError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from kagent.cli.app import (
    INTERRUPTED,
    TRUST,
    DeviceOption,
    IsolationOption,
    JobsOption,
    JsonOption,
    app,
    err,
    isolate,
    out,
    print_json,
)
from kagent.config.settings import load_config

if TYPE_CHECKING:
    from kagent.selftest.machine_checks import Check
    from kagent.selftest.run_all import Observer
    from kagent.selftest.runner import EntryResult

MACHINE = "machine"
_EVERY = 25  # results, of which one line is printed where there is no terminal
_WHY_CHARACTERS = 300  # of the reason, in the line of a miss


@app.command(rich_help_panel=TRUST)
def selftest(
    only: Annotated[str | None, typer.Option(help="Items by their numbers, such as 66,70.")] = None,
    chapter: Annotated[
        list[str] | None,
        typer.Option(
            help="faults, host, result, cheats, beyond, or machine: the checks of this machine; "
            "may be repeated."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the items and run nothing.")] = False,
    show: Annotated[
        int | None, typer.Option(help="Show an item whole, its files as they are run, by number.")
    ] = None,
    jobs: JobsOption = None,
    isolation: IsolationOption = None,
    json_: JsonOption = False,
    _device: DeviceOption = None,
) -> None:
    """Attack the judge with every fault, attack and cheat of the corpus, on this machine."""
    from kagent.selftest import table
    from kagent.selftest.catalogue import load_catalogue
    from kagent.selftest.run_all import keep
    from kagent.selftest.run_all import selftest as run

    if show is not None:
        for text in table.item_view(load_catalogue(only=[show])):
            out.print(text, soft_wrap=True)
        return
    isolate(isolation)
    numbers, chapters = _numbers(only), set(chapter or ())
    whole = not (numbers or chapters)
    named = chapters - {MACHINE}
    entries = load_catalogue(only=numbers, chapters=named) if whole or numbers or named else []
    if list_:
        if json_:
            print_json([table.entry_json(e) for e in entries])
        else:
            out.print(table.list_table(entries))
        return
    jobs = jobs or load_config().jobs
    try:
        with _watching(len(entries), quiet=json_) as observe:
            report = run(entries, jobs, observe, checks=whole or MACHINE in chapters)
    except KeyboardInterrupt:
        err.print("kagent: interrupted; all processes have ended, and nothing was stored")
        raise typer.Exit(INTERRUPTED) from None
    if whole:
        keep(report)
    if json_:
        print_json(table.report_json(report))
    else:
        for part in table.report_view(report):
            out.print(part, soft_wrap=isinstance(part, Text))
    if report.missed:
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word.strip()]
    except ValueError:
        raise UserError(f"--only {text}: expected numbers of items, such as 66,70") from None


@contextlib.contextmanager
def _watching(total: int, *, quiet: bool) -> Iterator[Observer]:
    """A bar on a terminal, plain lines elsewhere; on stderr, so that stdout stays clean."""
    if quiet:
        yield lambda _event: None
    elif err.is_terminal:
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("{task.description}"))  # fmt: skip
        with Progress(*columns, console=err, transient=True) as progress:
            bar = progress.add_task("starting", total=total)

            def show(event: str | EntryResult | Check) -> None:
                if isinstance(event, str):
                    progress.update(bar, description=event)
                else:
                    progress.update(bar, advance=1 if _is_result(event) else 0)
                    if line := _missed(event):
                        progress.print(line)

            yield show
    else:
        done = 0

        def say(event: str | EntryResult | Check) -> None:
            nonlocal done
            if isinstance(event, str):
                return
            done += _is_result(event)
            if line := _missed(event):
                err.print(line, soft_wrap=True)
            elif _is_result(event) and done % _EVERY == 0:
                err.print(f"{done} of {total}")

        yield say


def _is_result(event: EntryResult | Check) -> bool:
    return hasattr(event, "entry")


def _missed(event: EntryResult | Check) -> Text | None:
    """A miss in a line, as soon as it is known: a run that is cut off has said it, too."""
    from kagent.selftest.runner import EntryResult

    if isinstance(event, EntryResult):
        if not event.misses:
            return None
        why = shorten(event.misses[0], _WHY_CHARACTERS, placeholder="…")
        return Text(f"missed: {event.entry.id}: {why}", "red")
    return None if event.ok else Text(f"failed: {event.name}: {event.got}", "red")
