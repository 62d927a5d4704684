"""Spends one slice on one run, or races finalists: a request in JSON on stdin, events and the
answer as lines of JSON on stdout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.data.kind import kind_of_target
from kagent_sandbox.data.records import from_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import MachineError, UserError

from kagent.asktell.judging import judge_all
from kagent.campaign.exchange import Migrant, accept
from kagent.campaign.file import accelerator_of
from kagent.campaign.record import Campaign
from kagent.config.devices import use_device
from kagent.config.settings import Config, load_config_of
from kagent.evolve import session
from kagent.fleet.fleet import LOCAL
from kagent.runs.ask import Nobody
from kagent.runs.events import Event, PhaseBegan, Progress, Recorded, Started, Stop
from kagent.runs.store import RunStore
from kagent.suite.worker import Tell, serve
from kagent.tasks import find_task


def work(request: dict[str, Any], tell: Tell) -> str:
    """Do what is asked for.

    Args:
        request: "task", "device", "config", "run" (path of the folder that goes on, or ""), and
            "elites" of other runs. With "race", the elites race; "target" is what they are for.
        tell: Is told of the run's folder, of what is being done, and of verdicts.

    Returns:
        Why it ended, as `Stop` has it.

    Raises:
        KagentError: It could not be done.
    """
    phase = ""

    def observe(event: Event) -> None:
        nonlocal phase
        if isinstance(event, Started):
            tell({"run": event.run})
        elif isinstance(event, PhaseBegan):
            phase = event.phase.value
            tell({"doing": phase})
        elif isinstance(event, Progress):  # such as who has the device
            tell({"doing": f"{phase}: {event.text}" if phase else event.text})
        elif isinstance(event, Recorded):
            tell({"recorded": event.candidate.id})

    options = request["config"]
    if options.get("on") in (None, LOCAL):
        use_device(request["device"])  # before anything asks whether there is a GPU
    else:
        options["accelerator"] = accelerator_of(request["device"])
    # Runs of a campaign give each other kernels by its own rule, and nothing comes from outside.
    config = load_config_of(Campaign.FILE, options).model_copy(update={"memory": False})
    ask_for(config.isolation)
    task = find_task(request["task"])
    elites = [from_json(Migrant, e) for e in request["elites"]]
    resume = Path(request["run"]) if request["run"] else None
    if request["race"]:
        return _race(task, config, elites, resume, request["target"], tell, observe)
    if resume is not None and elites:
        with RunStore.open(resume) as store:
            accept(store, elites)
    return session.evolve(str(task.folder), config, observe, resume, race=False).stop.value


def _race(
    task: Task,
    config: Config,
    elites: list[Migrant],
    resume: Path | None,
    target: str,
    tell: Tell,
    observe: Callable[[Event], None],
) -> str:
    """Judge finalists in a run of their own, which ends with the final race."""
    if resume is None:
        kind = kind_of_target(target)
        own = config.model_copy(update={"proposer": Nobody.name})
        with RunStore.create(
            config.runs, session.new_manifest(task, kind, target, own, {})
        ) as store:
            accept(store, elites)
            tell({"run": store.folder.name})
            resume = store.folder
    with RunStore.open(resume) as store:
        try:
            judged = judge_all(store, task, config, observe, race=True)
        except (MachineError, UserError):
            if config.judges == 1:
                raise
            # Others may have the second device, or it has left. It would decide nothing.
            one = config.model_copy(update={"judges": 1})
            judged = judge_all(store, task, one, observe, race=True)
    return (judged.stop or Stop.ANSWERED).value


if __name__ == "__main__":
    serve(work)
