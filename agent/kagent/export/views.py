"""Final output of export and certify, for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kagent_sandbox.data.records import to_json
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kagent.export.certify import Certificate, Line
from kagent.export.dispatch_table import gain, mean_gain, used
from kagent.export.reading import without_texts
from kagent.export.record import TORCH, OperatorRecord
from kagent.text import interval_text, plural

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


def _operator_table(operator: OperatorRecord) -> Table:
    table = Table(title=f"{operator.task}: {operator.signature}", title_justify="left", box=None)
    for column, justify in (("device", "left"), ("case", "left"), ("used", "left"), ("µs", "right"),
                            ("torch µs", "right"), ("gain", "right")):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for device in operator.devices:
        for point in device.points:
            torch, ratio = point.times.get(TORCH), gain(point, used(point))
            table.add_row(
                Text(device.name),
                Text(point.case),
                Text(point.best),
                f"{point.times[used(point)].us:.1f}",
                "-" if torch is None else f"{torch.us:.1f}",
                "-" if ratio is None else f"{ratio:.2f}x",
            )
        mean = mean_gain(device)
        if mean is not None:
            table.add_row("", "", "", "", "geometric mean", f"{mean:.2f}x", style="bold")
    return table


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
    table = Table(title=f"{library} on {found.device}", title_justify="left", box=None)
    for column, justify in (("operator", "left"), ("case", "left"), ("kernel", "left"),
                            ("then µs", "right"), ("now µs", "right"), ("then", "right"),
                            ("now", "right"), ("verdict", "left"), ("", "left")):  # fmt: skip
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for line in found.lines:
        table.add_row(*_cells(line), Text(line.change, _COLOURS.get(line.change, "default")))
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


def _cells(line: Line) -> list[str]:
    return [
        line.operator,
        line.case,
        line.kernel,
        "-" if line.then_us is None else f"{line.then_us:.1f}",
        f"{line.now_us:.1f}",
        "-" if line.then_gain is None else f"{line.then_gain:.2f}x",
        "-" if line.now_gain is None else f"{line.now_gain:.2f}x",
        "-" if line.verdict is None else line.verdict.value,
    ]


def certificate_json(found: Certificate) -> Mapping[str, Any]:
    """Return the certificate as data."""
    return {**to_json(found), "ok": found.ok}
