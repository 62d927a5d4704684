"""The process of a user's script: `python -m kagent.workload.child REQUEST RESULT`."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


def main(request_path: Path, result_path: Path) -> None:
    """Run the request's script under its observer, and write the result or why there is none."""
    from kagent.workload.steps import ScriptFailed  # it loads torch, which an interrupt may end

    request = json.loads(request_path.read_text(encoding="utf-8"))
    observer = importlib.import_module(f"kagent.workload.{request['observer']}")
    try:
        told = {"result": observer.observe(request, script_of(request))}
    except ScriptFailed as e:
        told = {"error": str(e)}
    result_path.write_text(json.dumps(told), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # its data loaders and threads are no longer of interest


def script_of(request: Mapping[str, Any]) -> Callable[[], None]:
    """Return a function that runs the script as `python SCRIPT ARGS` does.

    The function raises `ScriptFailed`. `Done`, and a clean exit of the script, end it.
    """
    from kagent.workload.steps import Done, ScriptFailed

    script = request["script"]

    def run() -> None:
        sys.argv = [script, *request["args"]]
        sys.path[0] = str(Path(script).resolve().parent)
        try:
            runpy.run_path(script, run_name="__main__")
        except Done:
            return
        except SystemExit as e:
            if e.code not in (None, 0):
                raise ScriptFailed(f"the script ended with {e.code}") from None
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # noqa: BLE001 - whatever a user's script raises
            traceback.print_exception(e.with_traceback(_frames_of(script, e.__traceback__)))
            raise ScriptFailed(f"the script failed: {type(e).__name__}: {e}") from None

    return run


def _frames_of(script: str, trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in a script; None if it was not reached."""
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except KeyboardInterrupt:  # kagent itself says so
        os._exit(130)
