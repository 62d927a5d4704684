"""How many definitions of a FlashInfer-Bench suite become tasks, and why others do not.

    python benchmarks/import_flashinfer.py SUITE [--to FOLDER] [--only TEXT]
    python benchmarks/import_flashinfer.py --join part1.jsonl part2.jsonl

SUITE holds definitions/ and workloads/. Each definition is imported and its task checked in
processes of its own, which are ended at `--limit`. A line is printed as each ends; a table counts
by kind of operation, also after SIGINT or SIGTERM. The same command with the same `--out` goes on
where it was stopped. What was checked before is recalled.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from import_kernelbench import failed
from kagent.authoring.importers.flashinfer.exchange import find_definitions, read_definition
from kagent.authoring.importers.flashinfer.task import import_definition
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import KagentError
from kagent_sandbox.judge.task_check import check_kinds
from limited import Ended
from suite_imports import Found, add_options, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path, nargs="?")
    parser.add_argument("--to", type=Path, help="folder for the tasks (removed afterwards)")
    parser.add_argument("--only", default="", help="definitions whose names hold this text")
    add_options(parser)
    options = parser.parse_args()
    if not options.join and not options.suite:
        parser.error("expected a suite, or --join")
    with tempfile.TemporaryDirectory() as scratch:
        to = options.to or Path(scratch)
        found = find_definitions([options.suite]) if options.suite else []
        problems = {
            (read_definition(path).op_type, path.stem): _command(path, workloads, to)
            for path, workloads in found
            if options.only in path.stem
        }
        code = measure(options, problems, _read)
    sys.exit(code)


def _command(path: Path, workloads: Path | None, to: Path) -> list[str]:
    """What runs `one` in a process of its own."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        "from import_flashinfer import one; one(*sys.argv[1:])"
    )
    files = [str(f) for f in (path, workloads) if f is not None]
    return [sys.executable, "-c", script, str(to), *files]


def one(to: str, path: str, workloads: str | None = None) -> None:
    """Print what becomes of a definition, as JSON."""
    loads = None if workloads is None else Path(workloads)
    print("\n" + json.dumps(asdict(import_and_check(Path(path), loads, Path(to)))))


def import_and_check(path: Path, workloads: Path | None, to: Path) -> Found:
    """Import a definition, and check its task for both kinds of device."""
    try:
        task = load_task(import_definition(path, workloads, to, force=True).folder)
    except KagentError as e:
        return Found("refused", str(e))
    try:
        checks = check_kinds(task)
    except KagentError as e:
        return Found("fault", str(e))
    holes = [h for c in checks for h in c.holes]
    skipped = f"{len(checks[0].skipped)} GPU cases too large for a CPU" if checks[0].skipped else ""
    return Found("holes", "; ".join(holes)) if holes else Found("task", skipped)


def _read(ended: Ended) -> Found:
    if ended.status == 0 and ended.out.strip():
        return Found(**json.loads(ended.out.splitlines()[-1]))
    return failed(ended)


if __name__ == "__main__":
    main()
