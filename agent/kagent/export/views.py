"""Final output of export and certify, for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kagent_sandbox.data.records import to_json
from rich.console import Group, RenderableType
from rich.text import Text

from kagent.export.certify import Certificate, Line
from kagent.export.dispatch_table import gain, mean_gain, used
from kagent.export.reading import without_texts
from kagent.export.record import TORCH, OperatorRecord
from kagent.text import interval_text, plural
from kagent.ui.live import speed_text
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import verdict_text

if TYPE_CHECKING:
    from kagent.export.export import Exported, ExportedFiles

_COLOURS = {"slower": "red", "torch is faster now": "red", "faster": "green"}


def exported_view(done: Exported) -> RenderableType:
    """The library: what changed, and per operator who is used where."""
    library = done.library
    head = Text(f"{done.folder}", "bold")
    before = f" (was {done.before})" if done.before else ""
    head.append(f": {library.name} {library.version}{before}\n", "default")
    for line in library.history[0].lines:
        head.append(f"  {line}\n", "default")
    for note in done.notes:
        head.append(f"  {note}\n", "yellow")
    tables = [_operator_table(o) for o in library.operators]
    folder = done.folder if done.folder.is_absolute() else f"./{done.folder}"  # a path, not a name
    end = Text("\nnext:   ").append(shlex.join(["pip", "install", str(folder)]), "bold")
    end.append("   (or load it with Hugging Face kernels: README.md there)\n")
    end.append("tests:  ").append(shlex.join(["pytest", str(done.folder / "tests")]), "bold")
    return Group(head, *tables, end)


def _operator_table(operator: OperatorRecord) -> TextTable:
    table = TextTable(
        (
            Column("device", drop=1),
            Column("case"),
            Column("used"),
            Column("µs", right=True),
            Column("torch µs", right=True),
            Column("× torch", right=True),
        ),
        title=f"{operator.task}: {operator.signature}",
    )
    for device in operator.devices:
        for point in device.points:
            table.add_row(
                device.name,
                point.case,
                point.best,
                _us(point.times[used(point)].us),
                _us(torch.us if (torch := point.times.get(TORCH)) else None),
                speed_text(gain(point, used(point)) or 0),
            )
        if (mean := mean_gain(device)) is not None:
            whole = Text("geometric mean", "bold"), "", "", "", Text(speed_text(mean), "bold")
            table.add_row(device.name, *whole)
    return table


def _us(us: float | None) -> str:
    return "–" if us is None else f"{us:.1f}"


def exported_json(done: Exported) -> Mapping[str, Any]:
    """The library's record, without its texts, and what the export did."""
    return {
        "folder": str(done.folder),
        "before": done.before,
        "notes": list(done.notes),
        "library": without_texts(to_json(done.library)),
    }


def files_view(done: ExportedFiles) -> RenderableType:
    """The files, and per kernel where it is used."""
    head = Text(f"{done.folder}", "bold")
    head.append(f": {', '.join(done.files)}\n", "default")
    tests = [str(done.folder / name) for name in done.files if name.startswith("test_")]
    end = Text("\ntests:  ").append(shlex.join(["pytest", *tests]), "bold")
    return Group(head, *map(_operator_table, done.operators), end)


def files_json(done: ExportedFiles) -> Mapping[str, Any]:
    """Return the table of files as data, without texts."""
    found = {"operators": [to_json(o) for o in done.operators]}
    return {"folder": str(done.folder), "files": list(done.files), **without_texts(found)}


def certificate_view(found: Certificate, library: Path) -> RenderableType:
    """Case by case then and now, and the verdict."""
    table = TextTable(
        (
            Column("operator"),
            Column("case"),
            Column("kernel", drop=3),
            Column("µs then", right=True, drop=2),
            Column("µs now", right=True, drop=2),
            Column("× torch then", right=True, drop=1),
            Column("× torch now", right=True),
            Column("verdict"),
            Column("change"),
        ),
        title=f"{library} on {found.device}",
    )
    for line in found.lines:
        table.add_row(
            line.operator,
            line.case,
            line.kernel,
            _us(line.then_us),
            _us(line.now_us),
            speed_text(line.then_gain or 0),
            speed_text(line.now_gain or 0),
            verdict_text(line.verdict),
            _change(line),
        )
    text = Text()
    for path in found.changed:
        text.append(f"{path}: not as it was written\n", "red")
    for kernel, why in found.wrong.items():
        text.append(f"{kernel}: {why}\n", "red")
    if found.tests:
        text.append(f"{found.tests}\n", "red")
    for kernel, why in found.skipped.items():
        text.append(f"{kernel}: not judged: {why}\n", "yellow")
    text.append(f"{_shapes_text(found)}\n")
    for kernel, versus in found.hidden.items():
        ratio = interval_text(versus.ratio, versus.low, versus.high)
        beside = f"{versus.verdict} beside the best of torch, {ratio}"
        text.append(f"{kernel} on hidden shapes drawn now: {beside}\n")
    right = plural(len(found.checked), "correct kernel")
    worse = plural(len(found.regressions), "regression") if found.regressions else "no regressions"
    verdict = f"{right} here; {worse} in {plural(found.shapes.compared, 'compared shape')}"
    text.append(verdict, "bold green" if found.ok else "bold red")
    return Group(table, text)


def _shapes_text(found: Certificate) -> str:
    """Count of the shapes that are compared with then, and of those that are not."""
    shapes = found.shapes
    parts = [f"{shapes.compared} of {plural(shapes.visible, 'visible shape')} compared with then"]
    if shapes.torch:
        parts.append(f"torch is used at {shapes.torch}, where no kernel is compared")
    return "; ".join([*parts, "hidden shapes are others each time, and not compared"])


def _change(line: Line) -> Text:
    """The change of the time, or of the verdict where the time is as then."""
    then, now = line.then_verdict, line.verdict
    if line.change == "as then" and now is not None and then not in (None, now):
        return Text(f"was {then}", "yellow")
    return Text(line.change, _COLOURS.get(line.change, "default"))


def certificate_json(found: Certificate) -> Mapping[str, Any]:
    """Return the certificate as data."""
    return {**to_json(found), "ok": found.ok}
