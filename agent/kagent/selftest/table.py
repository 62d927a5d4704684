"""What `kagent selftest` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kagent_sandbox.records import to_json
from rich.text import Text

from kagent.grid import Column, Grid
from kagent.selftest.catalogue import Entry, Variant
from kagent.selftest.runner import Result


def list_table(entries: Sequence[Entry]) -> Grid:
    """The catalogue: a row per item."""
    grid = Grid(
        (Column("item", right=True), Column("title", wrap=True), Column("chapter", drop=2),
         Column("runs", drop=1), Column("mechanism", drop=3))
    )  # fmt: skip
    for item in dict.fromkeys(e.item for e in entries):
        runs = dict.fromkeys(e.runs for e in entries if e.item is item)
        grid.add_row(str(item.number), item.title, item.chapter, ", ".join(runs), item.mechanism)
    return grid


def results_table(results: Sequence[Result]) -> Grid:
    """A row per variant or scenario: what was expected, what came, what stopped it."""
    grid = Grid(
        (Column("item"), Column("expected", drop=1), Column("got"), Column("mechanism", drop=2))
    )
    for r in results:
        grid.add_row(r.entry.id, " or ".join(r.entry.expect), _got(r), r.entry.item.mechanism)
    return grid


def _got(result: Result) -> Text:
    if result.seen is None:
        return Text(f"skipped: {result.skipped}", "yellow")
    style = "bold red" if result.misses else "green"
    return Text(result.seen.outcome, style)


def misses_view(results: Sequence[Result]) -> Iterator[Text]:
    """Each miss explained: what was expected, what came, where the file is."""
    for r in results:
        for why in r.misses:
            where = r.entry.path if isinstance(r.entry, Variant) else r.entry.item.folder
            yield Text(f"\n{r.entry.id}: ", "bold red").append(f"{why}\n  {where}", "default")


def entry_json(entry: Entry) -> Mapping[str, object]:
    """An entry for programs."""
    item = entry.item
    return {
        "id": entry.id,
        "number": item.number,
        "title": item.title,
        "chapter": item.chapter,
        "mechanism": item.mechanism,
        "why": item.why,
        "runs": entry.runs,
        "expect": list(entry.expect),
        "says": entry.says,
    }


def result_json(result: Result) -> Mapping[str, object]:
    """A result for programs."""
    return {
        **entry_json(result.entry),
        "seen": to_json(result.seen) if result.seen else None,
        "twin": to_json(result.twin) if result.twin else None,
        "misses": list(result.misses),
        "skipped": result.skipped,
    }
