"""Writes one seed: a request in JSON on stdin, its source or the reason for none on stdout. In a
process of its own, since Inductor and the H100 that it is shown change torch as a whole.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.errors import KagentError
from kagent_sandbox.process.parent import end_with_parent


def write(task: Task, kind: Kind, *, library: bool = False) -> str:
    """A seed's source, which leaves allowed products of matrices to torch with `library`.

    Raises:
        NoSeed: There can be none; the text says why.
    """
    from torch._inductor import config

    from kagent.authoring.inductor import fake_gpu, trace
    from kagent.authoring.inductor.cpp import CppFile
    from kagent.authoring.inductor.triton import TritonFile

    gc.freeze()  # what was imported stays
    gc.enable()
    config.compile_threads = 1  # nothing is compiled: torch would start a pool of processes
    if kind == "gpu":
        fake_gpu.install()
    trace.install()
    traces = trace.trace(task, kind, library=library)
    file: Any = TritonFile(task) if kind == "gpu" else CppFile(task)
    if len(traces) == 1:
        file.add(traces[0], task.entry, "")
    else:
        for number, traced in enumerate(traces, 1):
            file.add(traced, f"_{task.entry}_{number}", f"_way{number}")
        file.hosts += ["", "", *_choice(task, traces)]
    return str(file.source(_docstring(task, kind)))


def _choice(task: Task, traces: list[Any]) -> list[str]:
    """The entry function, where dimensions and flags decide between several."""
    from kagent.authoring.inductor.host import INDENT, dims_lines

    names = ", ".join(a.name for a in task.arguments)
    body: list[str] = []
    for number, traced in enumerate(traces[:-1], 1):
        body += [f"if {traced.condition}:", f"{INDENT}return _{task.entry}_{number}({names})"]
    body.append(f"return _{task.entry}_{len(traces)}({names})")
    return [f"def {task.entry}({names}):", *(INDENT + x for x in (*dims_lines(task, body), *body))]


def _docstring(task: Task, kind: Kind) -> str:
    import torch

    version = torch.__version__.partition("+")[0]
    summary = task.summary.replace("\\", "/").replace('"', "'").rstrip(".")
    what = "Triton for an H100" if kind == "gpu" else "C++"
    return (
        f'"""{summary}.\n\nWritten by torch {version}: the {what} that Inductor has for this '
        'task\'s `eager`, made a candidate.\n"""'
    )


def main() -> None:
    """Answer one request: {"parent": process id, "task": folder, "kind": "gpu" or "cpu", "library":
    whether torch multiplies matrices}.
    """
    gc.disable()  # importing torch would collect often, and find next to nothing
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # what eager prints
        try:
            task = load_task(Path(request["task"]))
            answer = {"source": write(task, request["kind"], library=request["library"])}
        except KagentError as e:
            answer = {"error": str(e)}
        except Exception as e:
            from kagent.authoring.inductor.trace import NoSeed

            if not isinstance(e, NoSeed):
                raise
            answer = {"reason": str(e)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
