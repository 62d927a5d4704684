"""The kernels of an exported library under compute-sanitizer.

    python benchmarks/sanitize.py LIBRARY [--operator NAME ...] [--tools memcheck,racecheck]
        [--cases N] [--limit-s S] [--without-tool] [--json FILE]

Calls the host function of every kernel of the library, in each of its configurations, with the
arguments of the check cases of its task, and compares the results with float64. Arguments are drawn
and results compared outside of the tool, so that it sees the library's kernels alone, and not
torch's. torch allocates each tensor by itself (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memcheck
sees where one ends. Prints a table of kernels and tools: the errors or hazards, and how many cases
ran. Exits with 1 if there is any error, or a wrong result.

racecheck runs a kernel some hundred times slower: `--cases` takes the N smallest. A tool that is
not done with an operator after `--limit-s` is stopped, and the table says so. `--without-tool`
calls the kernels alone, on a CPU, too.

racecheck reports hazards in Triton's own code for `gl.warp_specialize`, as it does in cuDNN's
warp-specialized kernels: between the bytes that tell warps their role, and the warps that read
them. Between each such write and read there is a barrier of the whole block (`BAR.SYNC 0x1`, read
in the SASS of attention's kernel: docs/export.md). They are counted on their own, "in dispatch",
and are no error. Triton compiles into a folder of this run's own: its cache names the file that it
first compiled, which may be the same kernel's in runs/.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OPTIONS = (
    "--report-api-errors",
    "no",
)  # torch and cuda-bindings ask for functions that are not there
VARIABLES = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
SHOWN = 1000  # errors that a tool prints
_SUMMARY = re.compile(
    r"^=+ (?:ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: (\d+) hazards? )", re.MULTILINE
)
_PLACE = re.compile(
    r"access at .*?\+0x[0-9a-f]+(?: in (\S+?):(\d+))?(?: \[\d+ hazards?\])?$", re.MULTILINE
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument("--operator", action="append")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--without-tool", action="store_true")
    parser.add_argument("--json", type=Path, help="file for the table's lines")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    library: Path = options.library.resolve()
    if options.child:
        Kernels(library, options.child[0], options.cases).call(Path(options.child[1]))
        return
    tables = sorted(library.glob("build/torch-universal/*/portfolio/*.json"))
    if not tables:
        sys.exit(f"{library} is no exported library: it has no build/torch-universal/*/portfolio")
    names = [t.stem for t in tables]
    if unknown := set(options.operator or ()) - set(names):
        sys.exit(f"no operator {', '.join(unknown)} in {library}; there are {', '.join(names)}")
    tools = [""] if options.without_tool else options.tools.split(",")
    if unknown := set(tools) - {*TOOLS, ""}:
        sys.exit(f"no tool {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    if not options.without_tool and shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    print("| operator | tool | kernels and configurations | calls | found | s |")
    print("|---|---|---|---|---|---|")
    lines = []
    for name in options.operator or names:
        with tempfile.TemporaryDirectory(prefix="kagent-sanitize-") as folder:
            kernels = Kernels(library, name, options.cases)
            kernels.draw(Path(folder))
            lines += [sanitize(kernels, Path(folder), tool, options) for tool in tools]
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")
    sys.exit(0 if all(line["clean"] for line in lines) else 1)


def sanitize(
    kernels: Kernels, folder: Path, tool: str, options: argparse.Namespace
) -> dict[str, str | int | bool]:
    """Run one tool on one operator's kernels, and print a line; return it."""
    words = [sys.executable, __file__, str(kernels.library), "--cases", str(options.cases)]
    words += ["--child", kernels.name, str(folder)]
    if tool:
        words = ["compute-sanitizer", "--tool", tool, *OPTIONS, "--print-limit", str(SHOWN), *words]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=options.limit_s,
            env={**os.environ, **VARIABLES, "TRITON_CACHE_DIR": str(folder / "triton")},
            check=False,
        )
        out, code = done.stdout + done.stderr, done.returncode
        errors, in_dispatch = found_by(out, kernels.dispatch()) if tool else (0, 0)
        found = f"{errors}" if errors is not None else "no summary"
    except subprocess.TimeoutExpired as e:
        out = "".join(p.decode() if isinstance(p, bytes) else p or "" for p in (e.stdout, e.stderr))
        found, in_dispatch, code = f"not done after {options.limit_s:g} s", 0, -1
    seconds = time.monotonic() - begun
    calls, wrong = kernels.compare(folder)
    clean = found == "0" and code == 0 and bool(calls) and not wrong
    if in_dispatch:
        found += f", {in_dispatch} in dispatch"
    if wrong:
        found += f", wrong {len(wrong)}: {wrong[0]}"
    count = len({c[:2] for c in calls})
    print(f"| {kernels.name} | {tool or '–'} | {count} | {len(calls)} | {found} | {seconds:.0f} |")
    if not clean:
        print(f"{kernels.name} {tool}: exit {code}\n{out[-3000:]}", file=sys.stderr)
    sys.stdout.flush()
    return {
        "operator": kernels.name,
        "tool": tool,
        "kernels": count,
        "calls": len(calls),
        "found": found,
        "clean": clean,
    }


# -- what a tool printed ---------------------------------------------------------------------------


def found_by(out: str, dispatch: set[tuple[str, int]]) -> tuple[int | None, int]:
    """Errors or hazards of a run, and hazards in the dispatch of warps beside them.

    Args:
        out: All that compute-sanitizer printed. Without a summary the number is not known.
        dispatch: Places, file and line, to which Triton ascribes its code for warp_specialize.
    """
    counts = [int(a or b) for a, b in _SUMMARY.findall(out)]
    if not counts:
        return None, 0
    hazards = [list(_PLACE.findall(h)) for h in out.split("Race reported between ")[1:]]
    known = sum(
        1 for h in hazards if h and all((Path(f).name, int(n or 0)) in dispatch for f, n in h)
    )
    return sum(counts) - known, known


def dispatch_lines(source: str) -> Iterator[int]:
    """Lines to which Triton ascribes what it makes of `warp_specialize`: the call's own, those of
    the `if`s around it, that of the function, and that of an `if` on a constant that comes next,
    which gets the end of all roles. None of them is ascribed any access of the roles.
    """

    def visit(node: ast.AST, around: list[int]) -> Iterator[int]:
        if isinstance(node, ast.FunctionDef):
            around = [node.lineno]
        elif isinstance(node, ast.If):
            around = [*around, node.lineno]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warp_specialize":
            yield from (*around, node.lineno)
        body = getattr(node, "body", None)
        for before, after in itertools.pairwise(body if isinstance(body, list) else ()):
            called = before.value if isinstance(before, ast.Expr) else None
            named = isinstance(called, ast.Call) and getattr(called.func, "attr", "")
            constant = isinstance(after, ast.If) and isinstance(after.test, ast.Name)
            if named == "warp_specialize" and constant:
                yield after.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, around)

    yield from visit(ast.parse(source), [])


# -- calls -----------------------------------------------------------------------------------------


class Kernels:
    """All kernels of an operator, and the check cases they are called with.

    Args:
        library: Folder of an exported library.
        name: The operator's task.
        most: Cases, the smallest.
    """

    def __init__(self, library: Path, name: str, most: int) -> None:
        self.library, self.name = library, name
        (self._package,) = (p.parent for p in library.glob("build/torch-universal/*/portfolio"))
        for path in (str(self._package.parent), str(library / "tests")):
            if path not in sys.path:
                sys.path.insert(0, path)
        self._harness: Any = importlib.import_module("harness")
        self._torch: Any = importlib.import_module("torch")
        self._table = json.loads((self._package / "portfolio" / f"{name}.json").read_text())
        self._task = self._harness.Task(name)
        self._written = [
            a["name"] for a in self._task.data["arguments"] if a.get("mutates") or "writes" in a
        ]
        self._kind = "gpu" if self._torch.cuda.is_available() else "cpu"
        cases = (c for c in self._task.cases() if c.kind == self._kind)
        self._cases = sorted(cases, key=elements)[:most]

    def dispatch(self) -> set[tuple[str, int]]:
        """Files and lines of `dispatch_lines`."""
        files = [self._file(id_) for id_ in self._table["kernels"]]
        return {(f.name, n) for f in files for n in dispatch_lines(f.read_text(encoding="utf-8"))}

    def draw(self, folder: Path) -> None:
        """Keep each case's arguments in a file."""
        for number, case in enumerate(self._cases):
            self._torch.save(self._task.arguments(case), folder / f"arguments{number}.pt")

    def call(self, folder: Path) -> None:
        """Call each kernel in each configuration, and keep what it returns and has written."""
        kernels: Any = importlib.import_module(f"{self._package.name}._kernels")
        for id_, config, number in self._calls():
            tunables = self._table["kernels"][id_]["configs"][config]
            host = kernels.load(
                self._package.name, self._file(id_), self._table["entry"], tunables, f"call{config}"
            )
            given = self._torch.load(folder / f"arguments{number}.pt")
            values = list(given.values())
            tensors = [i for i, v in enumerate(values) if hasattr(v, "data_ptr")]
            results = host(*kernels.as_checked(values, tensors, pitched=False))
            kept = self._harness.as_tuple(results), given
            self._torch.save(kept, folder / f"{id_}-{config}-{number}.pt")

    def compare(self, folder: Path) -> tuple[list[tuple[str, int, int]], list[str]]:
        """Compare what was kept with float64, and delete it; the calls, and what is wrong."""
        done, wrong = [], []
        for id_, config, number in self._calls():
            path = folder / f"{id_}-{config}-{number}.pt"
            if not path.exists():
                continue
            results, written = self._torch.load(path)
            path.unlink()

            def called(own: dict[str, Any], results: Any = results, written: Any = written) -> Any:
                for argument in self._written:
                    own[argument].copy_(written[argument])
                return results

            try:
                self._task.check(called, self._torch.load(folder / f"arguments{number}.pt"))
            except AssertionError as e:
                wrong.append(f"{self._cases[number]}: {str(e)[:200]}")
            done.append((id_, config, number))
        return done, wrong

    def _calls(self) -> Iterator[tuple[str, int, int]]:
        """Kernels, numbers of configurations and of cases."""
        for id_, kernel in self._table["kernels"].items():
            if (kernel["language"] == "cpp") != (self._kind == "cpu"):
                continue
            dtypes = {r["dtype"] for r in kernel["regions"]}
            for config in range(len(kernel["configs"])):
                for number, case in enumerate(self._cases):
                    if case.dtype not in dtypes or (case.noncontiguous and self._written):
                        continue  # what a kernel writes to must not be a copy
                    yield id_, config, number

    def _file(self, id_: str) -> Path:
        return self._package / "kernels" / f"{id_}.py"


def elements(case: Any) -> float:
    """How large a case is."""
    return math.prod(abs(v) for v in case.dims.values() if isinstance(v, int | float) and v)


if __name__ == "__main__":
    main()
