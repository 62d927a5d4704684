"""The judge of a run that `kagent serve` holds, for programs of other search systems.

Standard library only: an evaluator's process imports it for every program.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass

VARIABLE = "KAGENT_JUDGE"
"""Environment variable with the path of the socket."""


class JudgeError(Exception):
    """There is no verdict: nothing listens, or the machine failed. The program is not to blame."""


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """The judge's verdict on a program.

    Attributes:
        id: The candidate's number in the run.
        correct: Whether it passed every check.
        speed_up: Ratio to the best of torch; 0 where it is not correct.
        promoted: Whether it is the best so far.
        feedback: Why it was refused, for the next attempt; empty where it was not.
        cases_us: µs by benchmark case.
        roofline_shares: Share of the measured roofline by benchmark case, from 0 to 1.
        seconds: What the judge took, waiting for other programs not counted.
    """

    id: int
    correct: bool
    speed_up: float
    promoted: bool
    feedback: str
    cases_us: dict[str, float]
    roofline_shares: dict[str, float]
    seconds: float


def judge(source: str, path: str | None = None) -> ProgramVerdict:
    """Have a program judged.

    Args:
        source: Text of a kernel file.
        path: The judge's socket; by default what KAGENT_JUDGE says.

    Raises:
        JudgeError: There is no verdict.
    """
    where = path or os.environ.get(VARIABLE)
    if not where:
        raise JudgeError(f"no judge: start `kagent serve TASK` and set {VARIABLE} to its socket")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(where)
            with connection.makefile("rwb") as stream:
                stream.write(json.dumps({"source": source}).encode() + b"\n")
                stream.flush()
                line = stream.readline()
    except OSError as e:
        raise JudgeError(f"{where}: {e.strerror or e}: is `kagent serve` running?") from e
    if not line:
        raise JudgeError(f"{where}: the judge ended without a verdict")
    answer = json.loads(line)
    if "error" in answer:
        raise JudgeError(answer["error"])
    return ProgramVerdict(**answer)
