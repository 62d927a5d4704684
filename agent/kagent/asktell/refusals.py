"""Verdicts that need no judge: of answers without a kernel, of known texts, and of what a build
refuses. Starting a judge takes a minute; a candidate that passes its build is built there again.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable
from dataclasses import replace

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.cpu.facts import cpu_facts

from kagent.config.settings import Config
from kagent.evolve.evaluation import texts_of, verdict_of_text
from kagent.evolve.open_machine import request_maker, search_cases
from kagent.fleet.fleet import LOCAL
from kagent.runs.events import Observer, Recorded, Stop
from kagent.runs.lineage import Candidate, Operator, Proposal
from kagent.runs.store import RunStore


def record_refusals(
    store: RunStore, task: Task, config: Config, observe: Observer, say: Callable[[str], None]
) -> tuple[int, ...]:
    """Record the verdicts of waiting candidates up to the first one that a judge is needed for, and
    return their ids. Nothing is done where that is sure (seeds wait), or where builds are another
    machine's.

    Raises:
        RunError: The run cannot be written.
        MachineError: This host lacks a compiler, or cannot confine one.
    """
    history, manifest = store.history(), store.manifest
    # Compilers for a GPU know the target by its name; those for a CPU are this host's.
    here = manifest.kind == "gpu" or manifest.environment.get("key") == cpu_facts().key
    seeds = any(p.operator is Operator.SEED for p in history.pending)
    if config.on != LOCAL or not here or seeds:
        return ()
    lineage = history.lineage
    refused: list[int] = []
    known = texts_of(store, history)
    cases = search_cases(task, manifest.kind, secrets.randbits(62))
    request = request_maker(task, manifest.target, cases, manifest.configs)
    stop = Stop.INTERRUPTED
    with contextlib.ExitStack() as processes:
        builder: Builder | None = None

        def built(proposal: Proposal) -> Built | Rejected:
            nonlocal builder
            if builder is None:
                ask_for(config.isolation)
                builder = processes.enter_context(Builder(config.jobs, on_wait=say))
            say(f"#{proposal.id} {proposal.name}: build")
            asked = request(proposal.source)
            if proposal.configs is not None:
                asked = replace(asked, max_configs=proposal.configs)
            return builder.build(asked)

        try:
            for proposal in history.pending:
                found = verdict_of_text(proposal, known) or built(proposal)
                if not isinstance(found, Rejected):
                    break
                if not refused:
                    store.begin(history.budget or config.budget)
                refused.append(proposal.id)
                candidate = Candidate(proposal, found)
                store.record(candidate)
                lineage.record(candidate)
                speed_up = math.exp(lineage.log_speed(candidate.id))
                observe(Recorded(candidate, False, lineage.counted, speed_up))
            stop = Stop.NO_SEED if lineage.incumbent is None else Stop.ANSWERED
        finally:
            if refused:
                store.stop(stop)
    return tuple(refused)
