"""Output of `kagent prompt`: the first prompt of a task, or the next one of a run."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind, kind_of_target
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.device.table import available, device_for, find_device
from kagent_sandbox.errors import UserError

from kagent.asktell.open_run import target_for
from kagent.asktell.state import read_state
from kagent.config.settings import Config
from kagent.evolve.remembering import SeedText
from kagent.evolve.session import seeds_for
from kagent.evolve.stored_run import setting_for, todays_task
from kagent.prompting.measured import docstring
from kagent.prompting.prompter import TEMPLATES, Prompter
from kagent.prompting.run_facts import RunFacts, run_facts_of
from kagent.runs.ask import Ask, Prompt, Setting
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal
from kagent.runs.manifest import Manifest
from kagent.runs.store import RunStore
from kagent.search.select import POOL, progress_of, select
from kagent.tasks import find_task

UNMEASURED = Passed((), (), 1.0, 0.0)
"""The verdict of a kernel that nobody has timed yet."""


@dataclass(frozen=True, slots=True)
class Preview:
    """An ask, and who writes its prompt."""

    ask: Ask
    prompter: Prompter

    def write(self, card: str | None = None) -> Prompt:
        """The prompt, with the technique of that name instead of the dealt one."""
        return self.prompter.write(self.ask, card)

    def instead(self, operator: Operator | None, parent: int | None) -> Preview:
        """Return the ask with another operator or parent.

        Raises:
            UserError: There is no such parent, or it does not fit the operator.
        """
        lineage = self.ask.lineage
        if parent is not None and not 0 <= parent < len(lineage):
            raise UserError(f"no candidate {parent}: the run has 0 to {len(lineage) - 1}")
        chosen = lineage[parent] if parent is not None else None
        if operator is None:
            operator = self.ask.operator
            if chosen is not None and _passed(chosen) == (operator is Operator.REPAIR):
                operator = Operator.STRUCTURE if _passed(chosen) else Operator.REPAIR
        chosen = chosen or _parent_for(operator, self.ask)
        if chosen is None or _passed(chosen) == (operator is Operator.REPAIR):
            passed, failed = "has passed", "was rejected"
            need, other = (failed, passed) if operator is Operator.REPAIR else (passed, failed)
            found = f"#{chosen.id} {other}" if chosen is not None else f"no candidate {need}"
            raise UserError(f"{found}: --operator {operator} needs a --parent that {need}")
        return replace(self, ask=replace(self.ask, operator=operator, parent=chosen))


def _passed(candidate: Candidate) -> bool:
    return isinstance(candidate.verdict, Passed)


def _parent_for(operator: Operator, ask: Ask) -> Candidate | None:
    """The ask's parent if it fits; else the incumbent, or the last failure that can be mended."""
    if _passed(ask.parent) != (operator is Operator.REPAIR):
        return ask.parent
    if operator is not Operator.REPAIR:
        return ask.elites[0]
    failures = (c for c in reversed(list(ask.lineage)) if not _passed(c) and c.proposal.source)
    return next((c for c in failures if not c.is_duplicate), None)


# -- a task ----------------------------------------------------------------------------------------


def of_task(config: Config, name: str, target: str | None, seed: str | None = None) -> Preview:
    """The first structural proposal for a task, from a seed that was not measured: the one of that
    name, else the one that explains itself best.

    Raises:
        UserError: There is no such task, seed or target.
    """
    task = find_task(name)
    kind, target = target_for(config.lang, target)
    device = own_device(target)
    setting = Setting(
        task=task,
        kind=kind,
        target=target,
        budget=config.budget,
        seed=config.seed,
        in_flight=config.in_flight,
        operators=tuple(TEMPLATES),
    )
    ask = first_brief(setting, seeds_for(task, kind, config.lang), seed)
    run_facts = RunFacts(device=device, lang=config.lang, tune=config.tune)
    return Preview(ask, Prompter(task, kind, target, run_facts, config.prompts))


def own_device(target: str) -> DeviceFacts | None:
    """This machine's device, if that is what the target means."""
    kind = kind_of_target(target)
    own = _facts(kind) if available(kind) else None
    return own if own is not None and own.target == target else None


def _facts(kind: Kind) -> DeviceFacts:
    return find_device(device_for(kind)).facts(0)


def first_brief(setting: Setting, seeds: Sequence[SeedText], name: str | None = None) -> Ask:
    """A structural change of one of the seeds, none of which was measured.

    Raises:
        UserError: There is no seed of that name.
    """
    names = [s.name for s in seeds]
    if name is not None and name not in names:
        raise UserError(f"no seed {name!r}: {setting.task.name} has {', '.join(names)}")
    chosen = name or max(seeds, key=lambda s: explanation(s.source)).name
    order = sorted(seeds, key=lambda s: s.name != chosen)
    lineage = Lineage(
        Candidate(Proposal(i, (), Operator.SEED, s.name, s.source, ""), UNMEASURED)
        for i, s in enumerate(order)
    )
    elites = tuple(lineage.elites(POOL))
    return Ask(setting, 0, lineage, Operator.STRUCTURE, lineage[0], elites, 0.0)


def explanation(source: str) -> float:
    """Words of a file's docstring and comments, per line."""
    words = len(docstring(source).split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words += len(token.string.split())
        elif token.type == tokenize.STRING:  # perhaps of a kernel in another language
            words += sum(len(c.split()) for c in re.findall(r"//(.*)", token.string))
    return words / max(1, source.count("\n"))


# -- a run -----------------------------------------------------------------------------------------


def prompter_of(task: Task, manifest: Manifest, history: History, config: Config) -> Prompter:
    """Writer of a stored run's next prompts, with the templates and tuning of a configuration."""
    run_facts = replace(run_facts_of(manifest, history), tune=config.tune)
    if run_facts.device is None:  # as good a guess as there is
        run_facts = replace(run_facts, device=own_device(manifest.target))
    return Prompter(task, manifest.kind, manifest.target, run_facts, config.prompts)


def of_run(config: Config, folder: Path, name: str | None = None) -> Preview:
    """Return the next prompt of a stored run; `name` says where its task is now.

    Raises:
        RunError: The run cannot be read, or its task is not on this machine.
        UserError: Nothing of it has passed yet, or it is a run of another task.
    """
    with RunStore.open(folder, write=False) as store:
        history, manifest = store.history(), store.manifest
        task = todays_task(folder, manifest) if name is None else find_task(name)
        if task.name != manifest.task:
            raise UserError(f"{folder}: a run of {manifest.task}, not of {task.name}")
        setting = setting_for(store, task, history, config.budget)
    lineage, state = history.lineage, read_state(history)
    pending = [state.ask(setting, a.number) for a in state.under_way]
    # Sweeps and recombinations need no model, so they are not asked for.
    wanted = tuple(o for o in setting.operators if o in TEMPLATES)
    usual = wanted if Operator.STRUCTURE in wanted else tuple(TEMPLATES)
    try:
        setting = replace(setting, operators=usual)
        ask = select(setting, lineage, history.asked, pending, state.seeds)
    except ValueError:
        text = "no candidate has passed yet, so there is nothing to start from"
        raise UserError(f"{folder}: {text}") from None
    prompter = prompter_of(task, manifest, history, config)
    return Preview(replace(ask, progress=progress_of(lineage, setting.budget)), prompter)
