"""The tables of the library that the repository keeps: in the README, and by shape in the docs.

    python benchmarks/library_table.py [--from kagent_kernels.tar.gz] [--figures FILE] [--check]
        [--library DIR]

Writes what stands between the markers in README.md and docs/results.md, from the library's own
record (PROVENANCE.json) and figures.json, which library.py has put beside it. `--from` first takes
the library of such an archive: its operators replace those that are there, others stay as they are.
`--figures` adds what a figures.json has of the operators that are there: stages that ran again, or
later, such as certify. `--check` writes nothing, and exits with 1 if a page does not have the
tables of the library that is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from do_bench import LONG_US, NEAR, agreement, times_eager
from kagent.export.card import row_of
from kagent.export.dispatch_table import gain, mean_gain, used
from kagent.export.merging import merge_library, merge_operator
from kagent.export.reading import OnDisk, is_library, read_library
from kagent.export.record import TORCH, DeviceRecord, OperatorRecord
from kagent.export.templating import figure, words
from kagent.export.writing import files_of, refuse_edited, write_library
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import KagentError, UserError

from library import FIGURES, digest_of

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "library"
BEGIN, END = "<!-- library: begin -->", "<!-- library: end -->"
NONE = (
    "No library is kept here yet: its kernels have to be measured on a GPU, which has not been "
    "done. `benchmarks/library.py` does it."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="archive", type=Path)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--library", type=Path, default=LIBRARY)
    options = parser.parse_args()
    try:
        if options.archive is not None:
            take(options.archive, options.library)
        if options.figures is not None:
            add(options.figures, options.library)
        found = {path: with_tables(path, text) for path, text in tables(options.library).items()}
    except (KagentError, OSError, tarfile.TarError, ValueError) as e:
        sys.exit(str(e))
    stale = [path for path, text in found.items() if path.read_text(encoding="utf-8") != text]
    if options.check:
        names = ", ".join(str(p.relative_to(ROOT)) for p in stale)
        if stale:
            sys.exit(f"{names}: not of the library that is there: run this without --check")
        return
    for path in stale:
        path.write_text(found[path], encoding="utf-8")
        print(path.relative_to(ROOT))


def take(archive: Path, library: Path) -> None:
    """Put the operators of an archive's library into the one that is there, or make it that.

    Raises:
        UserError: The archive holds no library as it was written, or one of a CPU; or the one that
            is there was edited.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (inside,) = Path(folder).iterdir()
        new = read_library(inside)
        if changed := new.changed():
            raise UserError(f"{archive}: {changed[0]} is not as it was written")
        if not all(d.kind == "gpu" for o in new.library.operators for d in o.devices):
            raise UserError(f"{archive}: expected a library that was measured on GPUs alone")
        if is_library(library):
            merge(new, read_library(library))
        else:
            inside.rename(library)


def merge(new: OnDisk, old: OnDisk) -> None:
    """Write the old library with the new one's operators, and what was found out about each."""
    refuse_edited(old)
    known = {o.task: o for o in old.library.operators}
    merged = [merge_operator(known.get(o.task), o) for o in new.library.operators]
    operators = [(o, lines or [f"{o.task}: measured again"]) for o, lines in merged]
    library = merge_library(old.library, old.library.name, new.library.kagent, operators)
    figures = together(_figures(old), _figures(new), library.version)
    files = files_of(library, cubins=new.cubins(), old=old)
    write_library(library, files, old.folder, old=old)
    (old.folder / FIGURES).write_text(figures, encoding="utf-8")


def add(file: Path, library: Path) -> None:
    """Add to a library's figures what a file has of its operators.

    Raises:
        UserError: There is no library, or the file has results of none of its operators as they
            are.
    """
    disk = read_library(library)
    new = json.loads(file.read_text(encoding="utf-8"))
    new["operators"] = {t: as_it_is(disk, t, of) for t, of in new["operators"].items()}
    if not any(new["operators"].values()):
        raise UserError(f"{file}: expected results of operators as they are in {library}, got none")
    text = together(_figures(disk), new, disk.library.version)
    (library / FIGURES).write_text(text, encoding="utf-8")


def as_it_is(disk: OnDisk, task: str, stages: Mapping[str, Any]) -> dict[str, Any]:
    """Those results of stages that are of an operator as it is in a library."""
    if task not in {o.task for o in disk.library.operators}:
        return {}
    of = digest_of(disk.folder, disk.library.name, task)
    return {stage: found for stage, found in stages.items() if found["of"] == of}


def together(old: Mapping[str, Any], new: Mapping[str, Any], version: str) -> str:
    """The text of figures.json: what is known of each operator, by stage, the new last."""
    known, found = old["operators"], new["operators"]
    operators = {t: {**known.get(t, {}), **found.get(t, {})} for t in sorted({*known, *found})}
    figures = {**new, "library": version, "operators": operators}
    return json.dumps(figures, indent=1) + "\n"


def _figures(disk: OnDisk) -> dict[str, Any]:
    path = disk.folder / FIGURES
    if not path.is_file():
        return {"operators": {}}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def with_tables(path: Path, text: str) -> str:
    """A page with what stands between its markers replaced.

    Raises:
        UserError: It does not have both markers once.
    """
    page = path.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise UserError(f"{path}: expected {BEGIN} and {END} after it, once each")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{text}\n{rest[rest.index(END) :]}"


def tables(library: Path) -> dict[Path, str]:
    """What stands between the markers, by page.

    Raises:
        UserError: The library is damaged.
    """
    readme, results = ROOT / "README.md", ROOT / "docs" / "results.md"
    if not is_library(library):
        return dict.fromkeys((readme, results), NONE)
    disk = read_library(library)
    figures = figures_of(disk)
    return {
        readme: "\n".join([*summary(disk, figures), "", *about(disk, figures)]),
        results: "\n".join([*by_shape(disk, figures), "", *about(disk, figures)]),
    }


def figures_of(disk: OnDisk) -> Mapping[str, Any]:
    """Results of tests, sanitizer and do_bench by operator: those of the operator as it is."""
    known = _figures(disk)["operators"]
    tasks = [o.task for o in disk.library.operators]
    return {task: as_it_is(disk, task, known.get(task, {})) for task in tasks}


def summary(disk: OnDisk, figures: Mapping[str, Any]) -> Iterator[str]:
    """A line for each operator and device."""
    yield (
        "| operator | kernels | × best of torch (range) | FASTER | do_bench | sanitizer "
        "| certified |"
    )
    yield "|---|---|---|---|---|---|---|"
    for operator in disk.library.operators:
        for device in operator.devices:
            gains = [g for p in device.points if (g := gain(p, used(p))) is not None]
            mean = mean_gain(device)
            faster = sum(p.verdicts.get(p.best) is SpeedVerdict.FASTER for p in device.points)
            speed = f"{mean:.2f} ({min(gains):.2f} to {max(gains):.2f})" if mean else "–"
            of = figures[operator.task]
            bench = agreement(of["bench"]["shapes"]) if "bench" in of else "not run"
            yield (
                f"| {operator.task} | {languages(operator)} | {speed} "
                f"| {faster} of {len(device.points)} | {bench} | {sanitized(of)} "
                f"| {certified(of)} |"
            )


def by_shape(disk: OnDisk, figures: Mapping[str, Any]) -> Iterator[str]:
    """A line for each measured shape."""
    yield (
        "| operator | shape | used | kernel, µs | best of torch, µs | ratio | | do_bench, µs "
        "| × eager: do_bench, judge |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for operator in disk.library.operators:
        timed = figures[operator.task].get("bench", {}).get("shapes", [])
        by_case = {(s["device"], s["case"]): s for s in timed}
        for device in operator.devices:
            for point in device.points:
                row = row_of(point)
                own = by_case.get((device.name, point.case))
                times = times_eager(own) if own and "eager_us" in own else ()
                yield (
                    f"| {operator.task} | {row.case} | {row.taken} | {row.kernel_us} "
                    f"| {row.torch_us} | {row.ratio} | {row.verdict} "
                    f"| {'–' if own is None else figure(own['us'])} "
                    f"| {', '.join(f'{t:.2f}' for t in times) or '–'} |"
                )


def about(disk: OnDisk, figures: Mapping[str, Any]) -> Iterator[str]:
    """How the figures were had, and on what."""
    operators = disk.library.operators
    timed = [s for of in figures.values() for s in of.get("bench", {}).get("shapes", [])]
    of_ratios = (
        "; behind × eager, those at which it agrees so on how many times as fast as eager torch "
        "the operator is"
        if any("eager_us" in s for s in timed)
        else ""
    )
    used_by_torch = sum(p.best == TORCH for o in operators for d in o.devices for p in d.points)
    yield (
        f"Version {disk.library.version}. Device times by the judge's clock, from a race beside "
        "torch at visible and hidden shapes, with 95 % intervals; ratios in the mean over shapes, "
        "FASTER beside the best of eager and the torch.compile modes. On "
        f"{used_by_torch} shapes torch is used: no kernel is FASTER than eager. do_bench: shapes "
        f"of {LONG_US:g} µs and more at which `triton.testing.do_bench` of the operator agrees "
        f"within {100 * NEAR:g} %{of_ratios}. Sanitizer: compute-sanitizer's memcheck and "
        "racecheck over each kernel's smallest check cases. Certified: the day on which `kagent "
        "certify` last found each kernel correct, and no slower than when it was exported."
    )
    yield ""
    for text in dict.fromkeys(environment(d) for o in operators for d in o.devices):
        yield f"- {text}"
    for stage, words_ in (("tests", "own tests"), ("sanitize", "sanitizer"), ("bench", "do_bench")):
        if missing := [o.task for o in operators if stage not in figures[o.task]]:
            yield f"- Not run: {words_} of {', '.join(missing)}."
    if missing := [o.task for o in operators if "certify" not in figures[o.task]]:
        yield f"- No certificate is kept of {', '.join(missing)}; docs/results.md has earlier ones."
    if wrong := [o.task for o in operators if not figures[o.task].get("tests", OK)["clean"]]:
        yield f"- Own tests fail: {', '.join(wrong)}."


OK = {"clean": True}


def environment(device: DeviceRecord) -> str:
    """A device with versions and date."""
    known = device.environment
    versions = known.get("versions")
    key = str(known.get("key", ""))
    parts = ["" if key.startswith(device.name) else device.name, key]
    if isinstance(versions, Mapping):
        others = [f"{k} {v}" for k, v in versions.items() if f"{k} {v}" not in key]
        parts.append(", ".join(others))
    return words("; ".join(filter(None, [*parts, device.date])))


def languages(operator: OperatorRecord) -> str:
    """Languages of an operator's kernels."""
    return " + ".join(dict.fromkeys(k.written_in.title for k in operator.kernels))


def sanitized(of: Mapping[str, Any]) -> str:
    """What the sanitizer found."""
    if "sanitize" not in of:
        return "not run"
    lines = of["sanitize"]["tools"]
    if not all(line["tool"] for line in lines):
        return "called without it"
    if all(line["clean"] for line in lines):
        return "clean"
    return words("; ".join(f"{li['tool']}: {li['found']}" for li in lines if not li["clean"]))


def certified(of: Mapping[str, Any]) -> str:
    """The day of the last certificate, and whether it holds anything against the operator."""
    if "certify" not in of:
        return "–"
    return f"{'' if of['certify']['clean'] else 'NOT: '}{of['certify']['date']}"


if __name__ == "__main__":
    main()
