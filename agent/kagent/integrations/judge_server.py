"""A run's judge behind a socket, for other search systems.

One connection brings one program, and takes its verdict. Programs are judged one after the other,
in the order in which they come. Each is told to the run as `kagent tell` would, so that the run's
folder holds everything, and one final race decides about every system in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.errors import KagentError, UserError

from kagent.api import Run
from kagent.asktell.results import Result
from kagent.integrations.judge_client import ProgramVerdict

MOST_BYTES = 4 << 20
"""Length of a request."""
_REQUEST_LIMIT_S = 10.0  # for a request, once somebody has connected


def serve(run: Run, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Judge programs until the process is interrupted.

    Args:
        run: The run that they are told to.
        listener: The socket that they come by (`listening`).
        say: Is told each outcome in a line.
    """
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # one that went away is not waited for
            connection.settimeout(_REQUEST_LIMIT_S)
            with connection.makefile("rwb") as stream:
                answer = _answer(run, stream.readline(MOST_BYTES + 1), say)
                stream.write(json.dumps(answer).encode() + b"\n")


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that only this user may use. It is removed at the end.

    Args:
        path: Of the socket. One that nobody listens at any more is replaced.

    Raises:
        UserError: There is no place for it, something else lies there, or another judge listens.
    """
    if path.is_socket():
        _refuse_used(path)
        path.unlink()
    elif path.exists():
        kind = "a folder" if path.is_dir() else "a file"
        raise UserError(f"{path}: {kind}, where a socket would be made: name another path")
    with socket.socket(socket.AF_UNIX) as listener:
        before, made = os.umask(0o177), path.with_name(f"{path.name}.new")
        try:
            made.unlink(missing_ok=True)
            listener.bind(str(made))
            listener.listen(64)
            made.rename(path)  # whoever sees it is served
        except OSError as e:
            raise UserError(
                f"{path}: no place for a socket: {e.strerror or e} (--socket PATH, of at most 103 "
                "characters)"
            ) from None
        finally:
            os.umask(before)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _refuse_used(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        if connection.connect_ex(str(path)) == 0:
            raise UserError(f"{path}: another judge listens there; name another path with --socket")


def _answer(run: Run, line: bytes, say: Callable[[str], None]) -> dict[str, object]:
    try:
        source = json.loads(line)["source"]
    except (ValueError, KeyError, TypeError, RecursionError):
        source = None
    if not isinstance(source, str):
        most = f"of {MOST_BYTES} bytes at most"
        return {"error": f'expected one line of JSON, {{"source": TEXT}}, {most}'}
    began = time.monotonic()
    try:
        result = run.tell(None, source, kernel=True)
    except KagentError as e:
        say(f"no verdict: {e}")
        return {"error": str(e)}
    say(str(result))
    found: dict[str, object] = to_json(judged(result, time.monotonic() - began))
    return found


def judged(result: Result, seconds: float) -> ProgramVerdict:
    """A told program's result as its search system gets it."""
    verdict = result.verdict
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    feedback = ""
    if isinstance(verdict, Rejected):
        where = f" in {verdict.case}" if verdict.case else ""
        feedback = f"{verdict.status} ({verdict.stage}){where}: {verdict.message}"
    return ProgramVerdict(
        id=result.id,
        correct=result.passed,
        speed_up=result.speed_up or 0.0,
        promoted=result.promoted,
        feedback=feedback,
        cases_us={t.case: t.kernel_us for t in timings},
        roofline_shares={t.case: t.roofline_share for t in timings},
        seconds=seconds,
    )
