"""Runs a user's script in a process of its own, as the user, and reads what was seen there.

The script is trusted: it is the user's own. It gets its arguments, folder and environment as if
`python SCRIPT ARGS` had been typed. What it prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kagent_sandbox.device.table import available, own_unit
from kagent_sandbox.errors import ChildDied, UserError
from kagent_sandbox.process.device_lock import DeviceLock


def require_script(script: Path) -> None:
    """Make sure that a script is there.

    Raises:
        UserError: It is not.
    """
    if script.is_dir():
        raise UserError(f"{script}: a folder, where a script was expected: name its Python file")
    if not script.is_file():
        raise UserError(f"{script}: no such file: name the script as for `python {script}`")


def run_script(observer: str, script: Path, args: Sequence[str], request: Mapping[str, Any]) -> Any:
    """Run a script under an observer, which times it: with a turn on the device for itself.

    Args:
        observer: Module of this package with `observe(request, run) -> result` (`child.py`).
        script: A Python file.
        args: Its arguments.
        request: For the observer, as JSON.

    Returns:
        The observer's result, which went through JSON.

    Raises:
        UserError: There is no such file, or the script fails or has no steps.
        ChildDied: The process ended without a result.
    """
    require_script(script)
    with tempfile.TemporaryDirectory(prefix="kagent-") as name:
        asked, told = Path(name, "request.json"), Path(name, "result.json")
        given = {"script": str(script), "args": list(args), "observer": observer, **request}
        asked.write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-m", "kagent.workload.child", str(asked), str(told)]
        gpu, environment = available("gpu"), dict(os.environ)
        if not gpu:  # lines of torch's profiler, "USDT:"; on a GPU this hides CUPTI's errors, too
            environment.setdefault("KINETO_LOG_LEVEL", "6")
        with DeviceLock(own_unit("gpu" if gpu else "cpu"), _say).turn("timing"):
            done = subprocess.run(command, stdout=2, env=environment, check=False)  # stderr
        if not told.is_file():
            raise ChildDied(f"{script}: its process ended with {done.returncode} and no result")
        result = json.loads(told.read_text(encoding="utf-8"))
    if "error" in result:
        raise UserError(f"{script}: {result['error']}")
    return result["result"]


def _say(text: str) -> None:
    sys.stderr.write(f"kagent: {text}\n")
