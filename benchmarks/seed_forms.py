"""Forms of the seeds that `kagent new` writes for a GPU, timed beside torch's own.

    python benchmarks/seed_forms.py TASK_FOLDER ... --write FOLDER   the forms' files, without a GPU
    python benchmarks/seed_forms.py TASK_FOLDER ... --from FOLDER    times them, on a GPU

A form is the seed as it is written now, or with one decision taken otherwise: convolutions of a
library with channels first, or last also for three dimensions of places; transposed ones left to
the library; rows that are not loaded ahead, or in other blocks. Forms that are the same file are
left out. Each is timed by `triton.testing.do_bench` on the task's first benchmark case beside eager
and torch.compile, in ms; results are compared with eager's by the L2 norm, and nothing else is
checked.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.importing import import_file

NOW = "now"
REP_MS = 60
LAST = {4: "channels_last", 5: "channels_last_3d"}
TRACED: Mapping[str, tuple[Mapping[int, str] | None, bool]] = {
    "channels_first": ({}, True),
    "channels_last": (LAST, True),
    "transposed": (None, False),
    "transposed_channels_first": ({}, False),
}
"""Memory formats of convolutions (None: as now), and whether transposed ones become sub-pixel
convolutions.
"""
EDITED: Mapping[str, Mapping[str, str]] = {
    "not_ahead": {"INNER_R0_STAGES": "1"},
    "4_ahead": {"INNER_R0_STAGES": "4"},
    "blocks_of_1024": {"INNER_R0_BLOCK": "1024"},
    "blocks_of_4096": {"INNER_R0_BLOCK": "4096"},
    "8_warps": {"INNER_NUM_WARPS": "8"},
    "not_ahead_blocks_of_4096": {"INNER_R0_STAGES": "1", "INNER_R0_BLOCK": "4096"},
    "rows_across_ahead": {"OUTER_R0_STAGES": "3"},
    "rows_across_64_wide": {"OUTER_XBLOCK": "64", "NUM_WARPS": "8"},
    "rows_across_128_wide": {"OUTER_XBLOCK": "128", "OUTER_R0_BLOCK": "16"},
    "elements_512": {"XBLOCK": "512"},
    "elements_2048": {"XBLOCK": "2048", "NUM_WARPS": "8"},
    "products_of_32": {"DOT_R0_BLOCK": "32"},
    "products_8_warps": {"DOT_NUM_WARPS": "8"},
}
"""Other values of a seed's constants."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--form", choices=[NOW, *TRACED], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:  # in a process of its own: tracing changes torch as a whole
        print(traced(load_task(options.tasks[0]), options.form), end="")
    elif options.write:
        for folder in options.tasks:
            write(folder, options.write / folder.name)
    elif options.source:
        for folder in options.tasks:
            time_forms(load_task(folder), options.source / folder.name)
    else:
        parser.error("give --write FOLDER or --from FOLDER")


def traced(task: Task, form: str) -> str:
    """The seed in one form."""
    from kagent.authoring.inductor import decompositions, library_convolution, worker

    formats, sub_pixel = TRACED.get(form, (None, True))
    if formats is not None:
        library_convolution.FORMATS.clear()
        library_convolution.FORMATS.update(formats)
    if not sub_pixel:
        left: Any = decompositions
        left.without_transposition = lambda *_: NotImplemented
    with contextlib.redirect_stdout(sys.stderr):
        return worker.write(task, "gpu")


def write(task: Path, folder: Path) -> None:
    """Write all forms of a task's seed that differ."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}  # file -> form
    for form, text in forms(task):
        if text not in texts:
            texts[text] = form
            (folder / f"{form}.py").write_text(text)
    print(f"{task.name}: {', '.join(texts.values()) or 'no seed'}", flush=True)


def forms(task: Path) -> Iterator[tuple[str, str]]:
    """Forms of a task's seed, some of which are the same."""
    texts: dict[str, str] = {}
    for form in (NOW, *TRACED):
        words = [sys.executable, __file__, str(task), "--form", form]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            print(f"{task.name}: {form}: {said[-1]}", flush=True)
        else:
            texts[form] = done.stdout
    yield from texts.items()
    for form, values in EDITED.items() if NOW in texts else ():
        text = texts[NOW]
        for name, value in values.items():
            text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        yield form, text


def time_forms(task: Task, folder: Path) -> None:
    """Print times of a task's forms beside eager and torch.compile."""
    import torch
    from kagent_sandbox.device.baseline_calls import make_call
    from kagent_sandbox.judge.timing.baselines import baseline_call

    case, device = task.cases("gpu").bench[0], torch.device("cuda")
    eager = make_call(baseline_call(task, case, "eager", 1), device)
    arguments = eager.keywords
    module: Any = import_file(task.folder / "reference.py", "seed_forms_reference")
    compiled = torch.compile(module.eager, dynamic=False)
    with torch.no_grad():
        expected = eager()
        if expected is None:
            print(f"{task.name}: it writes its arguments, which no form may find written")
            return
        found = {"eager": timed(eager, expected)}
        found["compile"] = timed(lambda: compiled(**arguments), expected)
        for path in sorted(folder.glob("*.py")):
            seed: Any = import_file(path, f"seed_forms_{path.stem}")
            entry = getattr(seed, task.entry)
            found[path.stem] = timed(lambda entry=entry: entry(**arguments), expected)
    best = min((ms for ms, _ in (found["eager"], found["compile"]) if ms), default=0.0)
    cells = [
        f"{name} {ms:.3f} ({best / ms:.2f}x, error {error:.0e})" if ms else f"{name} failed"
        for name, (ms, error) in found.items()
    ]
    print(f"{task.name} {case.name}: {'; '.join(cells)}", flush=True)


def timed(call: Callable[..., Any], expected: Any) -> tuple[float, float]:
    """Median time in ms, and the result's error in the L2 norm; zeros for what fails."""
    from triton.testing import do_bench

    try:
        error = distance(call(), expected)
        return float(do_bench(call, warmup=10, rep=REP_MS, return_mode="median")), error
    except Exception as e:  # noqa: BLE001 - a form may fail in any way; the others are timed
        print(f"  {type(e).__name__}: {str(e)[:200]}")
        return 0.0, 0.0


def distance(found: Any, expected: Any) -> float:
    """Largest error of a result in the L2 norm, relative to what was expected."""
    if isinstance(expected, tuple | list):
        return max(distance(a, b) for a, b in zip(found, expected, strict=True))
    a, b = found.double(), expected.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


if __name__ == "__main__":
    main()
