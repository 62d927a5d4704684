"""Making a run that is answered from outside, and opening one wherever its folder is now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import ANY, language, languages_of
from kagent_sandbox.data.target import DEFAULT_TARGET, parse_target
from kagent_sandbox.data.task import Task
from kagent_sandbox.device.detect import gpu_target, target_name
from kagent_sandbox.device.table import available
from kagent_sandbox.errors import UserError

from kagent.config.settings import Config
from kagent.evolve.proposers import check_prompts
from kagent.evolve.remembering import SeedText, seeds_from_memory, take, wanted
from kagent.evolve.session import kind_for, new_manifest, seeds_for
from kagent.runs.ask import Nobody
from kagent.runs.files import require_folder
from kagent.runs.store import RunStore
from kagent.tasks import command_word, find_task, sound_task


def new_run(
    task_name: str,
    config: Config,
    target: str | None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Make a run and accept the task's seeds into it. No device is needed.

    Args:
        task_name: Name of a task, or its folder.
        config: Settings of the run.
        target: Target of compilation; None: this machine's GPU, else its CPU.
        say: Is told what is being done.

    Returns:
        The run's folder.

    Raises:
        TaskError: The task has a fault.
        UserError: There is no such task or target, no seed for it, the language is not its own, the
            prompts' templates are wrong, or the folder of runs can be neither written nor made.
        RunError: The folder cannot be written.
    """
    config = config.model_copy(update={"proposer": Nobody.name})
    check_prompts(config)
    task = find_task(task_name)
    kind, target = target_for(config.lang, target)
    seeds = seeds_for(task, kind, config.lang)
    require_folder(config.runs)
    sound_task(task, kind, say)
    asked = wanted(task, kind, target, config.lang, seeds)
    taken = take(asked, config.runs, say) if config.memory else None
    with RunStore.create(config.runs, new_manifest(task, kind, target, config, {})) as store:
        if taken is not None:
            store.recall(*taken)
        _accept(store, seeds)
        return store.folder


def ready(store: RunStore, task: Task) -> None:
    """Make sure that a run can be asked and told.

    Raises:
        UserError: The run has a proposer of its own.
    """
    manifest, folder = store.manifest, store.folder
    if manifest.proposer != Nobody.name:
        word = command_word(task)
        raise UserError(
            f"{folder}: its proposals come from {manifest.proposer}, and kagent evolve {word} "
            f"--resume {folder.name} goes on with it; kagent ask {word} "
            "makes a run that is answered from outside"
        )
    history = store.history()
    if not history.lineage and not history.pending:  # the process that made it was killed
        _accept(store, seeds_for(task, manifest.kind, manifest.lang))


def _accept(store: RunStore, own: list[SeedText]) -> None:
    """All seeds in one commit, the task's own first: candidates 0, 1, ..."""
    seeds = [*own, *seeds_from_memory(store, store.history().recalled)]
    store.propose(*(seed.proposal(number) for number, seed in enumerate(seeds)))


def target_for(lang: str, target: str | None) -> tuple[Kind, str]:
    """Choose what to ask kernels for: a named target, else this machine's GPU, else its CPU.

    Raises:
        UserError: The target is unknown, or has no kernels in that language.
    """
    if target is None:
        if kind_for(lang, gpu=available("gpu")) == "cpu":
            return "cpu", "cpu"
        return "gpu", gpu_target() or DEFAULT_TARGET
    known = parse_target(target)
    kind: Kind = "cpu" if known.is_cpu else "gpu"
    if lang != ANY and language(lang).kind != kind:
        fitting = ", ".join(each.name for each in languages_of(kind))
        raise UserError(f"--lang {lang} has no kernels for {target}: expected {fitting} or {ANY}")
    return ("cpu", "cpu") if known.is_cpu else ("gpu", target_name(known.major, known.minor))
