"""The kernels of an exported library under compute-sanitizer.

    python benchmarks/sanitize.py LIBRARY [--operator NAME ...] [--tools memcheck,racecheck]
        [--cases N] [--limit-s S] [--without-tool] [--json FILE]

Calls the host function of every kernel of the library, in each of its configurations, with the
arguments of the check cases of its task, and compares the results with float64. torch allocates
each tensor by itself (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memcheck sees where one ends. Prints
a table of kernels and tools: the errors or hazards, and how many cases ran. Exits with 1 if there
is any error, or a wrong result.

racecheck runs a kernel some hundred times slower: `--cases` takes the N smallest. A tool that is
not done with an operator after `--limit-s` is stopped, and the table says so. `--without-tool`
calls the kernels alone, on a CPU, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


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
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    library: Path = options.library.resolve()
    if options.child:
        call_kernels(library, options.child, options.cases)
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
    lines = [
        sanitize(library, name, tool, options)
        for name in options.operator or names
        for tool in tools
    ]
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1) + "\n")
    sys.exit(0 if all(line["clean"] for line in lines) else 1)


def sanitize(
    library: Path, name: str, tool: str, options: argparse.Namespace
) -> dict[str, str | int | bool]:
    """Run one tool on one operator's kernels, and print a line; return it."""
    words = [sys.executable, __file__, str(library), "--child", name, "--cases", str(options.cases)]
    if tool:
        words = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", *words]
    begun = time.monotonic()
    found = ""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=options.limit_s,
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            check=False,
        )
        out, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as e:
        out = "".join(p.decode() if isinstance(p, bytes) else p or "" for p in (e.stdout, e.stderr))
        found, code = f"not done after {options.limit_s:g} s", -1
    calls = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("call ")]
    kernels = {(c["kernel"], c["config"]) for c in calls}
    wrong = [c for c in calls if c["wrong"]]
    if not found and tool:
        counts = [int(a or b) for a, b in _SUMMARY.findall(out)]
        found = f"{sum(counts)}" if counts else "no summary"
    found = found or "0"
    if wrong:
        found += f", wrong {len(wrong)}: {wrong[0]['wrong']}"
    clean = found == "0" and code == 0 and bool(calls)
    seconds = time.monotonic() - begun
    print(f"| {name} | {tool or '–'} | {len(kernels)} | {len(calls)} | {found} | {seconds:.0f} |")
    if not clean:
        print(f"{name} {tool}: exit {code}\n{out[-3000:]}", file=sys.stderr)
    sys.stdout.flush()
    return {
        "operator": name,
        "tool": tool,
        "kernels": len(kernels),
        "calls": len(calls),
        "found": found,
        "clean": clean,
    }


def call_kernels(library: Path, name: str, most: int) -> None:
    """Call each kernel of an operator in each configuration, and print a line for each call."""
    (package,) = (p.parent for p in library.glob("build/torch-universal/*/portfolio"))
    sys.path[:0] = [str(library / "tests"), str(package.parent)]
    harness: Any = importlib.import_module("harness")
    kernels: Any = importlib.import_module(f"{package.name}._kernels")
    torch: Any = importlib.import_module("torch")
    table = json.loads((package / "portfolio" / f"{name}.json").read_text())
    task = harness.Task(name)
    writes = any("writes" in a for a in task.data["arguments"])
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    cases = sorted((c for c in task.cases() if c.kind == kind), key=elements)[:most]
    for id_, kernel in table["kernels"].items():
        if (kernel["language"] == "cpp") != (kind == "cpu"):
            continue
        dtypes = {r["dtype"] for r in kernel["regions"]}
        for number, config in enumerate(kernel["configs"]):
            path = package / "kernels" / f"{id_}.py"
            host = kernels.load(package.name, path, table["entry"], config, f"sanitize{number}")
            for case in cases:
                if case.dtype not in dtypes or (case.noncontiguous and writes):
                    continue  # what a kernel writes to must not be a copy
                arguments = task.arguments(case)
                wrong = ""
                try:
                    task.check(lambda own, host=host: called(kernels, host, own), arguments)
                except AssertionError as e:
                    wrong = str(e)[:200]
                call = {"kernel": id_, "config": number, "case": str(case), "wrong": wrong}
                print("call " + json.dumps(call), flush=True)


def called(kernels: Any, host: Any, arguments: dict[str, Any]) -> Any:
    """Results of a host function, with tensors as the kernel was checked with them."""
    values = list(arguments.values())
    tensors = [i for i, v in enumerate(values) if hasattr(v, "data_ptr")]
    return host(*kernels.as_checked(values, tensors, pitched=False))


def elements(case: Any) -> float:
    """How large a case is."""
    return math.prod(abs(v) for v in case.dims.values() if isinstance(v, int | float) and v)


if __name__ == "__main__":
    main()
