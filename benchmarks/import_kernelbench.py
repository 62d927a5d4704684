"""How many KernelBench problems become tasks with nothing written by hand, and why others do not.

    python benchmarks/import_kernelbench.py KERNELBENCH/level1 KERNELBENCH/level2 --to /tmp/tasks
    python benchmarks/import_kernelbench.py --join part1.jsonl part2.jsonl

Each file is imported and checked by `kagent import kernelbench` in processes of its own, which are
ended at `--limit`. A line is printed as each ends; a table counts by folder, also after SIGINT or
SIGTERM. With `--seeds`, seeds are derived, too, and counted with the reasons for none. The same
command with the same `--out` goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from limited import Ended
from suite_imports import Found, add_options, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files, or folders of them")
    parser.add_argument("--to", type=Path, help="folder for the tasks, emptied as needed")
    parser.add_argument("--seeds", action="store_true", help="derive seeds, and count them")
    add_options(parser)
    options = parser.parse_args()
    if not options.join and not (options.paths and options.to):
        parser.error("expected files or folders and --to FOLDER, or --join")
    missing = [str(p) for p in options.paths if not p.exists()]
    if missing:
        parser.error(f"no such file or folder: {', '.join(missing)}")
    files = [f for p in options.paths for f in (sorted(p.glob("*.py")) if p.is_dir() else [p])]
    problems = {(f.parent.name, f.stem): _command(f, options.to, options.seeds) for f in files}

    def read(ended: Ended) -> Found:
        return outcome(ended, seeds=options.seeds)

    sys.exit(measure(options, problems, read))


def _command(file: Path, to: Path, seeds: bool) -> list[str]:
    folder = to / file.parent.name / file.stem
    flags = ["--json", *([] if seeds else ["--no-seeds"]), "--to", str(folder)]
    kagent = [sys.executable, "-m", "kagent", "import", "kernelbench", str(file), *flags]
    return ["sh", "-c", 'rm -rf "$0"; exec "$@"', str(folder), *kagent]


def outcome(ended: Ended, *, seeds: bool) -> Found:
    """Read what `kagent import kernelbench --json` printed for a file."""
    if ended.status in (0, 1) and ended.out:
        made = json.loads(ended.out)[0]
        names = " and ".join(made["seeds"]) if seeds else ""
        missing = [n for n in made["notes"] if seeds and re.match("no (Triton|C\\+\\+) seed", n)]
        words = "; ".join(filter(None, [*made["holes"], names, *missing]))
        return Found("holes" if made["holes"] else "task", words, tuple(made["seeds"]))
    return failed(ended)


def failed(ended: Ended) -> Found:
    """Read the error of a command: "crash" where it is not one line of kagent's own."""
    lines = ended.err.strip().splitlines()
    text = lines[-1] if lines else f"status {ended.status}"
    clear = ended.status is not None and ended.status > 0 and lines
    return Found("refused" if clear and "Traceback" not in ended.err else "crash", text)


if __name__ == "__main__":
    main()
