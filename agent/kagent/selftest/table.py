"""Output of `kagent selftest`: the table of items, the checks of the machine, every miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from kagent_sandbox.data.records import to_json
from kagent_sandbox.runtime.text import printable
from rich.console import RenderableType
from rich.text import Text

from kagent.runs.manifest import versions
from kagent.selftest.assemble import candidate_text, stored
from kagent.selftest.catalogue import Entry, Variant
from kagent.selftest.machine_checks import Check
from kagent.selftest.run_all import Report
from kagent.selftest.runner import EntryResult
from kagent.ui.table import Column, TextTable

_MOST_LINES = 10  # of a miss
_MOST_CHARACTERS = 1500


def list_table(entries: Sequence[Entry]) -> TextTable:
    """The catalogue, a row per item."""
    grid = TextTable(
        (
            Column("item", wrap=True),
            Column("runs", drop=1),
            Column("files", right=True, drop=2),
            Column("mechanism", drop=3),
        )
    )
    for chapter, items in groupby(entries, lambda e: e.item.chapter):
        grid.add_section()
        grid.add_row(Text(chapter, "bold"), "", "", "")
        for item, same in groupby(items, lambda e: e.item):
            group = list(same)
            runs = ", ".join(dict.fromkeys(e.runs for e in group))
            grid.add_row(f"{item.number} {item.title}", runs, str(len(group)), item.mechanism)
    return grid


def item_view(entries: Sequence[Entry]) -> Iterator[Text]:
    """One item whole: what it is, then every file as it is run, twins after their variants."""
    item = entries[0].item
    yield Text(f"{item.number} {item.title}", "bold")
    yield Text(f"{item.mechanism}: {item.why}")
    for e in entries:
        wanted = f"{e.runs}: {' or '.join(e.expect)}{f', says {e.says}' if e.says else ''}"
        if isinstance(e, Variant):
            yield from _file_view(e.path, f"{wanted}; its twin is {e.twin.name}")
        else:
            yield Text(f"\n{e.name} ({wanted})", "bold")
    for twin in dict.fromkeys(e.twin for e in entries if isinstance(e, Variant)):
        yield from _file_view(twin, "honest")


def _file_view(path: Path, about: str) -> Iterator[Text]:
    yield Text(f"\n{path.name} ({about})", "bold").append(f"\n{stored(path)}\n", "not bold dim")
    yield Text(printable(candidate_text(path)))


def results_table(results: Sequence[EntryResult]) -> TextTable:
    """A row per item and expectation: what was expected, what came, what stopped it."""
    grid = TextTable(
        (
            Column("item", wrap=True),
            Column("expected", wrap=True),
            Column("got", wrap=True),
            Column("mechanism", drop=1),
        )
    )
    for chapter, items in groupby(results, lambda r: r.entry.item.chapter):
        grid.add_section()
        grid.add_row(Text(chapter, "bold"), "", "", "")
        for item, group in groupby(items, lambda r: r.entry.item):
            by_expectation: dict[tuple[str, ...], list[EntryResult]] = {}
            for result in group:
                by_expectation.setdefault(result.entry.expect, []).append(result)
            name, mechanism = f"{item.number} {item.title}", item.mechanism
            for expect, same in by_expectation.items():
                grid.add_row(name, " or ".join(expect), _got(same), mechanism)
                name = mechanism = ""  # once per item
    return grid


def _got(results: Sequence[EntryResult]) -> Text:
    """Outcomes and how often they came: green, or red where something was missed."""
    text = Text()
    for style, wanted in (("bold red", True), ("green", False)):
        same = [r for r in results if r.seen is not None and bool(r.misses) is wanted]
        for outcome, count in Counter(_outcome(r) for r in same).items():
            text.append(", " if text else "").append(f"{outcome}{_times(count)}", style)
    for reason, count in Counter(r.skipped for r in results if r.seen is None).items():
        text.append(", " if text else "").append(f"skipped{_times(count)}: {reason}", "yellow")
    return text


def _outcome(result: EntryResult) -> str:
    assert result.seen is not None, "it was run"
    if result.misses and result.seen.outcome in result.entry.expect:
        wrong_twin = result.twin is not None and result.misses[-1].startswith("its honest twin")
        return f"{result.seen.outcome}, {'its twin failed' if wrong_twin else 'another message'}"
    return result.seen.outcome


def _times(count: int) -> str:
    return f" ×{count}" if count > 1 else ""


def checks_table(checks: Sequence[Check]) -> TextTable:
    """The checks of this machine."""
    grid = TextTable(
        (Column("this machine"), Column("expected", wrap=True), Column("got", wrap=True))
    )
    for c in checks:
        style = "green" if c.ok else "bold red"
        grid.add_row(c.name, c.expected, Text(c.got, style))
    return grid


def misses_view(results: Sequence[EntryResult], checks: Sequence[Check]) -> Iterator[Text]:
    """Each miss explained: what was expected, what came, where the file is."""
    for r in results:
        for why in r.misses:
            where = stored(r.entry.path) if isinstance(r.entry, Variant) else r.entry.item.folder
            yield Text(f"\n{r.entry.id}: ", "bold red").append(f"{_cut(why)}\n  {where}", "default")
    for c in checks:
        if not c.ok:
            yield Text(f"\n{c.name}: ", "bold red").append(
                f"expected {c.expected}, got {c.got}", "default"
            )


def noise_view(report: Report) -> Iterator[Text]:
    """Describe the noise of each device in a line."""
    for facts in report.devices:
        if facts.key in report.noise:
            yield Text(f"\nnoise of {facts.name}: {report.noise[facts.key].text}", end="")


def summary(report: Report) -> Text:
    """The result in a line."""
    ran = [r for r in report.results if r.seen is not None]
    missed = sum(bool(r.misses) for r in ran)
    failed = sum(not c.ok for c in report.checks)
    twins = {r.entry.twin for r in ran if isinstance(r.entry, Variant)}
    items = len({r.entry.item.number for r in ran})
    counts = [_many(items, "item"), _many(len(ran), "file"), _many(len(twins), "honest twin")]
    counts.append(f"{_many(len(report.checks), 'check')} of the machine")
    text = Text(f"\n{', '.join(counts)} in {report.seconds:.0f} s, ")
    text.append(f"tier {report.tier}, digest {report.digest}: ")
    wrong = [f"{missed} missed"] if missed else []
    wrong += [f"{_many(failed, 'check')} failed"] if failed else []
    if wrong:
        return text.append(", ".join(wrong), "bold red")
    return text.append("all as expected", "bold green")


def _cut(text: str) -> str:
    """The beginning of a long message; --json has all of it."""
    lines = text[:_MOST_CHARACTERS].splitlines()
    more = len(text) > _MOST_CHARACTERS or len(lines) > _MOST_LINES
    return "\n  ".join(lines[:_MOST_LINES]) + (" …" if more else "")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def report_view(report: Report) -> Iterator[RenderableType]:
    """All of it, in order."""
    if report.results:
        yield results_table(report.results)
        yield Text("passed: the attempt failed, and the kernel is correct\n", "dim")
    yield checks_table(report.checks)
    yield from misses_view(report.results, report.checks)
    yield from noise_view(report)
    yield summary(report)


def report_json(report: Report) -> Mapping[str, object]:
    """All of it, for programs."""
    return {
        "as_expected": not report.missed,
        "digest": report.digest,
        "when": report.when,
        "seconds": report.seconds,
        "tier": report.tier,
        "devices": [to_json(f) for f in report.devices],
        "noise": {key: to_json(n) for key, n in report.noise.items()},
        "versions": versions(),
        "missed": list(report.missed),
        "checks": [to_json(c) for c in report.checks],
        "entries": [result_json(r) for r in report.results],
    }


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


def result_json(result: EntryResult) -> Mapping[str, object]:
    """A result for programs."""
    return {
        **entry_json(result.entry),
        "seen": to_json(result.seen) if result.seen else None,
        "twin": to_json(result.twin) if result.twin else None,
        "misses": list(result.misses),
        "skipped": result.skipped,
    }
