"""`kagent selftest`."""

from __future__ import annotations

from typing import Annotated

import typer
from kagent_sandbox.errors import UserError

from kagent.cli.app import JobsOption, JsonOption, app, out, print_json, status
from kagent.config import load_config


@app.command()
def selftest(
    only: Annotated[str | None, typer.Option(help="Items by their numbers, such as 66,70.")] = None,
    chapter: Annotated[
        list[str] | None,
        typer.Option(help="faults, host, result, cheats or beyond; may be repeated."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the items and run nothing.")] = False,
    jobs: JobsOption = None,
    json_: JsonOption = False,
) -> None:
    """Attack this machine's judge with every fault, attack and cheat of the corpus."""
    from kagent.selftest import table
    from kagent.selftest.catalogue import load_catalogue
    from kagent.selftest.rig import Rig
    from kagent.selftest.runner import run

    entries = load_catalogue(only=_numbers(only), chapters=chapter or ())
    if list_:
        if json_:
            print_json([table.entry_json(e) for e in entries])
        else:
            out.print(table.list_table(entries))
        return
    with status(quiet=json_) as say, Rig(jobs or load_config().jobs) as rig:
        results = sorted(run(rig, entries, say), key=lambda r: entries.index(r.entry))
    if json_:
        print_json([table.result_json(r) for r in results])
    else:
        out.print(table.results_table(results))
        for part in table.misses_view(results):
            out.print(part, soft_wrap=True)
    if any(r.misses for r in results):
        raise typer.Exit(1)


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word.strip()]
    except ValueError:
        raise UserError(f"--only {text}: expected numbers of items, such as 66,70") from None
