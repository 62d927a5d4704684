"""Searches for one problem of a suite: a request in JSON on stdin, events and the answer as lines
of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.errors import (
    ChildDied,
    KagentError,
    MachineError,
    RunError,
    TaskError,
    UserError,
)
from kagent_sandbox.process.parent import end_with_parent

from kagent.config.devices import use_device
from kagent.config.settings import load_config
from kagent.evolve import session
from kagent.llm.chat import ModelError
from kagent.runs.events import Event, PhaseBegan, Started, Stop
from kagent.suite.record import FailedStep
from kagent.suite.workers import LISTENS

Tell = Callable[[dict[str, object]], None]
Work = Callable[[dict[str, Any], Tell], str]


def search(request: dict[str, Any], tell: Tell) -> str:
    """Search for one problem.

    Args:
        request: "task", "device" (None: the first one), "config", and "run" (path of the folder
            that goes on, or ""). A run that cannot go on is begun anew.
        tell: Is told of the run's folder, of phases, and why a run could not go on.

    Returns:
        Why it ended, as `Stop` has it.

    Raises:
        KagentError: It could not be done.
    """
    try:
        use_device(request["device"])  # before anything asks whether there is a GPU
    except UserError as e:  # no other problem would find it either
        raise MachineError(str(e)) from None

    def observe(event: Event) -> None:
        if isinstance(event, Started):
            tell({"run": event.run})
        elif isinstance(event, PhaseBegan):
            tell({"phase": event.phase.value})

    # No problem's result depends on what ran before it.
    config = load_config(**request["config"], memory=False)
    ask_for(config.isolation)
    resume = Path(request["run"]) if request["run"] else None
    if resume is not None:
        try:
            return session.evolve(request["task"], config, observe, resume).stop.value
        except RunError as e:
            tell({"lost": str(e)})
    return session.evolve(request["task"], config, observe).stop.value


def answer_to(work: Work, request: dict[str, Any], tell: Tell) -> dict[str, object]:
    """The last line: "stop", or "error" with the step that failed."""
    try:
        return {"stop": work(request, tell)}
    except KeyboardInterrupt:
        return {"stop": Stop.INTERRUPTED.value}
    except ModelError as e:
        return {"error": str(e), "model": True}
    except KagentError as e:
        # A judge that ended may have been taken away by whoever else was there.
        machine = isinstance(e, MachineError | ChildDied)
        step = FailedStep.MACHINE if machine else FailedStep.SEARCH
        step = FailedStep.TASK if isinstance(e, TaskError) else step
        return {"error": str(e), "step": step.value}
    except Exception as e:  # noqa: BLE001 - a fault of kagent's own costs one run
        return {"error": f"{type(e).__name__}: {e}", "step": FailedStep.SEARCH.value}


def serve(work: Work) -> None:
    """Answer one request (`kagent.suite.workers`)."""
    # The command ends it so, also where a shell's `&` had the command itself ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])  # a command that was killed may begin it again
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: dict[str, object]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    tell(LISTENS)
    tell(answer_to(work, request, tell))


if __name__ == "__main__":
    serve(search)
