"""Choose the proposer that a configuration asks for, and start it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import RunError, UserError

from kagent.config.settings import Config
from kagent.evolve.replayed import RecordedProposer
from kagent.llm.model_config import ModelConfig
from kagent.runs.ask import Ask, Nobody, Prompt, Proposer
from kagent.runs.events import Observer
from kagent.runs.history import History
from kagent.runs.lineage import Operator
from kagent.runs.manifest import find_run
from kagent.runs.profiles import Profile
from kagent.runs.store import RunStore
from kagent.search.tuner import Tuner

EVALUATING = 4  # answers on their way to a verdict, beside the calls of models in flight
REPLAY = "replay:"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A stored run that is to be repeated."""

    name: str
    history: History
    kind: Kind
    lang: str

    @property
    def evaluations(self) -> int:
        """Number of its proposals that were charged to the budget."""
        return sum(c.counts for c in self.history.lineage)


def recording(config: Config, task: str) -> StoredRun | None:
    """The run that `--proposer replay:RUN` names; None if the proposer is another one.

    Raises:
        RunError: There is no such run, or it is damaged.
        UserError: It is a run of another task.
    """
    if not config.proposer.startswith(REPLAY):
        return None
    name = config.proposer.removeprefix(REPLAY)
    folder = find_run(config.runs, name)
    with RunStore.open(folder, write=False) as store:
        manifest, history = store.manifest, store.history()
    if manifest.task != task:
        raise UserError(f"{folder}: a run of {manifest.task}, which cannot be replayed for {task}")
    return StoredRun(name, history, manifest.kind, manifest.lang)


def operators_of(proposer: str) -> tuple[Operator, ...]:
    """Operators that a proposer, given by its name, can carry out.

    Raises:
        RunError: There is no proposer of that name.
    """
    from kagent.llm.proposer import ModelProposer

    if proposer == ModelProposer.name:
        return ModelProposer.operators
    if proposer == Tuner.name:
        return Tuner.operators
    if proposer.startswith(REPLAY):
        return RecordedProposer.operators
    if proposer == Nobody.name:
        return ModelProposer.operators
    raise RunError(f"this kagent has no proposer {proposer!r}")


def scaled_in_flight(config: Config) -> int:
    """Calls of models at once, or proposals: as asked for, else enough for the run's judges. More
    than one in twelve of the budget would be selected before much is known (docs/search.md).
    """
    if "in_flight" in config.model_fields_set:
        return config.in_flight
    return max(config.in_flight, min(config.in_flight * config.judges, config.budget // 12, 64))


def max_in_flight(config: Config) -> int:
    """Proposals between their selection and their verdict."""
    return config.in_flight + (EVALUATING if config.proposer == "model" else 0)


def check_models(config: Config) -> tuple[ModelConfig, ...]:
    """The models that will be asked; none for other proposers.

    Raises:
        UserError: None is set, a key is missing, or `--max-cost` is set and a price is not known.
    """
    if config.proposer != "model":
        return ()
    from kagent.llm.pricing import most_dollars

    models = config.model_configs()
    unknown = [m.name for m in models if most_dollars(m, 1) is None]
    if config.max_cost is not None and unknown:
        raise UserError(
            f"--max-cost needs the price of {', '.join(unknown)}, which is in no table: set "
            "input_price and output_price in its [[models]] table of kagent.toml, or limit tokens "
            "with --max-tokens"
        )
    return models


def check_prompts(config: Config) -> None:
    """Look for the user's own prompt templates and cards. Read them, unless nobody is to be asked
    with them.

    Raises:
        UserError: Their folder is not there, or one of its files is malformed.
    """
    if config.prompts is None:
        return
    from kagent.prompting.templates import Templates, folders

    places = folders(config.prompts)
    if config.proposer in ("model", Nobody.name):
        from kagent.prompting.cards import load_cards

        Templates(places).read_all()
        load_cards([place / "cards" for place in places])


async def open_proposer(
    config: Config,
    task: Task,
    store: RunStore,
    observe: Observer,
    stack: AsyncExitStack,
    profiles: Sequence[Profile] | None = None,
) -> Proposer:
    """The proposer of a run; what it opened is closed with the stack. Prompts have the profiles
    that `profiles` holds when they are written; None: those that are stored by the first one.

    Raises:
        RunError: The recorded run cannot be read.
        UserError: No model is set, or its key is missing.
    """
    found = recording(config, task.name)
    if found is not None:
        return RecordedProposer(found.name, found.history)
    if config.proposer == Tuner.name:
        return Tuner()
    from kagent.llm.endpoint import Endpoint
    from kagent.llm.proposer import Model, ModelProposer
    from kagent.llm.spend_limit import SpendLimit

    models = [Model(m, Endpoint(m)) for m in check_models(config)]
    for model in models:
        stack.push_async_callback(model.chat.close)
    spend_limit = SpendLimit(
        store.history().spent, max_dollars=config.max_cost, max_tokens=config.max_tokens
    )
    return ModelProposer(
        models,
        prompt_writer(task, store, config, profiles),
        store.call,
        spend_limit,
        observe,
        at_once=config.in_flight,
        bandit=config.bandit,
    )


def prompt_writer(
    task: Task, store: RunStore, config: Config, profiles: Sequence[Profile] | None = None
) -> Callable[[Ask], Prompt]:
    """Renders asks with what the run has measured by the time of the first one, and with what
    `profiles` holds by its own.
    """
    from kagent.prompting import Prompter, run_facts_of

    prompter: Prompter | None = None

    def write(ask: Ask) -> Prompt:
        nonlocal prompter
        if prompter is None:
            run_facts = replace(run_facts_of(store.manifest, store.history()), tune=config.tune)
            if profiles is not None:
                run_facts = replace(run_facts, profiles=profiles)
            setting = ask.setting
            kind, target = setting.kind, setting.target
            prompter = Prompter(task, kind, target, run_facts, config.prompts)
        return prompter.write(ask)

    return write
