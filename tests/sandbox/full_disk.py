"""Run in a mount namespace: fills the disk of temporary files under a builder and a judge.

Prints a line each: what answered before, and what after.
"""

import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path

from kagent_sandbox.builder import health
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import BuildRequest
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import MachineError
from kagent_sandbox.judge.check.cases import check_cases
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.runtime.text import printable

KNOWN = health.known_request("cpu")


def fill():
    with contextlib.suppress(OSError), Path(tempfile.gettempdir(), "filler").open("wb", 0) as file:
        while True:
            file.write(bytes(4096))


def report(what, work):
    try:
        found = type(work()).__name__
    except MachineError as e:
        found = f"MachineError {e}"
    sys.stdout.write(f"{what}: {printable(found)}\n")


def main():
    folder = Path(sys.argv[1])
    task = load_task(folder)
    cases = tuple(build_case(task, case) for case in check_cases(task, "cpu", 7))
    source = next(iter(sorted(folder.glob("cpp_*.py")))).read_text()
    with Builder() as builder, JudgeClient(folder, "cpu", 7) as judge:
        built = builder.build(BuildRequest(source, task.entry, "cpu", cases))
        report("judge", lambda: judge.check(built))
        report("builder", lambda: builder.build(KNOWN))
        fill()
        other = dataclasses.replace(KNOWN, source=f"# another\n{KNOWN.source}")
        report("builder", lambda: builder.build(other))
        report("judge", lambda: judge.check(dataclasses.replace(built, source_hash="a" * 64)))
        with contextlib.suppress(OSError):
            Path(tempfile.gettempdir(), "filler").unlink()
        report("builder", lambda: builder.build(other))


if __name__ == "__main__":
    main()
