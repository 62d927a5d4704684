"""Puts a run together: the task's cases, a builder, a judge, a store, the loop.

This is what `kagent evolve` calls. Nothing is printed; whoever watches passes an observer.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.confine.policy import asked_for
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import ANY, language, languages_of
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import RunError, TaskError, UserError

from kagent import resources
from kagent.config.settings import NO_MODEL, Config
from kagent.evolve.loop import Evolution, Limits
from kagent.evolve.open_machine import open_machine, require_machine
from kagent.evolve.phases import PhaseClock
from kagent.evolve.proposers import (
    check_models,
    check_prompts,
    max_in_flight,
    open_proposer,
    operators_of,
    recording,
    scaled_in_flight,
)
from kagent.evolve.remembering import (
    SeedText,
    remember_run,
    repeat,
    seeds_from_memory,
    take,
    wanted,
)
from kagent.evolve.stored_run import setting_from
from kagent.fleet.fleet import LOCAL, fleet_of
from kagent.runs.ask import Nobody
from kagent.runs.cost import ModelCall
from kagent.runs.events import Observer, Phase, Progress, Stop, progress_to
from kagent.runs.files import require_folder
from kagent.runs.history import History
from kagent.runs.lineage import FREE
from kagent.runs.manifest import Manifest, read_manifest
from kagent.runs.profiles import stored_profiles
from kagent.runs.store import RunStore
from kagent.search.tuner import Tuner
from kagent.tasks import find_task, refusal_of, seeds_of, ships_with_kagent
from kagent.text import local_time, plural

_COURSE = ("lang", "proposer", "seed", "configs")
"""Options that decide a run's course, and stay. Budget, time and cores may change."""


@dataclass(frozen=True)
class Outcome:
    """The end of a session of a run."""

    folder: Path
    stop: Stop
    history: History


def evolve(
    task_name: str,
    config: Config,
    observe: Observer,
    resume: Path | None = None,
    *,
    race: bool = True,
) -> Outcome:
    """Run the search, new or resumed, until its budget is used up or it is interrupted.

    Args:
        task_name: Name of a task, or its folder.
        config: Settings of the run.
        observe: Receives every event.
        resume: Folder of the run to resume; None for a new run.
        race: Whether the final race follows the search.

    Raises:
        UserError: The task, or the languages asked for, cannot be evolved on this machine; or the
            folder of runs can be neither written nor made.
        RunError: The run's folder cannot be used.
        ModelError: A model cannot be asked; nothing was measured.
        MachineError: The machine failed. Events recorded until then are kept.
    """
    task = find_task(task_name)
    manifest = read_manifest(resume) if resume is not None else None
    config = resolve_config(config, task, manifest, resume)
    kind, seeds = choose_seeds(task, config)
    secret = secrets.randbits(62)
    budget = config.budget
    done = 0
    with contextlib.ExitStack() as opened:
        # All that can be refused comes first, before a model is asked and the machine is opened.
        resumed: RunStore | None = None
        require_machine(kind, config, config.judges)
        if manifest is None:
            require_folder(config.runs)
        else:
            assert resume is not None
            same_kind(manifest, kind, resume)
            resumed = opened.enter_context(RunStore.open(resume))
            past = resumed.history()
            done = past.lineage.counted
            if "budget" not in config.flags:
                budget = past.budget or config.budget  # the run's own, unless another one is given
        trials = _try_models(config, observe)
        phases = PhaseClock(
            observe,
            *(task.digest, kind, config.lang, config.proposer, config.configs),
            evaluations=max(0, budget - done),
            most_search_s=config.max_time,
        )
        phases.begin(Phase.START)
        say = progress_to(observe)

        def accept(environment: Mapping[str, object], facts: DeviceFacts) -> None:
            if manifest is not None and resume is not None:
                same_machine(manifest, environment, facts, resume)

        machine, facts, environment = opened.enter_context(
            open_machine(task, kind, config, secret, say, accept, config.judges, race=race)
        )
        if resumed is not None:
            note_isolation_change(resumed, environment, observe)
            store = resumed
        else:
            made = new_manifest(task, kind, facts.target, config, environment)
            recorded = recording(config, task.name)
            taken = None  # what may be refused is, before there is a run
            if recorded is None and config.memory:
                asked = wanted(task, kind, facts.target, config.lang, seeds, facts.name)
                taken = take(asked, config.runs, say)
            store = opened.enter_context(RunStore.create(config.runs, made))
            if recorded is not None:
                repeat(store, recorded.history)
            elif taken is not None:
                store.recall(*taken)
        for call in trials:
            store.tried(call)
        past = store.history()
        setting = setting_from(task, store.manifest, past, budget)
        seeds += seeds_from_memory(store, past.recalled)
        limits = Limits(
            seconds=config.max_time,
            stop_at=config.stop_at,
            # A run that is repeated is repeated whole.
            early_stop=config.early_stop and config.proposer in (Tuner.name, "model"),
            race=race,
        )

        profiles = [*stored_profiles(past).values()]  # grows as incumbents are profiled

        async def search() -> Stop:
            async with contextlib.AsyncExitStack() as stack:
                proposer = await open_proposer(config, task, store, observe, stack, profiles)
                evolution = Evolution(
                    setting, seeds, store, machine, proposer, observe, limits, phases, profiles
                )
                return await evolution.run()

        try:
            stop = asyncio.run(search())
        except KeyboardInterrupt:
            stop = Stop.INTERRUPTED
        remember_run(store, task, config, say)
        return Outcome(store.folder, stop, store.history())


def _try_models(config: Config, observe: Observer) -> Sequence[ModelCall]:
    """Ask each model once, before anything is measured; nothing for other proposers.

    Raises:
        ModelError: One cannot be asked.
    """
    models = check_models(config)
    if not models:
        return ()
    from kagent.llm.ping import require_models  # the SDK takes a second to import

    return require_models(models, progress_to(observe))


def resolve_config(
    config: Config,
    task: Task,
    manifest: Manifest | None = None,
    resume: Path | None = None,
    flags: Collection[str] = (),
) -> Config:
    """The configuration with what a resumed run, or the run to replay, has decided before.

    Args:
        config: Options as they were given.
        task: The task.
        manifest: Of the run to resume; None for a new one.
        resume: Its folder.
        flags: Options of the command line, which have to have an effect.

    Raises:
        RunError: The run to resume or to replay cannot be used.
        UserError: It is a run of another task, or needs a GPU and there is none; no model is set,
            or its key or price is missing; or a flag has no effect.
    """
    if manifest is not None:
        same_task(manifest, task, resume)
        if manifest.proposer == Nobody.name:
            raise UserError(
                f"{resume}: a run that is answered from outside: continue it with kagent ask "
                "and kagent tell, and judge its answers with kagent judge"
            )
        _same_course(manifest, config, flags, resume)
        config = config.model_copy(update={n: getattr(manifest, n) for n in _COURSE})
    found = recording(config, task.name)
    if found is not None:
        if not fleet_of(config).has(found.kind):
            raise UserError(
                f"{found.name} holds kernels for an NVIDIA GPU, and {place_of(config)} has none: "
                "replay it where there is one"
            )
        update: dict[str, object] = {} if "lang" in config.flags else {"lang": found.lang}
        if "budget" not in config.flags and manifest is None:
            update["budget"] = found.evaluations
        config = config.model_copy(update=update)
    check_models(config)
    check_prompts(config)
    _models_to_ask(config, flags)
    if config.proposer != "model":  # the tuner's evaluations are its configurations
        config = config.model_copy(update={"tune": 1})
    return config.model_copy(update={"in_flight": scaled_in_flight(config)})


def require_budget(budget: int, folder: Path, past: History) -> None:
    """Make sure that a budget has room for what a run has proposed: a session takes up what has no
    verdict, whatever it may spend.

    Raises:
        UserError: It has not.
    """
    asked = sum(a.operator not in FREE for a in past.asks)
    least = past.lineage.counted + past.waiting + asked
    if budget < least:
        raise UserError(
            f"--budget {budget}: {folder} has {plural(least, 'proposal')} "
            f"({past.lineage.counted} evaluated, {least - past.lineage.counted} under way when it "
            f"ended): --budget {least} finishes these alone, and more goes on with the search"
        )


def _same_course(
    manifest: Manifest, config: Config, flags: Collection[str], folder: Path | None
) -> None:
    """Make sure that flags do not contradict what decides a run's course since it began.

    Raises:
        UserError: One does.
    """
    for name in _COURSE:
        began, now = getattr(manifest, name), getattr(config, name)
        flag, given = name, now
        if name == "proposer" and name not in flags:  # a model is the proposer where one is set
            flag, given = "model", ",".join(config.model)
        if flag in flags and began != now:
            raise UserError(
                f"{folder}: began with --{name} {began}, and --{flag} {given} was given: omit it, "
                "or begin another run without --resume"
            )


def _models_to_ask(config: Config, flags: Collection[str]) -> None:
    """Make sure that models are asked where a flag is about their calls.

    Raises:
        UserError: None is.
    """
    for name in ("max_cost", "max_tokens", "base_url", "temperature", "bandit"):
        if name in flags and config.proposer != "model":
            raise UserError(
                f"--{name.replace('_', '-')} is about calls of models, and proposals come "
                f"from {config.proposer}: omit it, or {NO_MODEL}"
            )


def choose_seeds(task: Task, config: Config) -> tuple[Kind, list[SeedText]]:
    """The device and the seeds that a language stands for on this machine.

    Raises:
        UserError: There is no such seed, or no device to time it on.
    """
    kind = kind_here(config, task.name)
    return kind, seeds_for(task, kind, config.lang)


def kind_here(config: Config, what: str) -> Kind:
    """The kind of device on which kernels are timed: on this machine, or wherever they are to be.

    Args:
        config: The language, or "any", and where.
        what: What is to be evolved, for the error.

    Raises:
        UserError: The language needs a GPU, and there is none.
        MachineError: There is no cluster there.
    """
    fleet = fleet_of(config)
    has_gpu = fleet.has("gpu")
    gpu_only = config.accelerator not in (None, "cpu")
    kind = kind_for(config.lang, gpu=has_gpu or gpu_only)
    if kind == "cpu" and gpu_only:
        raise UserError(
            f"{config.lang} kernels run on a CPU, and --accelerator {config.accelerator} asks for "
            "a GPU: give one of the two"
        )
    if kind == "gpu" and not has_gpu:
        gpu = f"a GPU of type {config.accelerator}" if gpu_only else "an NVIDIA GPU"
        raise UserError(
            f"timing {config.lang} kernels needs {gpu}, and {place_of(config)} has none. "
            f"Possible here: --lang cpp evolves {what} on the CPU; "
            "kagent build compiles for a GPU; kagent check runs a Triton kernel in Triton's "
            "interpreter"
        )
    return kind


def place_of(config: Config) -> str:
    """The machines of a configuration, in an error."""
    return "this machine" if config.on == LOCAL else f"the Ray cluster ({config.on})"


def kind_for(lang: str, *, gpu: bool) -> Kind:
    """The kind of device that a language is for; of "any", a GPU if there is one."""
    if lang == ANY:
        return "gpu" if gpu else "cpu"
    return language(lang).kind


def seeds_for(task: Task, kind: Kind, lang: str) -> list[SeedText]:
    """The seeds in a language, or for "any" all those for a kind of device.

    Raises:
        TaskError: There is none.
    """
    wanted = languages_of(kind) if lang == ANY else (language(lang),)
    names = [each.name for each in wanted]
    seeds = [SeedText(s.name, s.source()) for s in seeds_of(task) if s.language in names]
    if not seeds:
        other = sorted({s.language for s in seeds_of(task)})
        refused = refusal_of(task, kind)
        raise TaskError(
            f"{task.folder}: no {' or '.join(names)} seed there"
            + (f": none could be derived: {refused}" if refused else "")
            + f"; write one as {wanted[0].seed_prefix}NAME.py in that folder (docs/candidates.md)"
            + (
                f", or start from a seed of another language with --lang {other[0]}"
                if other
                else ""
            )
        )
    return seeds


def new_manifest(
    task: Task, kind: Kind, target: str, config: Config, environment: Mapping[str, object]
) -> Manifest:
    """Make the manifest of a new run. `environment` is empty until a device is opened for it."""
    return Manifest(
        task=task.name,
        # A run may be given to others: the folder of kagent's own tasks is each machine's.
        task_folder=f"seeds/{task.name}" if ships_with_kagent(task) else str(task.folder),
        task_digest=task.digest,
        matrix=task.matrix,
        kind=kind,
        target=target,
        seed=config.seed,
        lang=config.lang,
        proposer=config.proposer,
        operators=operators_of(config.proposer),
        in_flight=max_in_flight(config),
        configs=config.configs,
        environment=environment,
        started=local_time(),
        version=resources.version(),
        id=secrets.token_hex(8),
    )


def same_task(manifest: Manifest, task: Task, folder: Path | None) -> None:
    """Make sure that a run is one of this task, as it is now.

    Raises:
        RunError: It is not.
    """
    if manifest.task != task.name:
        raise RunError(f"{folder}: a run of {manifest.task}, not of {task.name}")
    if manifest.task_digest != task.digest:
        raise RunError(
            f"{folder}: {task.folder} was changed since, so figures would no longer compare: "
            "start a new run"
        )


def same_kind(manifest: Manifest, kind: Kind, folder: Path) -> None:
    """Make sure that a run is for the kind of device that this machine would time it on.

    Raises:
        RunError: It is not.
    """
    if manifest.kind != kind:
        raise RunError(
            f"{folder}: a run for {manifest.target}, and this machine would time it on its "
            f"{kind.upper()}: continue where there is such a device, or start a new run"
        )


def note_isolation_change(
    store: RunStore, environment: Mapping[str, object], observe: Observer
) -> None:
    """Say, and keep with the run, that it goes on under another tier than it began."""
    began, tier = store.manifest.environment.get("isolation"), environment.get("isolation")
    if began is not None and tier is not None and began != tier:
        store.append("isolation", {"began": began, "tier": tier})
        observe(Progress(f"isolation is {tier}; the run began under {began}"))


def same_machine(
    manifest: Manifest, environment: Mapping[str, object], facts: DeviceFacts, folder: Path
) -> None:
    """Make sure that times of this machine compare with those that a run has (it may have none
    yet), and that it is confined no less, unless that was asked for.

    Raises:
        RunError: They do not.
    """
    before, now = manifest.environment.get("key"), environment["key"]
    if (manifest.kind, manifest.target) != (facts.kind, facts.target):
        raise RunError(
            f"{folder}: a run for {manifest.target}, and this is {now} ({facts.target}): continue "
            "where there is such a device, or start a new run"
        )
    if before not in (None, now):
        raise RunError(
            f"{folder}: measured on {before}, and this is {now}: times of the two do not compare; "
            "start a new run"
        )
    began, tier = manifest.environment.get("isolation"), environment.get("isolation")
    if began is not None and tier is not None and asked_for() is None and str(tier) < str(began):
        raise RunError(
            f"{folder}: began under isolation {began}, and this machine gives {tier} today "
            f"(kagent doctor gives the reason): accept it with --isolation {tier}"
        )
